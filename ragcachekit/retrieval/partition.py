"""What a search's results depend on beside the question: the hard part of the key."""

from __future__ import annotations

import datetime
import decimal
import enum
import logging
import types
import uuid
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

from ragcachekit.config import positive
from ragcachekit.retrieval.index_changes import attributes, observe

log = logging.getLogger(__name__)

MAX_VALUES = 10_000
"""Values visited for one key; beyond it, comparing takes longer than many a search."""

_MAX_SETTING = 100  # values in an attribute of an index; more are its documents
_MAX_DEPTH = 20
_SCALARS = (type(None), bool, int, float, complex, str, bytes, types.EllipsisType)
_VALUES = (datetime.date, datetime.datetime, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)
_CONTAINERS = (list, tuple, set, frozenset)
_CODE = (types.FunctionType, types.BuiltinFunctionType, type)

_bypassed: ContextVar[bool] = ContextVar("ragcachekit_query_cache_bypassed", default=False)


@contextmanager
def bypass_query_cache() -> Iterator[None]:
    """Let every retriever called inside search, neither reading nor filling its query cache.

    Holds for this thread and for asyncio tasks started inside. What is found is still registered with the
    engine.

    Examples
    --------
    >>> with bypass_query_cache():
    ...     found = retriever.retrieve("Where is Oslo?")  # doctest: +SKIP
    """
    token = _bypassed.set(True)
    try:
        yield
    finally:
        _bypassed.reset(token)


class Partition(NamedTuple):
    """The hard part of a query cache's key: entries of another partition are never considered.

    ``namespace`` is tenant and corpus, ``k`` the number of results asked for. The rest is whatever else
    changes the answer, such as versions of the index and of the embedding model. Use :meth:`of`, which takes
    dicts and lists apart.
    """

    namespace: str
    k: int
    filters: Hashable = None
    search_kwargs: Hashable = None
    index_id: Hashable = None

    @classmethod
    def of(
        cls,
        namespace: str,
        k: int,
        *,
        filters: object = None,
        search_kwargs: Mapping[str, object] | None = None,
        index_id: object = None,
    ) -> Partition:
        """A partition from ordinary (also mutable) filters and keyword arguments.

        ValueError for a ``k`` below 1; TypeError if a value is a function or does not show its content.
        """
        positive("k", k)
        reader = KeyReader()
        return cls(namespace, k, *map(reader.key, (filters, dict(search_kwargs or {}), index_id)))


class Identity:
    """A key that is equal for one object only, also after that is deleted (a weak reference if possible)."""

    __slots__ = ("_hash", "_object")

    def __init__(self, value: object) -> None:
        self._hash = id(value)
        self._object: Any
        try:
            self._object = weakref.ref(value)  # one and the same for every call
        except TypeError:
            self._object = value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self._object is other._object


class NotKeyable(TypeError):
    """A value that cannot be part of a key: its content cannot be read."""


class TooLarge(NotKeyable):
    """A value with too much content to be compared at every question."""


@dataclass(frozen=True)
class KeyRules:
    """Rules for a framework's classes. Objects of all other classes are refused.

    Attributes
    ----------
    libraries : frozenset of str
        Top-level packages whose classes depend on their fields and on nothing else.
    indexes : tuple of type
        Classes that hold documents: keyed by identity, settings, and the number of changes so far.
    delegating : tuple of type
        Abstract index classes whose changing methods only call those of their subclasses.
    retrievers : tuple of type
        Classes whose fields may hold indexes.
    models : tuple of type
        Embedders and language models, keyed by identity.
    ignored, uncached : tuple of type
        Classes that change no result (callbacks); classes whose results depend on more than can be read.
    """

    libraries: frozenset[str] = frozenset()
    indexes: tuple[type, ...] = ()
    delegating: tuple[type, ...] = ()
    retrievers: tuple[type, ...] = ()
    models: tuple[type, ...] = ()
    ignored: tuple[type, ...] = ()
    uncached: tuple[type, ...] = ()

    def is_library(self, kind: type) -> bool:
        """Whether the class belongs to one of the libraries."""
        return kind.__module__.partition(".")[0] in self.libraries

    def is_own_code(self, value: Any) -> bool:
        """Whether it is a function or a class of no library, or may be called and does what none defines."""
        if isinstance(value, types.FunctionType):  # __module__ may be that of what it wraps
            module = str(value.__globals__.get("__name__")).partition(".")[0]
            return bool(value.__closure__) or module not in self.libraries
        if isinstance(value, types.BuiltinFunctionType):
            return not isinstance(value.__self__, types.ModuleType)
        if isinstance(value, type):
            return value.__module__ != "builtins" and not self.is_library(value)
        by = next((base for base in type(value).__mro__ if "__call__" in vars(base)), None)
        return isinstance(value, types.ModuleType) or (by is not None and not self.is_library(by))


class KeyReader:
    """Makes keys of plain values, and of a framework's objects by their fields; one reader per key."""

    def __init__(self, rules: KeyRules | None = None, limit: int = MAX_VALUES) -> None:
        self._rules, self._left, self._depth = rules or KeyRules(), limit, 0

    def key(self, value: Any) -> Hashable:
        """Something hashable, equal only for values of equal types and content.

        NotKeyable (a TypeError) for functions and for objects that are not of the libraries, unless their
        class has a method ``cache_key_parts()``: then they are keyed by what it returns.
        """
        kind = type(value)
        self._left -= 1
        self._depth += 1
        if self._left < 0 or self._depth > _MAX_DEPTH:
            raise TooLarge("there is too much of it to compare at every question")
        content = self._content(kind, value)
        self._depth -= 1
        return kind, content

    def versions(self, value: object) -> tuple[Hashable, ...]:
        """Identities and versions of the indexes among the fields of a retriever and those inside it."""
        return tuple(self._version(index) for index in self._held_indexes(value))

    def _content(self, kind: type, value: Any) -> Hashable:
        if kind in _SCALARS:
            return repr(value) if kind in (float, complex) else value  # 0.0 == -0.0
        if kind is dict:  # in order, which decides where a filter language sorts by it
            return tuple([(self.key(name), self.key(one)) for name, one in list(value.items())])
        if kind in _CONTAINERS:
            keys = [self.key(one) for one in list(value)]
            return frozenset(keys) if kind in (set, frozenset) else tuple(keys)
        if kind in _VALUES:
            return repr(value)
        return self._object(kind, value)

    def _object(self, kind: type, value: Any) -> Hashable:
        rules, is_library = self._rules, self._rules.is_library(kind)
        by = _class_with_parts(kind, rules)
        if isinstance(value, rules.indexes) and (by is not None or is_library):
            return self._index(kind, value, by)
        if by is not None:
            return self.key(by.cache_key_parts(value))
        if not rules.is_own_code(value) and not isinstance(value, rules.uncached):
            if isinstance(value, (*_CODE, *rules.models)) or kind is object:
                return Identity(value)
            if isinstance(value, rules.ignored) and not isinstance(value, rules.retrievers):
                return None
            if is_library:
                return value.name if isinstance(value, enum.Enum) else self._fields(kind, value)
        raise NotKeyable(f"a {kind.__module__}.{kind.__qualname__} may depend on anything")

    def _fields(self, kind: type, value: object) -> Hashable:
        """An object of a library by its fields, unless it may hold more than those."""
        if not hasattr(value, "__dict__") or isinstance(value, (*_SCALARS[1:], dict, *_CONTAINERS)):
            raise NotKeyable(f"a {kind.__module__}.{kind.__qualname__} does not show its content")
        return tuple(
            [(name, self._field(kind, name, one)) for name, one in sorted(attributes(value).items())]
        )

    def _field(self, kind: type, name: str, value: object) -> Hashable:
        try:
            return self.key(value)
        except NotKeyable as error:
            raise type(error)(f"{kind.__qualname__}.{name}: {error}") from error

    def _index(self, kind: type, value: Any, by: Any) -> Hashable:
        """An index by identity, version and settings; its documents are what the version counts."""
        changes = observe(value, self._rules.delegating)
        if changes is None:
            raise NotKeyable(f"changes of a {kind.__module__}.{kind.__qualname__} cannot be seen")
        if by is not None:
            return Identity(value), changes.version, self.key(by.cache_key_parts(value))
        settings, others = list[Hashable](), dict[str, object]()
        for name, one in sorted(attributes(value).items()):
            if isinstance(one, self._rules.indexes):
                settings.append((name, self._field(kind, name, one)))
            elif any(map(self._rules.is_own_code, [one, *_items(one)])):
                raise NotKeyable(f"{kind.__qualname__}.{name}: a function may depend on anything")
            else:  # a setting, or its documents, a client, an embedder
                try:
                    settings.append((name, KeyReader(KeyRules(), _MAX_SETTING).key(one)))
                except NotKeyable:
                    others[name] = one
        changes.compare(others)
        return Identity(value), changes.version, tuple(settings)

    def _version(self, index: Any) -> Hashable:
        changes, by = observe(index, self._rules.delegating), _class_with_parts(type(index), self._rules)
        parts = None if by is None else self.key(by.cache_key_parts(index))
        inner = [one for one in attributes(index).values() if isinstance(one, self._rules.indexes)]
        versions = tuple(self._version(one) for one in inner)
        return Identity(index), None if changes is None else changes.version, parts, versions

    def _held_indexes(self, value: object, depth: int = 4) -> Iterator[object]:
        if isinstance(value, self._rules.indexes):
            yield value
        elif depth:
            for one in attributes(value).values():
                items = one if isinstance(one, list | tuple) else [one]
                for item in items:
                    if isinstance(item, (*self._rules.indexes, *self._rules.retrievers)):
                        yield from self._held_indexes(item, depth - 1)


class Partitioner:
    """Makes partitions out of a retriever and a call, or logs why the call cannot be cached.

    A partition holds the retriever's fields, the versions of its indexes, and the arguments of the call. Code
    outside the known libraries may depend on anything: what it finds is not cached, unless it names what
    counts.

    ``custom`` is called with the ``question`` of :meth:`partition` and gives what counts instead of the
    retriever and the run. None from it: do not cache. ``version`` is called without arguments at every
    question and names the state of an index that others change.
    """

    def __init__(
        self,
        rules: KeyRules,
        custom: Callable[..., object] | None = None,
        version: Callable[[], object] | None = None,
    ) -> None:
        self._rules, self._custom = rules, custom
        self._present_version = version or (lambda: None)
        self._warn = LogOnce(log)

    def partition(
        self,
        namespace: str,
        k: int,
        retriever: object,
        arguments: object,
        *,
        configurable: object = None,
        question: tuple[object, ...] = (),
    ) -> Partition | None:
        """The partition, or None if the call must not be cached; the reason is logged once.

        ``arguments`` are the search arguments of the call, ``configurable`` the values of its run that the
        retriever may read, ``question`` the arguments of ``custom``. ValueError or TypeError for a ``k`` that
        is no positive integer.
        """
        positive("k", k)
        if _bypassed.get():
            return None
        try:
            called = self._key((arguments, self._present_version()))
            if self._custom is None:
                return Partition(namespace, k, called, self._key(retriever), self._key(configurable))
            counts = self._custom(*question)
            if counts is None:
                return None
            return Partition(namespace, k, called, self._key(counts), self.changes_of(retriever))
        except Exception as error:  # of the user's code, too; and other threads may change what is read
            self._refuse(type(retriever).__name__, error)
            return None

    def of_own_index(
        self, namespace: str, index: Hashable, where: object, question: tuple[object, ...] = ()
    ) -> Partition | None:
        """The partition of an index that reports its changes; None if the call must not be cached.

        It holds plain values, so that it is the same after a restart. ``where`` is the filter of the search.
        """
        if _bypassed.get():
            return None
        try:
            counts = None if self._custom is None else self._custom(*question)
            if self._custom is not None and counts is None:
                return None
            parts = (where, counts, self._present_version())
            filters, run, version = (None if part is None else self._key(part) for part in parts)
            return Partition(namespace, 1, filters, run, (index, version))
        except Exception as error:
            self._refuse("the index", error)
            return None

    def changes_of(self, index: object) -> Hashable:
        """Versions of an index, or of those in the fields of a retriever, as far as they can be seen."""
        return KeyReader(self._rules).versions(index)

    def is_unchanged(self, before: object, after: Partition | None) -> bool:
        """Whether what a search found belongs to the partition that was read before it."""
        if after == before:
            return True
        if after is not None and after.search_kwargs != getattr(before, "search_kwargs", None):
            self._warn(
                "the retriever's attributes changed during a search, so its result is not cached; if the "
                "search itself changes them (a counter, a list), pass partition= to name what counts"
            )
        return False

    def _key(self, value: object) -> Hashable:
        return KeyReader(self._rules).key(value)

    def _refuse(self, what: str, error: Exception) -> None:
        why = str(error) if isinstance(error, NotKeyable) else repr(error)
        self._warn(
            f"results of {what} are not cached, as what they depend on cannot be read ({why}); "
            "pass partition= to name what counts"
        )


class LogOnce:
    """Warnings that may come at every question, each logged once."""

    def __init__(self, log: logging.Logger, most: int = 100) -> None:
        self._log, self._left = log, most
        self._logged: set[str] = set()

    def __call__(self, message: str, error: Exception | None = None) -> None:
        """Log a message with the traceback of ``error``."""
        if message not in self._logged and self._left:
            self._left -= 1
            self._logged.add(message)
            self._log.warning("%s", message, exc_info=error)


def _items(value: Any) -> list[Any]:
    """What a short container of settings holds."""
    if not isinstance(value, dict | list | tuple | set | frozenset) or len(value) > _MAX_SETTING:
        return []
    return list(value.values() if isinstance(value, dict) else value)


def _class_with_parts(kind: type, rules: KeyRules) -> Any:
    """The class with ``cache_key_parts``; that of a library does not hold for subclasses of the user's."""
    by = next((base for base in kind.__mro__ if "cache_key_parts" in vars(base)), None)
    if by is None or rules.is_library(kind) or not rules.is_library(by):
        return by
    return None

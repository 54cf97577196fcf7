"""What a search's results depend on beside the question: the hard part of the key.

The classes of known libraries are read by their fields; for other code, ``partition=`` or a method
``cache_key_parts()`` names what counts. Whatever can be read by neither is not cached.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import functools
import inspect
import itertools
import re
import threading
import types
import uuid
import weakref
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

MAX_VALUES = 10_000
"""Values visited for one key; beyond it, comparing takes longer than many a search."""

_MAX_SETTING = 100  # values in an attribute of an index; more are its documents
_SCALARS = (type(None), bool, int, float, complex, str, bytes, types.EllipsisType)
_VALUES = (datetime.date, datetime.datetime, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)
_MODEL_SETTINGS = (
    *("model_name", "model", "model_id", "deployment", "repo_id", "dimensions", "truncate_dim"),
    *("encode_kwargs", "normalize", "query_instruction", "text_instruction", "embed_instruction"),
)
"""Attributes of embedding models, in both frameworks, that name the model or change its vectors."""
_CONTAINERS = (dict, list, tuple, set, frozenset)
_CODE = (types.FunctionType, types.BuiltinFunctionType, type)
_COPYING = ("__getstate__", "__copy__", "__deepcopy__")
_COUNTER = "_ragcachekit_changes"
_observing = threading.Lock()
_CHANGING = re.compile(
    r"(a|async_)?(m?(add|delete|upsert|update|insert|remove|set|put)|merge|reset|drop|clear|refresh)(_|$)"
)

bypassed: ContextVar[bool] = ContextVar("ragcachekit_query_cache_bypassed", default=False)
"""Whether the caller is inside :func:`bypass_query_cache`."""


@contextmanager
def bypass_query_cache() -> Iterator[None]:
    """Let every retriever called inside search, neither reading nor filling its query cache.

    Holds for this thread and for asyncio tasks started inside. The engine still registers what is found.
    """
    token = bypassed.set(True)
    try:
        yield
    finally:
        bypassed.reset(token)


class Partition(NamedTuple):
    """The hard part of a query cache's key: entries of another partition are never considered.

    ``namespace`` is tenant and corpus, ``k`` the number of results asked for. The rest is whatever else
    changes the answer, such as versions of the index and of the embedding model: hashable values.
    """

    namespace: str
    k: int
    filters: Hashable = None
    search_kwargs: Hashable = None
    index_id: Hashable = None


class Identity:
    """A key that is equal for one object only, also after that is deleted (a weak reference if possible)."""

    __slots__ = ("_hash", "_object")

    def __init__(self, value: object) -> None:
        self._hash, self._object = id(value), value
        with suppress(TypeError):
            self._object = weakref.ref(value)  # one and the same for every call

    @property
    def value(self) -> Any:
        """The object; None where it is deleted."""
        return self._object() if isinstance(self._object, weakref.ref) else self._object

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self._object is other._object


class Version(NamedTuple):
    """An index and the number of its changes in this process."""

    of: Identity
    number: int | None


class NotKeyable(TypeError):
    """A value that cannot be part of a key: its content cannot be read, or there is too much of it."""


@dataclass(frozen=True)
class KeyRules:
    """Rules for a framework's classes. Objects of all other classes are refused.

    Attributes
    ----------
    libraries : frozenset of str
        Top-level packages whose classes depend on their fields and on nothing else.
    indexes : tuple of type
        Classes that hold documents: keyed by identity, settings, and the number of changes so far.
    retrievers : tuple of type
        Classes whose fields may hold indexes.
    models : tuple of type
        Embedders and language models, keyed by identity.
    ignored, uncached : tuple of type
        Classes that change no result (callbacks); classes whose results depend on more than can be read.
    """

    libraries: frozenset[str] = frozenset()
    indexes: tuple[type, ...] = ()
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

    def parts_of(self, kind: type) -> Callable[[Any], object] | None:
        """The class's ``cache_key_parts``; that of a library does not hold for subclasses of the user's."""
        by: Any = next((base for base in kind.__mro__ if "cache_key_parts" in vars(base)), None)
        own = by is not None and (self.is_library(kind) or not self.is_library(by))
        return by.cache_key_parts if own else None


class KeyReader:
    """Makes keys of plain values, and of a framework's objects by their fields."""

    def __init__(self, rules: KeyRules | None = None, limit: int = MAX_VALUES) -> None:
        self._rules, self._limit, self._left = rules or KeyRules(), limit, limit

    def key(self, value: Any) -> Hashable:
        """Something hashable, equal only for values of equal types and content.

        NotKeyable (a TypeError) for functions and for objects that are not of the libraries, unless their
        class has a method ``cache_key_parts()``: then they are keyed by what it returns.
        """
        self._left = self._limit
        try:
            return self._key(value)
        except RecursionError:
            raise NotKeyable("there is too much of it to compare at every question") from None

    def versions(self, value: object, depth: int = 4) -> tuple[Hashable, ...]:
        """Identities and versions of the indexes among the fields of a retriever and those inside it."""
        found, is_index = list[Hashable](), isinstance(value, self._rules.indexes)
        if is_index:
            parts = self._rules.parts_of(type(value))
            found.append((Version(Identity(value), changes_of(value)), parts and self.key(parts(value))))
        kinds = self._rules.indexes if is_index else (*self._rules.indexes, *self._rules.retrievers)
        for one in attributes(value).values() if depth else ():
            for item in one if isinstance(one, list | tuple) and not is_index else [one]:
                if isinstance(item, kinds):
                    found += self.versions(item, depth - 1)
        return tuple(found)

    def _key(self, value: Any) -> Hashable:
        kind = type(value)
        self._left -= 1
        if self._left < 0:
            raise NotKeyable("there is too much of it to compare at every question")
        if kind in _SCALARS or kind in _VALUES:
            return repr(value)
        if kind is dict:  # in order, which decides where a filter language sorts by it
            return kind, *((self._key(name), self._key(one)) for name, one in list(value.items()))
        if kind in _CONTAINERS:
            items = [self._key(one) for one in list(value)]
            return kind, frozenset(items) if kind in (set, frozenset) else tuple(items)
        return self._key_of_object(kind, value)

    def _key_of_object(self, kind: type, value: Any) -> Hashable:
        rules, is_library, parts = self._rules, self._rules.is_library(kind), self._rules.parts_of(kind)
        if isinstance(value, rules.indexes) and (parts is not None or is_library):
            return self._key_of_index(kind, value, parts)
        if parts is not None:
            return kind, self._key(parts(value))
        if not rules.is_own_code(value) and not isinstance(value, rules.uncached):
            if isinstance(value, (*_CODE, *rules.models)) or kind is object:
                return Identity(value)
            if isinstance(value, rules.ignored) and not isinstance(value, rules.retrievers):
                return "ignored"
            if is_library and isinstance(value, enum.Enum):
                return kind, value.name
            plain = (*_SCALARS[1:], *_CONTAINERS)  # its subclasses may hold more than their fields
            if is_library and hasattr(value, "__dict__") and not isinstance(value, plain):
                return kind, *(self._field(kind, *item) for item in sorted(attributes(value).items()))
        raise NotKeyable(f"a {kind.__module__}.{kind.__qualname__} may depend on anything")

    def _field(self, kind: type, name: str, value: object) -> Hashable:
        try:
            return name, self._key(value)
        except NotKeyable as error:
            raise NotKeyable(f"{kind.__qualname__}.{name}: {error}") from error

    def _key_of_index(self, kind: type, value: Any, parts: Callable[[Any], object] | None) -> Hashable:
        """An index by identity, version and settings; its documents are what the version counts."""
        version = changes_of(value)
        if version is None:
            raise NotKeyable(f"changes of a {kind.__module__}.{kind.__qualname__} cannot be seen")
        known = [] if parts is None else [self._key(parts(value))]
        for name, one in sorted(attributes(value).items()) if parts is None else ():
            if isinstance(one, self._rules.indexes):
                known.append(self._field(kind, name, one))
            elif any(map(self._rules.is_own_code, [one, *_settings(one)])):
                raise NotKeyable(f"{kind.__qualname__}.{name}: a function may depend on anything")
            else:
                with suppress(NotKeyable):  # no setting, but its documents, a client, an embedder
                    known.append((name, KeyReader(limit=_MAX_SETTING).key(one)))
        return Version(Identity(value), version), *known


def lasting(key: object, state: Callable[[Any], object], watcher: object, states: list[object]) -> object:
    """A key as other processes name it: classes and embedding models by name, indexes by their ``state``.

    A ``state`` is what every process reads from an index, or None; it is added to ``states``. As a count may
    miss a change, that calls ``watcher.clear()``. NotKeyable for other objects.
    """
    if isinstance(key, Version):
        index = key.of.value
        states.append(found := state(index))
        changes = getattr(index, "__dict__", {}).get(_COUNTER)
        if changes is not None and not hasattr(index, "cache_key_parts"):  # which are in keys
            changes.watchers.add(watcher)
        return class_name(type(index)), found
    if isinstance(key, tuple):
        return [lasting(one, state, watcher, states) for one in key]
    if isinstance(key, frozenset):
        return sorted(repr(lasting(one, state, watcher, states)) for one in key)
    if isinstance(key, Identity):
        value = key.value
        if isinstance(value, _CODE):
            return class_name(value)
        if not hasattr(value, "embed_query") and not hasattr(value, "get_query_embedding"):
            raise NotKeyable(f"a {class_name(type(value))} is known by this very object only")
        return name_of(value)
    return class_name(key) if isinstance(key, type) else key


class _Changes:
    """The number of changes of one index, to which ``owner`` refers weakly."""

    def __init__(self, owner: Callable[[], object]) -> None:
        self.owner, self.version, self._numbers = owner, 0, itertools.count(1)
        self.names: frozenset[str] = frozenset()  # of the wrappers
        self.watchers = weakref.WeakSet[Any]()

    def __deepcopy__(self, memo: object) -> _Changes:
        return self

    def count(self) -> None:
        self.version = next(self._numbers)
        for one in list(self.watchers):
            one.clear()


def changes_of(index: object) -> int | None:
    """The version of an index, another one after each change from now on; None if changes cannot be seen.

    The changing methods of this one object (``add_documents``, ``delete``, ``insert``, ...) are wrapped:
    attributes of the object come before methods of its class. Copies and pickles do without the wrappers,
    which would change the original. Other changes (by another process or client) are not seen.
    """
    with _observing:
        known: Any = getattr(index, "__dict__", {}).get(_COUNTER)
        if known is not None and known.owner() is index:
            return known.version  # type: ignore[no-any-return]
        try:
            changes = _Changes(weakref.ref(index))
            for name, wrapper in _wrappers(index, changes).items():
                object.__setattr__(index, name, wrapper)
        except (TypeError, AttributeError):  # an object without attributes or without weak references
            return None
        return changes.version


def class_name(kind: Any) -> str:
    """Module and name of a class or function."""
    return f"{kind.__module__}.{kind.__qualname__}"


def name_of(embedder: object) -> str:
    """Identity of an embedding model, as far as its class and the name of its model tell."""
    named = {name: getattr(embedder, name, None) for name in _MODEL_SETTINGS}
    shown = ",".join(
        f"{name}={value}" for name, value in named.items() if isinstance(value, str | int | dict)
    )
    return f"{class_name(type(embedder))}:{shown}"


def attributes(value: object) -> dict[str, Any]:
    """The attributes of an object, private ones of pydantic models among them.

    Cached properties and our own wrappers are none.
    """
    held = dict(getattr(value, "__dict__", {}))
    for name in list(held):
        if isinstance(getattr(type(value), name, None), functools.cached_property):
            del held[name]
    if (changes := held.get(_COUNTER)) is not None:
        held = _stripped(held, changes.names)
    return held | (getattr(value, "__pydantic_private__", None) or {})


def _wrappers(index: object, changes: _Changes) -> dict[str, Any]:
    kind, out = type(index), dict[str, Any]()
    for name in filter(_CHANGING.match, dir(kind)):
        function = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
        if isinstance(function, types.FunctionType):
            out[name] = _counted(types.MethodType(function, index), changes)
    changes.names = names = frozenset({_COUNTER, *_COPYING, *out})
    for name in _COPYING:
        if hasattr(kind, name):
            out[name] = functools.partial(_copied, name, index, names)
    return out | {_COUNTER: changes}


def _counted(method: types.MethodType, changes: _Changes) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        changes.count()
        try:
            result = method(*args, **kwargs)
        finally:
            changes.count()
        return awaited(result) if inspect.isawaitable(result) else result

    async def awaited(result: Awaitable[Any]) -> Any:
        changes.count()
        try:
            return await result
        finally:
            changes.count()

    return called


def _copied(name: str, index: object, names: frozenset[str], *args: Any) -> Any:
    """What a copying method of the class gives, without the wrappers.

    LlamaIndex's ``__getstate__`` deletes what it cannot pickle from the object: it gets a copy.
    """
    kind: Any = type(index)
    if hasattr(kind, "__copy__"):
        twin = _bare(kind.__copy__(index), names)
        return twin if name == "__copy__" else getattr(kind, name)(twin, *args)
    made = getattr(kind, name)(index, *args)
    return _stripped(made, names) if name == "__getstate__" else _bare(made, names)


def _bare(made: Any, names: frozenset[str]) -> Any:
    for name in names & vars(made).keys():
        object.__delattr__(made, name)
    return made


def _stripped(state: Any, names: frozenset[str]) -> Any:
    """A state as of ``__getstate__``: a dict, one beside the slots, or one inside pydantic's."""
    if isinstance(state, tuple):
        return tuple(_stripped(part, names) for part in state)
    if not isinstance(state, dict):
        return state
    kept = {name: one for name, one in state.items() if name not in names}
    if "__dict__" in kept:
        kept["__dict__"] = _stripped(kept["__dict__"], names)
    return kept


def _settings(value: Any) -> list[Any]:
    """What a short container of settings holds."""
    if not isinstance(value, _CONTAINERS) or len(value) > _MAX_SETTING:
        return []
    return list(value.values() if isinstance(value, dict) else value)

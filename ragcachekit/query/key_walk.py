"""The walk over an object graph that makes its key."""

from __future__ import annotations

import array
import contextvars
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import re
import types
import uuid
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Set
from typing import Any, NamedTuple

import numpy as np

from ragcachekit.query.index_changes import observe
from ragcachekit.query.keys import HashedKey, Identity, KeyRules, NotKeyable, ObjectKey, TooLarge

MAX_NODES = 2_000
"""Objects visited for one key; beyond it, comparing takes longer than many a search."""
SCALARS_PER_NODE = 16
MAX_ITEMS = 64
"""Items of a container that is looked through for indexes; a longer one is their content."""

_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes, range, type(...)})
_VALUES = (
    *(datetime.date, datetime.time, datetime.timedelta, datetime.timezone, re.Pattern),
    *(decimal.Decimal, fractions.Fraction, uuid.UUID, pathlib.PurePath, enum.Enum, np.generic, np.dtype),
)
_BY_IDENTITY = (type, types.ModuleType, np.ufunc, contextvars.ContextVar)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_CONTAINERS = (Mapping, list, tuple, deque, Set, bytearray, array.array, np.ndarray)
_READABLE = frozenset(
    {object, dict, list, tuple, set, frozenset, bytearray, deque, OrderedDict, defaultdict, Counter}
    | {int, float, str, bytes, array.array, np.ndarray, types.MappingProxyType, types.SimpleNamespace}
)
"""Types written in C whose whole content this module reads."""
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_NOT_STATE = frozenset({"__dict__", "__weakref__", "__pydantic_fields_set__"})


def freeze(value: object) -> Hashable:
    """``value`` as something hashable that is equal only for equal values *of equal types*.

    Types are part of it because ``True == 1 == 1.0`` in Python and not in every filter language.
    Containers, dataclasses, and objects of the standard library are taken apart.

    Raises
    ------
    TypeError
        For functions, and for objects of other classes: what they stand for may depend on anything.
    """
    return object_key(value).key


def object_key(value: object, rules: KeyRules | None = None) -> ObjectKey:
    """The key of ``value`` and of all that it refers to.

    An object with a method ``cache_key_parts()`` is keyed by what that returns.

    Raises
    ------
    NotKeyable
        Names the value, and where it is.
    """
    walk = _Walk(rules or KeyRules())
    return ObjectKey(HashedKey(walk.key(value)), walk.configurable)


def index_versions(value: object, rules: KeyRules) -> tuple[tuple[Identity, int], ...]:
    """The versions of the indexes in attributes, short containers and closures that ``value`` refers to."""
    versions: list[tuple[Identity, int]] = []
    seen: set[int] = set()
    todo = [value]
    while todo and len(seen) < MAX_NODES:
        one = todo.pop()
        if id(one) in seen or type(one) in _SCALARS or isinstance(one, _BY_IDENTITY):
            continue
        seen.add(id(one))
        if isinstance(one, rules.indexes) and (changes := observe(one, rules.delegating)) is not None:
            versions.append((Identity(one), changes.version))
        todo += _referred(one)
    return tuple(versions)


def _referred(value: Any) -> Iterator[object]:
    if isinstance(value, Mapping | list | tuple | Set):
        if len(value) <= MAX_ITEMS:
            yield from value.values() if isinstance(value, Mapping) else value
        return
    if isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    if isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    for cell in getattr(value, "__closure__", None) or ():
        yield from _content(cell)
    yield from getattr(value, "__dict__", {}).values()
    yield from (getattr(value, name, None) for name in _Class.of(type(value)).slots)


def _content(cell: Any) -> tuple[object, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not assigned yet
        return ()


class _Class(NamedTuple):
    """What is known of a class.

    ``hides`` state in C; ``is_data``: a dataclass or a named tuple without methods of its own; ``computed``:
    names of cached properties.
    """

    slots: tuple[str, ...]
    hides: bool
    is_data: bool
    computed: frozenset[str]

    @classmethod
    def of(cls, kind: type) -> _Class:
        known = _CLASSES.get(kind)
        if known is None:
            known = _CLASSES[kind] = cls(
                tuple(_slots(kind)),
                any(map(_hides_state, kind.__mro__)),
                _is_data(kind),
                frozenset(n for b in kind.__mro__ for n, v in vars(b).items() if _is_computed(v)),
            )
        return known


_CLASSES: weakref.WeakKeyDictionary[type, _Class] = weakref.WeakKeyDictionary()


class _Walk:
    """One walk over an object graph."""

    def __init__(self, rules: KeyRules) -> None:
        self._rules = rules
        self.configurable = False
        self._ancestors: list[int] = []
        self._nodes = 0.0

    def key(self, value: object) -> Hashable:
        """The key of one value."""
        kind = type(value)
        if kind in _SCALARS:
            self._count(1 / SCALARS_PER_NODE)
            return kind, value
        self._count(1)
        if isinstance(value, _VALUES):
            return kind, value
        if id(value) in self._ancestors:
            return "cycle", self._ancestors.index(id(value))
        self._ancestors.append(id(value))
        try:
            return self._compound(kind, value)
        finally:
            self._ancestors.pop()

    def _count(self, nodes: float) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            raise TooLarge("there is too much of it to compare at every question")

    def _compound(self, kind: type, value: Any) -> Hashable:
        if kind in _READABLE and kind is not object:
            extra = self._attributes(kind, value) if hasattr(value, "__dict__") else ()
            return (kind, *self._items(value), extra)
        if isinstance(value, _FUNCTIONS):
            return self._function(value)
        if isinstance(value, functools.partial):
            return kind, self.key(value.func), self.key(value.args), self.key(value.keywords)
        rules, library = self._rules, self._rules.is_library(kind.__module__)
        if isinstance(value, rules.indexes):
            return self._index(kind, value, library)
        if (parts := getattr(kind, "cache_key_parts", None)) is not None:
            return kind, self.key(parts(value))
        if isinstance(value, _CONTAINERS):
            bare = not (hasattr(value, "__dict__") or _Class.of(kind).slots)
            return (kind, *self._items(value), () if bare else self._attributes(kind, value))
        if kind is object or isinstance(value, (*_BY_IDENTITY, *rules.embedders)):
            return Identity(value)
        if rules.is_ignored(value):
            return None
        if isinstance(value, rules.uncached):
            raise NotKeyable(f"what a {_name(kind)} gives depends on more than its attributes")
        if not library and not _Class.of(kind).is_data:
            raise NotKeyable(f"a {_name(kind)} may depend on anything")
        if isinstance(value, rules.opaque):
            return Identity(value)
        self.configurable |= isinstance(value, rules.configurable)
        return kind, self._attributes(kind, value)

    def _items(self, value: Any) -> Iterator[Hashable]:
        if isinstance(value, Mapping):
            yield frozenset([(self.key(k), self.key(v)) for k, v in list(value.items())])
        elif isinstance(value, np.ndarray | array.array | bytearray):
            if getattr(getattr(value, "dtype", None), "hasobject", False):
                raise NotKeyable("an array of objects does not show its content")
            content = bytes(value) if isinstance(value, bytearray) else value.tobytes()
            self._count(len(content) / (8 * SCALARS_PER_NODE))
            yield (str(getattr(value, "dtype", "")), getattr(value, "shape", ()), content)
        elif isinstance(value, list | tuple | deque | Set):
            items = [self.key(item) for item in list(value)]
            yield frozenset(items) if isinstance(value, Set) else tuple(items)

    def _attributes(self, kind: type, value: object) -> Hashable:
        known = _Class.of(kind)
        attributes = dict(getattr(value, "__dict__", {}))
        if known.hides or not (known.slots or hasattr(value, "__dict__")):
            if self._rules.is_known_package(kind.__module__):
                return Identity(value)  # a client, a tokenizer: it is what it is
            raise NotKeyable(f"a {_name(kind)} does not show its content")
        attributes |= {name: getattr(value, name) for name in known.slots if hasattr(value, name)}
        attributes |= attributes.pop("__pydantic_private__", None) or {}
        names = sorted(attributes.keys() - known.computed)
        return tuple([(name, self._attribute(kind, name, attributes[name])) for name in names])

    def _attribute(self, kind: type, name: str, value: object) -> Hashable:
        try:
            return self.key(value)
        except NotKeyable as error:
            raise type(error)(f"{_name(kind)}.{name}: {error}") from error

    def _index(self, kind: type, value: object, library: bool) -> Hashable:
        """An index by identity, version and settings; its documents are what the version counts."""
        changes = observe(value, self._rules.delegating)
        if changes is None:
            raise NotKeyable(f"changes of a {_name(kind)} cannot be seen")
        if not library:
            parts = getattr(kind, "cache_key_parts", None)
            if parts is None:
                raise NotKeyable(f"a {_name(kind)} may depend on anything")
            return Identity(value), changes.version, self.key(parts(value))
        settings: list[Hashable] = []
        content: dict[str, object] = {}
        for name, one in sorted(getattr(value, "__dict__", {}).items()):
            foreign = not self._rules.is_library(type(one).__module__)
            read = (*_FUNCTIONS, *self._rules.indexes, *self._rules.embedders)
            if foreign or type(one) in _SCALARS or isinstance(one, read):
                settings.append((name, self._attribute(kind, name, one)))
            else:
                content[name] = one
        changes.compare(content)
        return Identity(value), changes.version, tuple(settings)

    def _function(self, value: Any) -> Hashable:
        """A function of a known library is itself; another may do anything."""
        function = getattr(value, "__func__", value)
        if isinstance(function, types.FunctionType):
            if not self._rules.is_library(function.__globals__.get("__name__")):
                raise NotKeyable(f"the function {function.__qualname__} may depend on anything")
            if function.__closure__:
                cells = [self.key(one) for cell in function.__closure__ for one in _content(cell)]
                return Identity(function), self.key(getattr(value, "__self__", None)), tuple(cells)
        owner = getattr(value, "__self__", None)
        return Identity(function) if owner is None else (function.__name__, self.key(owner))


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else tuple(names):
            private = name.startswith("__") and not name.endswith("__")
            if name not in _NOT_STATE:
                yield f"_{base.__name__.lstrip('_')}{name}" if private else name


def _hides_state(kind: type) -> bool:
    """Whether the class is written in C, so that its objects may hold more than their attributes show."""
    in_c = not kind.__flags__ & _HEAP_TYPE or isinstance(vars(kind).get("__new__"), types.BuiltinFunctionType)
    return in_c and kind not in _READABLE


def _is_data(kind: type) -> bool:
    """Whether the class has fields and no methods of its own."""
    if not dataclasses.is_dataclass(kind) and not issubclass(kind, tuple):
        return False
    bases = [base for base in kind.__mro__ if base not in _READABLE]
    own = [value for base in bases for name, value in vars(base).items() if not name.startswith("_")]
    methods = (property, classmethod, staticmethod)
    return not any(callable(value) or isinstance(value, methods) for value in own)


def _is_computed(value: object) -> bool:
    return isinstance(value, functools.cached_property)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"

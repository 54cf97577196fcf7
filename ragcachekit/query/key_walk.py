"""The walk over an object graph that makes its key."""

from __future__ import annotations

import array
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
from collections.abc import Callable, Hashable, Iterator, Mapping, Set
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ragcachekit.query.index_changes import observe
from ragcachekit.query.keys import HashedKey, Identity, KeyRules, NotKeyable, ObjectKey, TooLarge

MAX_NODES = 2_000
"""Objects visited for one key; beyond it, comparing takes longer than many a search."""
SCALARS_PER_NODE = 16
MAX_ITEMS = 32
"""Objects in an attribute of an index that are compared by value; more are its documents."""

_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes, range, type(...)})
_VALUES = (
    *(datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    *(decimal.Decimal, fractions.Fraction, uuid.UUID, pathlib.PurePath, np.dtype),
)
"""Types whose ``repr`` tells all that there is of a value."""
_CODE = (type, types.ModuleType)
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
    Containers and objects of the standard library are taken apart.

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
        if id(one) in seen or type(one) in _SCALARS or isinstance(one, _CODE):
            continue
        seen.add(id(one))
        if isinstance(one, rules.indexes) and (changes := observe(one, rules.delegating)) is not None:
            versions.append((Identity(one), changes.version))
        todo += _referred(one)
    return tuple(versions)


def _referred(value: Any) -> Iterator[object]:
    if isinstance(value, Mapping | list | tuple | deque | Set):
        if len(value) <= MAX_ITEMS:
            yield from value.values() if isinstance(value, Mapping) else value
        return
    if isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    if isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    if isinstance(value, types.FunctionType):
        yield from (value.__defaults__, value.__kwdefaults__)
    for cell in getattr(value, "__closure__", None) or ():
        yield from _content(cell)
    yield from _attributes_of(value).values()


def _content(cell: Any) -> tuple[object, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not assigned yet
        return ()


def _attributes_of(value: object) -> dict[str, Any]:
    """Attributes of an object, private ones of pydantic models among them, without cached properties."""
    known = _Class.of(type(value))
    attributes = dict(getattr(value, "__dict__", {}))
    attributes |= {name: getattr(value, name) for name in known.slots if hasattr(value, name)}
    attributes |= attributes.pop("__pydantic_private__", None) or {}
    return {name: one for name, one in attributes.items() if name not in known.computed}


class _Class(NamedTuple):
    """What is known of a class: slots, whether it has state in C, and its cached properties."""

    slots: tuple[str, ...]
    hides: bool
    computed: frozenset[str]

    @classmethod
    def of(cls, kind: type) -> _Class:
        known = _CLASSES.get(kind)
        if known is None:
            computed = (n for base in kind.__mro__ for n, value in vars(base).items() if _is_computed(value))
            hides = any(map(_hides_state, kind.__mro__))
            known = _CLASSES[kind] = cls(tuple(_slots(kind)), hides, frozenset(computed))
        return known


_CLASSES: weakref.WeakKeyDictionary[type, _Class] = weakref.WeakKeyDictionary()


class _Walk:
    """One walk over an object graph."""

    def __init__(self, rules: KeyRules) -> None:
        self._rules = rules
        self.configurable = False
        self._ancestors: list[int] = []
        self._nodes, self._limit, self._in_index = 0.0, float(MAX_NODES), False

    def key(self, value: object) -> Hashable:
        """The key of one value."""
        kind = type(value)
        if kind in _SCALARS:
            self._count(1 / SCALARS_PER_NODE)
            return kind, repr(value) if kind is float or kind is complex else value  # 0.0 == -0.0
        self._count(1)
        if id(value) in self._ancestors:
            return "cycle", self._ancestors.index(id(value))
        self._ancestors.append(id(value))
        try:
            return self._compound(kind, value)
        finally:
            self._ancestors.pop()

    def _count(self, nodes: float) -> None:
        self._nodes += nodes
        if self._nodes > self._limit:
            raise TooLarge("there is too much of it to compare at every question")

    def _compound(self, kind: type, value: Any) -> Hashable:
        if kind in _READABLE and kind is not object:
            extra = self._attributes(kind, value) if hasattr(value, "__dict__") else ()
            return (kind, *self._items(value), extra)
        if isinstance(value, _FUNCTIONS):
            return self._function(value)
        if kind is functools.partial:
            return kind, self.key(value.func), self.key(value.args), self.key(value.keywords)
        rules, library = self._rules, self._rules.is_library(kind.__module__)
        parts = self._parts(kind, library)
        if not library and parts is None:
            if not self._is_own_function(kind) and isinstance(value, rules.embedders):
                return Identity(value)
            if not self._is_own_function(kind) and rules.is_ignored(value):
                return None
            raise NotKeyable(f"a {_name(kind)} may depend on anything")
        if isinstance(value, rules.indexes):
            return self._index(kind, value, parts)
        if parts is not None:
            return kind, self.key(parts(value))
        return self._library_object(kind, value)

    def _is_own_function(self, kind: type) -> bool:
        """Whether objects of the class can be called, and do what the user wrote."""
        by = next((base for base in kind.__mro__ if "__call__" in vars(base)), None)
        return by is not None and not self._rules.is_library(by.__module__)

    def _parts(self, kind: type, library: bool) -> Callable[[Any], object] | None:
        """What a class says of itself; what a library says does not hold for subclasses of the user's."""
        for base in kind.__mro__:
            if "cache_key_parts" in vars(base):
                said: Callable[[Any], object] = vars(base)["cache_key_parts"]
                return said if library or not self._rules.is_library(base.__module__) else None
        return None

    def _library_object(self, kind: type, value: Any) -> Hashable:
        rules = self._rules
        if kind is object or isinstance(value, rules.embedders):
            return Identity(value)
        if isinstance(value, _CODE):
            return self._code(value)
        if isinstance(value, enum.Enum):
            return kind, value.name
        if isinstance(value, re.Pattern):
            return kind, value.pattern, value.flags
        if isinstance(value, _VALUES):
            return kind, repr(value)
        if isinstance(value, np.generic):
            return kind, value.dtype.str, value.tobytes()
        if isinstance(value, np.ufunc):  # others are made of functions
            name = str(getattr(value, "__name__", ""))
            if getattr(np, name, None) is not value:
                raise NotKeyable("a function made into a ufunc may depend on anything")
            return kind, name
        if isinstance(value, _CONTAINERS):
            bare = not (hasattr(value, "__dict__") or _Class.of(kind).slots)
            return (kind, *self._items(value), () if bare else self._attributes(kind, value))
        if rules.is_ignored(value):
            return None
        if isinstance(value, rules.uncached):
            raise NotKeyable(f"what a {_name(kind)} gives depends on more than its attributes")
        if isinstance(value, rules.opaque):
            attributes = sorted(_attributes_of(value).items())
            return Identity(value), tuple(
                [(n, self.key(one)) for n, one in attributes if type(one) in _SCALARS]
            )
        if self._in_index:  # a part of it: a client, a splitter
            return Identity(value)
        self.configurable |= isinstance(value, rules.configurable) and kind not in rules.unconfigurable
        return kind, self._attributes(kind, value)

    def _code(self, value: Any) -> Hashable:
        if not self._rules.is_library(value.__module__ if isinstance(value, type) else value.__name__):
            raise NotKeyable(f"{value.__name__} may depend on anything")
        return Identity(value)

    def _items(self, value: Any) -> Iterator[Hashable]:
        if isinstance(value, np.ndarray | array.array | bytearray):
            if getattr(getattr(value, "dtype", None), "hasobject", False):
                raise NotKeyable("an array of objects does not show its content")
            content = bytes(value) if isinstance(value, bytearray) else value.tobytes()
            self._count(len(content) / (8 * SCALARS_PER_NODE))
            form = str(getattr(value, "dtype", "")) + getattr(value, "typecode", "")
            yield (form, getattr(value, "shape", ()), content)
            return
        if self._in_index and len(value) > MAX_ITEMS:
            raise TooLarge("there is too much of it to compare at every question")
        if isinstance(value, Mapping):  # in order: it decides, where a filter language sorts by it
            yield tuple([(self.key(k), self.key(v)) for k, v in list(value.items())])
            yield self.key(getattr(value, "default_factory", None))
        elif isinstance(value, list | tuple | deque | Set):
            items = [self.key(item) for item in list(value)]
            yield frozenset(items) if isinstance(value, Set) else tuple(items)

    def _attributes(self, kind: type, value: object) -> Hashable:
        known = _Class.of(kind)
        if known.hides or not (known.slots or hasattr(value, "__dict__")):
            if self._rules.is_known_package(kind.__module__):
                return Identity(value)  # a client, a tokenizer: it is what it is
            raise NotKeyable(f"a {_name(kind)} does not show its content")
        attributes = sorted(_attributes_of(value).items())
        return tuple([(name, self._attribute(kind, name, one)) for name, one in attributes])

    def _attribute(self, kind: type, name: str, value: object) -> Hashable:
        try:
            return self.key(value)
        except NotKeyable as error:
            raise type(error)(f"{_name(kind)}.{name}: {error}") from error

    def _index(self, kind: type, value: object, parts: Callable[[Any], object] | None) -> Hashable:
        """An index by identity, version and settings; its documents are what the version counts."""
        changes = observe(value, self._rules.delegating)
        if changes is None:
            raise NotKeyable(f"changes of a {_name(kind)} cannot be seen")
        if parts is not None:
            return Identity(value), changes.version, self.key(parts(value))
        settings: list[Hashable] = []
        content: dict[str, object] = {}
        for name, one in sorted(_attributes_of(value).items()):
            if isinstance(one, self._rules.indexes):
                settings.append((name, self._attribute(kind, name, one)))
                continue
            saved = self._nodes, self._limit, self._in_index
            self._limit, self._in_index = min(self._limit, self._nodes + MAX_ITEMS), True
            try:
                settings.append((name, self._attribute(kind, name, one)))
            except TooLarge:
                self._check_items(kind, name, one)
                content[name] = one
                self._nodes = saved[0]
            finally:
                self._limit, self._in_index = saved[1:]
        changes.compare(content)
        return Identity(value), changes.version, tuple(settings)

    def _check_items(self, kind: type, name: str, value: Any) -> None:
        """Documents are data: what the user wrote among them would be code."""
        items = (
            list(islice(value.values() if isinstance(value, Mapping) else value, MAX_ITEMS))
            if isinstance(value, Mapping | list | tuple | deque | Set)
            else []
        )
        for item in items:
            if isinstance(item, _FUNCTIONS) or not self._rules.is_library(type(item).__module__):
                raise NotKeyable(f"{_name(kind)}.{name}: a {_name(type(item))} may depend on anything")

    def _function(self, value: Any) -> Hashable:
        """A function of a known library is itself; another may do anything."""
        function = getattr(value, "__func__", value)
        if isinstance(function, types.FunctionType):
            if not self._rules.is_library(function.__globals__.get("__name__")):
                raise NotKeyable(f"the function {function.__qualname__} may depend on anything")
            owner = self.key(getattr(value, "__self__", None))
            cells = [self.key(one) for cell in function.__closure__ or () for one in _content(cell)]
            return Identity(function), owner, tuple(cells)
        owner = getattr(value, "__self__", None)
        return Identity(function) if owner is None else (str(function.__name__), self.key(owner))


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


def _is_computed(value: object) -> bool:
    return isinstance(value, functools.cached_property)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"

"""What an object refers to: its attributes, and the indexes among all that it reaches."""

from __future__ import annotations

import array
import functools
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

import numpy as np

from ragcachekit.query.index_changes import observe
from ragcachekit.query.keys import Identity, KeyRules

MAX_NODES = 2_000
"""Objects visited for one key; beyond it, comparing takes longer than many a search."""
MAX_ITEMS = 32
"""Objects in an attribute of an index that are compared by value; more are its documents."""

SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes, range, type(...)})
SCALAR_BASES: tuple[type, ...] = (int, float, complex, str, bytes)
CODE = (type, types.ModuleType)
FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
CONTAINERS = (Mapping, list, tuple, deque, Set)
READABLE = frozenset(
    {dict, list, tuple, set, frozenset, bytearray, deque, OrderedDict, defaultdict, Counter}
    | {array.array, np.ndarray, types.MappingProxyType, types.SimpleNamespace}
)
"""Containers written in C whose whole content can be read."""
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_NOT_STATE = frozenset({"__dict__", "__weakref__", "__pydantic_fields_set__"})


class ClassParts(NamedTuple):
    """Slots of a class, whether it has state in C that no attribute shows, and its cached properties."""

    slots: tuple[str, ...]
    hides: bool
    computed: frozenset[str]

    @classmethod
    def of(cls, kind: type) -> ClassParts:
        """The parts of ``kind``, computed once."""
        known = _CLASSES.get(kind)
        if known is None:
            named = (item for base in kind.__mro__ for item in vars(base).items())
            computed = frozenset(n for n, one in named if isinstance(one, functools.cached_property))
            known = cls(tuple(_slots(kind)), any(map(_hides_state, kind.__mro__)), computed)
            _CLASSES[kind] = known
        return known


_CLASSES: weakref.WeakKeyDictionary[type, ClassParts] = weakref.WeakKeyDictionary()


def attributes_of(value: object) -> dict[str, Any]:
    """Attributes of an object, private ones of pydantic models among them, without cached properties."""
    parts = ClassParts.of(type(value))
    attributes = dict(getattr(value, "__dict__", ()))
    attributes |= {name: getattr(value, name) for name in parts.slots if hasattr(value, name)}
    attributes |= attributes.pop("__pydantic_private__", None) or {}
    for name in parts.computed & attributes.keys():
        del attributes[name]
    return attributes


def class_with_parts(kind: type, rules: KeyRules) -> type | None:
    """The class with ``cache_key_parts``; that of a library does not hold for subclasses of the user's."""
    by = next((base for base in kind.__mro__ if "cache_key_parts" in vars(base)), None)
    if by is None or rules.is_library(kind.__module__) or not rules.is_library(by.__module__):
        return by
    return None


def closure_of(function: Any) -> Iterator[object]:
    """What the closure of a function holds."""
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def index_versions(value: object, rules: KeyRules) -> tuple[tuple[Identity, int], ...]:
    """The versions of the indexes in attributes, short containers and closures that ``value`` refers to."""
    versions: list[tuple[Identity, int]] = []
    seen: set[int] = set()
    todo = [value]
    while todo and len(seen) < MAX_NODES:
        one = todo.pop()
        if id(one) in seen or type(one) in SCALARS or isinstance(one, CODE):
            continue
        seen.add(id(one))
        if isinstance(one, rules.indexes) and (changes := observe(one, rules.delegating)) is not None:
            versions.append((Identity(one), changes.version))
        todo += _referred(one)
    return tuple(versions)


def _referred(value: Any) -> Iterator[object]:
    if isinstance(value, CONTAINERS):
        if len(value) <= MAX_ITEMS:
            yield from value.values() if isinstance(value, Mapping) else value
        return
    if isinstance(value, (*FUNCTIONS, functools.partial)):
        names = ("__self__", "__func__", "__defaults__", "__kwdefaults__", "func", "args", "keywords")
        yield from (getattr(value, name, None) for name in names)
    yield from closure_of(value)
    yield from attributes_of(value).values()


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
    return in_c and kind not in READABLE and kind not in SCALAR_BASES and kind is not object

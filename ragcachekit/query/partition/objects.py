"""Objects: their identity, and what they refer to (attributes, items, closures)."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Iterator, Mapping, Set
from typing import Any

SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes, range, type(...)})
FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
CODE = (type, types.ModuleType)

_MAX_ITEMS = 32
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE


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


def attributes_of(value: object) -> dict[str, Any]:
    """Attributes of an object, private ones of pydantic models among them, without cached properties."""
    kind: Any = type(value)
    state: Any = object.__getstate__(value)  # not of the class, which may leave some out
    plain, slots = state if isinstance(state, tuple) else (state, None)
    attributes = {**(plain or {}), **(slots or {})}
    attributes |= attributes.pop("__pydantic_private__", None) or {}
    for name in _computed(kind) & attributes.keys():
        del attributes[name]
    return attributes


def closure_of(function: Any) -> Iterator[object]:
    """What the closure of a function holds."""
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def referred_by(value: Any) -> Iterator[object]:
    """Attributes of an object, items of a short container, and what a function is bound to."""
    if isinstance(value, Mapping | list | tuple | Set):
        if len(value) <= _MAX_ITEMS:
            yield from value.values() if isinstance(value, Mapping) else value
        return
    if isinstance(value, (*FUNCTIONS, functools.partial)):
        names = ("__self__", "__func__", "__defaults__", "__kwdefaults__", "func", "args", "keywords")
        yield from (getattr(value, name, None) for name in names)
    yield from closure_of(value)
    yield from attributes_of(value).values()


@functools.lru_cache(maxsize=1024)
def _computed(kind: Any) -> frozenset[str]:
    """What changes though the object does not: cached properties, and pydantic's record of what was set."""
    named = [item for base in kind.__mro__ for item in vars(base).items()]
    cached = {name for name, one in named if isinstance(one, functools.cached_property)}
    return frozenset({"__pydantic_fields_set__", *cached})


@functools.lru_cache(maxsize=1024)
def hides_state(kind: Any) -> bool:
    """Whether a base is written in C, so that objects may hold more than their attributes show."""
    return any(
        not base.__flags__ & _HEAP_TYPE or isinstance(vars(base).get("__new__"), types.BuiltinFunctionType)
        for base in kind.__mro__
        if base is not object
    )

"""Keys of objects: the rules for a framework's classes, and what an object refers to."""

from __future__ import annotations

import array
import functools
import logging
import sys
import sysconfig
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ragcachekit.query.index_changes import observe

_LIBRARIES = frozenset({"numpy", "pydantic", "pydantic_core", "typing_extensions"})
_IGNORED = (logging.Logger, logging.Handler, type(threading.Lock()), type(threading.RLock()))

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


class NotKeyable(TypeError):
    """A value that cannot be part of a key: its content cannot be read."""


class TooLarge(NotKeyable):
    """A value with too much content to be compared at every question."""


@dataclass(frozen=True)
class KeyRules:
    """Rules for a framework's classes. Classes of all other packages are refused.

    Attributes
    ----------
    libraries : frozenset of str
        Top-level packages whose classes depend on their attributes and on nothing else.
    indexes : tuple of type
        Classes that hold documents: keyed by identity, settings, and the number of changes so far.
    delegating : tuple of type
        Abstract classes whose changing methods only call those of their subclasses.
    embedders, opaque : tuple of type
        Classes that depend on the embedded text alone; classes keyed by identity (language models).
    ignored, searching : tuple of type
        Classes that change no result (callbacks, loggers, locks); classes that are never ignored.
    configurable, unconfigurable : tuple of type
        Classes that may read the ``configurable`` values of a run; those of them that do not.
    uncached : tuple of type
        Classes whose results depend on more than can be read.
    """

    libraries: frozenset[str] = frozenset()
    indexes: tuple[type, ...] = ()
    delegating: tuple[type, ...] = ()
    embedders: tuple[type, ...] = ()
    opaque: tuple[type, ...] = ()
    ignored: tuple[type, ...] = ()
    searching: tuple[type, ...] = ()
    configurable: tuple[type, ...] = ()
    unconfigurable: tuple[type, ...] = ()
    uncached: tuple[type, ...] = ()
    readers: weakref.WeakKeyDictionary[type, Any] = field(
        default_factory=weakref.WeakKeyDictionary, init=False, repr=False, compare=False
    )
    """How objects of a class are read under these rules; filled at first use."""

    def is_known_package(self, module: str | None) -> bool:
        """Whether the module belongs to one of the libraries."""
        top = (module or "").partition(".")[0]
        return top in self.libraries or top in _LIBRARIES

    def is_library(self, module: str | None) -> bool:
        """Whether the module belongs to one of the libraries or to Python's own."""
        return self.is_known_package(module) or _is_of_python((module or "").partition(".")[0])

    def is_ignored(self, kind: type) -> bool:
        """Whether objects of the class change no result."""
        return issubclass(kind, (*_IGNORED, *self.ignored)) and not issubclass(kind, self.searching)


@functools.cache
def _is_of_python(top: str) -> bool:
    """Whether a module is Python's own, and not one of the user's with such a name."""
    if top not in sys.stdlib_module_names or top == "types":  # the module of classes made at run time
        return False
    spec = getattr(sys.modules.get(top), "__spec__", None)
    origin = getattr(spec, "origin", None)
    return origin in (None, "built-in", "frozen") or Path(origin).is_relative_to(sysconfig.get_path("stdlib"))


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


class HashedKey:
    """A key whose hash is computed once; that of nested tuples is computed at every look-up."""

    __slots__ = ("_hash", "_key")

    def __init__(self, key: Hashable) -> None:
        self._key, self._hash = key, hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, HashedKey) and self._hash == other._hash and self._key == other._key


class ObjectKey(NamedTuple):
    """The key of an object; ``configurable`` if a part may read the ``configurable`` values of a run."""

    key: Hashable
    configurable: bool


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

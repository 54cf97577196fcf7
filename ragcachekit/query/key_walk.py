"""The walk over an object graph that makes its key."""

from __future__ import annotations

import contextvars
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import re
import threading
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Set
from contextlib import suppress
from typing import Any, Generic

import numpy as np

from ragcachekit.query.code import class_data, class_functions, function_reads
from ragcachekit.query.index_changes import is_counting, observe
from ragcachekit.query.keys import HashedKey, Identity, KeyRules, NotKeyable, ObjectKey

MAX_NODES = 2_000
"""Objects visited for one key; beyond it, comparing takes longer than many a search."""
MAX_LIBRARY_NODES = 500
"""Objects visited for one attribute of a library's object; a larger one is content, keyed by identity."""
SCALARS_PER_NODE = 16

_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes, range, type(...)})
_VALUES = (
    *(datetime.date, datetime.time, datetime.timedelta, datetime.timezone, re.Pattern),
    *(decimal.Decimal, fractions.Fraction, uuid.UUID, pathlib.PurePath, enum.Enum, np.generic, np.dtype),
)
_NAMED = (types.BuiltinFunctionType, types.ModuleType, np.ufunc, contextvars.ContextVar)
_FUNCTIONS = (types.FunctionType, types.MethodType)
_VISIBLE = frozenset(
    {object, Generic, dict, list, tuple, set, frozenset, bytearray, deque, OrderedDict, defaultdict, Counter}
    | {types.SimpleNamespace, threading.local, int, float, str, bytes}
)
"""Types written in C whose whole content this module reads."""
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_NOT_STATE = frozenset({"__dict__", "__weakref__", "__pydantic_fields_set__"})


def freeze(value: object) -> Hashable:
    """``value`` as something hashable that is equal only for equal values *of equal types*.

    Types are part of it because ``True == 1 == 1.0`` in Python and not in every filter language. Objects
    are taken apart.

    Raises
    ------
    TypeError
        For functions, and for objects that do not show their content.
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
    return ObjectKey(HashedKey(walk.key(value)), walk.own_code, tuple(walk.versions))


def index_versions(value: object, rules: KeyRules) -> tuple[tuple[Identity, int], ...]:
    """The versions of the indexes that ``value`` refers to, as far as they can be found."""
    walk = _Walk(rules, tolerant=True)
    walk.key(value)
    return tuple(walk.versions)


class _Walk:
    """One walk over an object graph; a tolerant one passes over what cannot be keyed."""

    def __init__(self, rules: KeyRules, tolerant: bool = False) -> None:
        self._rules, self._tolerant = rules, tolerant
        self.own_code = False
        self.versions: list[tuple[Identity, int]] = []
        self._ancestors: list[int] = []
        self._scanned: set[int] = set()  # classes and functions whose code was read
        self._listed: set[int] = set()  # classes whose data was
        self._nodes, self._limit = 0.0, float(MAX_NODES)

    def key(self, value: object) -> Hashable:
        """The key of one value."""
        try:
            return self._key(value)
        except NotKeyable:
            if not self._tolerant:
                raise
            return None

    def _key(self, value: object) -> Hashable:
        kind = type(value)
        if kind in _SCALARS:
            self._nodes += 1 / SCALARS_PER_NODE
            return kind, value
        self._nodes += 1
        if self._nodes > self._limit:
            raise NotKeyable("there is too much of it to compare at every question", own=False)
        if isinstance(value, _VALUES):
            return kind, value
        if isinstance(value, type):
            return value if self._rules.is_library(value.__module__) else (value, *self._shared_data(value))
        if callable(parts := getattr(kind, "cache_key_parts", None)):
            return kind, self.key(parts(value))
        if kind is object or isinstance(value, (*_NAMED, *self._rules.opaque)):
            return Identity(value)
        if self._rules.is_ignored(value):
            return None
        if id(value) in self._ancestors:
            return "cycle", self._ancestors.index(id(value))
        self._ancestors.append(id(value))
        try:
            return self._compound(kind, value)
        finally:
            self._ancestors.pop()

    def _compound(self, kind: type, value: Any) -> Hashable:
        if isinstance(value, _FUNCTIONS):
            return self._function(value)
        if isinstance(value, functools.partial):
            return kind, self.key(value.func), self.key(value.args), self.key(value.keywords)
        if isinstance(value, self._rules.indexes):
            return self._index(kind, value)
        if isinstance(value, np.ndarray):
            return self._array(kind, value)
        if kind in _VISIBLE and kind.__module__ == "builtins":
            return (kind, *self._items(value))
        return (kind, *self._items(value), self._object(kind, value))

    def _items(self, value: object) -> Iterator[Hashable]:
        if isinstance(value, Mapping):
            yield frozenset([(self.key(k), self.key(v)) for k, v in list(value.items())])
        elif isinstance(value, list | tuple | deque):
            yield tuple([self.key(item) for item in list(value)])
        elif isinstance(value, Set):
            yield frozenset([self.key(item) for item in list(value)])
        elif isinstance(value, bytearray | str | bytes | int | float):
            yield bytes(value) if isinstance(value, bytearray) else value

    def _array(self, kind: type, value: Any) -> Hashable:
        if value.dtype.hasobject or value.nbytes > 8 * SCALARS_PER_NODE * MAX_NODES:
            raise NotKeyable(f"a large {kind.__name__} is not compared at every question", own=False)
        return kind, value.dtype.str, value.shape, value.tobytes()

    # -- objects -----------------------------------------------------------------------------------

    def _object(self, kind: type, value: object) -> Hashable:
        """The attributes of an object; of the user's own classes also what their methods read."""
        library = self._rules.is_library(kind.__module__)
        slots = list(_slots(kind))
        if any(map(_hides_state, kind.__mro__)) or not (slots or hasattr(value, "__dict__")):
            raise NotKeyable(f"a {_name(kind)} does not show its content", own=False)
        attributes = dict(getattr(value, "__dict__", {}))
        attributes |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
        attributes |= attributes.pop("__pydantic_private__", None) or {}
        attribute = self._library_attribute if library else self._attribute
        state = tuple([(name, attribute(kind, name, attributes[name])) for name in sorted(attributes)])
        return state if library else (state, self._own_class(kind))

    def _attribute(self, kind: type, name: str, value: object) -> Hashable:
        try:
            return self.key(value)
        except NotKeyable as error:
            own = error.own or not self._rules.is_library(kind.__module__)
            raise NotKeyable(f"{_name(kind)}.{name}: {error}", own=own) from error

    def _library_attribute(self, kind: type, name: str, value: object) -> Hashable:
        """Known code calls the functions in its fields, and does not depend on what it cannot show."""
        if isinstance(value, _FUNCTIONS):
            return self._code(value)
        nodes, limit, own_code = self._nodes, self._limit, self.own_code
        self._limit = min(limit, nodes + MAX_LIBRARY_NODES)
        try:
            return self._attribute(kind, name, value)
        except NotKeyable as error:
            if error.own or self.own_code != own_code:
                raise
            self._nodes = nodes
            return Identity(value)
        finally:
            self._limit = limit

    def _index(self, kind: type, value: object) -> Hashable:
        changes = observe(value)
        if changes is None:
            raise NotKeyable(f"changes of a {_name(kind)} cannot be seen", own=True)
        attributes = getattr(value, "__dict__", {})
        settings = {name: (type(one), one) for name, one in attributes.items() if type(one) in _SCALARS}
        changes.compare({name: one for name, one in attributes.items() if name not in settings})
        self.versions.append((Identity(value), changes.version))
        own = not self._rules.is_library(kind.__module__)
        return (*self.versions[-1], self._object(kind, value) if own else tuple(sorted(settings.items())))

    # -- code --------------------------------------------------------------------------------------

    def _function(self, value: types.FunctionType | types.MethodType) -> Hashable:
        """A function that is data, such as a filter: known ones are themselves, others may do anything."""
        if not self._rules.is_library(value.__module__):
            raise NotKeyable(f"the function {value.__qualname__} may depend on anything", own=True)
        owner = self.key(value.__self__) if isinstance(value, types.MethodType) else None
        return Identity(getattr(value, "__func__", value)), owner

    def _code(self, function: Callable[..., Any]) -> Hashable:
        """A function that is called for every result: its code, and what that reads."""
        if isinstance(function, types.MethodType):
            return self.key(function.__self__), self._code(function.__func__)
        if not isinstance(function, types.FunctionType) or self._rules.is_library(function.__module__):
            return Identity(function)
        self.own_code = True
        if id(function) in self._scanned:
            return function.__code__
        self._scanned.add(id(function))
        kept = [(name, self._read(function, name, value)) for name, value in function_reads(function)]
        return function.__code__, tuple(kept)

    def _read(self, function: types.FunctionType, name: str, value: object) -> Hashable:
        if isinstance(value, types.FunctionType):  # follow the user's own, not every package's
            near = value.__module__.partition(".")[0] == function.__module__.partition(".")[0]
            return self._code(value) if near else Identity(value)
        try:
            return self.key(value)
        except NotKeyable as error:
            raise NotKeyable(f"{function.__qualname__} reads {name}: {error}", own=True) from error

    def _own_class(self, kind: type) -> Hashable:
        """What instances of a class share, and what its methods read."""
        self.own_code = True
        read: list[Hashable] = []
        for base in kind.__mro__:
            known = self._rules.is_library(base.__module__) or is_counting(base)
            if not known and id(base) not in self._scanned:
                self._scanned.add(id(base))
                read += [(name, self._attribute(base, name, value)) for name, value in class_data(base)]
                read += [self._code(function) for function in class_functions(base)]
        return tuple(read)

    def _shared_data(self, kind: type) -> Iterator[Hashable]:
        """The data of a class that is itself a value; what is no data is left out."""
        if id(kind) in self._listed:
            return
        self._listed.add(id(kind))
        for name, value in class_data(kind):
            with suppress(NotKeyable):
                yield name, self.key(value)


def _hides_state(kind: type) -> bool:
    """Whether the class is written in C, so that its objects may hold more than their attributes show."""
    in_c = not kind.__flags__ & _HEAP_TYPE or isinstance(vars(kind).get("__new__"), types.BuiltinFunctionType)
    return in_c and kind not in _VISIBLE


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else tuple(names):
            private = name.startswith("__") and not name.endswith("__")
            if name not in _NOT_STATE:
                yield f"_{base.__name__.lstrip('_')}{name}" if private else name


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"

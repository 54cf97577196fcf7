"""Keys of objects, made of all that they refer to."""

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
from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from ragcachekit.query.index_changes import observe
from ragcachekit.query.keys import (
    CODE,
    CONTAINERS,
    FUNCTIONS,
    MAX_ITEMS,
    MAX_NODES,
    READABLE,
    SCALAR_BASES,
    SCALARS,
    ClassParts,
    HashedKey,
    Identity,
    KeyRules,
    NotKeyable,
    ObjectKey,
    TooLarge,
    attributes_of,
    class_with_parts,
    closure_of,
)

SCALARS_PER_NODE = 16

_VALUES = (
    *(datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    *(decimal.Decimal, fractions.Fraction, uuid.UUID, pathlib.PurePath, np.dtype),
)
"""Types whose ``repr`` shows all that there is of a value."""
_BYTES = (bytearray, array.array, np.ndarray)
_BARE = frozenset({dict, list, tuple, set, frozenset})
_TOO_LARGE = "there is too much of it to compare at every question"
_RULES = KeyRules()


def freeze(value: object) -> Hashable:
    """``value`` as something hashable that is equal only for equal values *of equal types*.

    TypeError for functions and objects of other classes than the standard library's.
    """
    return object_key(value).key


def object_key(value: object, rules: KeyRules = _RULES) -> ObjectKey:
    """The key of ``value`` and of all that it refers to; NotKeyable names what cannot be read, and where.

    An object with a method ``cache_key_parts()`` is keyed by what that returns.
    """
    reader = _Reader(rules)
    return ObjectKey(HashedKey(reader.key(value)), reader.configurable)


class _Reader:
    """Makes the key of one object graph. How objects are read depends on their class alone."""

    def __init__(self, rules: KeyRules) -> None:
        self._rules = rules
        self.configurable = False
        self._ancestors: list[int] = []
        self._nodes, self._limit, self._in_index = 0.0, float(MAX_NODES), False

    def key(self, value: object) -> Hashable:
        """The key of one value."""
        kind = type(value)
        if kind in SCALARS:
            self._count(1 / SCALARS_PER_NODE)
            return kind, repr(value) if kind is float or kind is complex else value  # 0.0 == -0.0
        self._count(1)
        if id(value) in self._ancestors:
            return "cycle", self._ancestors.index(id(value))
        self._ancestors.append(id(value))
        try:
            read: _Read | None = self._rules.readers.get(kind)
            if read is None:
                read = self._rules.readers[kind] = _read_of(kind, self._rules)
            return read(self, kind, value)
        finally:
            self._ancestors.pop()

    def _count(self, nodes: float) -> None:
        self._nodes += nodes
        if self._nodes > self._limit:
            raise TooLarge(_TOO_LARGE)

    def refused(self, kind: type, value: object) -> Hashable:
        if issubclass(kind, self._rules.uncached):
            raise NotKeyable(f"what a {_name(kind)} gives depends on more than its attributes")
        raise NotKeyable(f"a {_name(kind)} may depend on anything")

    def code(self, kind: type, value: Any) -> Hashable:
        if not self._rules.is_library(value.__module__ if isinstance(value, type) else value.__name__):
            raise NotKeyable(f"{value.__name__} may depend on anything")
        return Identity(value)

    def scalar(self, kind: type, value: Any) -> Hashable:
        """A number or string of a subclass, whatever that makes of its ``repr``."""
        base: Any = next(base for base in SCALAR_BASES if isinstance(value, base))
        return kind, base.__repr__(value), self._state(kind, value)

    def function(self, kind: type, value: Any) -> Hashable:
        """A function of a known library is itself; another may do anything."""
        function = getattr(value, "__func__", value)
        owner = getattr(value, "__self__", None)
        if isinstance(function, types.FunctionType):
            if not self._rules.is_library(function.__globals__.get("__name__")):
                raise NotKeyable(f"the function {function.__qualname__} may depend on anything")
            return Identity(function), self.key(owner), tuple(map(self.key, closure_of(function)))
        return Identity(function) if owner is None else (str(function.__name__), self.key(owner))

    def array(self, kind: type, value: Any) -> Hashable:
        if getattr(getattr(value, "dtype", None), "hasobject", False):
            raise NotKeyable("an array of objects does not show its content")
        content = bytes(value) if isinstance(value, bytearray) else value.tobytes()
        self._count(len(content) / (8 * SCALARS_PER_NODE))
        form = str(getattr(value, "dtype", "")) + getattr(value, "typecode", "")
        return kind, form, getattr(value, "shape", ()), content, self._state(kind, value)

    def mapping(self, kind: type, value: Any) -> Hashable:
        """The items in order, which decides where a filter language sorts by it."""
        self._check_length(value)
        items = tuple([(self.key(k), self.key(one)) for k, one in list(value.items())])
        factory = getattr(value, "default_factory", None)
        return kind, items, None if factory is None else self.key(factory), self._state(kind, value)

    def items(self, kind: type, value: Any) -> Hashable:
        self._check_length(value)
        keys = [self.key(item) for item in list(value)]
        return kind, frozenset(keys) if isinstance(value, Set) else tuple(keys), self._state(kind, value)

    def _check_length(self, value: Any) -> None:
        if self._in_index and len(value) > MAX_ITEMS:
            raise TooLarge(_TOO_LARGE)

    def opaque(self, kind: type, value: object) -> Hashable:
        """An object by identity and its scalar settings: a language model."""
        scalars = [(n, one) for n, one in sorted(attributes_of(value).items()) if type(one) in SCALARS]
        return Identity(value), tuple([(name, self.key(one)) for name, one in scalars])

    def library_object(self, kind: type, value: object) -> Hashable:
        """An object of a library by its attributes; part of an index (a client, a splitter) by identity."""
        if self._in_index:
            return Identity(value)
        rules = self._rules
        self.configurable |= issubclass(kind, rules.configurable) and kind not in rules.unconfigurable
        return kind, self.attributes(kind, value)

    def attributes(self, kind: type, value: object) -> Hashable:
        known = ClassParts.of(kind)
        if known.hides or not (known.slots or hasattr(value, "__dict__")):
            if self._rules.is_known_package(kind.__module__):
                return Identity(value)  # a client, a tokenizer: it is what it is
            raise NotKeyable(f"a {_name(kind)} does not show its content")
        attributes = sorted(attributes_of(value).items())
        return tuple([(name, self._attribute(kind, name, one)) for name, one in attributes])

    def _state(self, kind: type, value: object) -> Hashable:
        if kind in _BARE or not (hasattr(value, "__dict__") or ClassParts.of(kind).slots):
            return ()
        return self.attributes(kind, value)

    def _attribute(self, kind: type, name: str, value: object) -> Hashable:
        try:
            return self.key(value)
        except NotKeyable as error:
            raise type(error)(f"{_name(kind)}.{name}: {error}") from error

    def index(self, kind: type, value: object) -> Hashable:
        """An index by identity, version and settings; its documents are what the version counts."""
        changes = observe(value, self._rules.delegating)
        if changes is None:
            raise NotKeyable(f"changes of a {_name(kind)} cannot be seen")
        if class_with_parts(kind, self._rules) is not None:
            return Identity(value), changes.version, self.key(_parts(kind, value))
        settings: list[Hashable] = []
        content: dict[str, object] = {}
        for name, one in sorted(attributes_of(value).items()):
            nodes, limit, in_index = self._nodes, self._limit, self._in_index
            is_index = type(one) not in SCALARS and isinstance(one, self._rules.indexes)
            if not is_index:
                self._limit, self._in_index = min(limit, nodes + MAX_ITEMS), True
            try:
                settings.append((name, self._attribute(kind, name, one)))
            except TooLarge:
                if is_index:
                    raise
                self._check_items(kind, name, one)
                content[name], self._nodes = one, nodes
            finally:
                self._limit, self._in_index = limit, in_index
        changes.compare(content)
        return Identity(value), changes.version, tuple(settings)

    def _check_items(self, kind: type, name: str, value: Any) -> None:
        """Refuse functions and objects of the user's classes among an index's documents."""
        items: Iterable[object] = value.values() if isinstance(value, Mapping) else value
        kinds = {type(one) for one in islice(items, MAX_ITEMS)} if isinstance(value, CONTAINERS) else ()
        for item in kinds:
            if issubclass(item, FUNCTIONS) or not self._rules.is_library(item.__module__):
                raise NotKeyable(f"{_name(kind)}.{name}: a {_name(item)} may depend on anything")


_Read: TypeAlias = Callable[[_Reader, type, Any], Hashable]

_IDENTITY: _Read = lambda _, __, value: Identity(value)  # noqa: E731
_NOTHING: _Read = lambda *_: None  # noqa: E731
_BY_BASE: tuple[tuple[type | tuple[type, ...], _Read], ...] = (
    (CODE, _Reader.code),
    (enum.Enum, lambda _, kind, value: (kind, value.name, repr(value.value))),
    (re.Pattern, lambda _, kind, value: (kind, value.pattern, value.flags)),
    (_VALUES, lambda _, kind, value: (kind, repr(value))),
    (np.generic, lambda _, kind, value: (kind, value.dtype.str, value.tobytes())),
    (np.ufunc, _Reader.refused),
    (SCALAR_BASES, _Reader.scalar),
    (_BYTES, _Reader.array),
    (Mapping, _Reader.mapping),
    (CONTAINERS, _Reader.items),
)


def _read_of(kind: type, rules: KeyRules) -> _Read:
    """The method that reads objects of a class: all that may decide about results."""
    if kind is types.SimpleNamespace:
        return lambda reader, kind, value: (kind, reader.attributes(kind, value))
    if kind in READABLE:
        return next(read for base, read in _BY_BASE if issubclass(kind, base))
    if issubclass(kind, FUNCTIONS):
        return _Reader.function
    if kind is functools.partial:
        return lambda reader, kind, value: (
            (kind, reader.key(value.func), reader.key(value.args), reader.key(value.keywords))
        )
    parts = class_with_parts(kind, rules)
    if parts is None and not rules.is_library(kind.__module__):
        return _read_of_others(kind, rules)
    if issubclass(kind, rules.indexes):
        return _Reader.index
    if parts is not None:
        return lambda reader, kind, value: (kind, reader.key(_parts(kind, value)))
    if kind is object or issubclass(kind, rules.embedders):
        return _IDENTITY
    by_base = next((read for base, read in _BY_BASE if issubclass(kind, base)), None)
    if by_base is not None:
        return by_base
    if rules.is_ignored(kind):
        return _NOTHING
    if issubclass(kind, rules.uncached):
        return _Reader.refused
    return _Reader.opaque if issubclass(kind, rules.opaque) else _Reader.library_object


def _read_of_others(kind: type, rules: KeyRules) -> _Read:
    """For the user's classes: embedders and callbacks, unless their objects can be called."""
    by = next((base for base in kind.__mro__ if "__call__" in vars(base)), None)
    if by is None or rules.is_library(by.__module__):
        if issubclass(kind, rules.embedders):
            return _IDENTITY
        if rules.is_ignored(kind):
            return _NOTHING
    return _Reader.refused


def _parts(kind: type, value: Any) -> object:
    return getattr(kind, "cache_key_parts")(value)  # noqa: B009


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"

"""Keys of objects: equal for equal content at any depth, refused where content does not show."""

from __future__ import annotations

import array
import collections
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import re
import types
import uuid
from collections.abc import Hashable
from typing import Any

import numpy as np

from ragcachekit.query.partition.index_changes import observe
from ragcachekit.query.partition.objects import (
    CODE,
    FUNCTIONS,
    SCALARS,
    Identity,
    attributes_of,
    closure_of,
    hides_state,
    referred_by,
)
from ragcachekit.query.partition.rules import KeyRules, class_with_parts

MAX_VALUES = 10_000
"""Values visited for one key; beyond it, comparing takes longer than many a search."""
_MAX_SETTING = 100  # values in an attribute of an index; more are its documents

_CONTAINERS = (dict, list, tuple, set, frozenset)
_OPEN = (
    *(*_CONTAINERS, int, float, complex, str, bytes, np.ndarray, np.ufunc),
    *(bytearray, array.array, collections.deque, types.MappingProxyType, types.SimpleNamespace),
)
"""Types whose subclasses may hold more than their items, and types that can be changed: refused."""
_VALUES = (
    *(datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    *(decimal.Decimal, fractions.Fraction, uuid.UUID, pathlib.PurePath, np.dtype),
)
"""Types whose ``repr`` shows all that there is of a value."""


class NotKeyable(TypeError):
    """A value that cannot be part of a key: its content cannot be read."""


class TooLarge(NotKeyable):
    """A value with too much content to be compared at every question."""


def object_key(value: object, rules: KeyRules | None = None) -> Hashable:
    """``value`` and all that it refers to as something hashable, equal only for equal values of equal types.

    NotKeyable (a TypeError) for functions and objects of classes outside the libraries; it names the place.
    An object with a method ``cache_key_parts()`` is keyed by what that returns.
    """
    return _Reader(rules or KeyRules()).key(value)


def index_versions(value: object, rules: KeyRules) -> tuple[tuple[Identity, int, Hashable], ...]:
    """The versions of the indexes in attributes, short containers and closures that ``value`` refers to."""
    versions: list[tuple[Identity, int, Hashable]] = []
    seen: set[int] = set()
    todo = [value]
    while todo and len(seen) < MAX_VALUES:
        one = todo.pop()
        if id(one) in seen or type(one) in SCALARS or isinstance(one, CODE):
            continue
        seen.add(id(one))
        if isinstance(one, rules.indexes) and (changes := observe(one, rules.delegating)) is not None:
            parts = class_with_parts(type(one), rules)
            own = None if parts is None else object_key(parts.cache_key_parts(one), rules)
            versions.append((Identity(one), changes.version, own))
        todo += referred_by(one)
    return tuple(versions)


class _Reader:
    """Makes the key of one object graph. How objects are read depends on their class alone."""

    def __init__(
        self,
        rules: KeyRules,
        limit: int = MAX_VALUES,
        ancestors: tuple[int, ...] = (),
        in_index: bool = False,
    ) -> None:
        self._rules, self._left, self._in_index = rules, limit, in_index
        self._ancestors = list(ancestors)

    def key(self, value: Any) -> Hashable:
        kind = type(value)
        self._require_room(1)
        self._left -= 1
        if kind in SCALARS:
            return kind, repr(value) if kind is float or kind is complex else value  # 0.0 == -0.0
        if id(value) in self._ancestors:
            return "cycle", self._ancestors.index(id(value))
        self._ancestors.append(id(value))
        try:
            content = self._content(kind, value)
            return type(value), content  # the class is another since an index is observed
        finally:
            self._ancestors.pop()

    def _require_room(self, values: int) -> None:
        if values > self._left:
            raise TooLarge("there is too much of it to compare at every question")

    def _content(self, kind: type, value: Any) -> Hashable:
        if kind in _CONTAINERS:
            self._require_room(len(value))
        if kind is dict:  # in order, which decides where a filter language sorts by it
            return tuple([(self.key(name), self.key(one)) for name, one in list(value.items())])
        if kind is list or kind is tuple:
            return tuple([self.key(one) for one in list(value)])
        if kind is set or kind is frozenset:
            return frozenset([self.key(one) for one in list(value)])
        if kind is functools.partial:
            return self.key((value.func, value.args, value.keywords))
        if issubclass(kind, FUNCTIONS):
            return self._function(value)
        if issubclass(kind, CODE):
            module = value.__module__ if isinstance(value, type) else value.__name__
            self._require_library(module, value.__name__)
            return Identity(value)
        return self._object(kind, value)

    def _function(self, value: Any) -> Hashable:
        """A function of a known library is itself; another may do anything."""
        function = getattr(value, "__func__", value)
        owner = self.key(getattr(value, "__self__", None))
        if not isinstance(function, types.FunctionType):
            return str(function.__name__), owner
        self._require_library(function.__globals__.get("__name__"), f"the function {function.__qualname__}")
        return Identity(function), owner, tuple([self.key(one) for one in closure_of(function)])

    def _require_library(self, module: str | None, code: str) -> None:
        if not self._rules.is_library(module):
            raise NotKeyable(f"{code} may depend on anything")

    def _object(self, kind: type, value: Any) -> Hashable:
        rules = self._rules
        parts = class_with_parts(kind, rules)
        if parts is None and not rules.is_library(kind.__module__):
            return self._of_others(kind, value)
        if issubclass(kind, rules.indexes):
            return self._index(kind, value, parts)
        if parts is not None:
            return self.key(parts.cache_key_parts(value))
        if kind is object or issubclass(kind, rules.embedders):
            return Identity(value)
        if issubclass(kind, enum.Enum):
            return str(value.name)
        if issubclass(kind, re.Pattern):
            return value.pattern, value.flags
        if issubclass(kind, _VALUES):
            return repr(value)
        if kind is np.ndarray or issubclass(kind, np.generic):
            return self._array(value)
        if rules.is_ignored(kind):
            return None
        if issubclass(kind, rules.uncached):
            raise NotKeyable(f"what a {_name(kind)} gives depends on more than its attributes")
        if issubclass(kind, rules.opaque):
            scalars = [item for item in sorted(attributes_of(value).items()) if type(item[1]) in SCALARS]
            return Identity(value), self.key(scalars)
        return self._library_object(kind, value)

    def _of_others(self, kind: type, value: object) -> Hashable:
        """An object of the user's classes: an embedder or a callback, unless it can be called."""
        by = next((base for base in kind.__mro__ if "__call__" in vars(base)), None)
        if by is None or self._rules.is_library(by.__module__):
            if issubclass(kind, self._rules.embedders):
                return Identity(value)
            if self._rules.is_ignored(kind):
                return None
        raise NotKeyable(f"a {_name(kind)} may depend on anything")

    def _array(self, value: Any) -> Hashable:
        if value.dtype.hasobject:
            raise NotKeyable("an array of objects does not show its content")
        self._require_room(value.size)
        return str(value.dtype), value.shape, value.tobytes()

    def _library_object(self, kind: Any, value: object) -> Hashable:
        """An object of a library by its attributes; part of an index (a client, a splitter) by identity."""
        if issubclass(kind, _OPEN):
            raise NotKeyable(f"a {_name(kind)} may depend on anything")
        if self._in_index:
            return Identity(value)
        if hides_state(kind) or object.__getstate__(value) is None:
            if self._rules.is_known_package(kind.__module__):
                return Identity(value)  # a client, a tokenizer: it is what it is
            raise NotKeyable(f"a {_name(kind)} does not show its content")
        attributes = sorted(attributes_of(value).items())
        return tuple([(name, self._attribute(kind, name, one)) for name, one in attributes])

    def _attribute(self, kind: type, name: str, value: object) -> Hashable:
        try:
            return self.key(value)
        except NotKeyable as error:
            raise type(error)(f"{_name(kind)}.{name}: {error}") from error

    def _index(self, kind: type, value: object, parts: Any) -> Hashable:
        """An index by identity, version and settings; its documents are what the version counts."""
        changes = observe(value, self._rules.delegating)
        if changes is None:
            raise NotKeyable(f"changes of a {_name(kind)} cannot be seen")
        if parts is not None:
            return Identity(value), changes.version, self.key(parts.cache_key_parts(value))
        settings: list[Hashable] = []
        documents: dict[str, object] = {}
        for name, one in sorted(attributes_of(value).items()):
            reader = self
            if not isinstance(one, self._rules.indexes):
                reader = _Reader(self._rules, _MAX_SETTING, tuple(self._ancestors), in_index=True)
            try:
                settings.append((name, reader._attribute(kind, name, one)))
            except TooLarge:
                if reader is self:
                    raise
                documents[name] = one
        changes.compare(documents)
        return Identity(value), changes.version, tuple(settings)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"

"""Parts of an object's key, and the rules for a framework's classes."""

from __future__ import annotations

import functools
import logging
import sys
import sysconfig
import threading
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

_LIBRARIES = frozenset({"numpy", "pydantic", "pydantic_core", "typing_extensions"})
_IGNORED = (logging.Logger, logging.Handler, type(threading.Lock()), type(threading.RLock()))


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
    embedders : tuple of type
        Classes that depend on the embedded text alone, of any package.
    opaque : tuple of type
        Classes keyed by identity alone: language models.
    ignored : tuple of type
        Classes that change no result, of any package: callbacks, loggers, locks.
    searching : tuple of type
        Classes that are never ignored.
    configurable : tuple of type
        Classes that may read the ``configurable`` values of a run.
    unconfigurable : tuple of type
        Those of them that do not; subclasses may.
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
    """A key that is equal for one object only.

    The object is referred to weakly, where it allows that: the key stays equal to itself alone when the
    object is gone.
    """

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

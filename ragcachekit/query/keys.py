"""Cache keys out of values and objects: equal only where the content is equal, at any depth.

What a retriever finds depends on its fields, on the fields of what it wraps, and on what its code reads.
A key holds all of that which can be read. What cannot be read raises :class:`NotKeyable`, and whoever asked
for the key does not cache.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any


class NotKeyable(TypeError):
    """A value that cannot be part of a key.

    Attributes
    ----------
    own : bool
        Whether code outside the known libraries is involved; only without it an identity will do.
    """

    def __init__(self, message: str, *, own: bool) -> None:
        super().__init__(message)
        self.own = own


@dataclass(frozen=True)
class KeyRules:
    """What is known of a framework's objects.

    Attributes
    ----------
    libraries : frozenset of str
        Top-level packages whose classes depend on their attributes and on nothing else. What cannot be
        read of an attribute there (a client, a large array) is keyed by identity; elsewhere it is refused.
    indexes : tuple of type
        Classes that hold documents: keyed by identity, settings, and the number of changes so far.
    opaque : tuple of type
        Classes keyed by identity alone: embedders, language models.
    ignored : tuple of type
        Classes that change no result: callbacks, loggers, locks.
    """

    libraries: frozenset[str] = frozenset()
    indexes: tuple[type, ...] = ()
    opaque: tuple[type, ...] = ()
    ignored: tuple[type, ...] = ()

    def is_library(self, module: str | None) -> bool:
        """Whether the module belongs to a known library or to Python's own."""
        top = (module or "").partition(".")[0]
        return top in self.libraries or top in _LIBRARIES or top in sys.stdlib_module_names

    def is_ignored(self, value: object) -> bool:
        """Whether the object changes no result."""
        return isinstance(value, self.ignored + _IGNORED)


_LIBRARIES = frozenset({"numpy", "pydantic", "pydantic_core", "typing_extensions"})
_IGNORED = (logging.Logger, logging.Handler, type(threading.Lock()), type(threading.RLock()))


class Identity:
    """A key that is equal for one object only, which it keeps alive only if that allows no weak reference."""

    __slots__ = ("_hash", "_object")

    def __init__(self, value: object) -> None:
        self._hash = id(value)
        self._object: Any
        try:
            self._object = weakref.ref(value)
        except TypeError:  # a dict or a list: were it freed, another object could take its address
            self._object = lambda: value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        mine = self._object()
        return mine is not None and isinstance(other, Identity) and other._object() is mine


class HashedKey:
    """A key whose hash is computed once; that of nested tuples is computed at every look-up."""

    __slots__ = ("_hash", "_key")

    def __init__(self, key: Hashable) -> None:
        self._key, self._hash = key, hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HashedKey) and self._hash == other._hash and self._key == other._key


@dataclass(frozen=True)
class ObjectKey:
    """The key of an object.

    Attributes
    ----------
    key : hashable
    own_code : bool
        Whether code outside the known libraries takes part. It may read the context of the call too.
    versions : tuple
        Identity and number of changes of every index that was met.
    """

    key: Hashable
    own_code: bool
    versions: tuple[tuple[Identity, int], ...]

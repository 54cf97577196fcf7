"""Rules for the classes of a framework: which are read, which stand for themselves, which change nothing."""

from __future__ import annotations

import functools
import logging
import pathlib
import sys
import sysconfig
import threading
from dataclasses import dataclass
from typing import Any

_LIBRARIES = frozenset({"numpy", "pydantic", "pydantic_core", "typing_extensions"})
_IGNORED = (logging.Logger, logging.Handler, type(threading.Lock()), type(threading.RLock()))


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
    uncached: tuple[type, ...] = ()

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


def class_with_parts(kind: type, rules: KeyRules) -> Any:
    """The class with ``cache_key_parts``; that of a library does not hold for subclasses of the user's."""
    by = next((base for base in kind.__mro__ if "cache_key_parts" in vars(base)), None)
    if by is None or rules.is_library(kind.__module__) or not rules.is_library(by.__module__):
        return by
    return None


@functools.cache
def _is_of_python(top: str) -> bool:
    """Whether a module is Python's own, and not one of the user's with such a name."""
    if top not in sys.stdlib_module_names or top == "types":  # the module of classes made at run time
        return False
    origin = getattr(getattr(sys.modules.get(top), "__spec__", None), "origin", None)
    if origin in (None, "built-in", "frozen"):
        return True
    return pathlib.Path(origin).is_relative_to(sysconfig.get_path("stdlib"))

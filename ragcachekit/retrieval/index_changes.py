"""Counting the changes of an index: a cached result is as old as the version it was searched in."""

from __future__ import annotations

import functools
import inspect
import re
import threading
import types
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_CHANGING = re.compile(
    r"(a|async_)?(m?(add|delete|upsert|update|insert|remove|set|put)|merge|reset|drop|clear|refresh)(_|$)"
)
_COPYING = ("__getstate__", "__copy__", "__deepcopy__")
_COUNTER = "_ragcachekit_changes"
_OBSERVING = threading.Lock()


class IndexChanges:
    """The number of changes of one index, to which ``owner`` refers weakly.

    Both the start and the end of a change are counted: a search beside one has a version of its own.
    """

    def __init__(self, owner: Callable[[], object]) -> None:
        self.owner, self.version = owner, 0
        self.names: frozenset[str] = frozenset()  # of the wrappers
        self._lock, self._parts = threading.Lock(), dict[str, object]()

    def __deepcopy__(self, memo: object) -> IndexChanges:
        return self

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Count around a change."""
        self._count()
        try:
            yield
        finally:
            self._count()

    def compare(self, parts: Mapping[str, object]) -> None:
        """Count a change if an attribute of the index is another object than at the last call."""
        with self._lock:
            same = parts.keys() == self._parts.keys() and all(
                self._parts[name] is part for name, part in parts.items()
            )
            if not same:
                self.version += bool(self._parts)
                self._parts = dict(parts)

    def _count(self) -> None:
        with self._lock:
            self.version += 1


def observe(index: object, delegating: tuple[type, ...] = ()) -> IndexChanges | None:
    """The counter of the index's changes, from now on; None if they cannot be counted.

    The changing methods of this one object (``add_documents``, ``delete``, ``insert``, ...) are wrapped:
    attributes of the object stand before the methods of its class. Methods of ``delegating`` classes stay,
    as they only call others. Copies and pickles do without the wrappers, which would change the original.
    Changes past these methods (another process, a client of one's own) are not counted.
    """
    with _OBSERVING:
        known: Any = getattr(index, "__dict__", {}).get(_COUNTER)
        if known is not None and known.owner() is index:
            return known  # type: ignore[no-any-return]
        try:
            changes = IndexChanges(weakref.ref(index))
            wrappers = _wrappers(index, changes, delegating)
            for name, wrapper in wrappers.items():
                object.__setattr__(index, name, wrapper)
        except (TypeError, AttributeError):  # an object without attributes or without weak references
            return None
        return changes


def attributes(value: object) -> dict[str, Any]:
    """The attributes of an object, private ones of pydantic models among them.

    Cached properties and our own wrappers are none.
    """
    held = dict(getattr(value, "__dict__", {}))
    for name in list(held):
        if isinstance(getattr(type(value), name, None), functools.cached_property):
            del held[name]
    if (changes := held.get(_COUNTER)) is not None:
        held = _stripped(held, changes.names)
    return held | (getattr(value, "__pydantic_private__", None) or {})


def _wrappers(index: object, changes: IndexChanges, delegating: tuple[type, ...]) -> dict[str, Any]:
    kind, out = type(index), dict[str, Any]()
    for name in filter(_CHANGING.match, dir(kind)):
        by = next((base for base in kind.__mro__ if name in vars(base)), None)
        function = None if by is None or by in delegating else vars(by)[name]
        if isinstance(function, types.FunctionType):
            out[name] = _counted(index, function, changes)
    changes.names = names = frozenset({_COUNTER, *_COPYING, *out})
    for name in _COPYING:
        if hasattr(kind, name):
            out[name] = functools.partial(_copied, name, index, names)
    return out | {_COUNTER: changes}


def _copied(name: str, index: object, names: frozenset[str], *args: Any) -> Any:
    """What a copying method of the class gives, without the wrappers.

    LlamaIndex's ``__getstate__`` deletes what it cannot pickle from the object: it gets a copy.
    """
    kind: Any = type(index)
    if hasattr(kind, "__copy__"):
        twin = _bare(kind.__copy__(index), names)
        return twin if name == "__copy__" else getattr(kind, name)(twin, *args)
    made = getattr(kind, name)(index, *args)
    return _stripped(made, names) if name == "__getstate__" else _bare(made, names)


def _bare(made: Any, names: frozenset[str]) -> Any:
    for name in names & vars(made).keys():
        object.__delattr__(made, name)
    return made


def _stripped(state: Any, names: frozenset[str]) -> Any:
    """A state as of ``__getstate__``: a dict, one beside the slots, or one inside pydantic's."""
    if isinstance(state, tuple):
        return tuple(_stripped(part, names) for part in state)
    if not isinstance(state, dict):
        return state
    kept = {name: one for name, one in state.items() if name not in names}
    if "__dict__" in kept:
        kept["__dict__"] = _stripped(kept["__dict__"], names)
    return kept


def _counted(index: object, function: types.FunctionType, changes: IndexChanges) -> Callable[..., Any]:
    called: Any
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def called(*args: Any, **kwargs: Any) -> Any:
            with changes.changing():
                return await function(index, *args, **kwargs)
    else:

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with changes.changing():
                result = function(index, *args, **kwargs)
            return _counted_await(result, changes) if inspect.isawaitable(result) else result

    return called  # type: ignore[no-any-return]


async def _counted_await(result: Awaitable[Any], changes: IndexChanges) -> Any:
    with changes.changing():
        return await result

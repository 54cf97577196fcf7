"""Counting the changes of an index: a cached result is as old as the version it was searched in."""

from __future__ import annotations

import copyreg
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
    r"(a|async_)?(m?(add|delete|upsert|update|insert|remove|set|put)|merge|reset|drop|clear|refresh|build)(_|$)"
)
_COUNTER = "_ragcachekit_changes"
_OBSERVING = threading.Lock()


class IndexChanges:
    """The number of changes of one index, to which ``owner`` refers weakly.

    Both the begin and the end of a change are counted: a search beside one has a version of its own.
    """

    def __init__(self, owner: Callable[[], object]) -> None:
        self.owner = owner
        self.version = 0
        self._lock = threading.Lock()
        self._parts: dict[str, object] = {}

    def count(self) -> None:
        """Count one change, begun or ended."""
        with self._lock:
            self.version += 1

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Count around a change."""
        self.count()
        try:
            yield
        finally:
            self.count()

    def compare(self, parts: Mapping[str, object]) -> None:
        """Count a change if an attribute of the index is another object than at the last call."""
        with self._lock:
            same = parts.keys() == self._parts.keys() and all(
                self._parts[name] is part for name, part in parts.items()
            )
            if not same:
                self.version += bool(self._parts)
                self._parts = dict(parts)


def observe(index: object, delegating: tuple[type, ...] = ()) -> IndexChanges | None:
    """The counter of the index's changes, from now on; None if they cannot be counted.

    The object gets a subclass of its class, of the same name, whose changing methods (``add_documents``,
    ``delete``, ``insert``, ...) count. Methods that only delegate stay as they are, because frameworks look
    whether a class overrides them. Pickles are of the first class; copies are not counted. Changes past
    these methods (another process, a client of one's own) are not counted.
    """
    with _OBSERVING:
        kind = type(index)
        known: IndexChanges | None = vars(kind).get(_COUNTER)
        if known is not None and known.owner() is index:
            return known
        if known is not None:  # a copy
            kind = kind.__mro__[1]
        try:
            changes = IndexChanges(weakref.ref(index))
            object.__setattr__(index, "__class__", _counting_subclass(kind, changes, delegating))
        except TypeError:  # a class that allows no subclass or no weak reference, or of fixed layout
            return None
        return changes


def _counting_subclass(kind: type, changes: IndexChanges, delegating: tuple[type, ...]) -> type:
    body: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__slots__": (),
        "__reduce_ex__": _reduced_as(kind),
    }
    for name in filter(_CHANGING.match, dir(kind)):
        by = next((base for base in kind.__mro__ if name in vars(base)), None)
        function = None if by is None or by in delegating else vars(by)[name]
        if isinstance(function, types.FunctionType):
            body[name] = _counted(function, changes)
    subclass = types.new_class(kind.__name__, (kind,), exec_body=lambda namespace: namespace.update(body))
    type.__setattr__(subclass, _COUNTER, changes)  # not in the body: pydantic would make a field of it
    return subclass


def _counted(function: types.FunctionType, changes: IndexChanges) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with changes.changing():
                return await function(*args, **kwargs)

        return awaited

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with changes.changing():
            result = function(*args, **kwargs)
        return _counted_await(result, changes) if inspect.isawaitable(result) else result

    return called


async def _counted_await(result: Awaitable[Any], changes: IndexChanges) -> Any:
    with changes.changing():
        return await result


def _reduced_as(kind: type) -> Callable[[Any, Any], Any]:
    """``__reduce_ex__`` of the subclass: copies and pickles are of the class itself."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:  # noqa: N807
        reduced = kind.__reduce_ex__(self, protocol)  # type: ignore[call-arg]
        if isinstance(reduced, str):
            return reduced
        maker, arguments, *rest = reduced
        plain = tuple(kind if one is type(self) else one for one in arguments)
        if maker is copyreg.__newobj__:  # type: ignore[attr-defined]
            maker = kind.__new__  # pickle would compare the class with that of the object
        return (kind if maker is type(self) else maker, plain, *rest)

    return __reduce_ex__

"""Objects that a forked child inherits and cannot use: their threads are gone, their locks may be held."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

from ragcachekit.errors import Closed

MESSAGE = "opened in another process: open it again after the fork"

_OPENED: weakref.WeakSet[RefusesAfterFork] = weakref.WeakSet()
_INHERITED: list[dict[str, Any]] = []  # state of the parent's objects: nothing of it may be closed here


class RefusesAfterFork:
    """Base of what holds threads, locks or files.

    In a forked child every use of it raises :class:`~ragcachekit.errors.Closed` before it takes a lock, and
    ``close`` does nothing: there its instance has no state.
    """

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__") or self not in _OPENED or vars(self).get("close") is not _nothing:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise Closed(MESSAGE)


def refuse_after_fork(opened: RefusesAfterFork) -> None:
    """Take the state of an opened store, pool or tree in forked children."""
    _OPENED.add(opened)


def _nothing(*_: object) -> None:
    """``close`` in a child: the parent closes it."""


def _refuse_all() -> None:
    for opened in list(_OPENED):
        _INHERITED.append(dict(vars(opened)))
        vars(opened).clear()
        vars(opened)["close"] = _nothing


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_refuse_all)

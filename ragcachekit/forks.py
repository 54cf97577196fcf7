"""Objects that a forked child inherits and cannot use: their threads are gone, their locks may be held."""

from __future__ import annotations

import os
import weakref
from typing import Any, NoReturn

from ragcachekit.errors import Closed

_OPENED: weakref.WeakSet[Any] = weakref.WeakSet()


def refuse_after_fork(opened: object) -> None:
    """Make an opened store, engine or pool raise :class:`~ragcachekit.errors.Closed` in forked children.

    There ``close`` does nothing, and every other method raises before it takes a lock.
    """
    _OPENED.add(opened)


class _OpenedBeforeFork:
    """Class of such an object in a child."""

    def _refuse(self, *_: object) -> NoReturn:
        raise Closed("opened in another process: open it again after the fork")

    __contains__ = __iter__ = __next__ = __enter__ = _refuse

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def close(self, *_: object) -> None:
        """Nothing: the parent closes it."""


def _refuse_all() -> None:
    for opened in list(_OPENED):
        opened.__class__ = _OpenedBeforeFork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_refuse_all)

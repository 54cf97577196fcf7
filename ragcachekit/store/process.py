"""One object, as if each process had its own; to be deleted with its last use (see ``ragcachekit.forks``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """Holds what ``make`` returns."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._made = make()

    def get(self) -> T:
        """The object."""
        return self._made

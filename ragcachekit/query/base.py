"""What a query cache returns, and the key that it is partitioned by."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ragcachekit.config import positive
from ragcachekit.query.partition.keys import object_key

ResultId: TypeAlias = str | int
"""What names one result of a search."""


class Hit(NamedTuple):
    """A cached answer: ordered result ids, and the distance of its query in the unit of the metric."""

    ids: tuple[ResultId, ...]
    distance: float


class Entry(NamedTuple):
    """A cached entry: its partition and its ordered result ids."""

    partition: Hashable
    ids: tuple[ResultId, ...]


@dataclass(frozen=True)
class QueryCacheStats:
    """Counters since the cache was made.

    ``inserts = entries + replacements + evictions + forgotten + expired``.
    """

    capacity: int
    entries: int
    partitions: int
    hits: int
    misses: int
    inserts: int
    replacements: int
    evictions: int
    forgotten: int
    expired: int

    @property
    def hit_rate(self) -> float:
        """Hits / lookups, 0 before the first lookup."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else 0.0


def checked_ids(ids: Sequence[ResultId]) -> tuple[ResultId, ...]:
    """The ids as a tuple; TypeError for ids that are neither str nor int."""
    if isinstance(ids, str):
        raise TypeError("ids must be a sequence of ids, not one string")
    frozen = tuple(ids)
    for one in frozen:
        if isinstance(one, bool) or not isinstance(one, str | int):
            raise TypeError(
                f"result ids are str or int, not {type(one).__name__}; convert with int() or str()"
            )
    return frozen


class Partition(NamedTuple):
    """The hard part of a query cache's key: entries of another partition are never considered.

    ``namespace`` is tenant and corpus, ``k`` the number of results asked for. The rest is whatever else
    changes the answer, such as versions of the index and of the embedding model. Use :meth:`of`, which takes
    dicts, lists and objects apart.
    """

    namespace: str
    k: int
    filters: Hashable = None
    search_kwargs: Hashable = None
    index_id: Hashable = None

    @classmethod
    def of(
        cls,
        namespace: str,
        k: int,
        *,
        filters: object = None,
        search_kwargs: Mapping[str, object] | None = None,
        index_id: object = None,
    ) -> Partition:
        """A partition from ordinary (also mutable) filters and keyword arguments.

        ValueError for a ``k`` below 1; TypeError if a value is a function or does not show its content.
        """
        positive("k", k)
        called = object_key(dict(search_kwargs or {}))
        return cls(namespace, k, object_key(filters), called, object_key(index_id))


class LogOnce:
    """Warnings that may come at every question, each logged once."""

    def __init__(self, log: logging.Logger, most: int = 100) -> None:
        self._log, self._left = log, most
        self._logged: set[str] = set()

    def __call__(self, message: str, error: Exception | None = None) -> None:
        """Log a message with the traceback of ``error``."""
        if message not in self._logged and self._left:
            self._left -= 1
            self._logged.add(message)
            self._log.warning("%s", message, exc_info=error)

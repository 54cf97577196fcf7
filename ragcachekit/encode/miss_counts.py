"""Counts of misses per entry: an entry that prompts need once only is not worth encoding."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from ragcachekit.model.encoding import InPromptEncoding
from ragcachekit.plan.link_plan import Missing
from ragcachekit.store.base import concerns
from ragcachekit.types import KVKey

MOST_COUNTED = 65_536
"""Entries counted in all namespaces together, about 50 MB."""


class MissCounts:
    """Misses of the entries that were not encoded yet. Not thread safe.

    Beyond :data:`MOST_COUNTED` entries, the namespace with the most of them drops the one that was missed
    least recently: a busy tenant does not push out others. ``in-prompt`` entries are counted per chunk, as
    their context hardly ever comes back as a whole.
    """

    def __init__(self) -> None:
        self._namespaces: dict[str, OrderedDict[KVKey, int]] = {}

    def is_due(self, item: Missing, after: int) -> bool:
        """Count a miss; True for the ``after``-th one, which ends the count of this entry."""
        key = replace(item.key, context=()) if isinstance(item.encoding, InPromptEncoding) else item.key
        counts = self._namespaces.setdefault(key.namespace, OrderedDict())
        misses = counts.pop(key, 0) + 1
        if misses < after:
            counts[key] = misses
        fullest = key.namespace
        if sum(map(len, self._namespaces.values())) > MOST_COUNTED:
            fullest = max(self._namespaces, key=lambda name: len(self._namespaces[name]))
            self._namespaces[fullest].popitem(last=False)
        for name in {key.namespace, fullest}:
            if not self._namespaces[name]:
                del self._namespaces[name]
        return misses >= after

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None) -> None:
        """Drop what ``store.forget`` with the same arguments drops."""
        counts = self._namespaces.pop(namespace, OrderedDict())
        left = OrderedDict((key, n) for key, n in counts.items() if not concerns(key, namespace, chunk_ids))
        if left:
            self._namespaces[namespace] = left

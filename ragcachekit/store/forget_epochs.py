"""When each chunk was last forgotten, so that work begun before that does not bring it back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from threading import Lock

from ragcachekit.types import KVKey

MOST_NAMES = 100_000
"""Chunks of one namespace that are remembered; beyond that, more counts as forgotten than was."""


@dataclass
class _Namespace:
    """``last``: name to the epoch of its last forget, oldest first; ``whole``: that of everything."""

    whole: int = 0
    last: OrderedDict[str, int] = field(default_factory=OrderedDict)

    def add(self, names: Iterable[str] | None, epoch: int, most: int) -> None:
        if names is None:
            self.whole = epoch
            self.last.clear()
            return
        for name in names:
            self.last[name] = epoch
            self.last.move_to_end(name)
        while len(self.last) > most:
            self.whole = max(self.whole, self.last.popitem(last=False)[1])


class ForgetEpochs:
    """A count of forgets, and for each chunk the count at its last one. Thread safe.

    Work takes :meth:`now` before it looks anything up. Before it stores what came of it, it asks with that
    number, in one :meth:`storing` (or :meth:`storing_in_tree`: a tree that waits for its disk stops no
    encoding). A forget is added when it has reached every tier, inside both: so work begun before it
    returned either is dropped from the tiers or never stored.

    Parameters
    ----------
    most : int
        Names of one namespace that are remembered. The oldest are given up by taking the whole namespace
        for forgotten at that time, which costs work in progress but never brings anything back.
    """

    def __init__(self, most: int = MOST_NAMES) -> None:
        self._most = most
        self._epoch = 0
        self._namespaces: dict[str, _Namespace] = {}
        self._lock = Lock()
        self._storing, self._storing_in_tree = Lock(), Lock()

    @contextmanager
    def storing(self) -> Iterator[None]:
        """One at a time: an entry is asked about and stored, or some are forgotten in every tier."""
        with self._storing:
            yield

    @contextmanager
    def storing_in_tree(self) -> Iterator[None]:
        """As :meth:`storing`, for the knowledge tree; who needs both takes the other one first."""
        with self._storing_in_tree:
            yield

    def now(self) -> int:
        """The number of forgets so far."""
        return self._epoch

    def add(self, namespace: str, chunk_ids: Iterable[str] | None = None, texts: Iterable[str] = ()) -> None:
        """These were forgotten; without ids, the whole namespace."""
        names = None if chunk_ids is None else [*chunk_ids, *map(_name, texts)]
        with self._lock:
            epoch = self._epoch + 1
            self._namespaces.setdefault(namespace, _Namespace()).add(names, epoch, self._most)
            self._epoch = epoch

    def forgot(self, key: KVKey, since: int) -> bool:
        """Whether the chunk, or one it was encoded behind, was forgotten after ``since``."""
        return self.forgot_any(key.namespace, (key.chunk_id, *key.context), since)

    def forgot_text(self, namespace: str, text: str, since: int) -> bool:
        """As :meth:`forgot`, for a chunk's text; outer whitespace does not count."""
        return self._epoch != since and self.forgot_any(namespace, (_name(text),), since)

    def forgot_any(self, namespace: str, names: Iterable[str], since: int) -> bool:
        """As :meth:`forgot`, for any of several chunk ids."""
        if self._epoch == since:
            return False
        with self._lock:
            known = self._namespaces.get(namespace)
            if known is None:
                return False
            return known.whole > since or any(known.last.get(name, 0) > since for name in names)


def _name(text: str) -> str:
    """A digest: what was forgotten is not kept in clear. No chunk id has this form."""
    return "text:" + blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

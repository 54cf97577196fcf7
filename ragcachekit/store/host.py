"""The host memory tier."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Evicted
from ragcachekit.store.eviction.base import EvictionPolicy
from ragcachekit.store.memory import Cost, MemoryStore
from ragcachekit.store.own_memory import in_own_memory
from ragcachekit.store.page_locked import Allocate, give_back, in_slabs, page_locked, taken_by
from ragcachekit.types import KVKey

log = logging.getLogger(__name__)

SPARE = 8
"""Of the budget, the part that torch may keep on top of it in freed page-locked memory: one in so many."""


class HostStore(MemoryStore):
    """Chunk KV in main memory.

    Parameters
    ----------
    budget : int
        Bytes that all keys and values may take together; > 0. Of page-locked entries, what counts is what
        torch's host allocator takes for them, which is a power of two for each of the few slabs that an
        entry lies in. On top of it torch keeps some of what was freed, for the next entries: up to
        1/8 of the budget, and at least one entry.
    pinned : bool
        Page-lock the tensors, so that a GPU can copy them without waiting. Costs a copy at every put and
        takes the memory from everybody else on the machine; needs CUDA.
        Without it, what comes page-locked is copied to ordinary memory.
    policy, quotas, cost
        As :class:`~ragcachekit.store.memory.MemoryStore`.
    allocate : callable
        Where page-locked memory comes from.
    """

    def __init__(
        self,
        budget: int,
        *,
        pinned: bool = False,
        policy: EvictionPolicy | None = None,
        quotas: Mapping[str, int] | None = None,
        cost: Cost = lambda kv: float(kv.tokens),
        allocate: Allocate = page_locked,
    ) -> None:
        super().__init__("host", budget, policy=policy, quotas=quotas, cost=cost)
        self._pinned = pinned and torch.cuda.is_available()
        self._allocate = allocate

    def admit(self, key: KVKey, kv: ChunkKV) -> tuple[bool, Evicted]:
        """As :meth:`put`, with whom it evicted."""
        kept, evicted = super().admit(key, kv)
        if evicted and self._pinned:
            give_back(max(self._budget // SPARE, taken_by(kv.unpacked())))
        return kept, evicted

    def _placed(self, kv: ChunkKV) -> tuple[ChunkKV, int]:
        kv, nbytes = self._in_memory(kv.unpacked())
        _ = kv.shapes, kv.stretches  # asked for here and not at every use: what is lent knows them too
        return kv, nbytes

    def _in_memory(self, kv: ChunkKV) -> tuple[ChunkKV, int]:
        if self._pinned:
            try:
                return in_slabs(kv, self._allocate), taken_by(kv)
            except RuntimeError as error:  # the system limits how much may be page-locked
                log.warning("host tier: cannot page-lock, going on without: %s", error)
                self._pinned = False
        kv = kv.to("cpu")
        begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if begun and kv.keys[0].is_pinned():
            kv = kv.each(torch.Tensor.clone)
        return in_own_memory(kv)

    def _least(self, kv: ChunkKV) -> int:
        return taken_by(kv.unpacked()) if self._pinned else kv.nbytes

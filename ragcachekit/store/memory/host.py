"""The host memory tier."""

from __future__ import annotations

import logging
from typing import Unpack

import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Evicted
from ragcachekit.store.memory.memory_store import MemoryOptions, MemoryStore
from ragcachekit.store.memory.own_memory import in_own_memory
from ragcachekit.store.memory.page_locked import give_back, in_slabs, taken_by
from ragcachekit.types import KVKey

log = logging.getLogger(__name__)

SPARE = 8
"""Torch may cache freed page-locked memory of this part (1/8) of the budget, beyond the budget."""


class HostStore(MemoryStore):
    """Chunk KV in main memory; parameters as in :class:`MemoryStore`.

    Parameters
    ----------
    budget : int
        Bytes; > 0. A page-locked entry counts with the powers of two that torch allocates for its slabs.
        Torch caches freed memory beyond that: up to 1/8 of the budget, and at least one entry.
    pinned : bool
        Page-lock the tensors, so that a GPU can copy them without waiting, for a copy at every put and
        memory that no other process can use. Without CUDA it does nothing. If False, page-locked tensors are
        copied to ordinary memory.
    """

    def __init__(self, budget: int, *, pinned: bool = False, **options: Unpack[MemoryOptions]) -> None:
        super().__init__("host", budget, **options)
        self._pinned = pinned and torch.cuda.is_available()

    def admit(self, key: KVKey, kv: ChunkKV) -> tuple[bool, Evicted]:
        kept, evicted = super().admit(key, kv)
        if evicted and self._pinned:
            give_back(max(self._budget // SPARE, taken_by(kv.unpacked())))
        return kept, evicted

    def _placed(self, kv: ChunkKV) -> tuple[ChunkKV, int]:
        kv, nbytes = self._in_memory(kv.unpacked())
        _ = kv.shapes, kv.stretches  # cached now, for all later uses
        return kv, nbytes

    def _in_memory(self, kv: ChunkKV) -> tuple[ChunkKV, int]:
        if self._pinned:
            try:
                return in_slabs(kv), taken_by(kv)
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

"""The host memory tier."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.eviction.base import EvictionPolicy
from ragcachekit.store.memory import Cost, MemoryStore

log = logging.getLogger(__name__)


class HostStore(MemoryStore):
    """Chunk KV in main memory.

    Parameters
    ----------
    budget : int
        Bytes that all keys and values may take together; > 0.
    pinned : bool
        Page-lock the tensors, so that a GPU can copy them without waiting. Costs a copy at every put and
        takes the memory from everybody else on the machine; needs CUDA.
    policy, quotas, cost
        As :class:`~ragcachekit.store.memory.MemoryStore`.
    """

    def __init__(
        self,
        budget: int,
        *,
        pinned: bool = False,
        policy: EvictionPolicy | None = None,
        quotas: Mapping[str, int] | None = None,
        cost: Cost = lambda kv: float(kv.tokens),
    ) -> None:
        super().__init__("host", budget, policy=policy, quotas=quotas, cost=cost)
        self._pinned = pinned and torch.cuda.is_available()

    def _placed(self, kv: ChunkKV) -> ChunkKV:
        kv = self._pin(kv.to("cpu"))
        _ = kv.shapes  # asked for here and not at every use: what is lent knows them too
        return kv

    def _pin(self, kv: ChunkKV) -> ChunkKV:
        if not self._pinned:
            return kv
        try:
            return kv.each(lambda tensor: tensor.pin_memory())
        except RuntimeError as error:  # the system limits how much may be page-locked
            log.warning("host tier: cannot page-lock, going on without: %s", error)
            self._pinned = False
            return kv

"""The GPU memory tier."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Evicted
from ragcachekit.store.eviction.base import EvictionPolicy
from ragcachekit.store.memory import Cost, MemoryStore
from ragcachekit.store.own_memory import in_own_memory
from ragcachekit.types import KVKey


class GpuStore(MemoryStore):
    """Chunk KV in a device's memory, the part of it that the model and its requests leave.

    Parameters
    ----------
    budget : int
        Bytes that all keys and values may take together; > 0.
    device : str or torch.device
        Where the model runs.
    policy, quotas, cost
        As :class:`~ragcachekit.store.memory.MemoryStore`.
    """

    def __init__(
        self,
        budget: int,
        device: str | torch.device = "cuda",
        *,
        policy: EvictionPolicy | None = None,
        quotas: Mapping[str, int] | None = None,
        cost: Cost = lambda kv: float(kv.tokens),
    ) -> None:
        super().__init__("gpu", budget, policy=policy, quotas=quotas, cost=cost)
        self._device = torch.device(device)

    def admit(self, key: KVKey, kv: ChunkKV) -> tuple[bool, Evicted]:
        """As :meth:`put`, with whom it evicted; a device without room for it is a refusal."""
        try:
            return super().admit(key, kv)
        except torch.OutOfMemoryError as error:
            self._counters.count("failed_writes")
            self._counters.warn_once("memory", "no room on %s: %s", self._device, error)
            return False, ()

    def _placed(self, kv: ChunkKV) -> tuple[ChunkKV, int]:
        kv = kv.to(self._device)
        if not all(tensor.is_contiguous() for tensor in (*kv.keys, *kv.values)):
            kv = kv.each(torch.Tensor.contiguous)
        kv, nbytes = in_own_memory(kv)
        # Read here and not at every use: what is lent knows them too.
        _ = kv.planes.formats, kv.planes.entries
        return kv, nbytes

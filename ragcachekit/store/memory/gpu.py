"""The GPU memory tier."""

from __future__ import annotations

from typing import Unpack

import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Evicted
from ragcachekit.store.memory.memory_store import MemoryOptions, MemoryStore
from ragcachekit.store.memory.own_memory import in_own_memory
from ragcachekit.types import KVKey


class GpuStore(MemoryStore):
    """Chunk KV in the memory of the model's ``device``; parameters as in :class:`MemoryStore`."""

    def __init__(
        self, budget: int, device: str | torch.device = "cuda", **options: Unpack[MemoryOptions]
    ) -> None:
        super().__init__("gpu", budget, **options)
        self._device = torch.device(device)

    def admit(self, key: KVKey, kv: ChunkKV) -> tuple[bool, Evicted]:
        """As :meth:`put`, with the evicted entries; False if the device has no memory for it."""
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
        _ = kv.planes.formats, kv.planes.entries  # computed here and not at every use
        return kv, nbytes

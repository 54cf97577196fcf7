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
    """Chunk KV in a device's memory, the part of it that the model and its requests leave.

    Parameters
    ----------
    budget : int
        Bytes that all keys and values may take together; > 0.
    device : str or torch.device
        Where the model runs.
    **options
        As in :class:`~ragcachekit.store.memory.memory_store.MemoryOptions`.
    """

    def __init__(
        self, budget: int, device: str | torch.device = "cuda", **options: Unpack[MemoryOptions]
    ) -> None:
        super().__init__("gpu", budget, **options)
        self._device = torch.device(device)

    def admit(self, key: KVKey, kv: ChunkKV) -> tuple[bool, Evicted]:
        """As :meth:`put`, with the entries that it evicted; a device without room for it is a refusal."""
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

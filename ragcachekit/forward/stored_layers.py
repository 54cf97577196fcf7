"""Layers of cached entries on the device: copied there a few layers ahead, beside the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ragcachekit.store.loader import AnyKV, LoadingKV

AHEAD = 2
"""Layers that are on their way while one is used: one has arrived, one is being copied."""

Layer = dict[int, tuple[torch.Tensor, ...]]
"""By entry, keys and values of one layer, followed by their scales if they are in eight bits."""


class StoredLayers:
    """Layers of entries on ``device``, each taken once.

    On a GPU, copies run on a stream of their own. A layer's kernels wait for its copies; the host waits for
    neither. Page-locked memory, as of the host tier, makes the copies asynchronous. Tensors that are on the
    device already are used where they are.
    """

    def __init__(self, entries: Mapping[int, AnyKV], device: torch.device) -> None:
        self._entries, self._device = entries, device
        self._layers = min(kv.layers for kv in entries.values())
        self._stream: Any = None
        self._copied: dict[int, tuple[Layer, Any]] = {}
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._copy_ahead(0)

    def take(self, number: int) -> Layer:
        """One layer, for kernels of the current stream.

        Raises
        ------
        LoadFailed
            If an entry could not be loaded; another call tries again.
        """
        if self._stream is None:
            return self._on_device(number)
        if number not in self._copied:
            self._copy(number)
        layer, arrived = self._copied.pop(number)
        compute: Any = torch.cuda.current_stream(self._device)
        compute.wait_event(arrived)
        for tensors in layer.values():
            for tensor in tensors:
                tensor.record_stream(compute)  # its memory belongs to the stream of the copies
        self._copy_ahead(number + 1)
        return layer

    def _copy_ahead(self, first: int) -> None:
        """Begin to copy the next layers, as far as they are loaded."""
        for number in range(first, min(first + AHEAD, self._layers)):
            loading = (kv for kv in self._entries.values() if isinstance(kv, LoadingKV))
            if number not in self._copied and all(kv.ready > number for kv in loading):
                self._copy(number)

    def _copy(self, number: int) -> None:
        with torch.cuda.stream(self._stream):
            self._copied[number] = self._on_device(number), self._stream.record_event()

    def _on_device(self, number: int) -> Layer:
        return {
            key: tuple(tensor.to(self._device, non_blocking=True) for tensor in kv.stored_layer(number))
            for key, kv in self._entries.items()
        }

"""Reading an entry of the disk tier layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.entry.file import EntryReader
from ragcachekit.store.entry.header import EntryDamaged


class DiskSource:
    """A :class:`~ragcachekit.store.base.LayerSource` over one entry file; closes ``reader``.

    ``ended`` is called once: with None when all was read, or with the error that ended the reading. A source
    that is closed early does not call it, and is neither a hit nor a miss.
    """

    tier: str = "disk"

    def __init__(self, reader: EntryReader, ended: Callable[[EntryDamaged | OSError | None], None]) -> None:
        self._reader, self._ended, self._over = reader, ended, False
        header = reader.header
        layout = header.layout
        self.nbytes, self.layers, self.shapes = layout.nbytes, layout.layers, layout.shapes
        self.tokens = layout.groups[0][1].shape[1]
        self.start, self.quantised = header.start, header.quantised
        self.sums: Mapping[str, torch.Tensor] = reader.sums

    def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            return self._reader.layer(number)
        except (EntryDamaged, OSError) as error:
            self._end(error)
            raise

    def finished(self, kv: ChunkKV) -> None:
        self._end(None)

    def close(self) -> None:
        self._reader.close()

    def _end(self, error: EntryDamaged | OSError | None) -> None:
        if not self._over:
            self._over = True
            self._ended(error)

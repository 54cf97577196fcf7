"""Both ends of a run of Ray Data, apart from what needs torch: their workers start at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
from ray.data import Datasink, Datasource
from ray.data.block import Block, BlockMetadata
from ray.data.datasource import ReadTask


class Slices(Datasource):
    """Batches of ``(chunk id, text)``, each a block of its own."""

    def __init__(self, batches: Sequence[Sequence[tuple[str, str]]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._blocks = [
            pa.table({"chunk_id": [one for one, _ in batch], "text": [text for _, text in batch]})
            for batch in batches
        ]

    def estimate_inmemory_data_size(self) -> int:
        return sum(block.nbytes for block in self._blocks)

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        return [_task(block) for block in self._blocks]


def _task(block: pa.Table) -> ReadTask:
    about = BlockMetadata(block.num_rows, block.nbytes, None, None)
    return ReadTask(lambda: [block], about, schema=block.schema)


class RowCount(Datasink[int]):
    """Counts rows; what reaches it is stored already, and noted by the checkpoint."""

    rows = 0

    def write(self, blocks: Iterable[Block], ctx: Any) -> int:
        return sum(int(block.num_rows) for block in blocks)

    def on_write_complete(self, write_result: Any) -> None:
        self.rows = sum(write_result.write_returns)

"""What a run of Ray Data reads, apart from what needs torch: its workers start at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from ray.data import Datasource
from ray.data.block import BlockMetadata
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

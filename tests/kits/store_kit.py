"""Keys, KV and disk helpers for the tests of this room and for the process that the kill test kills."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.entry import EntryReader, entry_name, open_file
from ragcachekit.types import KVKey

DISK_BUDGET = 1 << 20
KEY = KVKey("weights-1", "acme/docs", "chunk-1", "sinks:4", ("system", "neighbour"))


def key_of(number: int, **changes: object) -> KVKey:
    return replace(KVKey("weights-1", "acme/docs", f"chunk-{number}"), **changes)  # type: ignore[arg-type]


def kv_of(
    seed: int,
    *,
    tokens: int = 4,
    layers: int = 2,
    heads: int = 2,
    width: int = 8,
    dtype: torch.dtype = torch.float32,
    start: int | None = None,
) -> ChunkKV:
    """KV that is a function of ``seed`` and the shape alone."""
    random = torch.Generator().manual_seed(seed)

    def tensors() -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.randn(heads, tokens, width, generator=random, dtype=torch.float32).to(dtype)
            for _ in range(layers)
        )

    return ChunkKV(tensors(), tensors(), start)


def contents(kv: ChunkKV) -> tuple[object, ...]:
    """Everything about ``kv`` as comparable data: dtypes, shapes, raw bytes, start."""
    tensors = (*kv.keys, *kv.values)
    described = [(t.dtype, tuple(t.shape), bytes(t.contiguous().view(torch.uint8).numpy())) for t in tensors]
    return (kv.start, len(kv.keys), *described)


def opened(path: Path, budget: int = DISK_BUDGET, **options: Any) -> DiskStore:
    return DiskStore(path, budget, **options)


def file_of(path: Path, key: KVKey) -> Path:
    return path / entry_name(key)


def entry_size(path: Path) -> int:
    (size,) = {file.stat().st_size for file in path.glob("*.safetensors")}
    return size


def holds(store: DiskStore, number: int) -> bool:
    found = store.get(key_of(number))
    if found is not None:
        assert contents(found.kv) == contents(kv_of(number))
    return found is not None


def filled(path: Path, entries: int = 4) -> None:
    store = opened(path)
    for number in range(entries):
        assert store.put(key_of(number), kv_of(number))
    store.close()


def agrees_with_files(store: DiskStore, path: Path) -> bool:
    sizes = [file.stat().st_size for file in path.glob("*.safetensors")]
    (stats,) = store.stats()
    return (stats.entries, stats.nbytes) == (len(sizes), sum(sizes)) and not list(path.glob("*.tmp"))


def read_entry(path: Path, key: KVKey) -> ChunkKV:
    """The KV of ``key`` in the file at ``path``."""
    with open_file(path) as file:
        return EntryReader.of_file(file, key).kv()

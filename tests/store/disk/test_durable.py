"""Entry files hold the same bytes as an entry in memory, and none before they are complete."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.entry import EntryImage, from_bytes
from store_kit import KEY, contents, read_entry


def kv_of_layers(layers: int, tokens: int, dtype: torch.dtype = torch.float32) -> ChunkKV:
    drawn = torch.Generator().manual_seed(layers * tokens)
    tensors = [torch.randn(2, tokens, 32, generator=drawn).to(dtype) for _ in range(2 * layers)]
    return ChunkKV(tuple(tensors[:layers]), tuple(tensors[layers:]), sums={"attended": torch.rand(tokens)})


def written(path: Path, kv: ChunkKV) -> int:
    """Writes the entry; returns where its tensors begin."""
    with path.open("wb") as file:
        EntryImage(KEY, kv).write(file.fileno())
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("layers", "tokens"), [(4, 3), (12, 700), (3, 5000)])
def test_the_file_is_the_image(tmp_path: Path, dtype: torch.dtype, layers: int, tokens: int) -> None:
    kv = kv_of_layers(layers, tokens, dtype)
    written(tmp_path / "entry", kv)
    assert (tmp_path / "entry").read_bytes() == b"".join(EntryImage(KEY, kv).parts())


def test_what_is_half_written_is_no_entry(tmp_path: Path) -> None:
    path, seen = tmp_path / "entry", list[bytes]()
    kv = kv_of_layers(12, 700)
    with path.open("wb") as file:
        EntryImage(KEY, kv).write(file.fileno(), lambda _: seen.append(path.read_bytes()[:8]))
    half, whole = seen
    assert half == bytes(8)
    assert int.from_bytes(whole, "little") > 0


def test_kv_without_an_element_is_an_entry_too(tmp_path: Path) -> None:
    kv = ChunkKV((torch.empty(2, 0, 32),) * 3, (torch.empty(2, 0, 32),) * 3)
    written(tmp_path / "entry", kv)
    for read in (
        read_entry(tmp_path / "entry", KEY),
        from_bytes(memoryview(b"".join(EntryImage(KEY, kv).parts())), KEY),
    ):
        assert contents(read) == contents(kv)

"""Bytes reach the file whole, and the medium is given every full page once, before the fsync."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from store_kit import KEY, contents

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store import durable
from ragcachekit.store.entry_bytes import from_bytes, to_bytes
from ragcachekit.store.entry_file import EntryImage, read_entry

PAGE = 4096


def kv_of_layers(layers: int, tokens: int, dtype: torch.dtype = torch.float32) -> ChunkKV:
    drawn = torch.Generator().manual_seed(layers * tokens)
    tensors = [torch.randn(2, tokens, 32, generator=drawn).to(dtype) for _ in range(2 * layers)]
    return ChunkKV(tuple(tensors[:layers]), tuple(tensors[layers:]), sums={"attended": torch.rand(tokens)})


class Medium:
    """Stands for ``sync_file_range``."""

    def __init__(self, answer: int = 0) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.answer = answer

    def __call__(self, fd: int, begin: int, nbytes: int, flags: int) -> int:
        assert flags == 2  # begin to write; wait for nothing
        self.ranges.append((begin, begin + nbytes))
        return self.answer


def written(path: Path, kv: ChunkKV) -> int:
    """Writes the entry; returns where its tensors begin."""
    with path.open("wb") as file:
        EntryImage(KEY, kv).write(file.fileno())
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.parametrize(("layers", "tokens"), [(4, 3), (12, 700), (3, 5000), (30, 128)])
@pytest.mark.parametrize("answer", [0, -1], ids=["begun", "refused"])
def test_every_full_page_behind_the_header_is_given_away_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int, tokens: int, answer: int
) -> None:
    medium, kv = Medium(answer), kv_of_layers(layers, tokens)
    monkeypatch.setattr(durable, "_sync_file_range", medium)
    start = written(tmp_path / "entry", kv)
    first, behind = -(-start // PAGE) * PAGE, (start + 2 * layers * 2 * tokens * 32 * 4) // PAGE * PAGE
    if behind <= first:
        assert medium.ranges == []
    else:
        begins, ends = zip(*medium.ranges, strict=True)
        assert begins == (first, *ends[:-1])
        assert ends[-1] == behind
    assert contents(read_entry(tmp_path / "entry", KEY)) == contents(kv)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("layers", "tokens"), [(4, 3), (12, 700), (3, 5000)])
def test_the_file_is_the_image_whatever_the_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, layers: int, tokens: int
) -> None:
    kv = kv_of_layers(layers, tokens, dtype)
    written(tmp_path / "with", kv)
    monkeypatch.setattr(durable, "_sync_file_range", None)
    written(tmp_path / "without", kv)
    image = b"".join(to_bytes(KEY, kv))
    assert (tmp_path / "with").read_bytes() == (tmp_path / "without").read_bytes() == image


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
        from_bytes(memoryview(b"".join(to_bytes(KEY, kv))), KEY),
    ):
        assert contents(read) == contents(kv)


def test_linux_has_the_call() -> None:
    """Otherwise a typing mistake would only show as slowness."""
    assert durable._linux_call() is not None

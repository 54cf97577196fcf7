"""How near the disk tier comes to the bare file system: reading and writing with checksums."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import google_crc32c
import numpy as np
import torch
import typer

from ragcachekit.commands.console import note, show, written
from ragcachekit.commands.options import Json, Seed, numbers
from ragcachekit.commands.report import BenchReport
from ragcachekit.errors import RagCacheError
from ragcachekit.files import read_into
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.entry import entry_name
from ragcachekit.types import KVKey

READ_WARM, READ_COLD, WRITE = "read, warm", "read, cold", "write"
KV = "KV of 30 layers, 3 heads, head_dim 64, float32 (smollm2-135m), random numbers"

_LAYERS, _HEADS, _WIDTH = 30, 3, 64
_TOKEN_BYTES = _LAYERS * 2 * _HEADS * _WIDTH * 4
_BUDGET = 1 << 50
_ROUND_BYTES = 64_000_000  # of one timing: several small entries, or one large one


def store(
    sizes: Annotated[str, typer.Option(help="Of entries, in MB, with commas between.")] = "1,4,16,64",
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of timings of each row.")] = 9,
    folder: Annotated[
        Path | None, typer.Option(help="On the disk to measure; default: the temporary folder.")
    ] = None,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Read and write throughput of the disk tier beside raw files."""
    sizes_mb = numbers("--sizes", sizes)
    if not sizes_mb or min(sizes_mb) <= 0:
        raise ValueError("--sizes takes numbers > 0 with commas between")
    report = run(sizes_mb, rounds, folder, seed)
    show(report.table("Disk tier against raw files (share: median of pairs)"))
    written(report, json)


def run(sizes_mb: Sequence[float], rounds: int, folder: Path | None = None, seed: int = 0) -> BenchReport:
    """Measure throughput over entry sizes (of about so many 10^6 bytes: entries are of whole tokens).

    Each round times the raw file system and the tier one after the other, in turn first, on the same
    number of the same bytes. ``share`` is the median over rounds of raw seconds / tier seconds.

    - reading raw: open, read all into one buffer that is used again and again, CRC32C, close. The tier:
      ``get``, verified, in memory of the entry's own; each is let go of before the next is read.
    - ``warm``: the page cache has it; ``cold``: it was dropped before each timing (where the system has
      ``posix_fadvise``).
    - writing raw: create, write, close, without checksum or index. The tier: ``put``. Neither waits for the
      medium.

    RagCacheError if the tier did not return what was put: no number is reported then.
    """
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ragcachekit-store-", dir=folder) as where:
        for size in sizes_mb:
            note(f"entries of {size:g} MB")
            with _Bench(Path(where) / f"{size:g}", size, seed) as bench:
                rows += bench.rows(rounds)
    return BenchReport("store", KV, seed, tuple(rows))


class _Bench:
    """A folder with entries of one size, and beside it files of the same bytes."""

    def __init__(self, folder: Path, size_mb: float, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        tokens = max(1, round(size_mb * 1e6 / _TOKEN_BYTES))
        self._kv = [self._made(tokens) for _ in range(max(1, round(_ROUND_BYTES / tokens / _TOKEN_BYTES)))]
        self._keys = [KVKey("bench", "bench", str(number)) for number in range(len(self._kv))]
        self._raw = folder / "raw"
        self._raw.mkdir(parents=True)
        self._store = DiskStore(folder / "kv", _BUDGET)
        self._images: list[bytes] = []
        for key, kv in zip(self._keys, self._kv, strict=True):
            self._put(key, kv)
            self._images.append(self._file(key).read_bytes())
        self._buffer = np.ones(max(map(len, self._images)) + 1, np.uint8)
        self._crcs = [google_crc32c.value(image) for image in self._images]
        self._files = [self._raw / key.chunk_id for key in self._keys]
        self._write_raw()
        self.size_mb = len(self._images[0]) / 1e6

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def rows(self, rounds: int) -> Iterator[dict[str, Any]]:
        """All operations, each checked before it is timed."""
        ways: dict[str, tuple[Callable[[], None], Callable[[], None], Callable[[], None]]] = {
            READ_WARM: (self._read_raw, self._read, lambda: None),
            READ_COLD: (self._read_raw, self._read, self._drop_cache),
            WRITE: (self._write_raw, self._write, self._empty),
        }
        if not hasattr(os, "posix_fadvise"):
            del ways[READ_COLD]
        for operation, (raw, tier, before) in ways.items():
            before()
            tier()
            self._check()
            yield self._row(operation, *_paired(raw, tier, before, rounds))

    def _row(self, operation: str, raw: list[float], tier: list[float]) -> dict[str, Any]:
        gigabytes = sum(map(len, self._images)) / 1e9
        shares = [r / t for r, t in zip(raw, tier, strict=True)]
        return {
            "operation": operation,
            "size_mb": round(self.size_mb, 2),
            "gb_per_s": gigabytes / median(tier),
            "raw_gb_per_s": gigabytes / median(raw),
            "share": median(shares),
            "share_min": min(shares),
            "share_max": max(shares),
            "rounds": len(raw),
        }

    def _made(self, tokens: int) -> ChunkKV:
        def tensors() -> tuple[torch.Tensor, ...]:
            shape = (_HEADS, tokens, _WIDTH)
            return tuple(torch.randn(shape, generator=self._random) for _ in range(_LAYERS))

        return ChunkKV(tensors(), tensors())

    def _file(self, key: KVKey) -> Path:
        return self._raw.parent / "kv" / entry_name(key)

    def _check(self) -> None:
        """Every entry comes back as it was put."""
        for key, kv in zip(self._keys, self._kv, strict=True):
            found = self._store.get(key)
            pairs = () if found is None else zip(_tensors(found.kv), _tensors(kv), strict=True)
            if found is None or not all(torch.equal(ours, put) for ours, put in pairs):
                raise RagCacheError("the disk tier did not return what was put into it")

    def _read(self) -> None:
        for key in self._keys:
            if self._store.get(key) is None:
                raise RagCacheError("an entry is gone")

    def _read_raw(self) -> None:
        view = self._buffer.data
        for path, right in zip(self._files, self._crcs, strict=True):
            done = 0
            with _opened(path) as fd:
                while got := read_into(fd, view[done:], done):
                    done += got
            if google_crc32c.value(self._buffer[:done]) != right:
                raise RagCacheError(f"{path} is not what was written")

    def _put(self, key: KVKey, kv: ChunkKV) -> None:
        if not self._store.put(key, kv):
            raise RagCacheError("an entry could not be written; is the disk full?")

    def _write(self) -> None:
        for key, kv in zip(self._keys, self._kv, strict=True):
            self._put(key, kv)

    def _write_raw(self) -> None:
        for path, image in zip(self._files, self._images, strict=True):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            view = memoryview(image)
            while view:
                view = view[os.write(fd, view) :]
            os.close(fd)

    def _empty(self) -> None:
        """Both write new files: neither is to free old ones in its time."""
        self._store.forget("bench")
        for path in self._files:
            path.unlink(missing_ok=True)

    def _drop_cache(self) -> None:
        for path in (*self._files, *map(self._file, self._keys)):
            with _opened(path) as fd:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _tensors(kv: ChunkKV) -> tuple[torch.Tensor, ...]:
    return (*kv.keys, *kv.values)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def _paired(
    raw: Callable[[], None], tier: Callable[[], None], before: Callable[[], None], rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of both, one after the other in every round, first one and then the other first."""
    before()
    raw()
    tier()
    seconds: dict[int, list[float]] = {0: [], 1: []}
    for number in range(rounds):
        before()
        for which in (0, 1) if number % 2 else (1, 0):
            began = time.perf_counter()
            (raw, tier)[which]()
            seconds[which].append(time.perf_counter() - began)
    return seconds[0], seconds[1]

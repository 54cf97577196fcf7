"""What a request costs in the store beside moving tensors: finding its chunks among ten thousand."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from ragcachekit.errors import RagCacheError
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import Found, KVStore
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.entry import encode_entry, entry_name
from ragcachekit.store.memory import HostStore
from ragcachekit.types import KVKey

CHUNKS = 10
HOST, DISK, MIXED, MISSING = "all in host memory", "all on disk", "3 % of chunks take 60 %", "none anywhere"
_HOST_SHARE = 10  # a tenth of the entries fits into host memory
_BUDGET = 1 << 50
_LAYERS = 2


def rows(folder: Path, *, entries: int, requests: int, seed: int) -> list[dict[str, Any]]:
    """Time requests of ten chunks over a host tier (a tenth of the entries) above a disk tier (all).

    Counted: digests of the keys, the look-up in every tier, counters and orders of use, and for what is on
    disk opening the file, reading and verifying its header, and closing it. Not counted: reading, verifying
    and promoting tensors, which is what a loader does while the model computes. Entries are tiny, so that
    ten thousand fit anywhere.

    Returns
    -------
    list of dict
        Per kind of request: requests, chunks, us_per_request (median), us_p80, us_max, us_mean, entries.
    """
    keys = _fill(folder, entries)
    kv = _tiny(0)
    host = HostStore(kv.nbytes * max(CHUNKS, entries // _HOST_SHARE))
    disk = DiskStore(folder, _BUDGET)
    rng = random.Random(seed)
    try:
        for number, key in enumerate(keys[: entries // _HOST_SHARE]):
            host.put(key, _tiny(number))
        held = max(CHUNKS, entries // _HOST_SHARE)
        drawn = {
            HOST: lambda: keys[rng.randrange(min(held, len(keys)))],
            DISK: lambda: keys[rng.randrange(min(held, len(keys) - 1), len(keys))],
            MIXED: lambda: keys[_skewed(rng, len(keys))],
            MISSING: lambda: KVKey("bench", "bench", f"no {rng.random()}"),
        }
        return [
            {
                "requests_of": name,
                "chunks": CHUNKS,
                "entries": entries,
                **_timed((host, disk), draw, requests),
            }
            for name, draw in drawn.items()
        ]
    finally:
        disk.close()


def look_up(tiers: Sequence[KVStore], keys: Sequence[KVKey], read: ChunkKV) -> int:
    """Find every chunk of a request and note its use; returns how many there are.

    As a composed store does it, but without the tensors, and so without promoting them: ``read`` stands
    for what would have been read.
    """
    hits = 0
    for key in keys:
        for tier in tiers:
            found = tier.open(key)
            if found is None:
                continue
            hits += 1
            if not isinstance(found, Found):
                found.finished(read)
                found.close()
            break
    return hits


def _timed(tiers: Sequence[KVStore], draw: Callable[[], KVKey], requests: int) -> dict[str, Any]:
    micros, hits, read = [], 0, _tiny(0)
    for _ in range(requests):
        keys = [draw() for _ in range(CHUNKS)]
        began = time.perf_counter()
        hits += look_up(tiers, keys, read)
        micros.append((time.perf_counter() - began) * 1e6)
    return {"hit_rate": hits / CHUNKS / requests, **micros_row(micros)}


def micros_row(micros: Sequence[float]) -> dict[str, Any]:
    """Columns of a row: how many requests, and what they took in microseconds."""
    return {
        "requests": len(micros),
        "us_per_request": median(micros),
        "us_p80": quantiles(micros, n=5)[-1] if len(micros) > 1 else micros[0],
        "us_max": max(micros),
        "us_mean": sum(micros) / len(micros),
    }


def _skewed(rng: random.Random, count: int) -> int:
    hot = max(1, round(0.03 * count))
    return rng.randrange(hot) if rng.random() < 0.6 else rng.randrange(count)


def _tiny(number: int) -> ChunkKV:
    tensors = tuple(torch.full((1, 1, 8), float(number)) for _ in range(_LAYERS))
    return ChunkKV(tensors, tensors)


def _fill(folder: Path, entries: int) -> list[KVKey]:
    """Entry files as another process may have left them, not flushed one by one: the tier adopts them."""
    keys = [KVKey("bench", "bench", str(number)) for number in range(entries)]
    folder.mkdir(mode=0o700, parents=True)
    for number, key in enumerate(keys):
        (folder / entry_name(key)).write_bytes(b"".join(encode_entry(key, _tiny(number))))
    store = DiskStore(folder, _BUDGET)
    try:
        last = store.get(keys[-1])
        if last is None or not torch.equal(last.kv.keys[0], _tiny(entries - 1).keys[0]):
            raise RagCacheError("the disk tier did not adopt the entries that it found")
    finally:
        store.close()
    return keys

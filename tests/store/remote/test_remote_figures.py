"""What a put and a get through the remote tiers take; ``-m soak -s`` prints the figures of docs/remote.md."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.entry import EntryImage, from_bytes
from ragcachekit.store.fsspec_store import FsspecStore
from ragcachekit.store.remote import RemoteStore
from ragcachekit.store.seal import Seal
from redis_kit import KEY_BYTES, redis_store, running_server
from store_kit import contents, key_of, kv_of

pytestmark = pytest.mark.soak
BUDGET, ROUNDS = 1 << 30, 31


@pytest.fixture(params=["redis", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RemoteStore]:
    if request.param == "redis":
        with running_server(tcp=True) as server:
            yield redis_store(server, budget=BUDGET, entry_bytes=16 << 20)
    else:
        yield FsspecStore(tmp_path.as_uri(), BUDGET, key=KEY_BYTES, deadline=20)


def median_ms(operation: Callable[[int], object]) -> float:
    times = []
    for number in range(ROUNDS):
        start = time.perf_counter()
        assert operation(number)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


@pytest.mark.parametrize("kib", [64, 1024, 8192])
def test_figures(store: RemoteStore, kib: int) -> None:
    kv = kv_of(1, tokens=kib // 4, layers=4, heads=4, width=32)
    assert kv.nbytes == kib << 10
    put = median_ms(lambda number: store.put(key_of(number), kv))
    get = median_ms(lambda number: store.get(key_of(number)))
    miss = median_ms(lambda number: store.get(key_of(number + ROUNDS)) is None)
    seal = median_ms(lambda number: sealed_and_opened(kv))
    found = store.get(key_of(0))
    assert found is not None
    assert contents(found.kv) == contents(kv)
    times = f"put {put:.1f} ms, get {get:.1f} ms, miss {miss:.2f} ms, of put and get sealing {seal:.1f} ms"
    sys.stdout.write(f"\n{found.tier}, {kib} KiB: {times}\n")


def sealed_and_opened(kv: ChunkKV) -> bool:
    """What of a put and a get together is making the image, signing and verifying it."""
    key, seal = key_of(0), Seal(KEY_BYTES)
    blob = seal.sealed(key.digest(), EntryImage(key, kv).parts())
    return from_bytes(seal.opened(key.digest(), blob), key).tokens == kv.tokens

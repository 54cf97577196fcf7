"""Eight bits at rest: error bounds, honesty about being rounded, identity."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import KVStore, LayerSource
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.memory import HostStore
from ragcachekit.store.quantised import QuantisedStore, pack, unpack
from store_kit import KEY, contents, key_of, kv_of

BUDGET = 1 << 22
HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Relative error of one rounding to the type itself."""

TIERS: dict[str, Callable[[Path], KVStore]] = {
    "host": lambda path: HostStore(BUDGET),
    "disk": lambda path: DiskStore(path / "kv", BUDGET),
}


def wild(seed, dtype, layers=3):
    """Channels of very different size, some of them zero, as keys without RoPE have."""
    rng = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-4, 2, 16)
    spread[3] = 0
    tensors = [torch.randn(2, 40, 16, generator=rng) * spread for _ in range(2 * layers)]
    return ChunkKV(
        tuple(t.to(dtype) for t in tensors[:layers]),
        tuple(t.to(dtype) for t in tensors[layers:]),
        None,
        {"attended": torch.rand(40, generator=rng)},
    )


def bound(x, axis, kind):
    """The docstring's bound, from the numbers alone."""
    largest = np.abs(x).max(axis, keepdims=True)
    if kind == "int8":
        return np.broadcast_to(largest / 254, x.shape)
    return np.maximum(np.abs(x) / 16, largest / 448 / 1024)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(1))
def test_errors_stay_within_the_stated_bound(kind, dtype, seed):
    kv = wild(seed, dtype)
    back = unpack(pack(kv, kind), kind)
    for axis, before, after in ((1, kv.keys, back.keys), (2, kv.values, back.values)):
        for one, other in zip(before, after, strict=True):
            assert other.dtype == dtype
            x, y = one.double().numpy(), other.double().numpy()
            info = torch.finfo(dtype)
            rounding = np.maximum(np.abs(y) * HALF_ULP[dtype], info.tiny * info.eps / 2)  # or subnormal
            allowed = bound(x, axis, kind) * (1 + 1e-5) + rounding * 1.01
            assert (np.abs(x - y) <= allowed).all()
    assert back.quantised == kind
    assert torch.equal(back.sums["attended"], kv.sums["attended"])
    assert set(back.sums) == {"attended"}


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("tier", TIERS)
def test_a_rounded_entry_comes_back_the_same_every_time_and_marked(kind, tier, tmp_path):
    store = QuantisedStore(TIERS[tier](tmp_path), kind)
    kv = kv_of(1, tokens=50)
    assert store.put(KEY, kv)
    assert KEY in store
    first, second = store.get(KEY), store.get(KEY)
    assert contents(first.kv) == contents(second.kv) == contents(unpack(pack(kv, kind), kind))
    assert first.kv.quantised == kind
    opened = store.open(KEY)
    if isinstance(opened, LayerSource):
        layers = [opened.layer(i) for i in range(opened.layers)]
        assert opened.quantised == kind
        assert [(k.dtype, tuple(k.shape)) for k, _ in layers] == [keys for keys, _ in opened.shapes]
        read = ChunkKV(tuple(k for k, _ in layers), tuple(v for _, v in layers), opened.start)
        opened.finished(read)
        opened.close()
    else:
        read = opened.kv
    assert contents(read) == contents(first.kv)
    assert store.stats()[0].nbytes < 0.7 * kv.nbytes
    assert store.forget("acme/docs", frozenset({"chunk-1"})) == 1
    assert store.get(KEY) is None
    store.close()


def test_another_configuration_does_not_find_it(tmp_path):
    disk = DiskStore(tmp_path / "kv", BUDGET)
    QuantisedStore(disk, "int8").put(KEY, kv_of(1))
    assert disk.get(KEY) is None
    assert QuantisedStore(disk, "fp8").get(KEY) is None
    assert QuantisedStore(disk, "int8").get(KEY) is not None
    assert disk.stats()[0].damaged == 0
    disk.close()


@pytest.mark.parametrize("encoding", ["prefix@long", "path"])
def test_kv_that_is_only_reused_exactly_is_not_rounded(encoding):
    inner = HostStore(BUDGET)
    store = QuantisedStore(inner, "int8")
    key = key_of(1, encoding=encoding)
    store.put(key, kv_of(1, start=0))
    found, plain = store.get(key), inner.get(key)
    assert contents(found.kv) == contents(plain.kv) == contents(kv_of(1, start=0))
    assert found.kv.quantised == ""


def test_kv_that_is_not_finite_is_refused():
    kv = kv_of(1)
    kv.values[0][0, 0, 0] = float("inf")
    store = QuantisedStore(HostStore(BUDGET), "int8")
    assert store.put(KEY, kv) is False
    assert store.get(KEY) is None
    with pytest.raises(ValueError, match="NaN"):
        pack(kv, "int8")

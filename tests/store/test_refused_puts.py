"""A put that was refused is not found afterwards, in any tier."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.memory import HostStore
from ragcachekit.store.tiered import TieredStore
from store_kit import KEY, kv_of, opened


def test_what_one_tier_cannot_write_down_is_in_no_other(tmp_path: Path) -> None:
    host = HostStore(1 << 20)
    store = TieredStore([host, opened(tmp_path / "kv")])
    kv = kv_of(1)
    complex_kv = ChunkKV(tuple(k.to(torch.complex64) for k in kv.keys), kv.values)
    with pytest.raises(TypeError, match="cannot be stored"):
        store.put(KEY, complex_kv)
    assert KEY not in store
    assert host.stats()[0].entries == 0
    store.close()

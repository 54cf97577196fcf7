"""Captured forwards without a GPU: the function is run again over its fixed memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ragcachekit import GraphConfig
from ragcachekit.forward.cuda_graphs.graphed_forward import use_graphs
from ragcachekit_kernels import dispatch
from ragcachekit_kernels.options import AttentionOptions
from ragcachekit_kernels.rows import DeviceRows, KVTable


class Rerun:
    """Stands where CUDA graphs do; like theirs, its results all lie in the same memory."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        self.captured += 1
        memory = run().clone()  # as a warm-up does

        def replay() -> torch.Tensor:
            self.replayed += 1
            with torch.no_grad():
                return memory.copy_(run())

        return replay


def graphed(model: Any, **options: Any) -> Rerun:
    """``model`` with captured forwards."""
    capture = Rerun()
    use_graphs(model, GraphConfig(capture=capture, **options))
    return capture


def plain_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that go by tables in plain torch: a hundred times as fast as interpreted ones."""
    monkeypatch.setattr(dispatch, "scatter_at", _scatter_at)
    monkeypatch.setattr(dispatch, "sparse_attention_at", _sparse_attention_at)


def _at(address: int, heads: int, stride: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """``[heads, slots, dim]`` at an address."""
    raw = (ctypes.c_byte * (heads * stride * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype).view(heads, stride // dim, dim)


def _scatter_at(key: torch.Tensor, value: torch.Tensor, table: KVTable, layer: int, rows: DeviceRows) -> None:
    count = int(rows.count)
    at = rows.positions[:count].long()
    keys, values, *strides = table.entries[layer].tolist()
    for new, address, stride in ((key, keys, strides[0]), (value, values, strides[1])):
        _at(address, new.shape[0], stride, new.shape[2], table.dtype)[:, at] = new[:, :count]


def _sparse_attention_at(
    query: torch.Tensor,
    table: KVTable,
    layer: int,
    kv_heads: int,
    value_dim: int,
    rows: DeviceRows,
    options: AttentionOptions,
    *,
    tokens: int,
) -> torch.Tensor:
    count = int(rows.count)
    at = rows.positions[:count].tolist()
    keys, values, *strides = table.entries[layer].tolist()
    key = _at(keys, kv_heads, strides[0], query.shape[2], table.dtype)[:, : at[-1] + 1]
    value = _at(values, kv_heads, strides[1], value_dim, table.dtype)[:, : at[-1] + 1]
    out = query.new_full((*query.shape[:2], value_dim), float("nan"))
    out[:, :count] = dispatch.sparse_attention(query[:, :count], key, value, at, options)
    return out

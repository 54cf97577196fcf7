"""Launchers of the sparse-row attention kernels (:mod:`ragcachekit_kernels.attention.kernels`)."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ragcachekit_kernels.attention.configs import (
    QUESTION_ROWS,
    UNIT,
    Case,
    Config,
    config_for,
    splits_for,
)
from ragcachekit_kernels.attention.kernels import attention_kernel, merge_kernel
from ragcachekit_kernels.launch import FUSED, dense, factors, launching_on, padded, processors, upcast
from ragcachekit_kernels.options import AttentionOptions
from ragcachekit_kernels.rows import DeviceRows, KVTable

MERGED = 8
"""Query vectors per program that merges splits."""


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: DeviceRows,
    options: AttentionOptions,
    *,
    config: Config | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Attention over keys ``[kv_heads, tokens, head_dim]`` and values; returns what :func:`_launch` does.

    The last dimension of both must be contiguous; head and row strides are free.
    """
    kv_heads, tokens, head_dim = key.shape
    value_dim = value.shape[-1]
    case = Case(query.device, query.dtype, head_dim, value_dim, table=False, plain=options.is_plain)
    config = config or config_for(case)
    if config.descriptors and not (described(key) and described(value)):
        config = config_for(case._replace(table=True))
    sources = {
        "key": _descriptor(key, config) if config.descriptors else key,
        "value": _descriptor(value, config) if config.descriptors else value,
        "table": None,
        "key_head": key.stride(0),
        "value_head": value.stride(0),
        "KEY_ROW": key.stride(1),
        "VALUE_ROW": value.stride(1),
    }
    return _launch(query, sources, kv_heads, value_dim, tokens, rows, options, config, splits)


def attention_at(
    query: torch.Tensor,
    table: KVTable,
    layer: int,
    kv_heads: int,
    value_dim: int,
    rows: DeviceRows,
    options: AttentionOptions,
    *,
    tokens: int,
    config: Config | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Attention over one layer's keys and values in ``table``; returns what :func:`_launch` does.

    ``tokens``, the approximate number of keys, only decides the number of splits.
    """
    head_dim = query.shape[-1]
    case = Case(query.device, query.dtype, head_dim, value_dim, table=True, plain=options.is_plain)
    config = config or config_for(case)
    sources = {
        "key": None,
        "value": None,
        "table": table.entries[layer],
        "key_head": 0,
        "value_head": 0,
        "KEY_ROW": head_dim,
        "VALUE_ROW": value_dim,
    }
    return _launch(query, sources, kv_heads, value_dim, tokens, rows, options, config, splits)


def described(tensor: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator can load ``tensor``: address and strides in 16 bytes."""
    strides = (stride * tensor.itemsize for stride in tensor.stride()[:-1])
    return tensor.data_ptr() % 16 == 0 and all(stride % 16 == 0 and stride > 0 for stride in strides)


def _descriptor(tensor: torch.Tensor, config: Config) -> TensorDescriptor:
    block = [1, config.block_n, padded(tensor.shape[-1])]
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


def _launch(
    query: torch.Tensor,
    sources: dict[str, Any],
    kv_heads: int,
    value_dim: int,
    tokens: int,
    rows: DeviceRows,
    options: AttentionOptions,
    config: Config,
    splits: int | None,
) -> torch.Tensor:
    """Output ``[heads, rows, value_dim]``, a view of token-major memory.

    Rows from the count on are zeros with a table, else not written.
    """
    heads, room, head_dim = query.shape
    query, table = dense(query), sources["table"]
    scale, cap = factors(options)
    programs = processors(query.device) * max(config.resident, 1)
    if splits is None:
        splits = _splits(heads, room, kv_heads, tokens, options.window, config, programs)
    items = triton.cdiv(room * heads // kv_heads, config.block_m) * kv_heads * splits
    new = query.new_empty if table is None else query.new_zeros
    out = parts = new(room, heads, value_dim)
    lse = None
    if splits > 1:
        parts = query.new_empty(splits, room, heads, value_dim, dtype=torch.float32)
        lse = query.new_empty(splits, room, heads, dtype=torch.float32)
    sinks = None if options.sinks is None else options.sinks.contiguous()
    with launching_on(query.device):
        attention_kernel[(min(items, programs) if config.resident else items,)](
            query=query,
            **sources,
            out=parts,
            lse=lse,
            positions=rows.positions,
            count=rows.count,
            sinks=sinks,
            scale=scale,
            cap=cap,
            window=options.window or 0,
            splits=splits,
            room=room,
            query_head=query.stride(0),
            query_row=query.stride(1),
            KV_HEADS=kv_heads,
            GROUP=heads // kv_heads,
            D=head_dim,
            DV=value_dim,
            D_PAD=padded(head_dim),
            DV_PAD=padded(value_dim),
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            WINDOW=options.window is not None,
            SOFTCAP=options.softcap is not None,
            SINKS=sinks is not None,
            SPLIT=splits > 1,
            TABLE=table is not None,
            DESCRIPTORS=config.descriptors,
            UPCAST=upcast(query.dtype),
            num_warps=config.warps,
            num_stages=config.stages,
            **FUSED,
        )
        if splits > 1:
            merge_kernel[(triton.cdiv(room * heads, MERGED),)](
                parts, lse, out, rows.count, sinks, splits, room, HEADS=heads, DV=value_dim,
                DV_PAD=padded(value_dim), BLOCK=MERGED, SINKS=sinks is not None, num_warps=4, **FUSED,
            )  # fmt: skip
    return out.transpose(0, 1)


def _splits(
    heads: int, room: int, kv_heads: int, tokens: int, window: int | None, config: Config, programs: int
) -> int:
    group = heads // kv_heads
    blocks = triton.cdiv(room * group, config.block_m)
    question = triton.cdiv(min(room, QUESTION_ROWS) * group, config.block_m)
    units = triton.cdiv(tokens if window is None else min(tokens, window), UNIT)
    coarse = units if units <= 64 else triton.cdiv(units, 16) * 16  # few distinct arguments for the cache
    return splits_for(blocks, question, kv_heads, programs, coarse)

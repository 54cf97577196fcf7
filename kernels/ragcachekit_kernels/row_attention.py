"""Launches of the sparse-row attention kernel (:mod:`ragcachekit_kernels.attention_kernels`)."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ragcachekit_kernels.attention_kernels import attention_kernel
from ragcachekit_kernels.configs import QUESTION_ROWS, UNIT, USUAL_TOKENS, Config, config_for, splits_for
from ragcachekit_kernels.launch import FUSED, LOG2E, launching_on, padded, processors, upcast
from ragcachekit_kernels.merging import merge
from ragcachekit_kernels.rows import DeviceRows, KVTable


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: DeviceRows,
    *,
    config: Config | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch over keys ``[kv_heads, tokens, head_dim]`` and values; what :func:`_launch` returns.

    The last dimension of both must be contiguous; heads and rows may lie apart.
    """
    kv_heads, tokens, head_dim = key.shape
    value_dim = value.shape[-1]
    case = (query.device, query.dtype, head_dim, value_dim)
    plain = options.get("window") is None and options.get("softcap") is None
    config = config or config_for(*case, table=False, plain=plain)
    if config.descriptors and not (described(key) and described(value)):
        config = config_for(*case, table=True, plain=plain)
    sources = {
        "key": _descriptor(key, config) if config.descriptors else key,
        "value": _descriptor(value, config) if config.descriptors else value,
        "table": None,
        "key_head": key.stride(0),
        "value_head": value.stride(0),
        "KEY_ROW": key.stride(1),
        "VALUE_ROW": value.stride(1),
    }
    return _launch(query, sources, kv_heads, value_dim, tokens, rows, config, **options)


def attention_at(
    query: torch.Tensor,
    table: KVTable,
    layer: int,
    kv_heads: int,
    value_dim: int,
    rows: DeviceRows,
    *,
    tokens: int | None = None,
    config: Config | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch over the keys and values of one layer of ``table``; what :func:`_launch` returns.

    ``tokens`` only helps to choose into how many parts keys are split: about how many keys there will be.
    Without ``out`` rows from the count on are zeros.
    """
    head_dim = query.shape[-1]
    plain = options.get("window") is None and options.get("softcap") is None
    case = (query.device, query.dtype, head_dim, value_dim)
    config = config or config_for(*case, table=True, plain=plain)
    if options.get("out") is None:  # rows from the count on are not written
        options["out"] = query.new_zeros(rows.room, query.shape[0], value_dim)
    sources = {
        "key": None,
        "value": None,
        "table": table.entries[layer],
        "key_head": 0,
        "value_head": 0,
        "KEY_ROW": head_dim,
        "VALUE_ROW": value_dim,
    }
    return _launch(query, sources, kv_heads, value_dim, tokens or USUAL_TOKENS, rows, config, **options)


def described(tensor: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator can load from ``tensor``: all in multiples of 16 bytes."""
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
    config: Config,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    with_lse: bool = False,
    splits: int | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output ``[heads, rows, value_dim]``, a view of token-major memory, and log-sum-exps ``[heads, rows]``.

    Rows from the count on are left as they are in ``out`` (``[rows, heads, value_dim]``, contiguous; made
    if not given).
    """
    heads, room, head_dim = query.shape
    if query.stride(-1) != 1:
        query = query.contiguous()
    programs = processors(query.device) * max(config.resident, 1)
    if splits is None:
        splits = _splits(heads, room, kv_heads, tokens, window, config, programs)
    items = triton.cdiv(room * heads // kv_heads, config.block_m) * kv_heads * splits
    plane = (splits, room, heads) if splits > 1 else (room, heads)
    out = query.new_empty(room, heads, value_dim) if out is None else out
    lse = query.new_empty(room, heads, dtype=torch.float32) if with_lse else None
    parts = query.new_empty(*plane, value_dim, dtype=torch.float32) if splits > 1 else out
    part_lse = query.new_empty(*plane, dtype=torch.float32) if splits > 1 else lse
    sinks = None if sinks is None else sinks.contiguous()
    with launching_on(query.device):
        attention_kernel[(min(items, programs) if config.resident else items,)](
            query=query,
            **sources,
            out=parts,
            lse=part_lse,
            positions=rows.positions,
            count=rows.count,
            sinks=sinks,
            scale=scale * LOG2E if softcap is None else scale * 2 * LOG2E / softcap,
            cap=0.0 if softcap is None else softcap * LOG2E,
            window=window or 0,
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
            WINDOW=window is not None,
            SOFTCAP=softcap is not None,
            SINKS=sinks is not None,
            LSE=with_lse,
            SPLIT=splits > 1,
            TABLE=sources["table"] is not None,
            DESCRIPTORS=config.descriptors,
            UPCAST=upcast(query.dtype),
            num_warps=config.warps,
            num_stages=config.stages,
            **FUSED,
        )
    if part_lse is not None and splits > 1:
        merge(parts, part_lse, out, lse, rows.count, sinks)
    return out.transpose(0, 1), None if lse is None else lse.t()


def _splits(
    heads: int, room: int, kv_heads: int, tokens: int, window: int | None, config: Config, programs: int
) -> int:
    group = heads // kv_heads
    blocks = triton.cdiv(room * group, config.block_m)
    question = triton.cdiv(min(room, QUESTION_ROWS) * group, config.block_m)
    units = triton.cdiv(tokens if window is None else min(tokens, window), UNIT)
    coarse = units if units <= 64 else triton.cdiv(units, 16) * 16  # few different answers to work out
    return splits_for(blocks, question, kv_heads, programs, coarse)

"""Sparse-row attention in Triton: tile sizes, splits and launches of :mod:`.attention_kernels`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ragcachekit_kernels.arguments import AttentionOptions
from ragcachekit_kernels.attention_kernels import attention_kernel, merge_kernel
from ragcachekit_kernels.backend import FUSED, dense, factors, launching_on, padded, processors, upcast

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)

QUESTION_ROWS = 64
"""Rows assumed to see all keys when splits are chosen; the others are assumed to be spread evenly."""

UNIT = 128
"""Keys per unit of length when splits are chosen."""

MERGED = 8
"""Query vectors per program that merges splits."""


@dataclass(frozen=True)
class Config:
    """Compile and launch options of the kernel.

    Attributes
    ----------
    block_m, block_n : int
        Query vectors and keys of a tile; powers of two from 16 on.
    warps, stages : int
        Warps of a program; loads in flight (a stage is the keys and values of one ``block_n``).
    descriptors : bool
        Loads by the tensor memory accelerator (from Hopper on), which need no registers for addresses.
    resident : int
        Programs per multiprocessor among which all items are divided; 0: one program per item.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    descriptors: bool = False
    resident: int = 1


# By element size and padded head_dim. Compiled for Hopper (tests/kernels/test_compiled.py) they have no
# spills in the loop over keys and fit into 227 KiB of shared memory, with three stages if possible.
_HOPPER = {
    2: {
        64: Config(128, 128, 8, 3, True),
        128: Config(128, 128, 8, 3, True),
        256: Config(128, 32, 8, 3, True),
    },
    4: {64: Config(64, 32, 8, 2), 128: Config(64, 32, 8, 2), 256: Config(32, 32, 8, 2)},
}
_HOPPER_POINTERS = {
    2: {64: Config(128, 128, 8, 3), 128: Config(128, 64, 8, 3), 256: Config(64, 32, 8, 2)},
    4: _HOPPER[4],
}
_OTHER = {  # within 99 KiB, the smallest shared memory
    2: {
        64: Config(128, 64, 4, 2, resident=0),
        128: Config(64, 64, 4, 2, resident=0),
        256: Config(64, 32, 4, 2, resident=0),
    },
    4: {
        64: Config(64, 32, 4, 2, resident=0),
        128: Config(32, 32, 4, 2, resident=0),
        256: Config(16, 16, 4, 2, resident=0),
    },
}


def config_for(
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    *,
    described: bool = True,
    plain: bool = True,
    capability: tuple[int, int] | None = None,
) -> Config:
    """Config for heads of up to ``width`` dimensions.

    ``described``: descriptors can load keys and values. ``plain``: no window and no soft-cap. ``capability``
    is that of the device, unless given.
    """
    if device.type != "cuda":  # the interpreter: small tiles, so that tests see several
        return Config(32, 16, 4, 1, descriptors=described)
    if capability is None:
        capability = torch.cuda.get_device_capability(device)
    configs = _OTHER if capability[0] != 9 else _HOPPER if described else _HOPPER_POINTERS
    config = configs[dtype.itemsize][max(64, padded(width))]
    # Windows and soft-caps need registers: with 128 keys the loops would spill.
    return config if plain else replace(config, block_n=min(config.block_n, 64))


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    options: AttentionOptions,
    *,
    config: Config | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Output ``[heads, rows, value_dim]``, a view of token-major memory; ``positions`` are int32.

    The last dimension of keys and values must be contiguous; head and row strides are free.
    """
    (heads, rows, head_dim), kv_heads, value_dim = query.shape, key.shape[0], value.shape[2]
    query = dense(query)
    width, both = max(head_dim, value_dim), described(key) and described(value)
    if config is None:
        config = config_for(query.device, query.dtype, width, described=both, plain=options.is_plain)
    config = replace(config, descriptors=config.descriptors and both)
    scale, cap = factors(options)
    programs = processors(query.device) * max(config.resident, 1)
    if splits is None:
        splits = _splits(heads, rows, kv_heads, key.shape[1], options.window, config, programs)
    items = triton.cdiv(rows * heads // kv_heads, config.block_m) * kv_heads * splits
    out = parts = query.new_empty(rows, heads, value_dim)
    lse = None
    if splits > 1:
        parts = query.new_empty(splits, rows, heads, value_dim, dtype=torch.float32)
        lse = query.new_empty(splits, rows, heads, dtype=torch.float32)
    sinks = None if options.sinks is None else options.sinks.contiguous()
    with launching_on(query.device):
        attention_kernel[(min(items, programs) if config.resident else items,)](
            query=query,
            key=_descriptor(key, config) if config.descriptors else key,
            value=_descriptor(value, config) if config.descriptors else value,
            out=parts,
            lse=lse,
            positions=positions,
            sinks=sinks,
            scale=scale,
            cap=cap,
            window=options.window or 0,
            splits=splits,
            rows=rows,
            query_head=query.stride(0),
            query_row=query.stride(1),
            key_head=key.stride(0),
            value_head=value.stride(0),
            KEY_ROW=key.stride(1),
            VALUE_ROW=value.stride(1),
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
            DESCRIPTORS=config.descriptors,
            UPCAST=upcast(query.dtype),
            num_warps=config.warps,
            num_stages=config.stages,
            **FUSED,
        )
        if splits > 1:
            merge_kernel[(triton.cdiv(rows * heads, MERGED),)](
                parts, lse, out, sinks, splits, rows, HEADS=heads, DV=value_dim, DV_PAD=padded(value_dim),
                BLOCK=MERGED, SINKS=sinks is not None, num_warps=4, **FUSED,
            )  # fmt: skip
    return out.transpose(0, 1)


def described(tensor: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator can load ``tensor``: address and strides in 16 bytes."""
    strides = (stride * tensor.itemsize for stride in tensor.stride()[:-1])
    return tensor.data_ptr() % 16 == 0 and all(stride % 16 == 0 and stride > 0 for stride in strides)


def _descriptor(tensor: torch.Tensor, config: Config) -> TensorDescriptor:
    block = [1, config.block_n, padded(tensor.shape[-1])]
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


def _splits(
    heads: int, rows: int, kv_heads: int, tokens: int, window: int | None, config: Config, programs: int
) -> int:
    group = heads // kv_heads
    blocks = triton.cdiv(rows * group, config.block_m)
    question = triton.cdiv(min(rows, QUESTION_ROWS) * group, config.block_m)
    units = triton.cdiv(tokens if window is None else min(tokens, window), UNIT)
    coarse = units if units <= 64 else triton.cdiv(units, 16) * 16  # few distinct arguments for the cache
    return splits_for(blocks, question, kv_heads, programs, coarse)


@lru_cache(maxsize=4096)
def splits_for(blocks: int, question_blocks: int, kv_heads: int, programs: int, units: int) -> int:
    """Number of splits of each tile's keys that minimises the largest load of a program, merging included.

    Lengths, in ``UNIT`` keys, are modelled: the last ``question_blocks`` of the ``blocks`` of rows see all
    ``units``, the others are spread evenly.
    """
    if blocks * kv_heads >= 4 * programs:
        return 1  # enough tiles to balance without splits
    args = (blocks, min(question_blocks, blocks), kv_heads, programs, units)
    return min((s for s in SPLITS if s <= units), key=lambda splits: _makespan(splits, *args))


def _makespan(
    splits: int, blocks: int, question_blocks: int, kv_heads: int, programs: int, units: int
) -> float:
    """Largest load of a program, with items divided as in the kernel."""
    spread = blocks - question_blocks
    lengths = torch.full((blocks,), float(units))
    lengths[blocks - spread :] = torch.linspace(units, 1, spread)
    items = (lengths / splits).ceil().repeat_interleave(kv_heads * splits)
    rounds = torch.nn.functional.pad(items, (0, -len(items) % programs)).view(-1, programs)
    rounds[1::2] = rounds[1::2].flip(1)
    # Estimated for a Hopper GPU: writing and reading an item's output costs 1.6 units, a second launch 2.
    merging = 2 + 1.6 * len(items) / programs if splits > 1 else 0.0
    return float(rounds.sum(0).max()) + merging

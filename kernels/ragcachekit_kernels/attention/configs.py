"""Tile sizes and splits of the sparse-row attention kernel: defaults and tuning files."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

SETTING = "RAGCACHEKIT_KERNEL_TUNING"
"""Environment variable: a JSON file that ``python -m benchmarks kernels --tune FILE`` wrote."""

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
QUESTION_ROWS = 64
"""Rows assumed to see all keys when splits are chosen; the others are assumed to be spread evenly."""

UNIT = 128
"""Keys per unit of length when splits are chosen."""


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
        Loads by the tensor memory accelerator (from Hopper on), which need no registers for addresses;
        impossible where addresses come from a table.
    resident : int
        Programs per multiprocessor among which all items are divided; 0: one program per item.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    descriptors: bool = False
    resident: int = 1

    def __post_init__(self) -> None:
        for size in (self.block_m, self.block_n):
            if size < 16 or size & (size - 1):
                raise ValueError(f"a tile cannot have {size} rows; use a power of two from 16 on")
        if self.warps not in (1, 2, 4, 8, 16) or self.stages < 1 or self.resident < 0:
            raise ValueError(f"{self} cannot be launched: warps are 1, 2, 4, 8 or 16, stages at least 1")


# By element size and padded head_dim. Compiled for Hopper (tests/kernels/test_compiled_attention.py) they
# have no spills in the loop over keys and fit into 227 KiB of shared memory, with three stages if possible.
_HOPPER = {
    2: {
        64: Config(128, 128, 8, 3, True),
        128: Config(128, 128, 8, 3, True),
        256: Config(128, 32, 8, 3, True),
    },
    4: {64: Config(64, 32, 8, 2), 128: Config(64, 32, 8, 2), 256: Config(32, 32, 8, 2)},
}
_HOPPER_TABLE = {
    2: {64: Config(128, 128, 8, 3), 128: Config(128, 64, 8, 3), 256: Config(128, 32, 8, 2)},
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


class Case(NamedTuple):
    """What a config is chosen for; ``plain``: no window, no soft-cap."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    table: bool
    plain: bool = True

    @property
    def key(self) -> str:
        """Name in a tuning file."""
        where = ("table" if self.table else "pointers") + ("" if self.plain else "/masked")
        gpu = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if gpu else self.device.type
        return f"{name}/{str(self.dtype).removeprefix('torch.')}/{self.head_dim}/{self.value_dim}/{where}"


def config_for(case: Case) -> Config:
    """Tuned config for this device if there is one, else the default."""
    if case.device.type != "cuda":  # the interpreter: small tiles, so that tests see several
        return Config(32, 16, 4, 1, descriptors=not case.table)
    tuned = _tuned(os.environ.get(SETTING)).get(case.key)
    return tuned or default_config(case, torch.cuda.get_device_capability(case.device))


def default_config(case: Case, capability: tuple[int, int]) -> Config:
    """Default config for a compute capability."""
    configs = _OTHER if capability[0] != 9 else _HOPPER_TABLE if case.table else _HOPPER
    width = max(64, 1 << (max(case.head_dim, case.value_dim) - 1).bit_length())
    config = configs[case.dtype.itemsize][width]
    # Windows and soft-caps need registers: with 128 keys the loops would spill.
    return config if case.plain else replace(config, block_n=min(config.block_n, 64))


def loads(text: str) -> dict[str, Config]:
    """Configs of a tuning file's text; ValueError if it is none or a config cannot be launched."""
    try:
        frame = json.loads(text)
        if frame["schema"] != 1:
            raise ValueError(f"schema {frame['schema']!r} is not known")
        return {str(key): Config(**entry) for key, entry in frame["sparse_attention"].items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not a kernel tuning file ({error}); docs/gpu.md tells how to write one") from error


@lru_cache(maxsize=8)
def _tuned(path: str | None) -> dict[str, Config]:
    return loads(Path(path).read_text()) if path else {}


@lru_cache(maxsize=4096)
def splits_for(blocks: int, question_blocks: int, kv_heads: int, programs: int, units: int) -> int:
    """Number of splits of each tile's keys that minimises the largest load of a program, merging included.

    Lengths, in ``UNIT`` keys, are modelled, for the positions are in device memory. The last
    ``question_blocks`` of the ``blocks`` of rows see all ``units``; the others are spread evenly.
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

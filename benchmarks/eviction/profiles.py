"""Prefill times that the eviction bench reckons with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ragcachekit.commands.shapes import SHAPES
from ragcachekit.model.prefill_profile import PrefillProfile


@dataclass(frozen=True)
class Machine:
    """What a machine attains on a shape: operations and bytes per second, and the bytes of one value."""

    name: str
    flops: float
    memory: float
    to_device: float
    width: int


@dataclass(frozen=True)
class Costs:
    """Prefill times, and seconds to load one token's KV from host memory (None: unknown)."""

    label: str
    profile: PrefillProfile
    load_seconds: float | None


MACHINES = {
    "llama-3.1-8b": Machine("A10G-like: 60 TFLOP/s, 500 GB/s, 20 GB/s from host", 60e12, 500e9, 20e9, 2),
    "smollm2-135m": Machine("one CPU core: 50 GFLOP/s, 10 GB/s", 50e9, 10e9, 10e9, 4),
}
"""Assumed, not measured: the bench compares policies, for which only the proportions matter."""


def open_costs(name: str) -> Costs:
    """By arithmetic for a shape of :data:`MACHINES`, or from a JSON file of a ``PrefillProfile``'s fields.

    Raises
    ------
    ValueError
        If it is neither.
    """
    if name not in MACHINES:
        if not Path(name).is_file():
            raise ValueError(
                f"unknown profile {name!r}; known: {', '.join(MACHINES)}, or a profile's JSON file"
            )
        try:
            profile = PrefillProfile(**json.loads(Path(name).read_text()))
        except TypeError as error:
            raise ValueError(f"{name} has no fields of a prefill profile: {error}") from error
        return Costs(f"profile {Path(name).name}", profile, None)
    shape, machine = SHAPES[name], MACHINES[name]
    # Weights are read once; a row costs two operations per weight, a pair four per layer and dimension.
    kv_width = shape.hidden * shape.kv_heads // shape.heads
    weights = shape.layers * (
        2 * shape.hidden * shape.hidden + 2 * shape.hidden * kv_width + 3 * shape.hidden * shape.inter
    )
    profile = PrefillProfile(
        fixed=weights * machine.width / machine.memory,
        per_row=2 * weights / machine.flops,
        per_pair=4 * shape.layers * shape.hidden / machine.flops,
    )
    kv_bytes = 2 * shape.layers * shape.kv_heads * (shape.hidden // shape.heads) * machine.width
    return Costs(f"{name} shape, by arithmetic; {machine.name}", profile, kv_bytes / machine.to_device)

"""Seconds to the first token: arithmetic over the speeds of prefills, disk and copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ragcachekit.commands.estimate.replay import DISK, HOST, Served, Use
from ragcachekit.model.prefill_profile import PrefillProfile
from ragcachekit.model.prefill_timing import measure_profile
from ragcachekit.plan.load_planner import pipelined, pipelined_twice
from ragcachekit.plan.row_cost import scoring_pass_of
from ragcachekit.policies.base import SelectionPolicy

MEASURE_SECONDS = 5.0

ASSUMED_DISK = 1e9
ASSUMED_COPY = {"cpu": 5e9, "cuda": 2e10}
ASSUMED_FLOPS = {"cpu": 5e10, "cuda": 1e14}
ASSUMED_MEMORY = {"cpu": 1e10, "cuda": 1e12}
"""Bytes and operations per second of modest hardware."""


@dataclass(frozen=True, eq=False)
class Speeds:
    """Prefill profile, bytes per second from the disk and into a prompt's cache, and where they are from."""

    profile: PrefillProfile
    disk: float
    copy: float
    layers: int
    note: str

    def full(self, tokens: int) -> float:
        """Seconds of an ordinary prefill."""
        return self.profile.seconds(0, tokens)

    def served(self, served: Served, policy: SelectionPolicy) -> float:
        """Seconds to the first token, with as many of the longest entries loaded from the disk as pay."""
        host = served.from_tier(HOST)
        disk = sorted(served.from_tier(DISK), key=lambda use: -use.tokens)
        tokens = served.request.tokens
        return min(self._seconds(tokens, host, disk[:n], policy) for n in range(len(disk) + 1))

    def _seconds(
        self, tokens: int, host: Sequence[Use], loaded: Sequence[Use], policy: SelectionPolicy
    ) -> float:
        """Seconds if these entries load while earlier layers compute; guided policies run twice."""
        used = [*host, *loaded]
        compute = self._rows(tokens - sum(use.cost.spared for use in used), tokens)
        load = sum({use.key: use.nbytes for use in loaded}.values()) / self.disk
        place = sum(use.nbytes for use in used) / self.copy
        scoring = scoring_pass_of(policy, tokens - sum(use.tokens for use in used), ())
        if scoring is None or all(use.cost.is_exact for use in used):
            return place + pipelined(load, compute, self.layers)
        seen = scoring.layers(self.layers)
        watch = self._rows(scoring.rows, tokens) * seen / self.layers
        return place + pipelined_twice(load, watch, compute, self.layers, seen)

    def _rows(self, rows: int, tokens: int) -> float:
        """Seconds to run so many rows of a prompt, at least its last one."""
        rows = max(rows, 1)
        return self.profile.seconds(tokens - rows, rows)


def speeds_of(model: Any, *, context: int, layers: int, measure: bool, disk: float | None) -> Speeds:
    """Speeds of a model on its device.

    Prefills of a few lengths are measured, or assumed; ``disk`` is in bytes per second, assumed if None.
    """
    kind, disk = _kind(model), disk or ASSUMED_DISK
    if measure:
        profile = measure_profile(model, context=context, budget=MEASURE_SECONDS)
        source = f"measured on {model.device} (about {MEASURE_SECONDS:.0f} s)"
    else:
        profile = assumed_profile(model)
        source = f"assumed at {ASSUMED_FLOPS[kind] / 1e9:,.0f} GFLOP/s ({kind})"
    note = (
        f"prefills {source}; assumed: KV from the disk at {disk / 1e9:.2f} GB/s (--disk-gbps), "
        f"into place at {ASSUMED_COPY[kind] / 1e9:.2f} GB/s"
    )
    return Speeds(profile, disk, ASSUMED_COPY[kind], layers, note)


def assumed_profile(model: Any) -> PrefillProfile:
    """Prefills by arithmetic over the model's shape."""
    config, kind = model.config.get_text_config(), _kind(model)
    heads = config.num_attention_heads
    return PrefillProfile.of_shape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        inter=config.intermediate_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        flops_per_second=ASSUMED_FLOPS[kind],
        bytes_per_second=ASSUMED_MEMORY[kind],
        bytes_per_weight=model.dtype.itemsize,
    )


def _kind(model: Any) -> str:
    return "cuda" if model.device.type == "cuda" else "cpu"

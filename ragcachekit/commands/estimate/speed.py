"""Seconds to the first token: arithmetic over the speeds of prefills, disk and copies."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ragcachekit.commands.estimate.replay import DISK, HOST, Served, Use
from ragcachekit.model.kv import ChunkKV
from ragcachekit.model.prefill_profile import PrefillProfile
from ragcachekit.model.prefill_timing import measure_profile
from ragcachekit.model.rope.rotation import Rope
from ragcachekit.plan.load_planner import pipelined, pipelined_twice
from ragcachekit.plan.row_cost import scoring_pass_of
from ragcachekit.policies.base import SelectionPolicy
from ragcachekit.store.disk.disk_store import DiskStore
from ragcachekit.types import KVKey

MEASURE_SECONDS = 5.0
_SAMPLE_TOKENS, _REPEATS = 256, 5

ASSUMED_DISK = 1e9
ASSUMED_COPY = 5e9
ASSUMED_FLOPS = {"cpu": 5e10, "cuda": 1e14}
ASSUMED_MEMORY = {"cpu": 1e10, "cuda": 1e12}
"""Bytes and operations per second of modest hardware, used where nothing is measured."""


@dataclass(frozen=True, eq=False)
class Speeds:
    """Prefill profile, bytes per second from the disk and into a prompt's cache, and their sources."""

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


def measured(model: Any, rope: Rope, token: ChunkKV, folder: Path, disk: float | None) -> Speeds:
    """Measure this machine with this model, for a few seconds.

    ``token`` is the KV of one token, ``folder`` the cache folder, ``disk`` its bytes per second if known.
    """
    profile = measure_profile(model, context=rope.context, budget=MEASURE_SECONDS)
    # Random: repeated rows would be read from the processor's cache.
    random = token.each(lambda t: torch.rand(t.shape[0], _SAMPLE_TOKENS, t.shape[2]).to(t.dtype))
    sample = replace(random, sums={})
    copy = sample.nbytes / median(_place_seconds(rope, sample, model.device) for _ in range(_REPEATS))
    source = "as given"
    if disk is None:
        disk = sample.nbytes / _read_seconds(sample, folder)
        source = f"measured in {folder}, page cache dropped"
    note = (
        f"prefills measured on {model.device} (about {MEASURE_SECONDS:.0f} s); "
        f"disk: {disk / 1e9:.2f} GB/s, {source}; into place: {copy / 1e9:.2f} GB/s, measured"
    )
    return Speeds(profile, disk, copy, sample.layers, note)


def assumed(model: Any, disk: float | None) -> Speeds:
    """Arithmetic over the model's shape, for modest hardware."""
    config = model.config.get_text_config()
    kind = model.device.type if model.device.type in ASSUMED_FLOPS else "cpu"
    heads = config.num_attention_heads
    profile = PrefillProfile.of_shape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        inter=config.intermediate_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        flops_per_second=ASSUMED_FLOPS[kind],
        bytes_per_second=ASSUMED_MEMORY[kind],
        bytes_per_weight=model.dtype.itemsize,
    )
    disk = disk or ASSUMED_DISK
    note = (
        f"nothing measured: prefills at {ASSUMED_FLOPS[kind] / 1e9:,.0f} GFLOP/s ({kind}), KV from the disk "
        f"at {disk / 1e9:.2f} GB/s, into place at {ASSUMED_COPY / 1e9:.2f} GB/s"
    )
    return Speeds(profile, disk, ASSUMED_COPY, config.num_hidden_layers, note)


def _place_seconds(rope: Rope, kv: ChunkKV, device: torch.device) -> float:
    angles = rope.angles(torch.arange(kv.tokens), kv.tokens)
    begun = time.perf_counter()
    for layer in range(kv.layers):
        placed = rope.place(layer, kv.keys[layer].to(device), kv.values[layer].to(device), angles)
        copies = [tensor.clone() for tensor in placed]
    copies[0][0, -1, 0].item()  # waits for the device
    return time.perf_counter() - begun


def _read_seconds(kv: ChunkKV, folder: Path) -> float:
    """Median seconds to read the entry from a disk tier."""
    while not folder.is_dir():
        folder = folder.parent
    key, seconds = KVKey("estimate", "estimate", "estimate"), []
    with (
        tempfile.TemporaryDirectory(prefix="ragcachekit-", dir=folder) as scratch,
        closing(DiskStore(Path(scratch), 8 * kv.nbytes + (1 << 20))) as store,
    ):
        if not store.put(key, kv):
            raise OSError(f"nothing can be written in {folder}")
        (entry,) = Path(scratch).glob("*.safetensors")
        for _ in range(_REPEATS):
            if hasattr(os, "posix_fadvise"):  # else what was just written comes from memory
                with entry.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            begun = time.perf_counter()
            store.get(key)
            seconds.append(time.perf_counter() - begun)
    return median(seconds)

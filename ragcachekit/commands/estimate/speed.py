"""Times of prefills, of reading KV from the disk and of placing it, and the time to first token they give."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ragcachekit.commands.estimate.replay import DISK, HOST, Served
from ragcachekit.commands.estimate.requests import Use
from ragcachekit.model.kv import ChunkKV
from ragcachekit.model.prefill_profile import PrefillProfile
from ragcachekit.model.prefill_timing import measure_profile
from ragcachekit.model.rope.rotation import Rope
from ragcachekit.plan.load_planner import pipelined, pipelined_twice
from ragcachekit.policies.base import GuidedPolicy, PlacedChunk, SelectionPolicy
from ragcachekit.store.disk.disk_store import DiskStore
from ragcachekit.types import KVKey

MEASURE_SECONDS = 5.0
SAMPLE_TOKENS = 256
_REPEATS = 5

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
    notes: tuple[str, ...]

    def full(self, tokens: int) -> float:
        """Seconds of an ordinary prefill."""
        return self.profile.seconds(0, tokens)

    def served(self, served: Served, policy: SelectionPolicy) -> float:
        """Seconds to the first token, with as many of the longest entries loaded from the disk as pay."""
        host = served.from_tier(HOST)
        disk = sorted(served.from_tier(DISK), key=lambda use: -use.chunk.tokens)
        tokens = served.request.tokens
        return min(self._seconds(tokens, host, disk[:n], policy) for n in range(len(disk) + 1))

    def _seconds(
        self, tokens: int, host: Sequence[Use], loaded: Sequence[Use], policy: SelectionPolicy
    ) -> float:
        """Seconds if these entries load while earlier layers compute; guided policies run twice."""
        used = [*host, *loaded]
        chunks = [use.chunk for use in used]
        unknown = tokens - sum(chunk.tokens for chunk in chunks)
        compute = self._rows(unknown + rows_chosen(policy, chunks, tokens), tokens)
        load = sum({use.key: use.nbytes for use in loaded}.values()) / self.disk
        place = sum(use.nbytes for use in used) / self.copy
        if not isinstance(policy, GuidedPolicy) or all(chunk.is_exact for chunk in chunks):
            return place + pipelined(load, compute, self.layers)
        watched = policy.look.layers
        seen = self.layers if watched is None else max(layer % self.layers for layer in watched) + 1
        watch = self._rows(unknown, tokens) * seen / self.layers
        return place + pipelined_twice(load, watch, compute, self.layers, seen)

    def _rows(self, rows: int, tokens: int) -> float:
        """Seconds to run so many rows of a prompt, at least its last one."""
        rows = max(rows, 1)
        return self.profile.seconds(tokens - rows, rows)


def rows_chosen(policy: SelectionPolicy, chunks: Collection[PlacedChunk], tokens: int) -> int:
    """Number of rows of these chunks that a policy recomputes."""
    if isinstance(policy, GuidedPolicy) and any(not chunk.is_exact for chunk in chunks):
        layers = len(policy.look.layers or (0,))
        return len(policy.choose(list(chunks), [torch.ones(tokens)] * layers))
    return len(policy.select(list(chunks)))


def measured(
    model: Any, rope: Rope, token: ChunkKV, folder: Path, disk: float | None, say: Callable[[str], object]
) -> Speeds:
    """Measure this machine with this model, for a few seconds.

    ``token`` is the KV of one token, ``folder`` the cache folder, ``disk`` its bytes per second if known.
    """
    say("measuring prefills of a few lengths")
    profile = measure_profile(model, context=rope.context, budget=MEASURE_SECONDS)
    sample = _sample(token, min(SAMPLE_TOKENS, rope.context))
    copy = sample.nbytes / median(_place_seconds(rope, sample, model.device) for _ in range(_REPEATS))
    source = "as given"
    if disk is None:
        say("measuring the disk")
        disk, source = (
            sample.nbytes / _read_seconds(sample, folder),
            f"measured in {folder}, page cache dropped",
        )
    notes = (
        f"prefills measured on {model.device} (a few lengths, about {MEASURE_SECONDS:.0f} s)",
        f"disk: {disk / 1e9:.2f} GB/s, {source}; into place: {copy / 1e9:.2f} GB/s, measured",
    )
    return Speeds(profile, disk, copy, sample.layers, notes)


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
    notes = (
        f"nothing measured: prefills at {ASSUMED_FLOPS[kind] / 1e9:,.0f} GFLOP/s ({kind}), KV from the disk "
        f"at {disk / 1e9:.2f} GB/s, into place at {ASSUMED_COPY / 1e9:.2f} GB/s",
    )
    return Speeds(profile, disk, ASSUMED_COPY, config.num_hidden_layers, notes)


def _sample(token: ChunkKV, tokens: int) -> ChunkKV:
    """Random KV: repeated rows would be read from the processor's cache."""
    return replace(
        token.each(lambda t: torch.rand(t.shape[0], tokens, t.shape[2]).to(t.dtype)),
        sums={name: torch.zeros(tokens) for name in token.sums},
    )


def _place_seconds(rope: Rope, kv: ChunkKV, device: torch.device) -> float:
    angles = rope.angles(torch.arange(64, 64 + kv.tokens), 64 + kv.tokens)
    begun = time.perf_counter()
    for layer in range(kv.layers):
        placed = rope.place(layer, kv.keys[layer].to(device), kv.values[layer].to(device), angles)
        out = [torch.empty_like(tensor).copy_(tensor) for tensor in placed]
    out[0][0, -1, 0].item()
    return time.perf_counter() - begun


def _read_seconds(kv: ChunkKV, folder: Path) -> float:
    """Seconds to read the entry from a disk tier, the median of a few reads."""
    while not folder.is_dir():
        folder = folder.parent
    with tempfile.TemporaryDirectory(prefix="ragcachekit-", dir=folder) as scratch:
        store = DiskStore(Path(scratch) / "kv", 8 * kv.nbytes + (1 << 20))
        try:
            key = KVKey("estimate", "estimate", "estimate")
            if not store.put(key, kv):
                raise OSError(f"nothing can be written in {folder}")
            return median(_one_read(store, key, Path(scratch)) for _ in range(_REPEATS))
        finally:
            store.close()


def _one_read(store: DiskStore, key: KVKey, folder: Path) -> float:
    if hasattr(os, "posix_fadvise"):  # else what was just written comes from memory
        for path in folder.rglob("*.safetensors"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    begun = time.perf_counter()
    store.get(key)
    return time.perf_counter() - begun

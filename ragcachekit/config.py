"""Frozen configuration dataclasses; every field is validated when it is set."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

from ragcachekit.types import WHOLE, Kinds, check_number, check_type

DEFAULT_HOST_BYTES = 4 << 30
DEFAULT_DISK_BYTES = 64 << 30

TIERS = ("gpu", "host", "disk", "redis", "bulk")  # names of the storage tiers, fastest first

QUANTISATIONS = ("int8", "fp8")

_FIELDS: dict[str, tuple[Kinds, str]] = {
    "int": (Integral, WHOLE),
    "int | None": ((Integral, type(None)), f"{WHOLE}, or None"),
    "float": (Real, "a number"),
    "bool": (bool, "True or False"),
    "str": (str, "a string"),
    "str | None": ((str, type(None)), "a string, or None"),
    "str | os.PathLike[str] | None": ((str, os.PathLike, type(None)), "a path, or None"),
    "Mapping[str, int]": (Mapping, "a mapping such as {'tenant': 1 << 30}"),
    "Mapping[str, str]": (Mapping, "a mapping such as {'disk': 'int8'}"),
}
"""Accepted types of a configuration field, by the field's annotation."""


def _check_numbers(config: Any, names: Iterable[str], *, positive: bool = False) -> None:
    for name in names:
        check_number(name, getattr(config, name), "a number", positive=positive)


def _check_fields(config: Any) -> None:
    for entry in fields(config):
        if (known := _FIELDS.get(str(entry.type))) is not None:
            kinds, give = known
            if entry.name.endswith("_bytes"):
                give = give.replace(WHOLE, f"{WHOLE}, such as 4 << 30")
            check_type(entry.name, getattr(config, entry.name), kinds, give)


@dataclass(frozen=True)
class StoreConfig:
    """Storage tiers of chunk KV and the bytes that each may take. Any subset works.

    - ``gpu_bytes``: Budget of the GPU memory tier; 0 (the default): off. Filled by requests, not ahead.
    - ``host_bytes``: Budget of the host memory tier; 0: off. Page-locked with ``gpu_bytes`` or ``pin_host``,
      if there is CUDA.
    - ``disk_path``: Folder of the disk tier; None: off.
    - ``disk_bytes``: Budget of the disk tier. None (the default): half of the bytes that are free or already
      in the folder, at most 64 GiB.
    - ``redis_url``: ``redis://host:port/0`` (Redis or Valkey, ``rediss://`` over TLS) for small hot entries;
      None: off.
    - ``redis_entry_bytes``: Largest entry of that tier, whose budget is the server's ``maxmemory``; larger
      ones go to ``bulk_url`` alone.
    - ``bulk_url``: A folder on any fsspec file system (``s3://bucket/kv``, ``file:///mnt/kv``) for
      everything; None: off. Nothing is evicted from it.
    - ``remote_key``: Environment variable with the key that signs remote entries. The key itself never leaves
      the process.
    - ``remote_deadline``, ``bulk_deadline``: Seconds until an operation on Redis or the bulk tier is a miss.
    - ``eviction``: Eviction policy of the memory tiers: ``lru``, ``lfu``, ``gdsf``, ``pgdsf`` (see
      docs/eviction.md), ``f_r``; ``pgdsf:20000`` counts uses among the tier's last 20,000. Disk and
      Redis evict the least recently used.
    - ``quotas``: Bytes that single namespaces may take in memory and on disk; ``*``: every other one.
    - ``quantise``: Tiers that store KV in eight bits: ``{"disk": "int8"}``, or ``fp8``. Such KV is rounded
      and never counts as exact; a policy that asks for exact KV computes it again.
    - ``pin_host``: Page-lock host memory even without a GPU tier.
    """

    host_bytes: int = DEFAULT_HOST_BYTES
    disk_path: str | os.PathLike[str] | None = None
    disk_bytes: int | None = None
    gpu_bytes: int = 0
    redis_url: str | None = None
    redis_entry_bytes: int = 1 << 20
    bulk_url: str | None = None
    remote_key: str | None = None
    remote_deadline: float = 0.2
    bulk_deadline: float = 2.0
    eviction: str = "pgdsf"
    quotas: Mapping[str, int] = field(default_factory=dict)
    quantise: Mapping[str, str] = field(default_factory=dict)
    pin_host: bool = False

    def __post_init__(self) -> None:
        _check_fields(self)
        _check_numbers(self, ("gpu_bytes", "host_bytes"))
        if self.disk_bytes is not None and self.disk_bytes <= 0:
            raise ValueError(
                f"disk_bytes must be > 0, got {self.disk_bytes}; use disk_path=None for no disk tier"
            )
        remote = ("redis_entry_bytes", "remote_deadline", "bulk_deadline")
        _check_numbers(self, remote, positive=True)
        if (self.redis_url or self.bulk_url) and not self.remote_key:
            raise ValueError(
                "a remote tier needs remote_key=, the name of an environment variable with the key that "
                "entries are signed with (make one with `openssl rand -hex 32`)"
            )
        for name, nbytes in self.quotas.items():
            check_type(f"the quota of namespace {name!r}", nbytes, Integral, WHOLE)
            if nbytes <= 0:
                raise ValueError(f"the quota of namespace {name!r} must be > 0 bytes, got {nbytes}")
        for tier, kind in self.quantise.items():
            if tier not in TIERS or kind not in QUANTISATIONS:
                raise ValueError(
                    f"cannot quantise tier {tier!r} to {kind!r}; tiers: {', '.join(TIERS)}; "
                    f"kinds: {', '.join(QUANTISATIONS)}"
                )
        if self.disk_path is not None:
            object.__setattr__(self, "disk_path", Path(self.disk_path).expanduser())


@dataclass(frozen=True)
class TreeConfig:
    """Budgets of the knowledge tree: exact KV of the beginnings of past prompts.

    - ``gpu_bytes``, ``host_bytes``: Budgets in GPU memory and in host memory. The GPU tier is off at 0, the
      default, and for a model on a CPU.
    - ``disk_bytes``: Budget on the disk, in the folder ``tree`` of the store's ``disk_path``; 0: off.
    - ``eviction``: Eviction policy in memory: ``pgdsf`` (RAGCache section 5.1; its time window:
      ``pgdsf:20000``), ``gdsf``, ``lfu``, ``lru``.
    - ``turns_bytes``: Host memory for the last turns of conversations, whose rows the next turn reuses: exact
      rows stay exact, approximate ones approximate. 0 (the default): off.
    """

    host_bytes: int = 1 << 30
    gpu_bytes: int = 0
    disk_bytes: int = 0
    eviction: str = "pgdsf"
    turns_bytes: int = 0

    def __post_init__(self) -> None:
        _check_fields(self)
        _check_numbers(self, ("host_bytes", "gpu_bytes", "disk_bytes", "turns_bytes"))


@dataclass(frozen=True)
class ShadowConfig:
    """Share of requests prefilled a second time in full, to measure the effect of reuse on answers.

    - ``share``: Share of requests that are drawn, 0 to 1; 0: off.
    - ``window``: Number of last compared requests to which the bound applies.
    - ``bound``: Warn when more than ``bound * window`` of the last ``window`` prompts had a token that
      differed from full's.
    - ``fall_back``: After the warning, prefill that namespace in full, until ``rag.shadow.reset()``.
    - ``seed``: Seed of the draw: the same seed draws the same requests.
    """

    share: float
    window: int = 50
    bound: float = 0.1
    fall_back: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        _check_fields(self)
        for name in ("share", "bound"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        if self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")


@dataclass(frozen=True)
class LoadConfig:
    """Loading of entries from slow tiers (disk, remote) into a prompt.

    - ``when``: ``auto`` computes a chunk if loading its KV would take longer, as measured here.
    - ``deadline``: Seconds that a request waits for an entry, and for each call of a store of your own; after
      that its chunk is computed. After three late calls that store is not asked for 5 s.
    - ``threads``: Number of simultaneous reads.
    - ``bytes_in_flight``: Bytes that :meth:`RagCache.prefetch` may read ahead for future prompts.
    """

    when: Literal["auto", "always"] = "auto"
    deadline: float = 30.0
    threads: int = 2
    bytes_in_flight: int = 1 << 30

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.when not in ("auto", "always"):
            raise ValueError(f"load must be 'auto' or 'always', got {self.when!r}")
        _check_numbers(self, ("deadline", "threads", "bytes_in_flight"), positive=True)


@dataclass(frozen=True)
class QueueConfig:
    """The queue of :meth:`RagCache.submit`, and the batch that its requests are decoded in.

    - ``max_batch``: Most requests decoded together.
    - ``max_waiting``: Most requests that wait for their turn; further ones raise ``QueueFull``.
    - ``window``: How often later requests of its namespace, with more of their prompt cached, may overtake a
      request; 0: first come, first served.
    - ``batch_bytes``: Most bytes of KV in the batch. None: 2 GiB on a CPU, a tenth of what is free on a GPU.
    """

    max_batch: int = 16
    max_waiting: int = 256
    window: int = 32
    batch_bytes: int | None = None

    def __post_init__(self) -> None:
        _check_fields(self)
        _check_numbers(self, ("max_batch", "max_waiting"), positive=True)
        _check_numbers(self, ("window",))
        if self.batch_bytes is not None:
            _check_numbers(self, ("batch_bytes",), positive=True)

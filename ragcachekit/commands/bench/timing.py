"""TTFT benches: samples, rows, engines per tier, and the checks before any figure."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.errors import RagCacheError
from ragcachekit.forward.agreement import tolerance_for
from ragcachekit.store.base import KVStore, Tier
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.memory import GpuStore, HostStore
from ragcachekit.store.tiered import TieredStore
from ragcachekit.types import Prompt

COLD_DISK = "disk-cold"  # the disk tier after the system has dropped its files from the page cache
KNOWN_TIERS = ("gpu", "host", "disk", *((COLD_DISK,) if hasattr(os, "posix_fadvise") else ()))
NO_TIER = "none"
ONE_TOKEN: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False}
_EVERYTHING = f"lego:{1 << 30}"  # through the linked path, at ratio 1.0
_BYTES = 32 << 30  # nothing that is measured may be evicted


class Measured(NamedTuple):
    """One request: times in ms, and recomputed / cached rows."""

    ttft_ms: float
    link_ms: float
    recompute_ratio: float
    prompt_tokens: int
    wait_ms: float = 0.0
    overlap: float | None = None


@dataclass
class Timings:
    """Samples of one row of the table, filled round by round."""

    policy: str
    tier: str
    samples: list[Measured] = field(default_factory=list)

    def median(self, name: str) -> float | None:
        """Of one field, over the samples that have it."""
        values = [value for sample in self.samples if (value := getattr(sample, name)) is not None]
        return statistics.median(values) if values else None

    def row(self, full_ms: float) -> dict[str, Any]:
        """The flat row; ``full_ms`` is the median of ``full`` in the same run."""
        times = [sample.ttft_ms for sample in self.samples]
        return {
            "policy": self.policy,
            "tier": self.tier,
            "prompt_tokens": round(self.median("prompt_tokens") or 0),
            "recompute_ratio": self.median("recompute_ratio"),
            "ttft_ms": statistics.median(times),
            "ttft_ms_min": min(times),
            "ttft_ms_max": max(times),
            "speedup": full_ms / statistics.median(times),
            **{name: self.median(name) for name in ("link_ms", "wait_ms", "overlap")},
            "runs": len(times),
        }


def rows(timings: Sequence[Timings]) -> tuple[dict[str, Any], ...]:
    """Rows of all timings, with speed-ups over the one called ``full``."""
    full_ms = next(t.median("ttft_ms") or 0.0 for t in timings if t.policy == "full")
    return tuple(t.row(full_ms) for t in timings)


@dataclass(frozen=True)
class Engines:
    """Engines around one model.

    Each of ``warm``, by tier, reads that tier alone and stores nothing; ``cold`` has a host tier that stays
    empty. ``folder`` holds the disk tier.
    """

    warm: dict[str, RagCache]
    cold: RagCache
    folder: Path

    def drop_pages(self) -> None:
        """Drop the disk tier's files from the page cache: the next read comes from the medium."""
        for file in self.folder.glob("**/*.safetensors"):
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def open_engines(
    model: Any, tiers: Sequence[str], fill: Callable[[RagCache], object], encoder: str | None = None
) -> Iterator[Engines]:
    """Engines whose chunk KV lies in these tiers; a disk tier lives in a temporary folder meanwhile.

    ``fill`` makes an engine encode all that is measured, before the others open its tiers.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragcachekit-bench-")))

        def open_tier(kind: str) -> Tier:
            store: Tier
            if kind == "disk":
                store = DiskStore(folder / "kv", _BYTES)
            elif kind == "gpu":
                store = GpuStore(_BYTES, model.device)
            else:
                store = HostStore(_BYTES, pinned=model.device.type == "cuda")
            stack.callback(store.close)
            return store

        def engine(store: KVStore, cold: Literal["now", "never"]) -> RagCache:
            # load="always": what is measured is loading.
            options: dict[str, Any] = {"namespace": "bench", "cold": cold, "load": "always"}
            rag = RagCache(model, policy="reuse", encoder=encoder, store=store, **options)
            return stack.enter_context(rag)

        kinds = {tier: tier.removesuffix("-cold") for tier in tiers}
        stores = {kind: open_tier(kind) for kind in dict.fromkeys(kinds.values())}
        fill(engine(TieredStore(tuple(stores.values())), "now"))
        yield Engines(
            {tier: engine(stores[kind], "never") for tier, kind in kinds.items()},
            engine(open_tier("host"), "never"),
            folder,
        )


def check_exact(rag: RagCache, prompt: str | Prompt) -> None:
    """Compare ``full``, and the linked path at ratio 1.0, with the model's own ``generate``.

    Raises RagCacheError if tokens or logits differ, but for rounding, or if nothing was linked.
    """
    model = rag.model
    ids = rag.link(prompt, policy="full").input_ids
    expected = _first_logits(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    token = int(expected.argmax())
    full = rag.generate(prompt, policy="full", **ONE_TOKEN).token_ids
    if full != (token,):
        raise RagCacheError(f"policy full gave the tokens {full}, model.generate gave {token}")
    linked = rag.link(prompt, policy=_EVERYTHING)
    report = linked.report
    if not report.recomputed_tokens or report.approximate_tokens:
        raise RagCacheError(f"the linked path was not checked: {report}")
    scale = float(expected.abs().max())
    allowed = tolerance_for(model.dtype) * scale
    difference = float((_first_logits(model, linked.inputs) - expected).abs().max())
    if not difference <= allowed:
        raise RagCacheError(f"at ratio 1.0 the logits differ by {difference:.2g}, allowed {allowed:.2g}")
    (found,) = rag.generate(prompt, policy=_EVERYTHING, **ONE_TOKEN).token_ids
    # Two tokens whose logits are equal but for rounding may change places.
    if not float(expected[token] - expected[found]) <= allowed:
        raise RagCacheError(f"linked inside generate, the first token is {found}, not {token}")


def check_policy(rag: RagCache, prompt: Prompt, policy: str) -> None:
    """Compare the first token of ``generate``, which links inside its prefill, with that of ``link``.

    Raises RagCacheError if they differ, but for rounding.
    """
    expected = _first_logits(rag.model, rag.link(prompt, policy=policy).inputs)
    answer = rag.generate(prompt, policy=policy, **ONE_TOKEN)
    (found,) = answer.token_ids
    allowed = tolerance_for(rag.model.dtype) * float(expected.abs().max())
    if not float(expected.max() - expected[found]) <= allowed:
        raise RagCacheError(
            f"policy {policy}: linked ahead the first token is {int(expected.argmax())}, inside generate "
            f"{found} ({answer.report.link})"
        )


def _first_logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """``[vocab]`` logits of the first new token, on the CPU."""
    output = model.generate(
        **inputs, **ONE_TOKEN, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    logits: torch.Tensor = output.logits[0][0].float().cpu()
    return logits

"""Replays of requests at a rate, the figures of one replay, and the check of its answers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.serve.systems import Served, System
from benchmarks.serve.workload import Ids, ServeRequest
from ragcachekit.engine.grade import tolerance_for
from ragcachekit.errors import RagCacheError


def replay(system: System, requests: Sequence[ServeRequest], rate: float | None) -> list[Served]:
    """Send the requests at ``rate`` per second (None: all at once) and wait for all answers.

    A request is due at its arrival, however late the sender is, so that no wait is left out.
    """
    start, out = time.perf_counter(), list[Served]()
    for request in requests:
        due = start if rate is None else start + request.arrival / rate
        time.sleep(max(0.0, due - time.perf_counter()))
        out.append(Served(request, due))
        system.serve(out[-1])
    system.drain()
    return out


def figures(served: Sequence[Served], deadline_s: float | None) -> dict[str, Any]:
    """Figures of a replay: times in ms, rates per second, ``hit_rate`` over prompt tokens.

    ``ttft_ms`` is the mean time from arrival to first token, ``tbt_ms`` are times between tokens. ``goodput``
    counts answers whose first token came within the deadline. Refused requests are in ``refused`` alone.
    RagCacheError if an answer has no time for each of its tokens.
    """
    answered = [one for one in served if not one.refused]
    if not answered:
        raise RagCacheError("every request was refused; allow more to wait")
    for one in answered:
        if not one.times or len(one.times) != len(one.token_ids):
            raise RagCacheError(f"an answer of {len(one.token_ids)} tokens came with {len(one.times)} times")
    first = np.array([one.times[0] - one.due for one in answered]) * 1e3
    between = np.array([b - a for one in answered for a, b in itertools.pairwise(one.times)] or [0.0]) * 1e3
    seconds = max(one.times[-1] for one in answered) - min(one.due for one in served)
    reused = [one.reused for one in answered if one.reused is not None]
    prompts = sum(len(one.request.token_ids) for one in answered)
    in_time = len(answered) if deadline_s is None else int((first <= deadline_s * 1e3).sum())
    return {
        "requests": len(served),
        "refused": len(served) - len(answered),
        "ttft_ms": float(first.mean()),
        "ttft_ms_p50": float(np.percentile(first, 50)),
        "ttft_ms_p99": float(np.percentile(first, 99)),
        "tbt_ms_p50": float(np.percentile(between, 50)),
        "tbt_ms_p99": float(np.percentile(between, 99)),
        "throughput": len(answered) / seconds,
        "tokens_per_s": sum(len(one.token_ids) for one in answered) / seconds,
        "goodput": in_time / seconds,
        "hit_rate": sum(reused) / prompts if reused else None,
    }


def same_answers(expected: Sequence[Ids], served: Sequence[Served]) -> float:
    """Share of the answers that have the expected tokens; refused requests are not counted."""
    pairs = [(want, one.token_ids) for want, one in zip(expected, served, strict=True) if not one.refused]
    return sum(want == found for want, found in pairs) / len(pairs)


def check_same(model: Any, expected: Sequence[Ids], served: Sequence[Served], name: str) -> None:
    """Compare answers with those of ``model`` alone; RagCacheError for a difference beyond rounding.

    At the first different token, the logits of both must be equal but for rounding.
    """
    for want, one in zip(expected, served, strict=True):
        if one.refused or want == one.token_ids:
            continue
        pairs = zip(want, one.token_ids, strict=False)
        at = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        if at is None:
            raise RagCacheError(f"{name}: an answer has {len(one.token_ids)} tokens, not {len(want)}")
        ids = torch.tensor([[*one.request.token_ids, *want[:at]]], device=model.device)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()
        allowed = tolerance_for(model.dtype) * float(logits.abs().max())
        if not float(logits[want[at]] - logits[one.token_ids[at]]) <= allowed:
            raise RagCacheError(
                f"{name}: token {at + 1} of an answer is {one.token_ids[at]}, generate gave {want[at]}; "
                "no figures are given"
            )

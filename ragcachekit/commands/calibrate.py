"""Calibration of a quality budget: the cheapest policy that loses no more than that against full."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from tqdm.auto import tqdm

from ragcachekit.commands.engines import FULL, Engines
from ragcachekit.commands.grades import CALIBRATE, check_linked
from ragcachekit.commands.questions import PromptMaker, Sample
from ragcachekit.commands.report import BenchReport, Bootstrap, versions
from ragcachekit.commands.workspace import CacheFolder, load_checked
from ragcachekit.policies.base import PolicyAndEncoder
from ragcachekit.policies.registry import open_policy
from ragcachekit.quality.records import Calibration, CurvePoint, calibration_path, write_record
from ragcachekit.types import DEFAULT_ENCODER, encoder_name

REUSE = "reuse"
"""Always measured: what it loses shows how much there is to lose."""

CANDIDATES = (
    *(REUSE, "lego:4", "lego:16"),
    *("sensitive:0.05", "sensitive:0.1", "sensitive:0.2"),
    *("impact:0.05", "impact:0.1", "impact:0.2", "impact:0.3"),
    *("deep:0.3", "deep:0.5"),
)
"""Policies measured by default."""

ROUND = 8
"""Questions between two decisions, and the least number of them."""

CONFIDENCE = 0.9
"""Of the upper bound that is compared with a budget."""


class Loss(NamedTuple):
    """KL(full || policy) per token of full's answer on one question, and recomputed / cached rows."""

    loss: float
    ratio: float


@dataclass
class Candidate:
    """A policy with its losses so far, and the upper bound of their mean."""

    policy: str
    losses: list[Loss] = field(default_factory=list)
    upper: float = np.inf

    @property
    def mean(self) -> Loss:
        return Loss(*np.mean(self.losses, axis=0).tolist())

    def decision(self, budget: float) -> str:
        """Whether it is within the budget: "within" or "not sure"."""
        return "within" if self.upper <= budget else "not sure"


_bootstrap = cache(Bootstrap)


def upper_bound(losses: ArrayLike, worst: float, seed: int = 0) -> float:
    """90 % upper bound of the mean loss over questions, where one more question is lost by ``worst``.

    Without it, a sample would prove that losses too rare to be in it do not exist.
    """
    sample = np.append(losses, worst)
    return _bootstrap(len(sample), seed).quantile_of_mean(sample, CONFIDENCE)


def is_settled(found: Iterable[Candidate], budget: float) -> bool:
    """Whether the cheapest candidate whose mean is within the budget surely is."""
    within = [one for one in found if one.mean.loss <= budget]
    return bool(within) and min(within, key=lambda one: (one.mean.ratio, one.upper)).upper <= budget


def candidates(names: Iterable[str], encoder: str) -> list[str]:
    """Policies to measure over ``encoder``: ``reuse``, and those named or the default ones, without ``full``.

    Raises ValueError for an unknown policy, or one that is defined over another encoder.
    """
    out = [REUSE]
    for name in tuple(names) or CANDIDATES:
        policy = open_policy(name)
        if policy.encoder not in (None, encoder):
            raise ValueError(
                f"policy {name} is defined over encoder {policy.encoder}, and this calibration is for "
                f"{encoder}; give --encoder {policy.encoder} or leave {name} out"
            )
        if policy.reads_cache:
            out.append(policy.name)
    return list(dict.fromkeys(out))


def run(
    name: str,
    sample: Sample,
    *,
    encoder: str = DEFAULT_ENCODER,
    policies: Sequence[str] = (),
    budget: float = 0.1,
    namespace: str = "default",
    max_new_tokens: int = 24,
    seed: int = 0,
    device: str | None = None,
    dtype: str = "auto",
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> tuple[Calibration, BenchReport]:
    """Measure the candidates and store the record, for engines loaded from files and made around a model.

    ``budget`` is what may be lost, in nats per token of full's answer; ``policies`` are the candidates
    (empty: the default ones). Returned are the record as it was stored for a model loaded by
    ``RagCache.from_pretrained``, and a row per candidate.

    Raises ValueError for too few questions and other wrong values; RagCacheError if the model, the cache
    folder or a prompt cannot be used.
    """
    folder = CacheFolder.at(cache_dir)
    folder.check_writable()
    if len(sample.questions) < ROUND:
        raise ValueError(f"{len(sample.questions)} questions show too little; give at least {ROUND}")
    encoder = encoder_name(encoder)
    measured = candidates(policies, encoder)
    model, tokenizer = load_checked(name, device, dtype)
    check_linked(model, tokenizer, cache_dir, CALIBRATE)
    order = np.random.default_rng(seed).permutation(len(sample.questions)).tolist()
    maker = PromptMaker(tokenizer)
    engines = Engines(
        model,
        tokenizer,
        [encoder],
        sample,
        stop=maker.stop,
        max_new_tokens=max_new_tokens,
        cache_dir=cache_dir,
    )

    found, worst = [Candidate(one) for one in measured], 0.0
    rounds = tqdm(range(0, len(order), ROUND), desc="calibrate", unit="round", disable=not progress)
    with closing(engines):
        for start in rounds:
            for question in (sample.questions[number] for number in order[start : start + ROUND]):
                prompt = maker.prompt(question)
                _, reference = engines.full(prompt)
                for one in found:
                    asked_as = PolicyAndEncoder(one.policy, encoder)
                    shown, link = engines.compare(question, prompt, asked_as, reference)
                    one.losses.append(Loss(shown.kl, link.recompute_ratio))
                    worst = max(worst, shown.kl)
            for one in found:
                one.upper = upper_bound([loss.loss for loss in one.losses], worst, seed)
            if is_settled(found, budget):
                break
    curve = [
        CurvePoint(one.policy, one.mean.ratio, one.mean.loss, one.upper, len(one.losses)) for one in found
    ]
    curve.sort(key=lambda point: (point.ratio, point.upper))
    asked = max(point.n for point in curve)
    record = Calibration(
        fingerprint=engines.fingerprint,
        namespace=namespace,
        encoder=encoder,
        quality="kl",
        budget=budget,
        curve=(*curve, CurvePoint(FULL.policy, 1.0, 0.0, 0.0, asked)),
        n=asked,
        sample=sample.kind,
        seed=seed,
        versions=versions(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    write_record(calibration_path(folder.path, record.fingerprint, record.namespace), record)
    return record, BenchReport("calibrate", name, seed, tuple(_row(record, one) for one in found))


def _row(record: Calibration, found: Candidate) -> dict[str, Any]:
    mean = found.mean
    return {
        "policy": found.policy,
        "encoder": record.encoder,
        "ratio_spent": mean.ratio,
        "loss": mean.loss,
        "upper": found.upper,
        "n": len(found.losses),
        "decision": found.decision(record.budget),
        "chosen": found.policy == record.cheapest(record.budget).policy,
        "budget": record.budget,
        "namespace": record.namespace,
    }


def summary(record: Calibration) -> str:
    """What was chosen and how sure it is, in a sentence or two."""
    chosen, more = record.cheapest(record.budget), ""
    if chosen.policy == FULL.policy:
        chosen = min((one for one in record.curve if one.policy != FULL.policy), key=lambda one: one.upper)
        more = "full: no candidate is surely within it; give more questions or a larger budget; nearest is "
    return (
        f"budget:{record.budget:g} -> {more}{chosen.policy} on {record.encoder}: KL "
        f"{chosen.loss:.4f}, surely at most {chosen.upper:.4f} (90 %), ratio spent {chosen.ratio:.3f}, "
        f"{chosen.n} questions"
    )

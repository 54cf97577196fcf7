"""Calibration of a quality budget: the cheapest policy that loses no more than that against full."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np

from ragcachekit.commands.bench.fidelity.engines import FULL, needs_neighbours
from ragcachekit.commands.bench.report import BenchReport, versions
from ragcachekit.commands.calibrate.losses import (
    JUDGE,
    KL,
    NEED_ANSWERS,
    QUALITIES,
    SCORED,
    Judge,
    Panel,
)
from ragcachekit.commands.calibrate.race import ROUND, Bounds, Candidate, decision, race
from ragcachekit.commands.own_questions import DOCUMENT, Asking, Sample, check_neighbours, neighbours_of
from ragcachekit.commands.workspace import CacheFolder, check_dtype, load_checked
from ragcachekit.errors import RagCacheError
from ragcachekit.model.identity.fingerprint import fingerprint
from ragcachekit.model.pretrained import weights_folder
from ragcachekit.model.rope.probe import describe_rope
from ragcachekit.plan.encodings import Encodings
from ragcachekit.plan.neighbours import Neighbours
from ragcachekit.policies.budgets.budget import Budget
from ragcachekit.policies.budgets.calibration import Calibration, CurvePoint, write_record
from ragcachekit.policies.registry import open_policy

REUSE = "reuse"
"""Always measured: what it loses shows how much there is to lose."""

CANDIDATES = (
    *(REUSE, "lego:4", "lego:16"),
    *("impact:0.05", "impact:0.1", "impact:0.2", "impact:0.3"),
    *("deep:0.3", "deep:0.5"),
)
"""Policies measured by default."""

LEAST_SCORE = 0.1
"""Least mean score of ``full``; below it most of the score is chance."""


@dataclass(frozen=True)
class CalibrateSettings(Asking):
    """What is calibrated, and on what; the record goes to the cache folder.

    ``budget`` is what may be lost, in the unit of ``quality``: nats per token (``kl``, ``answer-loss``,
    ``gold-loss``) or shares of a score (``contains``, ``f1``, ``judge``); ``policies`` are the candidates.
    """

    encoder: str = "standalone"
    neighbours: str = DOCUMENT
    quality: str = KL
    budget: float = 0.1
    namespace: str = "default"
    probes: int = 30
    max_new_tokens: int = 24

    def __post_init__(self) -> None:
        Budget(self.budget)
        check_dtype(self.dtype)
        check_neighbours(self.neighbours)
        if not self.namespace:
            raise ValueError("the namespace is empty; leave it out for 'default'")
        if self.quality not in (*QUALITIES, JUDGE):
            raise ValueError(f"unknown quality {self.quality!r}; known: {', '.join(QUALITIES)}")


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
    settings: CalibrateSettings, *, judge: Judge | None = None, progress: bool = False
) -> tuple[Calibration, BenchReport]:
    """Measure the candidates and store the record, for engines loaded from files and made around a model.

    ``judge`` scores answers for the quality ``judge``. Returned are the record as it was stored for a model
    loaded by ``RagCache.from_pretrained``, and a row per candidate.

    Raises ValueError, CorpusError for bad settings, questions or corpora, before any work; RagCacheError if
    the model, the cache folder or a prompt cannot be used, or ``full`` scores (nearly) nothing.
    """
    CacheFolder(settings.folder).check_writable()
    sample = settings.sample(answered=settings.quality in NEED_ANSWERS)
    if needs_neighbours(settings.encoder):
        check_neighbours(settings.neighbours, sample)
    check_sample(settings, sample, judge)
    model, tokenizer = load_checked(settings.model, settings.device, settings.dtype)

    near = partial(neighbours_of, sample, settings.neighbours == DOCUMENT, progress)
    record, rows = calibrated(settings, model, tokenizer, sample, near, judge=judge, progress=progress)
    source = weights_folder(settings.model)
    loaded = fingerprint(model, tokenizer, source=source, cache=settings.folder / "digests.json")
    # The same weights have two fingerprints: by their files, and in memory.
    by_files = replace(record, fingerprint=loaded.digest)
    for one in (record, by_files):
        write_record(settings.folder, one)
    return by_files, BenchReport("calibrate", settings.model, settings.seed, tuple(rows))


def check_sample(settings: CalibrateSettings, sample: Sample, judge: Judge | None = None) -> None:
    """ValueError for fewer questions than one round, or a judge that is missing or not asked for."""
    if len(sample.questions) < ROUND:
        raise ValueError(f"{len(sample.questions)} questions show too little; give at least {ROUND}")
    if (judge is not None) != (settings.quality == JUDGE):
        raise ValueError(
            'a judge and quality="judge" go together; run(settings, judge=...) takes the function'
        )


def calibrated(
    settings: CalibrateSettings,
    model: Any,
    tokenizer: Any,
    sample: Sample,
    neighbours: Callable[[], Neighbours],
    *,
    judge: Judge | None = None,
    progress: bool = False,
) -> tuple[Calibration, list[dict[str, Any]]]:
    """Measure a model in memory, with a row per candidate; ``neighbours`` gives those of ``similar:n``.

    Nothing is stored.
    """
    encoder = Encodings(settings.encoder, describe_rope(model), tokenizer.bos_token_id).name
    policies, budget = candidates(settings.policies, encoder), settings.budget
    scored = settings.quality in SCORED
    order = np.random.default_rng(settings.seed).permutation(len(sample.questions)).tolist()
    panel = Panel(
        model,
        tokenizer,
        sample.questions,
        encoder=encoder,
        quality=settings.quality,
        judge=judge,
        neighbours=neighbours() if needs_neighbours(encoder) else None,
        max_new_tokens=settings.max_new_tokens,
        cache_dir=settings.cache_dir,
    )
    with closing(panel):
        found = race(
            panel.losses,
            policies,
            order,
            budget,
            Bounds(settings.seed),
            worst=float(scored),
            progress=progress,
        )
    if scored:
        _check_score(found, settings)
    curve = [
        CurvePoint(one.policy, one.mean("ratio"), one.mean("loss"), one.upper, len(one.losses))
        for one in found
    ]
    asked = max(point.n for point in curve)
    record = Calibration(
        fingerprint=panel.fingerprint,
        namespace=settings.namespace,
        encoder=encoder,
        quality=settings.quality,
        budget=budget,
        curve=(*sorted(curve, key=lambda point: (point.ratio, point.upper)), full_point(asked)),
        n=asked,
        sample=sample.kind,
        seed=settings.seed,
        versions=versions(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return record, [_row(record, one, decision(one, found, budget)) for one in found]


def full_point(asked: int) -> CurvePoint:
    """The point of ``full``, which loses nothing."""
    return CurvePoint(FULL.policy, 1.0, 0.0, 0.0, asked)


def _check_score(found: list[Candidate], settings: CalibrateSettings) -> None:
    """RagCacheError if ``full`` scores so little that a policy which answers nothing loses nothing."""
    longest = max(found, key=lambda one: len(one.losses))
    mean = longest.mean("score")
    if mean < max(LEAST_SCORE, settings.budget):
        raise RagCacheError(
            f"no budget is stored: a full prefill scores (nearly) nothing ({settings.quality} {mean:.3f} on "
            f"{len(longest.losses)} questions), so that nothing can be lost against it; use the quality kl, "
            "which compares with full's own answers"
        )


def _row(record: Calibration, found: Candidate, decided: str) -> dict[str, Any]:
    return {
        "policy": found.policy,
        "encoder": record.encoder,
        "ratio_spent": found.mean("ratio"),
        "loss": found.mean("loss"),
        "upper": found.upper,
        "kl": found.mean("kl"),
        "answer_loss": found.mean("answer"),
        "gold_loss": found.mean("gold"),
        "n": len(found.losses),
        "decision": decided,
        "chosen": found.policy == record.cheapest(record.budget).policy,
        "budget": record.budget,
        "quality": record.quality,
        "namespace": record.namespace,
    }


def summary(record: Calibration) -> str:
    """What was chosen and how sure it is, in a sentence or two."""
    chosen = record.cheapest(record.budget)
    if chosen.policy != FULL.policy:
        return (
            f"budget:{record.budget:g} -> {chosen.policy} on {record.encoder}: {record.quality} loss "
            f"{chosen.loss:.4f}, surely at most {chosen.upper:.4f} (90 %), ratio spent {chosen.ratio:.3f}, "
            f"{chosen.n} questions"
        )
    best = min((point for point in record.curve if point.policy != FULL.policy), key=lambda p: p.upper)
    more = "more questions or " if best.loss < record.budget else ""
    return (
        f"budget:{record.budget:g} -> full: no candidate is surely within it after {record.n} questions; "
        f"nearest is {best.policy}, {best.loss:.4f}, surely at most {best.upper:.4f}; "
        f"give {more}a larger budget"
    )

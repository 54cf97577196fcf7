"""Calibration of a quality budget: the cheapest policy that loses no more than that against full."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from ragcachekit.commands.bench.fidelity.engines import needs_neighbours
from ragcachekit.commands.bench.report import BenchReport, versions
from ragcachekit.commands.calibrate.measure import Panel, candidates, measured_curve, needed
from ragcachekit.commands.checks import check_writable
from ragcachekit.commands.own_questions import AGREEMENT, Asking, Sample, neighbours_of
from ragcachekit.commands.workspace import check_dtype, load_checked
from ragcachekit.encode.neighbours import Neighbours
from ragcachekit.model.identity.fingerprint import fingerprint
from ragcachekit.model.pretrained import weights_folder
from ragcachekit.model.rope.probe import describe_rope
from ragcachekit.plan.encodings import Encodings
from ragcachekit.policies.budgets.budget import Budget
from ragcachekit.policies.budgets.calibration import Calibration, write_record

SIMILAR, PRECEDING = "similar", "preceding"


@dataclass(frozen=True)
class CalibrateSettings(Asking):
    """What is calibrated, and on what; the record goes to the cache folder.

    ``neighbours`` of ``similar:n`` are ``similar`` (all-MiniLM-L6-v2) or ``preceding`` (the chunks before in
    the file); ``budget`` is F1 that may be lost, absolute; ``policies`` are the candidates.
    """

    encoder: str = "standalone"
    neighbours: str = SIMILAR
    budget: float = 0.01
    namespace: str = "default"

    def __post_init__(self) -> None:
        Budget(self.budget)
        check_dtype(self.dtype)
        if not self.namespace:
            raise ValueError("the namespace is empty; leave it out for 'default'")
        if self.neighbours not in (SIMILAR, PRECEDING):
            raise ValueError(f"neighbours are 'similar' or 'preceding', not {self.neighbours!r}")
        if self.neighbours == PRECEDING and self.corpus is None:
            raise ValueError("give --corpus: a chunk's predecessors are those of its file")


def run(settings: CalibrateSettings, *, progress: bool = False) -> Calibration:
    """Measure the curve and store the record, for engines loaded from files and made around a model.

    Returned is the record as it was stored for a model loaded by ``RagCache.from_pretrained``.

    Raises ValueError, CorpusError for bad settings, questions or corpora, before any work; RagCacheError if
    the model, the cache folder or a prompt cannot be used, or ``full`` answers (nearly) nothing right.
    """
    check_writable(settings.folder)
    sample = settings.sample()
    model, tokenizer = load_checked(settings.model, settings.device, settings.dtype)

    near = partial(neighbours_of, sample, settings.neighbours == PRECEDING, progress)
    record = calibrated(settings, model, tokenizer, sample, near, progress=progress)
    source = weights_folder(settings.model)
    loaded = fingerprint(model, tokenizer, source=source, cache=settings.folder / "digests.json")
    # The same weights have two fingerprints: by their files, and in memory.
    by_files = replace(record, fingerprint=loaded.digest)
    for one in (record, by_files):
        write_record(settings.folder, one)
    return by_files


def calibrated(
    settings: CalibrateSettings,
    model: Any,
    tokenizer: Any,
    sample: Sample,
    neighbours: Callable[[], Neighbours],
    *,
    progress: bool = False,
) -> Calibration:
    """Measure a model in memory; ``neighbours`` gives those of ``similar:n``. Nothing is stored."""
    encoder = Encodings(settings.encoder, describe_rope(model), tokenizer.bos_token_id).name
    policies = candidates(settings.policies, encoder)
    panel = Panel(
        model,
        tokenizer,
        sample.questions,
        encoder=encoder,
        agreement=sample.quality == AGREEMENT,
        neighbours=neighbours() if needs_neighbours(encoder) else None,
        max_new_tokens=settings.max_new_tokens,
        cache_dir=settings.cache_dir,
        progress=progress,
    )
    with closing(panel):
        curve = measured_curve(panel, policies, settings.seed, settings.budget)
    record = Calibration(
        fingerprint=panel.fingerprint,
        namespace=settings.namespace,
        encoder=encoder,
        budget=settings.budget,
        policy="full",
        ratio=1.0,
        curve=curve,
        n=len(sample.questions),
        quality=sample.quality,
        seed=settings.seed,
        versions=versions(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    chosen = record.cheapest(settings.budget)
    return replace(record, policy=chosen.policy, ratio=chosen.ratio)


def report(record: Calibration, model: str) -> BenchReport:
    """Rows of the curve; ``chosen`` marks the policy of the budget."""
    rows = [
        {
            "policy": point.policy,
            "encoder": record.encoder,
            "ratio_spent": point.ratio,
            "f1": point.f1,
            "loss": point.loss,
            "doubt": point.doubt,
            "upper": point.upper,
            "within": point.upper <= record.budget,
            "chosen": point.policy == record.policy,
            "budget": record.budget,
            "quality": record.quality,
            "namespace": record.namespace,
            "n": record.n,
        }
        for point in record.curve
    ]
    return BenchReport("calibrate", model, record.seed, tuple(rows))


def summary(record: Calibration) -> str:
    """What was chosen and how sure it is, in a sentence or two."""
    chosen = record.cheapest(record.budget)
    least = needed(record.budget)
    if chosen.policy == "full" and record.n < least:
        return (
            f"budget:{record.budget:g} -> full: {record.n} questions cannot show so small a loss; give at "
            f"least {least}, or a larger budget"
        )
    return (
        f"budget:{record.budget:g} -> {chosen.policy} on {record.encoder}: F1 {chosen.f1:.3f}, loss "
        f"{chosen.loss:+.4f} (upper bound {chosen.upper:.4f}), ratio spent {chosen.ratio:.3f}, "
        f"{record.n} questions"
    )

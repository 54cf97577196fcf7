"""The fidelity bench over the sample world, answered by the reader."""

from __future__ import annotations

import os
from dataclasses import replace

from benchmarks.world.questions import world_sample
from benchmarks.world.reader_folder import READER, READER_NAME, one_thread
from ragcachekit.commands.bench import fidelity
from ragcachekit.commands.bench.fidelity import FidelitySettings
from ragcachekit.commands.bench.report import BenchReport

POLICIES = (
    *("reuse", "lego0", *(f"lego:{k}" for k in (1, 2, 4, 6, 12))),
    *(
        f"{kind}:{r}"
        for kind in ("random", "heavy", "query", "deep", "impact")
        for r in (0.05, 0.1, 0.15, 0.3)
    ),
    *("cacheblend:0.05", "cacheblend:0.15", "cacheblend-gradual:0.15"),
    *(f"craft:{alpha}" for alpha in (0.1, 0.2, 0.3, 0.6)),  # over standalone half of it is spent
    "craft-focused:0.6",
)


def run(
    settings: FidelitySettings,
    per_type: int,
    *,
    work: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> BenchReport:
    """Ask ``per_type`` questions of each kind about the world of the settings' seed."""
    settings = replace(settings, policies=settings.policies or POLICIES)  # the reader's prompts cost little
    with one_thread():
        sample = world_sample(settings.seed, per_type)
        report = fidelity.run(settings, sample, work=work, progress=progress)
    return replace(report, model=READER_NAME) if settings.model == READER else report

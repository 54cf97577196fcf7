"""Calibration curve: what every candidate policy loses against full, question by question."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from ragcachekit.commands.bench.fidelity.engines import FULL, Engines, Way
from ragcachekit.commands.bench.fidelity.metrics import token_f1
from ragcachekit.commands.bench.fidelity.prompts import PromptMaker
from ragcachekit.commands.bench.fidelity.questions import FidelityQuestion
from ragcachekit.commands.bench.resample import Bootstrap
from ragcachekit.errors import RagCacheError
from ragcachekit.policies.budgets.calibration import CurvePoint
from ragcachekit.policies.registry import open_policy

LEVEL = 0.9
"""Confidence of the one-sided bound that is compared with a budget."""

LEAST_F1 = 0.1
"""Least F1 of ``full``; below it, most of the score is wrong answers that agree by chance."""

CANDIDATES = (
    *("reuse", "lego:4", "lego:16"),
    *("query:0.1", "query:0.3"),
    *("deep:0.05", "deep:0.1", "deep:0.15", "deep:0.3", "deep:0.5"),
    *("cacheblend:0.15", "cacheblend:0.3"),
    *("craft:0.1", "craft:0.25", "craft:0.5", "craft:1", "craft:2"),
    *("craft-focused:0.5", "craft-focused:1", "craft-focused:2"),
)
"""Policies measured by default; Cache-Craft's alpha is calibrated among them."""


@dataclass(frozen=True)
class Scores:
    """F1, recomputed / cached rows, and probability of full's first token, ``[questions]`` each."""

    f1: NDArray[np.float64]
    ratio: NDArray[np.float64]
    first: NDArray[np.float64]


def candidates(names: Iterable[str], encoder: str) -> list[str]:
    """Policies to measure over ``encoder``, without ``full``; the default ones if none are named.

    Raises ValueError for an unknown policy, or one that is defined over another encoder.
    """
    given = list(names)
    out = []
    for name in given or CANDIDATES:
        policy = open_policy(name)
        if policy.encoder not in (None, encoder):
            if given:
                raise ValueError(
                    f"policy {name} is defined over encoder {policy.encoder}, and this calibration is for "
                    f"{encoder}; give --encoder {policy.encoder} or leave {name} out"
                )
            continue
        if policy.reads_cache:
            out.append(policy.name)
    return list(dict.fromkeys(out))


class Panel:
    """Questions asked of one model over one encoder; ``agreement`` scores against the answers of ``full``.

    ``options`` are those of :class:`~ragcachekit.commands.bench.fidelity.engines.Engines`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        questions: Sequence[FidelityQuestion],
        *,
        encoder: str,
        agreement: bool = False,
        progress: bool = False,
        **options: Any,
    ) -> None:
        maker = PromptMaker(tokenizer)
        self._asked = [(question, maker.prompt(question)) for question in questions]
        self._encoder, self._progress = encoder, progress
        self._begin: dict[int, int] = {}
        self._right: list[str] | None = None if agreement else [question.answer for question in questions]
        self._engines = Engines(model, tokenizer, [encoder], stop=maker.stop, **options)

    @property
    def fingerprint(self) -> str:
        """The model's fingerprint."""
        return self._engines.fingerprint

    def scores(self, policy: str) -> Scores:
        """Ask every question under one policy."""
        way = FULL if policy == FULL.policy else Way(policy, self._encoder)
        if self._right is None:
            self._right = [self._answer(at, FULL)[0] for at in self._bar("full")]
        rows = []
        for at in self._bar(policy):
            text, ratio = self._answer(at, way)
            rows.append((token_f1(text, self._right[at]), ratio, self._first(at, way)))
        return Scores(*np.array(rows).T)

    def close(self) -> None:
        """Close the engines."""
        self._engines.close()

    def _answer(self, at: int, way: Way) -> tuple[str, float]:
        question, prompt = self._asked[at]
        self._engines.encode(question, prompt, way)
        answer = self._engines.answer(prompt, way)
        return answer.text.strip(), answer.report.link.recompute_ratio

    def _first(self, at: int, way: Way) -> float:
        """Probability of the token that full's answer begins with."""
        prompt = self._asked[at][1]
        if at not in self._begin:
            self._begin[at] = int(self._engines.prefilled(prompt, FULL)[0].log_probs[0].argmax())
        found, _ = self._engines.prefilled(prompt, way)
        return float(found.log_probs[0][0, self._begin[at]].exp())

    def _bar(self, what: str) -> Iterable[int]:
        return tqdm(range(len(self._asked)), desc=what, unit="question", disable=not self._progress)


def measured_curve(panel: Panel, policies: Sequence[str], seed: int, budget: float) -> tuple[CurvePoint, ...]:
    """Points of every candidate and ``full``, by the ratio spent; raises as :func:`check_full`, first."""
    full = panel.scores(FULL.policy)
    check_full(full.f1, budget, seed)
    points = [CurvePoint(FULL.policy, 1.0, float(full.f1.mean()), 0.0, 0.0, 0.0)]
    for name in policies:
        found = panel.scores(name)
        loss, doubt = full.f1 - found.f1, full.first - found.first
        ratio, f1 = float(found.ratio.mean()), float(found.f1.mean())
        upper = max(upper_bound(loss, seed), Bootstrap(len(doubt), seed).upper_of_mean(doubt, LEVEL))
        points.append(CurvePoint(name, ratio, f1, float(loss.mean()), float(doubt.mean()), upper))
    return tuple(sorted(points, key=lambda point: (point.ratio, point.upper)))


def check_full(f1: NDArray[np.float64], budget: float, seed: int) -> None:
    """RagCacheError if ``full`` scores so little that a policy which answers nothing loses nothing."""
    mean = float(f1.mean())
    if mean < LEAST_F1 or upper_bound(f1, seed) <= budget:
        raise RagCacheError(
            f"no budget is stored: a full prefill answers (nearly) nothing right (F1 {mean:.3f} on {len(f1)} "
            "questions), so that nothing can be lost against it. Are the answers short and taken from the "
            "given chunks, was the model trained on the language, is --max-new-tokens right?"
        )


def upper_bound(losses: NDArray[np.float64], seed: int) -> float:
    """One-sided 90 % upper bound of the mean loss, paired by question (bootstrap).

    One more question counts as lost completely: n questions without loss give a bound of about 2 / (n + 1),
    near the exact binomial bound of 2.3 / n.
    """
    sample = np.append(losses, 1.0)
    return Bootstrap(len(sample), seed).upper_of_mean(sample, LEVEL)


def needed(budget: float) -> int:
    """Number of questions without any loss that a budget needs as proof."""
    return int(np.ceil(2 / budget - 1e-9)) - 1

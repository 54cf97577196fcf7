"""What a way of answering loses against a full prefill, question by question."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ragcachekit.commands.bench.fidelity.engines import Engines, Way
from ragcachekit.commands.bench.fidelity.measure import Reference
from ragcachekit.commands.bench.fidelity.metrics import divergence, loss_per_token, token_f1, words
from ragcachekit.commands.bench.fidelity.prompts import FidelityPrompt, PromptMaker
from ragcachekit.commands.bench.fidelity.questions import FidelityQuestion
from ragcachekit.errors import RagCacheError

Judge = Callable[[str, str, str], float]
"""Function of question, answer and reference (the right answer, or that of ``full``), giving 0 to 1."""

KL, ANSWER, GOLD, CONTAINS, F1, JUDGE = "kl", "answer-loss", "gold-loss", "contains", "f1", "judge"
QUALITIES = (KL, ANSWER, GOLD, CONTAINS, F1)
"""Qualities that the command line offers; the judge is of the Python interface."""

NEED_ANSWERS = (GOLD, CONTAINS, F1)
SCORED = (CONTAINS, F1, JUDGE)
"""Qualities in shares of a point; the others are in nats per token."""

_SCORES: dict[str, Judge] = {
    CONTAINS: lambda _, answer, right: contains(answer, right),
    F1: lambda _, answer, right: token_f1(answer, right),
}


@dataclass(frozen=True)
class Loss:
    """What one way loses on one question.

    ``loss`` is in the quality that is calibrated. ``kl`` is KL(full || way), ``answer`` and ``gold`` are what
    full's and the right answer become less likely: means over the answer's tokens, in nats. ``score`` is that
    of full's answer, 0 where none is asked for. ``ratio`` is recomputed / cached rows.
    """

    loss: float
    kl: float
    answer: float
    gold: float
    score: float
    ratio: float


def contains(answer: str, right: str) -> float:
    """1 if the words of ``right`` stand in ``answer``, together and in order, else 0."""
    return float(f" {' '.join(words(right))} " in f" {' '.join(words(answer))} ")


class Panel:
    """Questions asked of one model over one encoder; ``quality`` says what :attr:`Loss.loss` is.

    ``options`` are those of :class:`~ragcachekit.commands.bench.fidelity.engines.Engines`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        questions: Sequence[FidelityQuestion],
        *,
        encoder: str,
        quality: str = KL,
        judge: Judge | None = None,
        **options: Any,
    ) -> None:
        self._maker, self._questions = PromptMaker(tokenizer), questions
        self._encoder, self._quality = encoder, quality
        self._judge = judge if quality == JUDGE else _SCORES.get(quality)
        self._begun: set[str] = set()
        self._engines = Engines(model, tokenizer, [encoder], stop=self._maker.stop, **options)

    @property
    def fingerprint(self) -> str:
        """The model's fingerprint."""
        return self._engines.fingerprint

    def losses(self, at: int, policies: Sequence[str]) -> Iterator[Loss]:
        """Losses of policies on the question number ``at``.

        RagCacheError if a prompt cannot be reused; ValueError for a judge's score that is not from 0 to 1.
        """
        question = self._questions[at]
        prompt = self._maker.prompt(question)
        gold = self._maker.answer_ids(question.answer) if question.answer else ()
        full, score = Reference.of(self._engines, prompt, gold), 0.0
        if self._judge is not None:
            right = full.answer.text.strip()
            score = self._score(question, right, right)
        for policy in policies:
            yield self._loss(question, prompt, Way(policy, self._encoder), full, score)

    def close(self) -> None:
        """Close the engines."""
        self._engines.close()

    def _loss(
        self,
        question: FidelityQuestion,
        prompt: FidelityPrompt,
        way: Way,
        full: Reference,
        score: float,
    ) -> Loss:
        self._engines.encode(question, prompt, way)
        if prompt.before not in self._begun:  # an answer stores the text before the chunks
            self._begun.add(prompt.before)
            self._engines.answer(prompt, way)
        right, gold_ids, ids = full.answer.text.strip(), full.gold, full.answer.token_ids
        if self._quality in (KL, ANSWER, GOLD):
            text, (found, report) = "", self._engines.prefilled(prompt, way, (ids, gold_ids))
        else:
            compared = self._engines.compared(prompt, way, ids, gold_ids)
            text, found, report = compared.text.strip(), compared.prefilled, compared.report
        if report.fallback:
            raise RagCacheError(f"{way} fell back to a full prefill ({report.fallback}): nothing to measure")
        of_full, of_way = full.answer.prefilled.log_probs, found.log_probs
        kl = divergence(of_full[0], of_way[0])
        answer, gold = (
            loss_per_token(other, tokens) - loss_per_token(one, tokens)
            for one, other, tokens in zip(of_full, of_way, (ids, gold_ids), strict=True)
        )
        lost = {KL: kl, ANSWER: answer, GOLD: gold}.get(self._quality)
        if lost is None:
            lost = score - self._score(question, text, right)
        return Loss(lost, kl, answer, gold, score, report.recompute_ratio)

    def _score(self, question: FidelityQuestion, answer: str, right: str) -> float:
        assert self._judge is not None
        known = question.answers if question.answer else (right,)
        scores = [float(self._judge(question.question, answer, one)) for one in known]
        if not all(0.0 <= score <= 1.0 for score in scores):
            raise ValueError(f"the judge gave {scores} on {question.question!r}; scores are from 0 to 1")
        return max(scores)

"""Answers of a real model to the results that a query cache returned, scored against the right ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tqdm.auto import tqdm

from ragcachekit.commands.bench.query_cache.workload import Workload
from ragcachekit.commands.datasets import Question
from ragcachekit.commands.question_prompts import FEW_SHOT, PromptMaker
from ragcachekit.commands.text_scores import word_f1
from ragcachekit.engine.rag_cache import RagCache


@dataclass(frozen=True)
class Answering:
    """How answers are made: ``lookups`` of the workload, drawn by ``seed``, by a policy on the model."""

    lookups: int
    policy: str = "full"
    prompt: str = FEW_SHOT
    max_new_tokens: int = 24
    seed: int = 0


class AnswerScores:
    """Mean F1 of greedy answers over the passages that lookups returned. One model, one thread.

    Copies of passages that fill up an index have no text, and stand in no prompt. ValueError for a workload
    without right answers.
    """

    def __init__(
        self, rag: RagCache, workload: Workload, answering: Answering, progress: bool = False
    ) -> None:
        if not workload.answers:
            raise ValueError("answers are scored on a dataset, which has the right ones; give --dataset")
        self._rag, self._workload, self._answering, self._progress = rag, workload, answering, progress
        self._maker = PromptMaker(rag.tokenizer, answering.prompt)
        order = list(range(len(workload.texts)))
        random.Random(answering.seed).shuffle(order)
        self._chosen = order[: answering.lookups]
        self._scores: dict[tuple[int, tuple[int, ...]], float] = {}

    def row(self, returned: Sequence[Sequence[int]], own: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Scores of what was returned to each question, and of the index's ``own`` results."""
        return {
            "answer_f1": self._mean(returned, "answers over hits"),
            "answer_f1_uncached": self._mean(own, "answers"),
            "answers": len(self._chosen),
        }

    def _mean(self, results: Sequence[Sequence[int]], title: str) -> float:
        bar = tqdm(self._chosen, title, unit="answer", leave=False, disable=not self._progress)
        return fmean(self._score(at, results[at]) for at in bar)

    def _score(self, at: int, ids: Sequence[int]) -> float:
        texts = self._workload.passages
        known = tuple(one for one in ids if one < len(texts))
        if (at, known) not in self._scores:
            self._scores[at, known] = self._answered(at, [texts[one] for one in known]) if known else 0.0
        return self._scores[at, known]

    def _answered(self, at: int, chunks: Sequence[str]) -> float:
        right, asked = self._workload.answers[at], self._workload.texts[at]
        question = Question(asked, tuple(chunks), right)
        answer = self._rag.generate(
            self._maker.prompt(question).prompt,
            policy=self._answering.policy,
            stop=self._maker.stop,
            max_new_tokens=self._answering.max_new_tokens,
            do_sample=False,
        )
        return max(word_f1(answer.text, one) for one in right)

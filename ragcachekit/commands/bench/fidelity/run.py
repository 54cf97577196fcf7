"""Fidelity: what reuse does to answers, for every policy and encoder, beside a full prefill.

Everything goes through the public interface of :class:`~ragcachekit.engine.rag_cache.RagCache`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tqdm.auto import tqdm

import ragcachekit
from ragcachekit.commands.bench.fidelity.engines import FULL, NO_ENCODER, Engines, Way, needs_neighbours
from ragcachekit.commands.bench.fidelity.measure import Measurement, measure
from ragcachekit.commands.bench.fidelity.prompts import PromptMaker
from ragcachekit.commands.bench.fidelity.questions import FidelityQuestion, digest
from ragcachekit.commands.bench.fidelity.rows import QUALITY, layer_rows, quality_rows
from ragcachekit.commands.bench.fidelity.settings import DOCUMENT, FidelitySettings, chosen_ways
from ragcachekit.commands.bench.fidelity.work import Work, WorkHeader
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.own_questions import neighbours_of
from ragcachekit.commands.workspace import check_dtype, load_checked
from ragcachekit.encode.neighbours import Neighbours
from ragcachekit.errors import PromptTooLong, RagCacheError
from ragcachekit.model.identity.fingerprint import fingerprint
from ragcachekit.policies.registry import open_policy


def run(
    settings: FidelitySettings, *, work: str | os.PathLike[str] | None = None, progress: bool = False
) -> BenchReport:
    """Ask the user's questions, or probes made from the user's corpus, in every way.

    Results are kept in the file ``work`` as they come; one of an earlier run is continued. The report is
    that of :func:`measured`.

    Raises ValueError, CorpusError for unknown policies or encoders, bad or missing questions; before any
    work; RagCacheError as :func:`measured`.
    """
    check(settings)
    settings.check_neighbours(documents=settings.corpus is not None)
    sample = settings.sample()

    def near() -> Neighbours:
        return neighbours_of(sample, settings.neighbours == DOCUMENT, progress)

    return measured(settings, sample.questions, near, work=work, progress=progress)


def check(settings: FidelitySettings) -> None:
    """ValueError for an unknown dtype or policy."""
    check_dtype(settings.dtype)
    for name in settings.policies:
        open_policy(name)


def measured(
    settings: FidelitySettings,
    questions: Sequence[FidelityQuestion],
    neighbours: Callable[[], Neighbours],
    *,
    part: str = QUALITY,
    work: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> BenchReport:
    """Ask these questions in every way; ``neighbours`` is called where an encoder ``similar:n`` needs them.

    Returns
    -------
    BenchReport
        Flat rows. ``part`` is ``quality`` (or the name given): means per policy, encoder and question
        type with ``<metric>_low`` and ``<metric>_high``, of ``f1`` just ``low`` and ``high`` (95 %,
        bootstrap over questions); ``layer``: KV deviation per layer; ``check``: ``full`` against the
        model's own generate.

    Raises RagCacheError if ``full`` through the library is not what the model's own ``generate`` gives (no
    figure then), a way falls back to a full prefill, or the work file belongs to another run.
    """
    model, tokenizer = load_checked(settings.model, settings.device, settings.dtype)
    ways = chosen_ways(settings, model, tokenizer)
    return _Run(settings, questions, ways, model, tokenizer, neighbours, part, progress).report(work)


class _Run:
    """One run over a loaded model."""

    def __init__(
        self,
        settings: FidelitySettings,
        questions: Sequence[FidelityQuestion],
        ways: Sequence[Way],
        model: Any,
        tokenizer: Any,
        neighbours: Callable[[], Neighbours],
        part: str,
        progress: bool,
    ) -> None:
        self._settings, self._questions, self._ways = settings, questions, ways
        self._model, self._tokenizer, self._progress = model, tokenizer, progress
        self._neighbours, self._part = neighbours, part
        self._maker = PromptMaker(tokenizer)
        self._prompts = [self._maker.prompt(question) for question in questions]
        self._tokens = settings.max_new_tokens
        self._check_lengths()

    def report(self, path: str | os.PathLike[str] | None) -> BenchReport:
        """Do what is left and sum up."""
        with Work(self._header(), path) as work:
            expected = self._own_answers(work)
            with self._engines() as engines:
                self._ask_all(engines, work, expected)
            rows = self._rows(work)
        return BenchReport("fidelity", self._settings.model, self._settings.seed, tuple(rows))

    def _check_lengths(self) -> None:
        context = self._model.config.get_text_config().max_position_embeddings
        for question, prompt in zip(self._questions, self._prompts, strict=True):
            if len(prompt.token_ids) + self._tokens > context:
                raise PromptTooLong(
                    f"the question {question.question!r} has {len(prompt.token_ids)} prompt tokens; with "
                    f"{self._tokens} for the answer that is more than the model's context ({context})"
                )

    def _header(self) -> WorkHeader:
        found = fingerprint(self._model, self._tokenizer, cache=self._settings.folder / "digests.json")
        return WorkHeader(
            found.digest,
            self._settings.seed,
            digest(self._questions),
            self._tokens,
            self._settings.neighbours,
            ragcachekit.__version__,
        )

    @torch.no_grad()
    def _own_answers(self, work: Work) -> dict[int, tuple[int, ...]]:
        """What the model's own ``generate`` gives before the library touches it, where not checked yet."""
        left = [i for i in range(len(self._questions)) if work.get(i, FULL) is None]
        out = {}
        for i in tqdm(left, desc="generate", unit="question", disable=not self._progress or not left):
            ids = torch.tensor([self._prompts[i].token_ids], device=self._model.device)
            output = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self._tokens,
                do_sample=False,
                pad_token_id=self._maker.pad,
            )
            out[i] = tuple(output[0, ids.shape[1] :].tolist())
        return out

    def _engines(self) -> Engines:
        encoders = dict.fromkeys(way.encoder for way in self._ways if way.encoder != NO_ENCODER)
        near = self._neighbours() if any(map(needs_neighbours, encoders)) else None
        return Engines(
            self._model,
            self._tokenizer,
            encoders,
            neighbours=near,
            stop=self._maker.stop,
            max_new_tokens=self._tokens,
            cache_dir=self._settings.cache_dir,
        )

    def _ask_all(self, engines: Engines, work: Work, expected: Mapping[int, tuple[int, ...]]) -> None:
        left = [
            (i, [way for way in self._ways if work.get(i, way) is None]) for i in range(len(self._questions))
        ]
        total = sum(len(ways) for _, ways in left)
        with tqdm(total=total, desc="fidelity", unit="answer", disable=not self._progress) as bar:
            for i, ways in left:
                if ways:
                    self._ask(engines, work, i, ways, expected.get(i), bar)

    def _ask(
        self,
        engines: Engines,
        work: Work,
        i: int,
        ways: Sequence[Way],
        expected: tuple[int, ...] | None,
        bar: tqdm[Any],
    ) -> None:
        """One question in every way that is left; ``full`` is first among the ways."""
        question, prompt = self._questions[i], self._prompts[i]
        if expected is not None and engines.token_ids(prompt) != expected:
            raise RagCacheError(
                "full through the library differs from the model's own generate on the question "
                f"{question.question!r}; do not trust any figure"
            )
        full, _ = engines.prefilled(prompt, FULL)
        for way in ways:
            known = work.get(i, FULL)
            work.put(i, way, measure(engines, question, prompt, way, full, known.text if known else None))
            bar.update()

    def _rows(self, work: Work) -> list[dict[str, Any]]:
        results = {
            way: [self._result(work, i, way) for i in range(len(self._questions))] for way in self._ways
        }
        seed = self._settings.seed
        check = {
            "part": "check",
            "name": "full equals the model's own generate",
            "n": len(self._questions),
            "mismatches": 0,
        }
        layers = layer_rows(results, seed) if self._part == QUALITY else []
        return [*quality_rows(self._part, self._questions, results, seed), *layers, check]

    @staticmethod
    def _result(work: Work, i: int, way: Way) -> Measurement:
        found = work.get(i, way)
        assert found is not None
        return found

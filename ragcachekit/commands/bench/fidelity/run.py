"""Fidelity bench: what reuse does to answers, for every policy and encoder, beside a full prefill."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tqdm.auto import tqdm

import ragcachekit
from ragcachekit.commands.bench.fidelity.engines import (
    ALONE,
    BASELINES,
    FULL,
    NO_ENCODER,
    Engines,
    Way,
    needs_neighbours,
    quantisation,
)
from ragcachekit.commands.bench.fidelity.measure import Reference, Work, measure
from ragcachekit.commands.bench.fidelity.prompts import ASK, STYLES, FidelityPrompt, PromptMaker
from ragcachekit.commands.bench.fidelity.questions import FidelityQuestion, digest
from ragcachekit.commands.bench.fidelity.rows import Results, quality_rows
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.own_questions import (
    DOCUMENT,
    EMBEDDING,
    Asking,
    Sample,
    check_neighbours,
    neighbours_of,
)
from ragcachekit.commands.workspace import check_dtype, load_checked
from ragcachekit.errors import PromptTooLong, RagCacheError
from ragcachekit.model.identity.fingerprint import fingerprint
from ragcachekit.model.rope.probe import describe_rope
from ragcachekit.plan.encodings import IN_PROMPT, Encodings
from ragcachekit.plan.neighbours import Neighbours
from ragcachekit.policies.registry import open_policy

POLICIES = (
    *("reuse", "lego0", "lego:4", "lego:16"),
    *(f"{kind}:0.15" for kind in ("random", "heavy", "query", "cacheblend", "cacheblend-gradual")),
    *(f"{kind}:{r}" for kind in ("deep", "impact") for r in (0.05, 0.1, 0.15, 0.3)),
    *("craft:0.1", "craft:0.3", "craft-focused:0.6"),  # over standalone half of it is spent
)


@dataclass(frozen=True)
class FidelitySettings(Asking):
    """What is measured: every policy over every encoder.

    A policy that insists on an encoder gets that one only. ``full``, and ``reuse`` over ``system``, are
    always added, and with a dataset ``reuse`` over ``standalone``. ``neighbours`` of ``similar:n`` are by
    ``embedding`` (all-MiniLM-L6-v2) or of the ``document`` (the chunks before). ``prompt`` is a style of
    :class:`.PromptMaker`.
    """

    encoders: tuple[str, ...] = ("standalone",)
    neighbours: str = EMBEDDING
    prompt: str = ASK

    def check(self, sample: Sample | None = None) -> None:
        """ValueError for unknown names, or neighbours of a document where ``sample`` has none."""
        check_dtype(self.dtype)
        for name in self.policies:
            open_policy(name)
        if self.prompt not in STYLES:
            raise ValueError(f"unknown prompt {self.prompt!r}; known: {', '.join(STYLES)}")
        check_neighbours(self.neighbours, sample)


def run(
    settings: FidelitySettings, *, work: str | os.PathLike[str] | None = None, progress: bool = False
) -> BenchReport:
    """Ask the user's questions, or probes made from the user's corpus, in every way.

    Returns
    -------
    BenchReport
        ``quality`` rows: means per policy, encoder and question type with ``<metric>_low`` and
        ``<metric>_high``, of ``f1`` just ``low`` and ``high`` (95 %, bootstrap over questions). One ``check``
        row: ``full`` against the model's own generate.

    Raises ValueError, CorpusError for bad settings or questions, before any work; else as :func:`ask`.
    """
    settings.check()  # before a corpus is read
    sample = settings.sample()
    settings.check(sample)
    near = partial(neighbours_of, sample, settings.neighbours == DOCUMENT, progress)
    results = ask(settings, sample.questions, near, work=work, progress=progress)
    return report(settings, sample.questions, results)


def report(
    settings: FidelitySettings, questions: Sequence[FidelityQuestion], results: Results
) -> BenchReport:
    """The rows of :func:`run`."""
    rows = quality_rows(questions, results, settings.seed)
    name = "full equals the model's own generate"
    rows.append({"part": "check", "name": name, "n": len(questions), "mismatches": 0})
    return BenchReport("fidelity", settings.model, settings.seed, tuple(rows))


def ask(
    settings: FidelitySettings,
    questions: Sequence[FidelityQuestion],
    neighbours: Callable[[], Neighbours],
    *,
    work: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> Results:
    """Ask these questions in every way; ``neighbours`` is called where ``similar:n`` needs them.

    Results are written to the file ``work`` as they come; that of an earlier run is continued.

    Raises RagCacheError if ``full`` differs from the model's own ``generate``, a way falls back to a full
    prefill, or the work file belongs to another run; ValueError for encoders that the model cannot have.
    """
    model, tokenizer = load_checked(settings.model, settings.device, settings.dtype)
    ways = _ways(settings, model, tokenizer)
    maker = PromptMaker(tokenizer, settings.prompt)
    prompts = [maker.prompt(question) for question in questions]
    _check_lengths(questions, prompts, model, settings.max_new_tokens)
    header = {
        "model": fingerprint(model, tokenizer, cache=settings.folder / "digests.json").digest,
        "seed": settings.seed,
        "questions": digest(questions),
        "max_new_tokens": settings.max_new_tokens,
        "neighbours": settings.neighbours,
        "prompt": settings.prompt,
        "version": ragcachekit.__version__,
    }
    with closing(Work(header, work)) as done:
        unchecked = [i for i in range(len(questions)) if (i, FULL) not in done.results]
        numbers = tqdm(unchecked, desc="generate", unit="question", disable=not progress or not unchecked)
        # Before the library touches the model.
        expected = {i: _generated(model, prompts[i], settings.max_new_tokens, maker.pad) for i in numbers}
        encoders = dict.fromkeys(way.encoder for way in ways if way.encoder != NO_ENCODER)
        engines = Engines(
            model,
            tokenizer,
            encoders,
            neighbours=neighbours() if any(map(needs_neighbours, encoders)) else None,
            stop=maker.stop,
            max_new_tokens=settings.max_new_tokens,
            cache_dir=settings.cache_dir,
        )
        with closing(engines):
            _ask_all(engines, done, questions, prompts, maker, ways, expected, progress)
        return {way: [done.results[i, way] for i in range(len(questions))] for way in ways}


def _ask_all(
    engines: Engines,
    done: Work,
    questions: Sequence[FidelityQuestion],
    prompts: Sequence[FidelityPrompt],
    maker: PromptMaker,
    ways: Sequence[Way],
    expected: Mapping[int, tuple[int, ...]],
    progress: bool,
) -> None:
    """Measure what is not done; ``expected`` are the model's own tokens by question."""
    left = {i: [w for w in ways if (i, w) not in done.results] for i in range(len(questions))}
    total = sum(map(len, left.values()))
    with tqdm(total=total, desc="fidelity", unit="answer", disable=not progress) as bar:
        for i in (number for number, ways_left in left.items() if ways_left):
            question, prompt = questions[i], prompts[i]
            if i in expected and engines.token_ids(prompt) != expected[i]:
                raise RagCacheError(
                    "full through the library differs from the model's own generate on the question "
                    f"{question.question!r}; do not trust any figure"
                )
            full = Reference.of(engines, prompt, maker.answer_ids(question.answer))
            for way in left[i]:  # full is the first of all ways
                done.put(i, way, measure(engines, question, prompt, way, full))
                bar.update()


def _ways(settings: FidelitySettings, model: Any, tokenizer: Any) -> list[Way]:
    """The baselines, then every policy over every encoder, once each."""
    if not settings.encoders:
        raise ValueError("give at least one encoder, for example standalone")
    baselines = BASELINES if settings.dataset is None else (*BASELINES, ALONE)
    rope, out = describe_rope(model), dict.fromkeys(baselines)
    for name in settings.policies or POLICIES:
        policy = open_policy(name)
        if not policy.reads_cache:
            continue
        for encoder in (policy.encoder,) if policy.encoder else settings.encoders:
            if encoder == IN_PROMPT:
                raise ValueError(
                    "chunks are encoded in-prompt by earlier prompts, and asking a question would encode its "
                    "own context for the next policy; benchmarks/selection/craft_in_prompt.py measures that"
                )
            plain, rounded = encoder.partition("+")[0], quantisation(encoder)
            found = Encodings(plain, rope, tokenizer.bos_token_id).name
            out[Way(policy.name, f"{found}+{rounded}" if rounded else found)] = None
    return list(out)


def _check_lengths(
    questions: Sequence[FidelityQuestion], prompts: Sequence[FidelityPrompt], model: Any, answer_tokens: int
) -> None:
    context = model.config.get_text_config().max_position_embeddings
    for question, prompt in zip(questions, prompts, strict=True):
        if len(prompt.token_ids) + answer_tokens > context:
            raise PromptTooLong(
                f"the question {question.question!r} has {len(prompt.token_ids)} prompt tokens; with "
                f"{answer_tokens} for the answer that is more than the model's context ({context})"
            )


@torch.no_grad()
def _generated(model: Any, prompt: FidelityPrompt, max_new_tokens: int, pad: int) -> tuple[int, ...]:
    """Greedy tokens of the model's own ``generate``."""
    ids = torch.tensor([prompt.token_ids], device=model.device)
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=pad,
    )
    return tuple(output[0, ids.shape[1] :].tolist())

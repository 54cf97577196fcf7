"""Fidelity bench: what reuse does to answers, for every policy and encoder, beside a full prefill."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from rich.table import Table
from tqdm.auto import tqdm

from ragcachekit.commands.engines import FULL, Engines
from ragcachekit.commands.questions import PromptMaker, Question, QuestionPrompt, Sample
from ragcachekit.commands.report import BenchReport, Bootstrap, table
from ragcachekit.errors import PromptTooLong, RagCacheError
from ragcachekit.model.rope import describe_rope
from ragcachekit.plan.encodings import Encodings
from ragcachekit.plan.variants import IN_PROMPT
from ragcachekit.policies.base import PolicyAndEncoder
from ragcachekit.policies.registry import open_policy
from ragcachekit.quality.compare import Reference, exact_match, word_f1
from ragcachekit.reports import Answer
from ragcachekit.types import Ids

POLICIES = (
    *("reuse", "lego0", "lego:4", "lego:16"),
    *(f"{kind}:0.15" for kind in ("random", "query", "cacheblend", "cacheblend-gradual")),
    *(f"{kind}:{r}" for kind in ("deep", "impact", "sensitive") for r in (0.05, 0.1, 0.15, 0.3)),
    *("craft:0.1", "craft:0.3", "craft-focused:0.6"),  # over standalone half of it is spent
)
REUSE = PolicyAndEncoder("reuse", "system")
BASELINES = (FULL, REUSE)
"""Always measured."""

ALL, QUALITY = "all", "quality"
_AGAINST_FULL = (
    *("policy", "encoder", "ratio_spent", "agreement"),
    *("kl", "answer_kl", "answer_loss", "gold_loss", "prompt_tokens", "recomputed_tokens"),
)
_ANSWERS = (
    *("policy", "encoder", "question_type", "ratio_asked", "ratio_spent", "exact_match"),
    *("f1", "low", "high", "n"),
)

Row = dict[str, Any]


@dataclass(frozen=True)
class Measurement:
    """Result of one question with one policy and encoder; plain values only.

    ``exact_match`` and ``f1`` are against the right answer, ``agreement`` against that of ``full``.
    ``kl`` is KL(full || this) of the first token in nats, ``answer_kl`` its mean over the tokens of full's
    answer, given those before. ``answer_loss`` and ``gold_loss`` are nats per token of full's and of the
    right answer. ``ratio_spent`` is recomputed / cached rows over all layers.
    """

    text: str
    exact_match: float
    f1: float
    agreement: float
    answer_tokens: int
    kl: float
    answer_kl: float
    answer_loss: float
    gold_loss: float
    ratio_spent: float
    prompt_tokens: int
    recomputed_tokens: int
    reused_tokens: int


Results = MutableMapping[tuple[int, PolicyAndEncoder], Measurement]
"""By number of the question, and policy and encoder."""


def check_encoders(encoders: Sequence[str]) -> None:
    """ValueError for an encoder that this bench cannot compare."""
    if IN_PROMPT in encoders:
        raise ValueError(
            "chunks are encoded in-prompt by earlier prompts, and asking a question would encode its own "
            "context for the next policy"
        )


def pairs(
    model: Any, tokenizer: Any, policies: Sequence[str], encoders: Sequence[str]
) -> list[PolicyAndEncoder]:
    """The baselines, then every policy over every encoder, or over the one that it insists on."""
    out, rope = dict.fromkeys(BASELINES), describe_rope(model)
    for policy in filter(lambda policy: policy.reads_cache, map(open_policy, policies or POLICIES)):
        for encoder in (policy.encoder,) if policy.encoder else encoders:
            plain, plus, rounded = encoder.partition("+")
            name = Encodings(plain, rope, tokenizer.bos_token_id).name
            out[PolicyAndEncoder(policy.name, f"{name}{plus}{rounded}")] = None
    return list(out)


def measure(
    model: Any,
    tokenizer: Any,
    sample: Sample,
    ways: Sequence[PolicyAndEncoder],
    results: Results,
    *,
    maker: PromptMaker | None = None,
    max_new_tokens: int = 64,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> None:
    """Ask every question in every way that has no result yet, beside a full prefill.

    Raises PromptTooLong before any work; RagCacheError if a model or a prompt cannot be used, or ``full``
    differs from the model's own generate.
    """
    maker = maker or PromptMaker(tokenizer)
    prompts = [maker.prompt(question) for question in sample.questions]
    _check_length(model, sample.questions, prompts, max_new_tokens)
    left = [i for i in range(len(prompts)) if (i, FULL) not in results]
    numbers = tqdm(left, desc="generate", unit="question", disable=not progress or not left)
    # Before the library touches the model.
    own = {i: generated(model, prompts[i].token_ids, max_new_tokens, maker.pad) for i in numbers}
    engines = Engines(
        model,
        tokenizer,
        dict.fromkeys(way.encoder for way in ways if way != FULL),
        sample,
        stop=maker.stop,
        max_new_tokens=max_new_tokens,
        cache_dir=cache_dir,
    )
    with closing(engines), tqdm(total=len(prompts) * len(ways), unit="answer", disable=not progress) as bar:
        for number, (question, prompt) in enumerate(zip(sample.questions, prompts, strict=True)):
            todo = [way for way in ways if (number, way) not in results]
            bar.update(len(ways) - len(todo))
            if number in own and engines.answer(prompt, FULL, whole=True).token_ids != own[number]:
                raise RagCacheError(
                    "full through the library differs from the model's own generate on the question "
                    f"{question.question!r}; do not trust any figure"
                )
            if todo:
                right, reference = engines.full(prompt, maker.answer_ids(question.answers[0]))
            for way in todo:
                results[number, way] = _measured(engines, question, prompt, way, right, reference)
                bar.update()


def _check_length(
    model: Any, questions: Sequence[Question], prompts: Sequence[QuestionPrompt], limit: int
) -> None:
    context = model.config.get_text_config().max_position_embeddings
    longest, asked = max((len(p.token_ids), q.question) for p, q in zip(prompts, questions, strict=True))
    if longest + limit > context:
        raise PromptTooLong(
            f"the prompt of {asked!r} has {longest} tokens; with {limit} for the answer that is more than "
            f"the model's context ({context})"
        )


@torch.no_grad()
def generated(model: Any, token_ids: Ids, max_new_tokens: int, pad: int) -> Ids:
    """Greedy tokens of the model's own ``generate``."""
    ids = torch.tensor([token_ids], device=model.device)
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": pad}
    output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    return tuple(output[0, ids.shape[1] :].tolist())


def _measured(
    engines: Engines,
    question: Question,
    prompt: QuestionPrompt,
    way: PolicyAndEncoder,
    right: Answer,
    reference: Reference,
) -> Measurement:
    compared, link = engines.compare(question, prompt, way, reference)
    answer = right if way == FULL else engines.answer(prompt, way)
    text = answer.text.strip()
    return Measurement(
        text=text,
        exact_match=max(exact_match(text, one) for one in question.answers),
        f1=max(word_f1(text, one) for one in question.answers),
        agreement=float(text == right.text.strip()),
        answer_tokens=len(answer.token_ids),
        kl=compared.first_kl,
        answer_kl=compared.kl,
        answer_loss=compared.losses[0],
        gold_loss=compared.losses[1],
        # By definition full recomputes all that could be cached.
        ratio_spent=1.0 if way == FULL else link.recompute_ratio,
        prompt_tokens=link.prompt_tokens,
        recomputed_tokens=link.recomputed_tokens,
        reused_tokens=link.reused_tokens,
    )


def quality_rows(
    questions: Sequence[Question],
    ways: Sequence[PolicyAndEncoder],
    results: Mapping[tuple[int, PolicyAndEncoder], Measurement],
    seed: int,
) -> list[Row]:
    """One row per way and question type, and one of all: means with 95 % intervals over questions.

    The interval of ``kl`` is ``kl_low`` and ``kl_high``, and so on; that of ``f1`` just ``low`` and ``high``.
    """
    groups = {kind: (inside, Bootstrap(len(inside), seed)) for kind, inside in by_type(questions).items()}
    return [
        _row(kind, way, [results[i, way] for i in inside], bootstrap)
        for way in ways
        for kind, (inside, bootstrap) in groups.items()
    ]


def by_type(questions: Sequence[Question]) -> dict[str, list[int]]:
    """Numbers of the questions of each type, and of all."""
    kinds = sorted({question.question_type for question in questions} - {""})
    members = {kind: [i for i, q in enumerate(questions) if q.question_type == kind] for kind in kinds}
    return members | {ALL: list(range(len(questions)))}


def _row(kind: str, way: PolicyAndEncoder, found: Sequence[Measurement], bootstrap: Bootstrap) -> Row:
    row: Row = {
        "part": QUALITY,
        "policy": way.policy,
        "encoder": way.encoder,
        "question_type": kind,
        "ratio_asked": ratio_asked(way.policy),
    }
    for name in [field.name for field in fields(Measurement) if field.name != "text"]:
        values = np.array([getattr(one, name) for one in found], np.float64)
        low, high = bootstrap.of_mean(values)
        row |= {name: float(values.mean()), f"{name}_low": low, f"{name}_high": high}
    row["low"], row["high"] = row.pop("f1_low"), row.pop("f1_high")
    return {**row, "n": len(found)}


def ratio_asked(policy: str) -> float | None:
    """The ratio written in a policy's name (``query:0.15``), where there is one.

    Whole numbers are no ratios: ``lego:16`` counts tokens.
    """
    argument = policy.partition(":")[2]
    return float(argument) if "." in argument and 0 <= float(argument) <= 1 else None


def report_of(model: str, seed: int, rows: Sequence[Row], questions: int) -> BenchReport:
    """The report of ``quality`` rows, and a ``check`` row: ``full`` against the model's own generate."""
    check = {"part": "check", "name": "full equals the model's own generate", "n": questions, "mismatches": 0}
    return BenchReport("fidelity", model, seed, (*rows, check))


def tables(report: BenchReport) -> Iterator[Table]:
    """Quality by question type, and agreement with ``full``."""
    rows = report.part(QUALITY).rows
    yield table(f"Fidelity: {report.model}", rows, _ANSWERS)
    all_questions = [row for row in rows if row["question_type"] == ALL]
    yield table("Against full, all questions", all_questions, _AGAINST_FULL)

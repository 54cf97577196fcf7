"""Fidelity bench: what reuse does to answers, for every policy and encoder, beside a full prefill."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from tqdm.auto import tqdm

import ragcachekit
from ragcachekit.commands.engines import FULL, Engines, needs_neighbours, quantisation
from ragcachekit.commands.questions import (
    ASK,
    EMBEDDING,
    STYLES,
    MeasureSettings,
    PromptMaker,
    Question,
    QuestionPrompt,
    Sample,
    digest,
)
from ragcachekit.commands.report import BenchReport, Bootstrap, Statistic, table
from ragcachekit.commands.workspace import load_checked
from ragcachekit.errors import PromptTooLong, RagCacheError
from ragcachekit.model.identity import fingerprint
from ragcachekit.model.rope import describe_rope
from ragcachekit.plan.encodings import Encodings
from ragcachekit.plan.variants import IN_PROMPT
from ragcachekit.policies.measured import PolicyAndEncoder
from ragcachekit.policies.registry import open_policy
from ragcachekit.quality.compare import Reference, exact_match, word_f1
from ragcachekit.reports import Answer
from ragcachekit.types import Ids

POLICIES = (
    *("reuse", "lego0", "lego:4", "lego:16"),
    *(f"{kind}:0.15" for kind in ("random", "heavy", "query", "cacheblend", "cacheblend-gradual")),
    *(f"{kind}:{r}" for kind in ("deep", "impact") for r in (0.05, 0.1, 0.15, 0.3)),
    *("craft:0.1", "craft:0.3", "craft-focused:0.6"),  # over standalone half of it is spent
)
REUSE = PolicyAndEncoder("reuse", "system")
BASELINES = (FULL, REUSE)
"""Always measured: FusionRAG's normalized F1 is relative to them."""

ALONE = PolicyAndEncoder("reuse", "standalone")
"""Measured with a dataset: recovery is relative to ``full`` and to this."""

_FORMAT = 5
_ALL, _QUALITY = "all", "quality"
_RECOVERED = ("kl", "answer_kl", "gold_loss", "f1")
_MEANS = (
    *("exact_match", "f1", "agreement", "answer_tokens"),
    *("kl", "answer_kl", "answer_loss", "gold_loss"),
    *("ratio_spent", "prompt_tokens", "recomputed_tokens", "reused_tokens"),
)
_TABLES = {
    "Against full, all questions": (
        *("policy", "encoder", "ratio_spent", "agreement"),
        *("kl", "answer_kl", "answer_loss", "gold_loss", "prompt_tokens", "recomputed_tokens"),
    ),
    "Recovered of what reuse of standalone chunks loses, with 95 % intervals": (
        *("policy", "encoder", "ratio_spent"),
        *(f"{name}_recovery{end}" for name in _RECOVERED for end in ("", "_low", "_high")),
    ),
}
_QUALITY_COLUMNS = (
    *("policy", "encoder", "question_type", "ratio_asked", "ratio_spent", "exact_match"),
    *("f1", "low", "high", "normalized_f1", "n"),
)
_PANELS = {
    "answer_kl": "KL(full || reuse) per token of full's answer (nats)",
    "gold_loss": "loss of the right answer (nats per token)",
    "f1": "F1 against the right answer",
}

Row = dict[str, Any]


@dataclass(frozen=True)
class FidelitySettings(MeasureSettings):
    """What is measured: every policy over every encoder.

    A policy that insists on an encoder gets that one only. ``full``, and ``reuse`` over ``system``, are
    always added, and with a dataset ``reuse`` over ``standalone``. ``prompt`` is a style of
    :class:`.PromptMaker`.
    """

    encoders: tuple[str, ...] = ("standalone",)
    neighbours: str = EMBEDDING
    prompt: str = ASK
    probes: int = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.policies:
            open_policy(name)
        if not self.encoders:
            raise ValueError("give at least one encoder, for example standalone")
        if self.prompt not in STYLES:
            raise ValueError(f"unknown prompt {self.prompt!r}; known: {', '.join(STYLES)}")

    def ways(self, model: Any, tokenizer: Any) -> list[PolicyAndEncoder]:
        """The baselines, then every policy over every encoder, once each."""
        rope = describe_rope(model)
        out = dict.fromkeys(BASELINES if self.dataset is None else (*BASELINES, ALONE))
        for policy in filter(lambda policy: policy.reads_cache, map(open_policy, self.policies or POLICIES)):
            for encoder in (policy.encoder,) if policy.encoder else self.encoders:
                if encoder == IN_PROMPT:
                    raise ValueError(
                        "chunks are encoded in-prompt by earlier prompts, and asking a question would encode "
                        "its own context for the next policy"
                    )
                plain, rounded = encoder.partition("+")[0], quantisation(encoder)
                found = Encodings(plain, rope, tokenizer.bos_token_id).name
                out[PolicyAndEncoder(policy.name, f"{found}+{rounded}" if rounded else found)] = None
        return list(out)


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


def run(
    settings: FidelitySettings,
    sample: Sample | None = None,
    *,
    work: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> BenchReport:
    """Ask a ``sample``, by default that of the settings, with every policy over every encoder.

    ``work`` is a file with the results so far, from which an interrupted run continues.

    Returns
    -------
    BenchReport
        ``quality`` rows: means per policy, encoder and question type with ``<metric>_low`` and
        ``<metric>_high``, of ``f1`` just ``low`` and ``high`` (95 %, bootstrap over questions). One ``check``
        row: ``full`` against the model's own generate.

    Raises ValueError, CorpusError for bad settings or questions, and PromptTooLong, before any work;
    RagCacheError if a model or a prompt cannot be used, or ``full`` differs from the model's own generate.
    """
    if sample is None:
        sample = settings.sample(needs_neighbours=any(map(needs_neighbours, settings.encoders)))
    model, tokenizer = load_checked(settings.model, settings.device, settings.dtype)
    ways, maker = settings.ways(model, tokenizer), PromptMaker(tokenizer, settings.prompt)
    prompts = [maker.prompt(question) for question in sample.questions]
    _check_length(model, sample.questions, prompts, settings.max_new_tokens)
    header = {
        "model": fingerprint(model, tokenizer, cache=settings.folder / "digests.json").digest,
        "seed": settings.seed,
        "questions": digest(sample.questions),
        "max_new_tokens": settings.max_new_tokens,
        "neighbours": settings.neighbours,
        "prompt": settings.prompt,
        "version": ragcachekit.__version__,
    }
    with closing(Work(header, work)) as done:
        _measure(settings, sample, (model, tokenizer, maker), prompts, ways, done, progress)
    results = {way: [done.results[i, way] for i in range(len(prompts))] for way in ways}
    rows = quality_rows(sample.questions, results, settings.seed)
    name = "full equals the model's own generate"
    rows.append({"part": "check", "name": name, "n": len(prompts), "mismatches": 0})
    return BenchReport("fidelity", settings.model, settings.seed, tuple(rows))


def _measure(
    settings: FidelitySettings,
    sample: Sample,
    asked: tuple[Any, Any, PromptMaker],
    prompts: Sequence[QuestionPrompt],
    ways: Sequence[PolicyAndEncoder],
    done: Work,
    progress: bool,
) -> None:
    """Measure what is not done yet; ``asked`` are model, tokenizer and the maker of the prompts."""
    model, tokenizer, maker = asked
    left = [i for i in range(len(prompts)) if (i, FULL) not in done.results]
    numbers = tqdm(left, desc="generate", unit="question", disable=not progress or not left)
    # Before the library touches the model.
    own = {i: _generated(model, prompts[i].token_ids, settings.max_new_tokens, maker.pad) for i in numbers}
    engines = Engines(
        model,
        tokenizer,
        dict.fromkeys(way.encoder for way in ways if way != FULL),
        neighbours=lambda: sample.neighbours(settings.neighbours, progress),
        stop=maker.stop,
        max_new_tokens=settings.max_new_tokens,
        cache_dir=settings.cache_dir,
    )
    with closing(engines), tqdm(total=len(prompts) * len(ways), unit="answer", disable=not progress) as bar:
        for number, (question, prompt) in enumerate(zip(sample.questions, prompts, strict=True)):
            todo = [way for way in ways if (number, way) not in done.results]
            bar.update(len(ways) - len(todo))
            if number in own and engines.answer(prompt, FULL, whole=True).token_ids != own[number]:
                raise RagCacheError(
                    "full through the library differs from the model's own generate on the question "
                    f"{question.question!r}; do not trust any figure"
                )
            if todo:
                right, reference = engines.full(prompt, maker.answer_ids(question.answers[0]))
            for way in todo:
                done.put(number, way, _measured(engines, question, prompt, way, right, reference))
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
def _generated(model: Any, token_ids: Ids, max_new_tokens: int, pad: int) -> Ids:
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


class Work:
    """Results by question and way, also written to a file if there is one.

    ``header`` holds what must be the same for results to go together. A last line that was cut off is
    dropped. Raises RagCacheError if the file belongs to another run or is no work file.
    """

    def __init__(self, header: Mapping[str, Any], path: str | os.PathLike[str] | None = None) -> None:
        self.results: dict[tuple[int, PolicyAndEncoder], Measurement] = {}
        self._file = None
        if path is not None:
            place = Path(path)
            place.parent.mkdir(parents=True, exist_ok=True)
            self._read({"fidelity": _FORMAT, **header}, place)
            self._file = place.open("a", encoding="utf-8")

    def put(self, question: int, way: PolicyAndEncoder, found: Measurement) -> None:
        """Add a result."""
        self.results[question, way] = found
        if self._file is not None:
            line = {"question": question, **way._asdict(), "result": asdict(found)}
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _read(self, header: dict[str, Any], path: Path) -> None:
        raw = path.read_bytes() if path.exists() else b""
        whole, _, cut = raw.rpartition(b"\n")
        if not raw.startswith(b'{"fidelity"'[: len(raw)]):
            raise RagCacheError(f"{path} is no work file of this bench; give another one")
        first, *lines = whole.decode("utf-8", errors="replace").splitlines() or [json.dumps(header)]
        try:
            found = json.loads(first)
            if other := [name for name, value in header.items() if found.get(name) != value]:
                raise RagCacheError(
                    f"{path} is of a run with another {' and '.join(other)}; delete it or give another file"
                )
            for entry in map(json.loads, lines):
                way = PolicyAndEncoder(entry["policy"], entry["encoder"])
                self.results[entry["question"], way] = Measurement(**entry["result"])
        except (ValueError, KeyError, TypeError) as error:
            raise RagCacheError(f"{path} is damaged; delete it and start again") from error
        if cut or not whole:
            path.write_text("".join(line + "\n" for line in (first, *lines)), encoding="utf-8")


Results = dict[PolicyAndEncoder, list[Measurement]]
"""One result per question, in the order of the questions."""


def quality_rows(questions: Sequence[Question], results: Results, seed: int) -> list[Row]:
    """One row per way and question type, and one of all; ``low`` and ``high`` are the interval of ``f1``."""
    kinds = sorted({question.question_type for question in questions} - {""})
    members = {kind: [i for i, q in enumerate(questions) if q.question_type == kind] for kind in kinds}
    members[_ALL] = list(range(len(questions)))
    bootstraps = {kind: Bootstrap(len(inside), seed) for kind, inside in members.items()}
    return [
        _row(kind, way, {w: [found[i] for i in inside] for w, found in results.items()}, bootstraps[kind])
        for way in results
        for kind, inside in members.items()
    ]


def ratio_asked(policy: str) -> float | None:
    """The ratio written in a policy's name (``query:0.15``, ``lego:4+query:0.1``), where there is one.

    Whole numbers are no ratios: ``lego:16`` counts tokens.
    """
    arguments = [part.partition(":")[2] for part in policy.split("+")]
    found = [float(argument) for argument in arguments if "." in argument and 0 <= float(argument) <= 1]
    return found[0] if len(found) == 1 else None


def recovery(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """(x - reuse) / (full - reuse) of columns x, reuse, full; NaN where reuse and full are the same."""
    value, reuse, full = sums.T
    gap = full - reuse
    out: NDArray[np.float64] = np.full(len(gap), np.nan)
    np.divide(value - reuse, gap, out=out, where=np.abs(gap) > 1e-9)
    return out


def normalized_f1(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """:func:`recovery` of F1; NaN where full is no better than reuse.

    FusionRAG, section 5; F1_reuse is that of encoder ``system`` and policy ``reuse``.
    """
    return np.where(sums[:, 2] - sums[:, 1] > 1e-9, recovery(sums), np.nan)


def _row(kind: str, way: PolicyAndEncoder, results: Results, bootstrap: Bootstrap) -> Row:
    found = results[way]
    row: Row = {
        "part": _QUALITY,
        "policy": way.policy,
        "encoder": way.encoder,
        "question_type": kind,
        "ratio_asked": ratio_asked(way.policy),
    }
    for name in _MEANS:
        values = np.array([getattr(one, name) for one in found], np.float64)
        low, high = bootstrap.of_mean(values)
        row |= {name: float(values.mean()), f"{name}_low": low, f"{name}_high": high}
    row |= _relative(
        "normalized_f1", "f1", normalized_f1, [results[w] for w in (way, REUSE, FULL)], bootstrap
    )
    ways = [results[w] for w in (way, ALONE, FULL)] if ALONE in results else []
    for name in _RECOVERED:
        row |= _relative(f"{name}_recovery", name, recovery, ways, bootstrap)
    row["low"], row["high"] = row.pop("f1_low"), row.pop("f1_high")
    return {**row, "n": len(found)}


def _relative(
    name: str, metric: str, statistic: Statistic, ways: Sequence[Sequence[Measurement]], bootstrap: Bootstrap
) -> dict[str, float | None]:
    """A figure of the sums of ``metric`` over these ways, with its interval; None without ways or value."""
    value, low, high = np.nan, None, None
    if ways:
        columns = np.array([[getattr(one, metric) for one in found] for found in ways]).T
        value = float(statistic(columns.sum(axis=0, keepdims=True))[0])
    if not np.isnan(value):
        low, high = bootstrap.interval(columns, statistic) or (None, None)
    return {name: None if np.isnan(value) else value, f"{name}_low": low, f"{name}_high": high}


def tables(report: BenchReport) -> Iterator[Table]:
    """Quality by question type, agreement with ``full``, and what is recovered of the loss of reuse."""
    rows = report.part(_QUALITY).rows
    yield table(f"Fidelity: {report.model}", rows, _QUALITY_COLUMNS)
    for title, columns in _TABLES.items():
        yield table(title, [row for row in rows if row["question_type"] == _ALL], columns)


def plot(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draw each metric over the ratio spent, with 95 % intervals; ``full`` is a level line."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    rows = [row for row in report.part(_QUALITY).rows if row["question_type"] == _ALL]
    figure = Figure(figsize=(4.6 * len(_PANELS), 5), layout="constrained")
    for axes, (metric, title) in zip(figure.subplots(1, len(_PANELS)), _PANELS.items(), strict=True):
        lines: dict[str, list[Row]] = {}
        for row in sorted(rows, key=lambda row: float(row["ratio_spent"])):
            family = "+".join(part.partition(":")[0] for part in row["policy"].split("+"))
            lines.setdefault(f"{family} on {row['encoder']}", []).append(row)
        axes.axhline(lines.pop(f"{FULL}")[0][metric], color="#4d4d4d", linewidth=1, label="full")
        ends = ("low", "high") if metric == "f1" else (f"{metric}_low", f"{metric}_high")
        for label, points in lines.items():
            middle, low, high = (np.array([row[name] for row in points]) for name in (metric, *ends))
            spread = np.maximum(0, [middle - low, high - middle])
            axes.errorbar(
                [row["ratio_spent"] for row in points], middle, spread, label=label, marker="o", capsize=2
            )
        axes.set(title=title, xlabel="recompute ratio spent")
        axes.grid(alpha=0.25)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(f"{report.model}, {rows[0]['n']} questions, 95 % intervals", fontsize=10)
    figure.savefig(path, dpi=150)

"""``python -m benchmarks fidelity``: what reuse does to answers, on the sample world or a dataset.

Beside the figures of ``ragcachekit bench fidelity``: what a policy recovers of the loss of reuse, pictures,
and a file of results, from which an interrupted run continues.
"""

from __future__ import annotations

import hashlib
import json as json_format
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import typer
from numpy.typing import NDArray
from rich.table import Table

import ragcachekit
from benchmarks.datasets import Sampling, draw_questions
from benchmarks.output import Plot, written
from benchmarks.world.questions import world_sample
from benchmarks.world.reader_folder import ANSWER_TOKENS, READER, READER_NAME, one_thread
from ragcachekit.commands import fidelity as shipped
from ragcachekit.commands import options as opt
from ragcachekit.commands.console import INTERRUPTED, note, quiet_loading, show
from ragcachekit.commands.embedding import MiniLM
from ragcachekit.commands.engines import FULL
from ragcachekit.commands.fidelity import ALL, QUALITY, REUSE, Measurement, Row, by_type, quality_rows
from ragcachekit.commands.questions import SEPARATOR, PromptMaker, Question, Sample
from ragcachekit.commands.report import RESAMPLES, BenchReport, Bootstrap, table
from ragcachekit.commands.workspace import load_checked, needs_neighbours
from ragcachekit.errors import RagCacheError
from ragcachekit.plan.companions import PrecedingChunks, SimilarChunks
from ragcachekit.policies.base import PolicyAndEncoder

POLICIES = (
    *("reuse", "lego0", *(f"lego:{k}" for k in (1, 2, 4, 6, 12))),
    *(f"{kind}:{r}" for kind in ("random", "query", "deep", "impact") for r in (0.05, 0.1, 0.15, 0.3)),
    *("cacheblend:0.05", "cacheblend:0.15", "cacheblend-gradual:0.15"),
    *(f"craft:{alpha}" for alpha in (0.1, 0.2, 0.3, 0.6)),  # over standalone half of it is spent
    "craft-focused:0.6",
)
"""Of the reader, whose prompts cost little."""

ALONE = PolicyAndEncoder("reuse", "standalone")
"""Measured with a dataset: recovery is relative to ``full`` and to this."""

Result = TypeVar("Result")

Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Sums per column ``[resamples, columns]`` -> the figure ``[resamples]``; NaN where it has none."""

EMBEDDING, DOCUMENT = "embedding", "document"
_FORMAT = 6
_RECOVERED = ("kl", "answer_kl", "gold_loss", "f1")
_RECOVERY = (
    *("policy", "encoder", "ratio_spent"),
    *(f"{name}_recovery{end}" for name in _RECOVERED for end in ("", "_low", "_high")),
)
_PANELS = {
    "answer_kl": "KL(full || reuse) per token of full's answer (nats)",
    "gold_loss": "loss of the right answer (nats per token)",
    "f1": "F1 against the right answer",
}
_SHOTS = (
    ("What colour is the sky on a clear day?", "blue"),
    ("How many legs does a spider have?", "eight"),
    ("Which metal is liquid at room temperature?", "mercury"),
)


def fidelity(
    model: Annotated[str, typer.Option("--model", help="Folder or hub id; default: the reader.")] = READER,
    policies: opt.Policies = None,
    encoders: opt.Encoders = "standalone",
    neighbours: Annotated[
        str, typer.Option(help="Of similar:n, average:n: embedding (all-MiniLM) or document (chunks before).")
    ] = EMBEDDING,
    questions_per_type: Annotated[int, typer.Option(min=1, help="About the sample world.")] = 100,
    dataset: Annotated[str | None, typer.Option(help="squad:FILE or musique:FILE instead.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Questions drawn from the dataset.")] = 50,
    distractors: Annotated[int, typer.Option(min=0, help="Passages beside the relevant ones.")] = 3,
    half: Annotated[str, typer.Option(help="Of the dataset: all, develop or report.")] = "all",
    prompt: Annotated[str, typer.Option(help="ask (as the command does) or few-shot.")] = "ask",
    seed: opt.Seed = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = ANSWER_TOKENS,
    device: opt.Device = None,
    dtype: opt.Dtype = "auto",
    resume: Annotated[
        Path | None, typer.Option(help="Keep results here and go on from them; default: beside --json.")
    ] = None,
    json: opt.Json = None,
    plot: Plot = None,
) -> None:
    """What reuse does to answers about the sample world, or about a dataset."""
    quiet_loading()
    chosen, over = opt.names(policies), opt.names(encoders)
    shipped.check_encoders(over)
    makers: dict[str, Callable[..., PromptMaker]] = {
        "ask": PromptMaker,
        "few-shot": partial(PromptMaker, plain=few_shot, stop=("\n",)),
    }
    if prompt not in makers or neighbours not in (EMBEDDING, DOCUMENT):
        raise ValueError("--prompt is ask or few-shot, --neighbours embedding or document")
    if dataset is None:
        sample = world_sample(seed, questions_per_type)
    else:
        asked = draw_questions(dataset, Sampling(count, distractors, half, seed))
        documents = dict.fromkeys(one.document for one in asked if one.document)
        sample = Sample(asked, neighbours=PrecedingChunks(list(documents)))
    if neighbours == EMBEDDING and any(needs_neighbours(one) or one.startswith("average") for one in over):
        sample = similar(sample)
    work = resume or (json.with_name(json.name + ".work") if json is not None else None)
    asked_how = {"prompt": prompt, "neighbours": neighbours, "max_new_tokens": max_new_tokens}
    header = {"fidelity": _FORMAT, "model": model, "dtype": dtype, "seed": seed, **asked_how}
    header |= {"version": ragcachekit.__version__}
    try:
        results = Work(header, sample, work, Measurement)
        with one_thread() if model == READER else nullcontext(), closing(results) as done:
            lm, tokenizer = load_checked(model, device, dtype)
            found = shipped.pairs(lm, tokenizer, chosen or (() if dataset else POLICIES), over)
            ways = found if dataset is None else list(dict.fromkeys((*shipped.BASELINES, ALONE, *found)))
            shipped.measure(
                *(lm, tokenizer, sample, ways, done),
                maker=makers[prompt](tokenizer),
                max_new_tokens=max_new_tokens,
                progress=True,
            )
    except KeyboardInterrupt:
        if work is not None:
            note(f"interrupted; the results so far are in {work}, the same command goes on")
        raise typer.Exit(INTERRUPTED) from None
    rows = quality_rows(sample.questions, ways, done, seed)
    add_recovery(rows, sample.questions, done, seed)
    name = READER_NAME if model == READER else model
    report = shipped.report_of(name, seed, rows, len(sample.questions))
    for one in tables(report, dataset is not None):
        show(one)
    written(report, json, plot, draw)
    if work is not None and resume is None:
        work.unlink()


def similar(sample: Sample) -> Sample:
    """The sample with the nearest of its chunks by all-MiniLM-L6-v2 as neighbours."""
    texts = list(dict.fromkeys(chain.from_iterable(question.chunks for question in sample.questions)))
    return Sample(sample.questions, sample.kind, SimilarChunks(texts, MiniLM().embed(texts)))


def few_shot(context: str, question: str) -> str:
    """A prompt with three made-up questions and answers: small models answer it better."""
    shots = "".join(f"Question: {asked}\nAnswer: {answer}\n\n" for asked, answer in _SHOTS)
    instruction = "Answer the question from the passages. Give a short answer."
    return f"{instruction}{SEPARATOR}{context}\n\n{shots}Question: {question}\nAnswer:"


class Work(dict[tuple[int, PolicyAndEncoder], Result]):
    """Results by question and way, also written to a file if there is one.

    ``kind`` is that of the results, a dataclass. ``header`` holds what must be the same for results to go
    together. A last line that was cut off is dropped. Raises RagCacheError if the file is of another run.
    """

    def __init__(
        self, header: Mapping[str, Any], sample: Sample, path: Path | None, kind: type[Result]
    ) -> None:
        super().__init__()
        self._file, self._kind = None, kind
        if path is None:
            return
        asked = json_format.dumps([asdict(question) for question in sample.questions], sort_keys=True)
        digest = hashlib.sha256(asked.encode()).hexdigest()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._read({**header, "questions": digest}, path)
        self._file = path.open("a", encoding="utf-8")

    def __setitem__(self, key: tuple[int, PolicyAndEncoder], found: Result) -> None:
        super().__setitem__(key, found)
        if self._file is not None:
            line = {"question": key[0], **key[1]._asdict(), "result": vars(found)}
            self._file.write(json_format.dumps(line) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _read(self, header: dict[str, Any], path: Path) -> None:
        whole, _, cut = (path.read_bytes() if path.exists() else b"").rpartition(b"\n")
        first, *lines = whole.decode().splitlines() or [json_format.dumps(header)]
        if json_format.loads(first) != header:
            raise RagCacheError(f"{path} is of another run ({first}); delete it or give another file")
        for entry in map(json_format.loads, lines):
            way = PolicyAndEncoder(entry["policy"], entry["encoder"])
            super().__setitem__((entry["question"], way), self._kind(**entry["result"]))
        if cut or not whole:
            path.write_text("".join(line + "\n" for line in (first, *lines)), encoding="utf-8")


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


def interval_of(
    bootstrap: Bootstrap, columns: NDArray[np.float64], statistic: Statistic
) -> tuple[float, float] | None:
    """95 % interval of ``statistic`` of the sums over ``columns`` ``[n, columns]``.

    None if the figure has no value in most of the resamples.
    """
    figures = statistic(bootstrap.counts @ columns)
    figures = figures[~np.isnan(figures)]
    if figures.size <= RESAMPLES // 2:
        return None
    low, high = np.quantile(figures, (0.025, 0.975))
    return float(low), float(high)


def add_recovery(
    rows: Sequence[Row],
    questions: Sequence[Question],
    results: Mapping[tuple[int, PolicyAndEncoder], Measurement],
    seed: int,
) -> None:
    """Add ``normalized_f1``, and what is recovered of the loss of reuse of standalone chunks."""
    groups = {kind: (inside, Bootstrap(len(inside), seed)) for kind, inside in by_type(questions).items()}
    for row in rows:
        inside, bootstrap = groups[row["question_type"]]
        way = PolicyAndEncoder(row["policy"], row["encoder"])
        figures: list[tuple[str, str, Statistic, PolicyAndEncoder]] = [
            ("normalized_f1", "f1", normalized_f1, REUSE),
            *((f"{name}_recovery", name, recovery, ALONE) for name in _RECOVERED),
        ]
        for name, metric, statistic, reuse in figures:
            columns = np.array(
                [
                    [getattr(results[i, one], metric) if (i, one) in results else np.nan for i in inside]
                    for one in (way, reuse, FULL)
                ]
            ).T
            value = float(statistic(columns.sum(axis=0, keepdims=True))[0])
            interval = None if np.isnan(value) else interval_of(bootstrap, columns, statistic)
            row[name] = None if np.isnan(value) else value
            row[f"{name}_low"], row[f"{name}_high"] = interval or (None, None)


def tables(report: BenchReport, recovered: bool) -> Iterator[Table]:
    """Those of the shipped bench, and what is ``recovered`` of the loss of reuse."""
    yield from shipped.tables(report)
    if recovered:
        title = "Recovered of what reuse of standalone chunks loses, with 95 % intervals"
        rows = [row for row in report.part(QUALITY).rows if row["question_type"] == ALL]
        yield table(title, rows, _RECOVERY)


def draw(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draw each metric over the ratio spent, with 95 % intervals; ``full`` is a level line."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    rows = [row for row in report.part(QUALITY).rows if row["question_type"] == ALL]
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

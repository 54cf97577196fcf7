"""``python -m benchmarks contexts``: how close reuse is over rows of which contexts.

Chunks of a measured prompt are encoded after passages that are not in that prompt, except in one line, which
is marked as a control. KL is that of the bare model's own greedy answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from tqdm.auto import tqdm

import ragcachekit
from benchmarks.context_draws import (
    CORPUS,
    DOCUMENT,
    MAX_CHARS,
    NEAR,
    OTHER,
    OWN,
    USES,
    VARIANTS,
    Context,
    draw_contexts,
    passages,
)
from benchmarks.datasets import Sampling, draw_questions
from benchmarks.fidelity import Work, interval_of, recovery
from benchmarks.output import Plot, written
from ragcachekit import RagCache
from ragcachekit.commands import options as opt
from ragcachekit.commands.console import INTERRUPTED, note, quiet_loading, show
from ragcachekit.commands.embedding import MiniLM
from ragcachekit.commands.questions import PromptMaker, Question, Sample
from ragcachekit.commands.report import BenchReport, Bootstrap, table
from ragcachekit.commands.workspace import load_checked
from ragcachekit.encode.background import BackgroundEncoder
from ragcachekit.encode.encoders import ChunkEncoder, NeighbourEncoder
from ragcachekit.encode.in_prompt import InPromptEncoder, RunningMean
from ragcachekit.engine.components import EngineComponents
from ragcachekit.errors import RagCacheError
from ragcachekit.forward.prefill import link_ahead
from ragcachekit.generate.options import end_tokens
from ragcachekit.model.encoding import InPromptEncoding
from ragcachekit.model.kv import ChunkKV
from ragcachekit.plan.companions import SimilarChunks
from ragcachekit.plan.encodings import Wanted
from ragcachekit.plan.link_plan import COMPUTED, LinkPlan, Missing, make_plan
from ragcachekit.plan.variants import IN_PROMPT, VariantPool
from ragcachekit.policies.base import PolicyAndEncoder
from ragcachekit.policies.registry import open_policy
from ragcachekit.quality.compare import Continuation, Reference, compare
from ragcachekit.store.base import KVStore
from ragcachekit.store.forgets import ForgetEpochs
from ragcachekit.store.memory import HostStore
from ragcachekit.types import DEFAULT_ENCODER, Ids, chunk_id

POLICIES = "reuse,lego:8,sensitive:0.1,impact:0.1"
BESIDE = "impact:0.1"
"""Differences are paired with this policy over the same contexts."""

MEAN, STANDALONE, SYSTEM, SIMILAR = DEFAULT_ENCODER, "standalone", "system", "similar:10"

PUBLISHED = {
    "variants of three prompts": (IN_PROMPT, ("craft:0.2", "craft:1", BESIDE)),  # Cache-Craft
    "ten similar chunks": (SIMILAR, ("query:0.1", "query:0.15", BESIDE)),  # FusionRAG
}
TOKENS = 24  # of an answer, at most
ALONE = PolicyAndEncoder("reuse", STANDALONE)
NAMESPACE = "default"
_FORMAT = 1


@dataclass(frozen=True)
class Found:
    """Of one question over one kind of contexts, with one policy.

    ``ratio`` is the share of its cacheable rows that was computed, ``contexts`` the most that any chunk's
    rows are the mean of.
    """

    kl: float
    ratio: float
    seconds: float
    contexts: int


def contexts(
    dataset: Annotated[str, typer.Option(help="squad:FILE or musique:FILE.")],
    other: Annotated[str, typer.Option(help="The same, of another subject.")],
    model: str = "sample",
    policies: opt.Policies = POLICIES,
    only: Annotated[str, typer.Option(help="Kinds of contexts, with commas; all, if empty.")] = "",
    count: Annotated[int, typer.Option(min=1, help="Questions.")] = 30,
    companions: Annotated[int, typer.Option(min=1, help="The n of average:n.")] = 2,
    distractors: Annotated[int, typer.Option(min=1, help="Passages beside the relevant ones.")] = 3,
    half: Annotated[str, typer.Option(help="Of the dataset: all, develop or report.")] = "report",
    seed: opt.Seed = 0,
    json: opt.Json = None,
    plot: Plot = None,
) -> None:
    """How close reuse is over rows of which contexts, none of them of the measured prompt."""
    quiet_loading()
    questions = draw_questions(dataset, Sampling(count, distractors, half, seed))
    corpus = passages(dataset)
    far = [text[:MAX_CHARS] for text in passages(other)]
    ways = ways_of(opt.names(policies), all(one.document for one in questions))
    if kinds := opt.names(only):
        if unknown := sorted(set(kinds) - {way.encoder for way in ways}):
            raise typer.BadParameter(f"unknown contexts: {', '.join(unknown)}")
        ways = [way for way in ways if way == ALONE or way.encoder in kinds]
    work = json.with_name(json.name + ".work") if json is not None else None
    header = {"contexts": _FORMAT, "model": model, "seed": seed, "other": other}
    header |= {"version": ragcachekit.__version__, "companions": companions}
    lm, tokenizer = load_checked(model, None, "auto")
    near = SimilarChunks(corpus, MiniLM().embed(corpus))
    try:
        with (
            closing(Work(header, Sample(questions), work, Found)) as done,
            closing(Bench(lm, tokenizer, near)) as bench,
            tqdm(total=len(questions) * len(ways), unit="answer") as bar,
        ):
            for number, question in enumerate(questions):
                todo = [way for way in ways if (number, way) not in done]
                bar.update(len(ways) - len(todo))
                drawn = draw_contexts(question, questions, corpus, far, seed, companions, near.of)
                for way, found in bench.measure(question, drawn, todo):
                    done[number, way] = found
                    bar.update()
    except KeyboardInterrupt:
        if work is not None:
            note(f"interrupted; the results so far are in {work}, the same command goes on")
        raise typer.Exit(INTERRUPTED) from None
    report = BenchReport("contexts", model, seed, tuple(rows_of(ways, done, len(questions), seed)))
    show(table(f"Contexts: {model}, {len(questions)} questions", report.rows))
    written(report, json, plot, draw)
    if work is not None:
        work.unlink()


def ways_of(policies: Sequence[str], documents: bool) -> list[PolicyAndEncoder]:
    """Policies and contexts; ``documents``: those of the questions are known."""
    means = [*([DOCUMENT] if documents else []), NEAR, CORPUS, OTHER, OWN, *USES]
    ways = [PolicyAndEncoder(open_policy(policy).name, name) for name in means for policy in policies]
    ways += [PolicyAndEncoder(policy, name) for name, (_, own) in PUBLISHED.items() for policy in own]
    return [ALONE, PolicyAndEncoder("reuse", SYSTEM), *ways]


# -- what they do to answers ---------------------------------------------------------------------------


Rows = tuple[tuple[str, ...], ChunkKV]
"""Ids of the segments before a chunk in an earlier prompt, and its rows there."""


class Others:
    """Neighbours of ``source`` without those in ``measured``, the passages of the present prompt."""

    def __init__(self, source: SimilarChunks) -> None:
        self._source, self.measured = source, frozenset[str]()

    def of(self, text: str) -> Sequence[str]:
        """The most similar first."""
        return [other for other in self._source.of(text) if other not in self.measured]


class Bench:
    """Measures prompts with one model, over rows that are made for each. Close it."""

    def __init__(self, model: Any, tokenizer: Any, near: SimilarChunks) -> None:
        self._model, self._maker, self._near = model, PromptMaker(tokenizer), Others(near)
        self._opened, self._parts = ExitStack(), dict[str, EngineComponents]()
        for name in (STANDALONE, SYSTEM, MEAN, IN_PROMPT, SIMILAR):
            others = self._near if name == SIMILAR else None
            rag = RagCache(model, tokenizer, policy="reuse", encoder=name, neighbours=others)
            self._parts[name] = self._opened.enter_context(rag).components
        self._parser, self._rope = self._parts[MEAN].parser, self._parts[MEAN].rope
        self._in_prompts = InPromptEncoder(model, self._rope)
        self._system, self._earlier = Ids(), dict[tuple[Ids, Context], Rows]()

    def close(self) -> None:
        """Close the engines."""
        self._opened.close()

    def measure(
        self,
        question: Question,
        drawn: Mapping[str, Mapping[str, list[Context]]],
        ways: Sequence[PolicyAndEncoder],
    ) -> Iterator[tuple[PolicyAndEncoder, Found]]:
        """Each way on one question; RagCacheError if the library has other tokens than the tokenizer."""
        if not ways:
            return
        asked = self._maker.prompt(question)
        self._near.measured = frozenset(question.chunks)
        self._parser.register(NAMESPACE, list(question.chunks))
        prompt = self._parser.parse(asked.prompt, NAMESPACE)
        if prompt.token_ids != asked.token_ids:
            raise RagCacheError(
                f"the prompt of {question.question!r} has other tokens here; nothing to measure"
            )
        full = Continuation(self._model, {"input_ids": torch.tensor([prompt.token_ids])})
        answer, log_probs = full.greedy(TOKENS, end_tokens({}, self._model.generation_config))
        reference = Reference((answer[:-1],), (log_probs,))
        self._system, self._earlier = prompt.segments[0].token_ids, {}
        for name in dict.fromkeys(way.encoder for way in ways):
            encoder, _ = PUBLISHED.get(name, (name if name in (STANDALONE, SYSTEM) else MEAN, ()))
            kind = VARIANTS if encoder == IN_PROMPT else name
            with closing(HostStore(1 << 60)) as store:
                pool = VariantPool()
                for way in (way for way in ways if way.encoder == name):
                    request = self._parts[encoder].planner.request_over(
                        store, prompt.segments, prompt.texts, open_policy(way.policy), NAMESPACE
                    )
                    for want in request.wanted:
                        of = drawn.get(prompt.texts.get(want.token_ids, ""), {}).get(kind, [])
                        self._fill(store, pool, want, of)
                    yield way, self._found(make_plan(request, pool), reference)

    def _fill(self, store: KVStore, pool: VariantPool, want: Wanted, of: Sequence[Context]) -> None:
        """Store what serves a wanted chunk, made of these contexts; a prompt's first chunk is exact."""
        whole = want.whole or want
        is_variant = isinstance(want.encoding, InPromptEncoding)
        key = whole.average if not is_variant else replace(whole.key, context=())
        if key is None or len(want.before) < 2 or not of:
            item = want.to_encode
            if item.key not in store:
                self._encoder(store).now([Missing(item.key, item.token_ids, item.encoding)])
            return
        if key in pool or pool.average(key) is not None or pool.ranked(key, ()):
            return
        found = [self._encoded(whole, context) for context in of]
        if is_variant:
            for before, kv in found:
                key = replace(whole.key, context=before)
                store.put(key, kv)
                pool.add(key, kv)
            return
        mean = RunningMean()
        for number, (_, kv) in enumerate(found):
            mean.add(kv, number)
        store.put(key, mean.result())
        pool.add_average(key)

    def _encoded(self, want: Wanted, context: Context) -> Rows:
        """Ids of what precedes a chunk in an earlier prompt, and its rows there."""
        if (known := self._earlier.get((want.token_ids, context))) is not None:
            return known
        joint = self._parser.blank_line
        before = [ids for text in context.passages for ids in (self._parser.chunk_ids(text), joint)]
        segments = [ids for ids in (self._system, *before) if ids]
        asked = self._parser.question
        if context.question is not None:
            asked = self._parser.chunk_ids(f"\n\n{context.question}\n")
        tokens = tuple(token for ids in segments for token in ids)
        encoding = InPromptEncoding(IN_PROMPT, tokens, segments=tuple(map(len, segments)))
        names = tuple(chunk_id(ids, NAMESPACE) for ids in segments)
        item = Missing(want.key, want.token_ids, encoding)
        (kv,) = self._in_prompts.forward([item], [item] if context.summed else [], asked)
        self._earlier[want.token_ids, context] = names, kv
        return names, kv

    def _encoder(self, store: KVStore) -> BackgroundEncoder:
        alone = ChunkEncoder(self._model, self._rope)
        near = NeighbourEncoder(self._model, self._rope, alone, store)
        parts = alone, store, lambda: True, near, self._in_prompts
        return BackgroundEncoder(*parts, lambda *_: None, ForgetEpochs())

    def _found(self, plan: LinkPlan, reference: Reference) -> Found:
        started_at = time.perf_counter()
        linked, plan = link_ahead(self._model, self._rope, plan)
        seconds, report = time.perf_counter() - started_at, plan.report
        uses = [use for use in (report.prefix, *report.chunks) if use is not None]
        if any(use.source == COMPUTED for use in uses):
            raise RagCacheError(f"chunks could not be encoded for {report}")
        found = compare(Continuation(self._model, linked.inputs), reference)
        return Found(found.kl, report.recompute_ratio, seconds, max(use.contexts for use in uses))


# -- the report ----------------------------------------------------------------------------------------


def rows_of(
    ways: Sequence[PolicyAndEncoder], done: Mapping[tuple[int, PolicyAndEncoder], Found], n: int, seed: int
) -> Iterator[dict[str, Any]]:
    """A row per way; what is recovered is relative to ``reuse`` of standalone chunks."""
    bootstrap = Bootstrap(n, seed)
    kl = {way: np.array([done[i, way].kl for i in range(n)]) for way in ways}
    for way in ways:
        found = [done[i, way] for i in range(n)]
        columns = np.stack([kl[way], kl[ALONE], np.zeros(n)], axis=1)
        low, high = interval_of(bootstrap, columns, recovery) or (None, None)
        row: dict[str, Any] = {
            "contexts": way.encoder,
            "policy": way.policy,
            "of": max(one.contexts for one in found),
            "recomputed": float(np.mean([one.ratio for one in found])),
            "kl": float(kl[way].mean()),
            "recovered": float(recovery(columns.sum(axis=0, keepdims=True))[0]),
            "low": low,
            "high": high,
        }
        beside = kl.get(PolicyAndEncoder(BESIDE, way.encoder))
        if beside is not None and way.policy != BESIDE:
            less, more = bootstrap.of_mean(kl[way] - beside)
            row |= {"minus_impact": float((kl[way] - beside).mean()), "minus_low": less, "minus_high": more}
        else:
            row |= dict.fromkeys(("minus_impact", "minus_low", "minus_high"))
        yield row | {"ms": 1e3 * float(np.median([one.seconds for one in found])), "n": n}


def draw(report: BenchReport, path: Path) -> None:
    """Draw what is recovered, a group of points per kind of contexts."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes, names = figure.subplots(), list(dict.fromkeys(row["contexts"] for row in report.rows))
    policies = list(dict.fromkeys(row["policy"] for row in report.rows))
    for number, policy in enumerate(policies):
        rows = [row for row in report.rows if row["policy"] == policy and row["low"] is not None]
        at = [names.index(row["contexts"]) + (number / len(policies) - 0.5) / 2 for row in rows]
        middle, low, high = (np.array([row[key] for row in rows]) for key in ("recovered", "low", "high"))
        axes.errorbar(middle, at, xerr=np.maximum(0, [middle - low, high - middle]), fmt="o", label=policy)
    axes.set(yticks=range(len(names)), yticklabels=names, xlabel="KL recovered of reuse of standalone chunks")
    axes.invert_yaxis()
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)

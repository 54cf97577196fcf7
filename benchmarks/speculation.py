"""``python -m benchmarks speculation``: speculative pipelining over an IVF search (RAGCache, section 7.4)."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from tqdm.auto import tqdm

from benchmarks.ivf_index import FaissIvfIndex
from benchmarks.query_cache.workload import Workload, of_dataset
from benchmarks.serve.workload import Documents, text_documents
from benchmarks.speculative_chain import chain_rows
from ragcachekit import RagCache, SpeculativePipeline, TreeConfig
from ragcachekit.commands import options as opt
from ragcachekit.commands.console import quiet_loading, show, written
from ragcachekit.commands.report import BenchReport
from ragcachekit.errors import RagCacheError
from ragcachekit.model.loading import load_model
from ragcachekit.retrieval.index import VectorIndex
from ragcachekit.retrieval.plumbing import STAGES
from ragcachekit.types import DEFAULT_POLICY

AFTER, SPECULATIVE, WRONG = WAYS = ("after the search", "speculative", "always wrong")
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
LISTS = 256

Ids = tuple[Any, ...]


def speculation(
    dataset: Annotated[str, typer.Option(help="squad:FILE, ...: its passages are searched.")],
    model: str = "sample",
    policy: opt.Policy = DEFAULT_POLICY,
    vectors: Annotated[int, typer.Option(help="Passages and noisy copies of them.")] = 250_000,
    shares: Annotated[str, typer.Option(help="Of the lists that are searched.")] = "0.125,0.25,0.5,1",
    stages: int = 8,
    results: int = 2,
    documents: int = 64,
    chunk_tokens: int = 190,
    questions: int = 30,
    chain: Annotated[bool, typer.Option(help="Ask through LangChain, over our own graph index.")] = False,
    ef_search: Annotated[int, typer.Option(help="Breadth of the search in that.")] = 8192,
    json: opt.Json = None,
) -> None:
    """Search time that speculative pipelining does not hide (RAGCache, table 3).

    Every question is asked in three ways, in turn: its request is submitted after the search; a pipeline
    submits provisional documents; the same where all provisional documents are wrong. All documents are
    cached beforehand, and answers must be the same. ``search_share`` is the search's time over that of the
    prefill after it. ``exposed_ms`` is the part of the search before the final request was submitted.

    With ``--chain``, a plain chain and ``SpeculativeRag`` are asked in turn. ``exposed_ms`` is then the time
    to the first piece of text less that of the prefill.
    """
    quiet_loading()
    lm, tokenizer = load_model(model, "cpu", dtype=torch.float32)
    lm.generation_config.eos_token_id = None
    workload = of_dataset(dataset, questions, wordings=1, vectors=vectors, progress=True)
    texts = text_documents(tokenizer, documents, chunk_tokens, dataset=dataset)
    found: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="ragcachekit-bench-") as folder,
        RagCache(
            lm,
            tokenizer,
            policy=policy,
            encode_after=1,
            cache_dir=folder,
            tree=TreeConfig(host_bytes=0) if chain else None,  # every way computes the whole prompt
        ) as rag,
    ):
        if chain:
            decoded = [tokenizer.decode(ids).strip() for ids in texts.chunks]
            found += chain_rows(rag, workload, decoded, results, ef_search)
        else:
            for prompt in texts.each_once(results):
                rag.generate(prompt, max_new_tokens=1)
            rag.flush()
        searched = () if chain else opt.numbers("--shares", shares)
        with tqdm(total=len(searched) * questions, unit="question") as bar:
            for share in searched:
                probes = max(1, round(share * LISTS))
                index = FaissIvfIndex(workload.chunks.shape[1], lists=LISTS, probes=probes)
                index.add(range(len(workload.chunks)), workload.chunks)
                asker = Asker(TimedEngine(rag), texts, workload, index, results, stages)
                asker.ask(0, None)
                found += rows(asker, questions, probes, bar)
                del asker, index  # two large ones at once may not fit
    steps = STAGES if chain else stages
    name = f"{model}, {policy}; {workload.name}; {results} results in at most {steps} stages"
    report = BenchReport("speculation", name, 0, tuple(found))
    show(report.table(f"Speculative pipelining: {name}"))
    written(report, json)


class TimedEngine:
    """Passes requests on to an engine and notes when the newest one was submitted."""

    def __init__(self, rag: RagCache) -> None:
        self.queue, self._rag, self._started = rag.queue, rag, dict[Any, float]()

    def submit(self, prompt: Any, **options: Any) -> Any:
        submitted_at = time.perf_counter()
        request = self._rag.submit(prompt, **options)
        self._started = {request: submitted_at}
        return request

    def started(self, request: Any) -> float:
        """When a request was submitted; it is the newest one."""
        return self._started[request]


@dataclass(frozen=True)
class Timing:
    """One question in one way; times in ms, ``prefill`` from its submission to its first token."""

    search: float
    prefill: float
    exposed: float
    ttft: float
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Asker:
    """Asks questions over one index; ``results`` nearest vectors stand for as many documents or fewer."""

    engine: TimedEngine
    documents: Documents
    workload: Workload
    index: VectorIndex
    results: int
    stages: int

    def ask(self, at: int, pipeline: SpeculativePipeline | None, wrong: bool = False) -> Timing:
        """Search and answer, one after the other without a pipeline."""
        ended: list[float] = []

        def staged() -> Iterator[Ids]:
            found = list[Ids]()
            for result in self.index.search_stages(self.workload.questions[at], self.results, self.stages):
                if found:
                    yield self._misled(found[-1], len(found)) if wrong else found[-1]
                found.append(result.ids)
            ended.append(time.perf_counter())
            yield found[-1]

        def prompt(ids: Sequence[Any]) -> Any:
            places = dict.fromkeys(one % len(self.documents.chunks) for one in ids)
            return self.documents.prompt(list(places), at % len(self.documents.questions))

        submitted_at = time.perf_counter()
        if pipeline is None:
            found = self.index.search(self.workload.questions[at], self.results).ids
            ended.append(time.perf_counter())
            request = self.engine.submit(prompt(found), **OPTIONS)
        else:
            with pipeline.begin(**OPTIONS) as speculation:
                for ids in staged():
                    speculation.offer(asked := prompt(ids))
                request = speculation.submit(asked, **OPTIONS)
        answer, submitted = request.result(), self.engine.started(request)
        first = max(ended[0], submitted + answer.report.ttft_ms / 1e3)
        times = (ended[0] - submitted_at, min(submitted, ended[0]) - submitted_at, first - submitted_at)
        search, exposed, ttft = (seconds * 1e3 for seconds in times)
        return Timing(search, answer.report.ttft_ms, exposed, ttft, answer.token_ids)

    def _misled(self, ids: Ids, stage: int) -> Ids:
        """Documents that are none of those of the search, others at every stage."""
        return tuple(one + stage + 1 for one in ids)


def rows(asker: Asker, questions: int, probes: int, bar: tqdm[Any]) -> Iterator[dict[str, Any]]:
    """A row per way; RagCacheError if one way answers otherwise than another."""
    pipelines = {way: SpeculativePipeline(asker.engine) for way in WAYS[1:]}  # type: ignore[arg-type]
    timed = defaultdict[str, list[Timing]](list)
    for at in range(questions):
        turn = at % len(WAYS)
        for way in (*WAYS[turn:], *WAYS[:turn]):
            timed[way].append(asker.ask(at, pipelines.get(way), way == WRONG))
        if len({timed[way][-1].token_ids for way in WAYS}) != 1:
            raise RagCacheError(f"question {at} has other answers with speculation; no figures are given")
        bar.update()
    plain = timed[AFTER]
    for way in WAYS:
        stats = pipelines[way].stats if way in pipelines else None
        exposed, ttft = (statistics.fmean(getattr(a, n) for a in timed[way]) for n in ("exposed", "ttft"))
        yield {
            "probes": probes,
            "way": way,
            "search_ms": statistics.fmean(a.search for a in timed[way]),
            "search_share": sum(a.search for a in plain) / sum(a.prefill for a in plain),
            "exposed_ms": exposed,
            "exposed_gain": statistics.fmean(a.exposed for a in plain) / exposed,
            "ttft_ms": ttft,
            "ttft_ms_p50": statistics.median(a.ttft for a in timed[way]),
            "ttft_gain": statistics.fmean(a.ttft for a in plain) / ttft,
            "provisional": stats.provisional if stats else None,
            "right": stats.right if stats else None,
            "n": questions,
        }

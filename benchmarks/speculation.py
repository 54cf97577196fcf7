"""Speculative pipelining over an IVF search (RAGCache, section 7.4, table 3): search time that is not hidden.

Every question is asked in three ways, in turn: its request is submitted after the search; a pipeline submits
provisional documents; the same where all provisional documents are wrong. All documents are cached
beforehand, and answers must be the same. ``search_share`` is the search's time over that of the prefill
behind it. ``exposed_ms`` is the part of the search during which the final request was not submitted yet.

    python benchmarks/speculation.py --model sample --dataset squad:dev-v2.0.json --json out.json
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from ragcachekit import RagCache, SpeculativePipeline
from ragcachekit.cli.console import quiet_loading, show
from ragcachekit.commands.bench.query_cache.workload import Workload, of_dataset
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.bench.serve.workload import Documents, text_documents
from ragcachekit.commands.sample_model import resolve_model
from ragcachekit.errors import RagCacheError
from ragcachekit.model.pretrained import load_model
from ragcachekit.retrieval.index import VectorIndex, open_index

AFTER, SPECULATIVE, WRONG = WAYS = ("after the search", "speculative", "always wrong")
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
LISTS = 256

Ids = tuple[Any, ...]


class TimedEngine:
    """Passes requests on to an engine and notes when the newest one was submitted."""

    def __init__(self, rag: RagCache) -> None:
        self.queue, self._rag, self._begun = rag.queue, rag, dict[Any, float]()

    def submit(self, prompt: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        request = self._rag.submit(prompt, **options)
        self._begun = {request: begun}
        return request

    def begun(self, request: Any) -> float:
        """When a request was submitted; it is the newest one."""
        return self._begun[request]


@dataclass(frozen=True)
class Asked:
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

    def ask(self, at: int, pipeline: SpeculativePipeline | None, wrong: bool = False) -> Asked:
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

        begun = time.perf_counter()
        if pipeline is None:
            found = self.index.search(self.workload.questions[at], self.results).ids
            ended.append(time.perf_counter())
            request = self.engine.submit(prompt(found), **OPTIONS)
        else:
            request = pipeline.submit(staged(), prompt, **OPTIONS)
        answer, submitted = request.result(), self.engine.begun(request)
        first = max(ended[0], submitted + answer.report.ttft_ms / 1e3)
        times = (ended[0] - begun, min(submitted, ended[0]) - begun, first - begun)
        search, exposed, ttft = (seconds * 1e3 for seconds in times)
        return Asked(search, answer.report.ttft_ms, exposed, ttft, answer.token_ids)

    def _misled(self, ids: Ids, stage: int) -> Ids:
        """Documents that are none of those of the search, others at every stage."""
        return tuple(one + stage + 1 for one in ids)


def rows(asker: Asker, questions: int, probes: int, bar: tqdm[Any]) -> Iterator[dict[str, Any]]:
    """A row per way; RagCacheError if one way answers otherwise than another."""
    pipelines = {way: SpeculativePipeline(asker.engine) for way in WAYS[1:]}  # type: ignore[arg-type]
    asked = defaultdict[str, list[Asked]](list)
    for at in range(questions):
        turn = at % len(WAYS)
        for way in (*WAYS[turn:], *WAYS[:turn]):
            asked[way].append(asker.ask(at, pipelines.get(way), way == WRONG))
        if len({asked[way][-1].token_ids for way in WAYS}) != 1:
            raise RagCacheError(f"question {at} has other answers with speculation; no figures are given")
        bar.update()
    plain = asked[AFTER]
    for way in WAYS:
        stats = pipelines[way].stats if way in pipelines else None
        exposed, ttft = (statistics.fmean(getattr(a, n) for a in asked[way]) for n in ("exposed", "ttft"))
        yield {
            "probes": probes,
            "way": way,
            "search_ms": statistics.fmean(a.search for a in asked[way]),
            "search_share": sum(a.search for a in plain) / sum(a.prefill for a in plain),
            "exposed_ms": exposed,
            "exposed_gain": statistics.fmean(a.exposed for a in plain) / exposed,
            "ttft_ms": ttft,
            "ttft_ms_p50": statistics.median(a.ttft for a in asked[way]),
            "ttft_gain": statistics.fmean(a.ttft for a in plain) / ttft,
            "provisional": stats.provisional if stats else None,
            "right": stats.right if stats else None,
            "n": questions,
        }


def _index(workload: Workload, probes: int) -> VectorIndex:
    index = open_index("faiss-ivf", workload.chunks.shape[1], lists=LISTS, probes=probes)
    index.add(range(len(workload.chunks)), workload.chunks)
    return index


def run(given: argparse.Namespace) -> BenchReport:
    """All rows: per number of probed lists, three ways."""
    model, tokenizer = load_model(resolve_model(given.model), "cpu", dtype=torch.float32)
    model.generation_config.eos_token_id = None
    workload = of_dataset(given.dataset, given.questions, wordings=1, vectors=given.vectors, progress=True)
    documents = text_documents(tokenizer, given.documents, given.chunk_tokens, dataset=given.dataset)
    found: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="ragcachekit-bench-") as folder,
        RagCache(model, tokenizer, policy=given.policy, encode_after=1, cache_dir=folder) as rag,
    ):
        for prompt in documents.each_once(given.results):
            rag.generate(prompt, max_new_tokens=1)
        rag.flush()
        shares = [float(share) for share in given.shares.split(",")]
        with tqdm(total=len(shares) * given.questions, unit="question") as bar:
            for share in shares:
                probes = max(1, round(share * LISTS))
                bar.set_description(f"index of {len(workload.chunks)} vectors, {probes} of {LISTS} lists")
                index = _index(workload, probes)
                asker = Asker(TimedEngine(rag), documents, workload, index, given.results, given.stages)
                asker.ask(0, None)
                found += rows(asker, given.questions, probes, bar)
                del asker, index  # two large ones at once may not fit
    name = f"{given.model}, {given.policy}; {workload.name}; {given.results} results in {given.stages} stages"
    return BenchReport("speculation", name, 0, tuple(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="sample")
    parser.add_argument("--dataset", required=True, help="squad:FILE, ...: its passages are searched")
    parser.add_argument("--policy", default="impact:0.1")
    parser.add_argument("--vectors", type=int, default=250_000, help="passages and noisy copies of them")
    parser.add_argument("--shares", default="0.125,0.25,0.5,1", help="of the lists that are searched")
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--results", type=int, default=2)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--chunk-tokens", type=int, default=190)
    parser.add_argument("--questions", type=int, default=30)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    quiet_loading()
    report = run(given)
    show(report.table(f"Speculative pipelining: {report.model}"))
    if given.json:
        report.write_json(given.json)


if __name__ == "__main__":
    main()

"""``python -m benchmarks demo``: SmolLM2 answers from Python's documentation, with caches and in full."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import AutoModelForCausalLM

import ragcachekit
from benchmarks.demo import corpus, first_token, plot, query_hits, show
from benchmarks.demo.answers import Answering, answer
from benchmarks.demo.chain import build_chain
from benchmarks.demo.corpus import QUICK, Corpus, Settings
from benchmarks.demo.engines import LIBRARY, main_engine
from benchmarks.demo.manual_search import CHUNK
from benchmarks.demo.questions import Question
from benchmarks.demo.score import PART, Answered, quality
from benchmarks.demo.work import Work
from langchain_ragcachekit import ChatRagCache, RagCacheRetriever
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.console import quiet_loading
from ragcachekit.commands.reading_prompt import prompt_for
from ragcachekit.commands.sample_model import resolve_model
from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.errors import RagCacheError

RESULTS, WORK, PICTURE = "demo.json", "work.jsonl", "demo.png"


def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="Three questions: shows that all works, its figures mean nothing.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="All of the documentation, not its first 600 chunks.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for results, picture and embeddings.")] = Path("demo-out"),
) -> None:
    """SmolLM2 answers from Python's documentation: answers, first-token times, query cache, one picture.

    An interrupted demo continues where it stopped.
    """
    if quick and full:
        raise ValueError("give --quick or --full, not both")
    quiet_loading()
    settings = QUICK if quick else Settings()
    run(replace(settings, chunks=None) if full else settings, out)


def run(settings: Settings, out: Path, *, progress: bool = True) -> BenchReport:
    """Run the demo, print what it finds, and write ``demo.json`` and ``demo.png`` to the folder ``out``.

    Results per question go to ``work.jsonl`` as they come, from which an interrupted demo continues.

    Raises RagCacheError if the library's answers are not the model's own where they must be, or the
    documentation answers no question; OSError if ``out`` cannot be written.
    """
    start = time.monotonic()
    model, kv = Path(resolve_model(settings.model)), out / "kv"
    read = corpus.read(settings, out / "cache", progress)
    show.corpus(len(read.texts), settings.vectors, read.asked, read.missing)
    if not read.asked:
        raise RagCacheError("the documentation of this Python answers none of the questions; use another one")
    with main_engine(model, kv) as rag, Work(out / WORK, _header(settings, read)) as work:
        queries, retriever = _queries(read, rag, progress)
        answered = _answers(settings, read, rag, model, retriever, work, progress)
        timed = first_token.time_all(rag, answered[: settings.timed], read.texts, work, model, kv, progress)
    rows = [{"part": PART, **asdict(one)} for one in answered]
    rows += [*first_token.rows(timed), quality(answered, settings.seed), *queries]
    report = BenchReport("demo", settings.model, settings.seed, tuple(rows))
    report.write_json(out / RESULTS)
    show.answers(answered)
    show.figures(report)
    plot.draw(report, out / PICTURE)
    show.end(time.monotonic() - start, out, (RESULTS, PICTURE))
    return report


def _queries(read: Corpus, rag: RagCache, progress: bool) -> tuple[list[dict[str, Any]], RagCacheRetriever]:
    """All wordings through the query cache: its rows, and the retriever with what it holds then."""
    retriever = RagCacheRetriever.wrap(
        read.retriever, embeddings=read.embeddings, cache=rag, tolerance=read.calibration.tolerance
    )
    lookups = query_hits.replay(read.retriever, retriever, read.wordings, progress)
    calibrated = {
        "tolerance": read.calibration.tolerance,
        "calibration_pairs": read.calibration.different_pairs,
    }
    rows = [query_hits.row(lookups, read.evidence, embed_ms=read.embed_ms, **calibrated)]
    return [*rows, *query_hits.sweep(lookups, read.wordings, read.embeddings, read.evidence)], retriever


def _answers(
    settings: Settings,
    read: Corpus,
    rag: RagCache,
    model: Path,
    retriever: RagCacheRetriever,
    work: Work,
    progress: bool,
) -> list[Answered]:
    left = [question for question in read.asked if work.get(PART, question.text) is None]
    if left:
        places = {place for question in left for place in _found(retriever, question)}
        before = prompt_for(rag.tokenizer).before
        rag.encode([read.texts[place] for place in sorted(places)], system=before, progress=progress)
        # A second copy, which the library never touches: the answers of full are checked against it.
        own = AutoModelForCausalLM.from_pretrained(model, local_files_only=True).eval()
        answering = Answering(rag, own, settings.max_tokens)
        chain = build_chain(retriever, ChatRagCache(cache=rag, max_tokens=settings.max_tokens))
        usual = {question.text: _found(read.retriever, question) for question in left}
        answer(answering, left, usual, read.texts, chain, work, progress)
    return [Answered.of(work.results[PART, question.text]) for question in read.asked]


def _header(settings: Settings, read: Corpus) -> dict[str, Any]:
    """What must be the same for results to go together; more requests may be timed."""
    asked = [asdict(question) for question in read.asked]
    described = [asdict(replace(settings, timed=0)), LIBRARY, read.texts, asked, read.calibration.tolerance]
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    return {"version": ragcachekit.__version__, "settings": digest}


def _found(retriever: Any, question: Question) -> Sequence[int]:
    return [document.metadata[CHUNK] for document in retriever.invoke(question.text)]

"""``make demo FULL=1``: SmolLM2 answers from Python's documentation, with caches and in full."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM

from benchmarks.demo import corpus, first_token, query_hits, report
from benchmarks.demo.answers import PART, Answered, Answering, quality
from benchmarks.demo.chain import build_chain
from benchmarks.demo.corpus import CHUNK, Corpus, Question, Settings
from langchain_ragcachekit import ChatRagCache, RagCacheRetriever
from ragcachekit.commands.console import show
from ragcachekit.commands.questions import PromptMaker
from ragcachekit.commands.report import BenchReport
from ragcachekit.config import StoreConfig
from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.errors import RagCacheError
from ragcachekit.model.loading import resolve_model

RESULTS, PICTURE = "demo.json", "demo.png"


def run(settings: Settings, out: Path, *, progress: bool = True) -> BenchReport:
    """Run the demo, print what it finds, and write ``demo.json`` and ``demo.png`` to the folder ``out``.

    Raises RagCacheError if the library's answers are not the model's own where they must be, or the
    documentation answers no question; OSError if ``out`` cannot be written.
    """
    start = time.monotonic()
    model, kv = Path(resolve_model(settings.model)), out / "kv"
    read = corpus.read(settings, progress)
    show(
        f"[bold]SmolLM2-135M-Instruct[/] answers {len(read.asked)} questions from {len(read.texts)} chunks "
        f"of the documentation of Python's standard library (Faiss, {settings.vectors:,} vectors, random "
        "fillers included)"
    )
    for question in read.missing:
        show(f"  left out, its answer is not in these chunks: {escape(question.text)}")
    if not read.asked:
        raise RagCacheError("the documentation of this Python answers none of the questions; use another one")
    with RagCache.from_pretrained(model, store=StoreConfig(disk_path=kv), cold="now") as rag:
        queries, retriever = query_figures(read, rag, progress)
        answered = _answers(settings, read, rag, model, retriever, progress)
        timed = first_token.time_all(rag, answered[: settings.timed], read.texts, model, kv, progress)
    shutil.rmtree(kv, ignore_errors=True)
    rows = [{"part": PART, **asdict(one)} for one in answered]
    rows += [*first_token.rows(timed), quality(answered, settings.seed), *queries]
    found = BenchReport("demo", settings.model, settings.seed, tuple(rows))
    found.write_json(out / RESULTS)
    report.answers(answered)
    report.figures(found)
    report.draw(found, out / PICTURE)
    show(f"Wrote {RESULTS} and {PICTURE} to {out}; {time.monotonic() - start:.0f} s")
    return found


def query_figures(
    read: Corpus, rag: RagCache, progress: bool
) -> tuple[list[dict[str, Any]], RagCacheRetriever]:
    """All wordings through the query cache: its rows, and the retriever with what it holds then."""
    retriever = RagCacheRetriever.wrap(
        read.retriever, embeddings=read.embeddings, rag=rag, tolerance=read.calibration.tolerance
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
    progress: bool,
) -> list[Answered]:
    places = {place for question in read.asked for place in found_places(retriever, question)}
    before = PromptMaker(rag.tokenizer).before
    rag.encode([read.texts[place] for place in sorted(places)], system=before, progress=progress)
    # A second copy, which the library never touches: the answers of full are checked against it.
    own = AutoModelForCausalLM.from_pretrained(model, local_files_only=True).eval()
    answering = Answering(rag, own, settings.max_tokens)
    chain = build_chain(retriever, ChatRagCache(rag=rag, max_tokens=settings.max_tokens))
    return [
        answering.answered(question, found_places(read.retriever, question), read.texts, chain)
        for question in tqdm(read.asked, "answers", unit="question", disable=not progress)
    ]


def found_places(retriever: Any, question: Question) -> Sequence[int]:
    """Places among the texts of the chunks that are found for a question's first wording."""
    return [document.metadata[CHUNK] for document in retriever.invoke(question.text)]

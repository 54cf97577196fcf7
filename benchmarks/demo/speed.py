"""The demo's second table: TTFT of a LangChain chain over the manual of Python's standard library.

Real documents, real embeddings and a real subword tokenizer; the model has the shape of SmolLM2-135M
and random weights, which is enough to measure time and of no use for answers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.documents import Document
from langchain_core.prompts import PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnablePassthrough
from tqdm.auto import tqdm

from benchmarks.demo.manual import DEFAULT_CHUNKS
from benchmarks.demo.manual_search import ManualRetriever, bare_count, manual_retriever, manual_texts
from langchain_ragcachekit import RagCacheLLM, RagCacheRetriever
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.bench.shapes import describe, random_model
from ragcachekit.commands.bench.timing import (
    NO_TIER,
    ONE_TOKEN,
    Engines,
    Measured,
    Timings,
    check_exact,
    open_engines,
    rows,
)
from ragcachekit.commands.embedding import MiniLM
from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.errors import RagCacheError

TIERS = ("host", "disk")

QUESTIONS = (
    "How do I parse the arguments of the command line?",
    "How do I read and write a CSV file?",
    "How do I run another program and capture its output?",
    "How do I compute the SHA-256 digest of a file?",
    "How do I run functions in a pool of threads?",
    "How do I format a date and time as a string?",
    "How do I match text with a regular expression?",
    "How do I open a URL and read the response?",
)
POLICIES = ("lego:16", "reuse")
PROMPT = (
    "Answer from the documentation of the standard library.\n\n{context}\n\nQuestion: {question}\nAnswer:"
)
_JOINT = "\n\n"
_QUICK_CHUNKS, _QUICK_TOKENS, _QUICK_QUESTIONS = 250, 600, 3


@dataclass(frozen=True)
class _Assembled:
    """A prompt, and the chunks in it."""

    text: str
    chunks: tuple[str, ...]


def run(
    *,
    full_manual: bool = False,
    prompt_tokens: int = 2000,
    runs: int = 3,
    cache_dir: str | os.PathLike[str],
    progress: bool = True,
    quick: bool = False,
    shape: str = "smollm2-135m",
    embedder: MiniLM | None = None,
    seed: int = 0,
) -> BenchReport:
    """Ask questions about the standard library through a chain, and measure TTFT.

    Every question is asked in every way before the next one. ``full`` and ``cold``, which take a
    whole prefill each, are measured on the first ``runs`` questions only.

    Parameters
    ----------
    full_manual : bool
        All of the manual, not about 1,000 chunks.
    prompt_tokens : int
        Greatest length of a prompt.
    runs : int
        Questions that are also asked with ``full`` and ``cold``.
    cache_dir : path
        Where the chunks' embeddings are kept between calls.
    progress : bool
        Show bars.
    quick : bool
        A few chunks, short prompts, three questions: to see that it works.
    shape : str
        A key of :data:`~ragcachekit.commands.bench.shapes.SHAPES`.
    embedder : MiniLM, optional
        Embeds chunks and questions, and lends its tokenizer to the model; made here by default.
    seed : int
        Of the random weights.

    Returns
    -------
    BenchReport
        Rows ``policy, state, tier, prompt_tokens, recompute_ratio, ttft_ms, ttft_ms_min, ttft_ms_max,
        speedup, link_ms, runs``; ``state`` is cold where nothing was cached (the same for every policy),
        warm where all chunks were, and ``runs`` the number of questions.

    Raises
    ------
    ValueError
        For numbers that are too small.
    RagCacheError
        The library's answer is not the model's own; no figure is given then.
    """
    if runs < 1:
        raise ValueError(f"runs must be at least 1, got {runs}")
    questions = QUESTIONS[:_QUICK_QUESTIONS] if quick else QUESTIONS
    runs = min(runs, 1 if quick else len(questions))
    prompt_tokens = min(prompt_tokens, _QUICK_TOKENS) if quick else prompt_tokens
    embedder = embedder or MiniLM()
    limit = _QUICK_CHUNKS if quick else DEFAULT_CHUNKS
    texts = manual_texts(embedder.tokenizer, full_manual and not quick, limit)
    room = prompt_tokens - _tokens_around(embedder.tokenizer)
    retriever = manual_retriever(embedder, texts, room, Path(cache_dir), progress)
    model = random_model(shape, seed=seed)
    with open_engines(model, TIERS, embedder.tokenizer) as engines:
        prompts = _prompts(retriever, embedder, engines, questions)
        _warm_up(engines, prompts, progress)
        timings = _measure(engines, [prompt.text for prompt in prompts], runs, progress)
    name = f"{describe(shape)} (timing only)"
    return BenchReport("demo-speed", name, seed, tuple(_with_state(row) for row in rows(timings)))


def _prompts(
    retriever: ManualRetriever, embedder: MiniLM, engines: Engines, questions: Sequence[str]
) -> list[_Assembled]:
    """Each question's prompt as the chain assembles it; all engines learn of the chunks in it."""
    cached = RagCacheRetriever.wrap(retriever, embeddings=embedder, cache=engines.filler)
    chain = _chain(cached)
    out = []
    for question in questions:
        chunks = tuple(document.page_content for document in cached.invoke(question))
        # The chain's own search of the same question is answered by the query cache.
        out.append(_Assembled(chain.invoke(question).to_string(), chunks))
        for engine in (engines.filler, *engines.warm.values(), engines.cold):
            engine.register(chunks)
    return out


def _chain(retriever: BaseRetriever) -> Runnable[str, Any]:
    """The part of the user's chain before the language model."""

    def join(documents: Sequence[Document]) -> str:
        return _JOINT.join(document.page_content for document in documents)

    inputs: Any = {"context": retriever | join, "question": RunnablePassthrough()}
    chain: Runnable[str, Any] = inputs | PromptTemplate.from_template(PROMPT)
    return chain


def _tokens_around(tokenizer: Any) -> int:
    """Most tokens of a prompt beside its chunks: the template's, a question's, the special one in front."""
    count = bare_count(tokenizer)
    return count(PROMPT) + max(map(count, QUESTIONS)) + 1


def _warm_up(engines: Engines, prompts: Sequence[_Assembled], progress: bool) -> None:
    """Encode every chunk and the text before them, then check on a short prompt that answers are right."""
    engines.filler.encode(dict.fromkeys(chunk for p in prompts for chunk in p.chunks), progress=progress)
    short = PROMPT.format(context=_JOINT.join(prompts[0].chunks[:2]), question=QUESTIONS[0])
    engines.filler.generate(short, **ONE_TOKEN)
    check_exact(engines.warm[TIERS[-1]], short)


def _measure(engines: Engines, prompts: Sequence[str], runs: int, progress: bool) -> list[Timings]:
    full, unknown = Timings("full", NO_TIER), Timings(POLICIES[0], NO_TIER)
    linked = [Timings(policy, tier) for tier in engines.warm for policy in POLICIES]
    for number, prompt in enumerate(tqdm(prompts, disable=not progress, unit="question", desc="ttft")):
        if number < runs:
            _ask(engines.cold, prompt, full)
            _ask(engines.cold, prompt, unknown)
        for timings in linked:
            _ask(engines.warm[timings.tier], prompt, timings)
    return [full, unknown, *linked]


def _ask(rag: RagCache, prompt: str, timings: Timings) -> None:
    """Ask the language model of the chain for one token, and note what its report says."""
    llm = RagCacheLLM(cache=rag, policy=timings.policy, max_tokens=1)
    info = llm.generate([prompt]).generations[0][0].generation_info or {}
    report = info["ragcachekit"]
    link = report["link"]
    sources = {use["source"] for use in (*([link["prefix"]] if link["prefix"] else []), *link["chunks"])}
    cold = {"computed"} if timings.policy != "full" else set()
    expected = cold if timings.tier == NO_TIER else {timings.tier}
    if sources != expected:
        raise RagCacheError(
            f"{timings.policy}: expected chunks from {sorted(expected)}, got {sorted(sources)}"
        )
    found = Measured(report["ttft_ms"], link["link_ms"], link["recompute_ratio"], link["prompt_tokens"])
    timings.samples.append(found)


def _with_state(row: dict[str, Any]) -> dict[str, Any]:
    state = "warm" if row["tier"] != NO_TIER else "-" if row["policy"] == "full" else "cold"
    return {"policy": row["policy"], "state": state, **row}

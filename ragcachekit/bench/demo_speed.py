"""The demo's second table: TTFT of a LangChain chain over the manual of Python's standard library.

Real documents, real embeddings and a real subword tokenizer; the model has the shape of SmolLM2-135M
and random weights, which is enough to measure time and of no use for answers.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_ragcachekit import RagCacheLLM, RagCacheRetriever
from numpy.typing import NDArray
from pydantic import SkipValidation
from tqdm.auto import tqdm

from ragcachekit.bench import manual
from ragcachekit.bench.embedding import MiniLM
from ragcachekit.bench.report import BenchReport
from ragcachekit.bench.shapes import describe, random_model
from ragcachekit.bench.ttft import NO_TIER, TIERS, Timings, check_exact, open_engine, rows
from ragcachekit.engine import RagCache
from ragcachekit.errors import RagCacheError
from ragcachekit.search.registry import open_index

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
PROMPT = "Answer from the documentation of the standard library.\n\n{context}\n\nQuestion: {question}\nAnswer:"
RETRIEVED = 40
"""Chunks that are searched for; as many of the best as fit go into the prompt."""

_JOINT = "\n\n"
_QUICK_CHUNKS, _QUICK_TOKENS, _QUICK_QUESTIONS = 250, 600, 3


class Embedder(Protocol):
    """What the demo needs of :class:`~ragcachekit.bench.embedding.MiniLM`, a LangChain ``Embeddings`` too."""

    @property
    def tokenizer(self) -> Any:
        """A fast tokenizer of transformers: it measures the chunks and feeds the model."""
        ...

    def embed(self, texts: Sequence[str], *, progress: bool = False) -> NDArray[np.float32]:
        """Float32 ``[n, dim]``."""
        ...


class ManualRetriever(BaseRetriever):
    """Searches the chunks by embedding, and returns the best ones that fit into a number of tokens."""

    embedder: SkipValidation[Any]
    index: SkipValidation[Any]
    texts: tuple[str, ...]
    room: int
    count: SkipValidation[Callable[[str], int]]

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,  # noqa: ARG002
    ) -> list[Document]:
        found = self.index.search(self.embedder.embed_query(query), min(RETRIEVED, len(self.texts)))
        fitting: list[Document] = []
        left = self.room
        for number in found.ids:
            left -= self.count(self.texts[number])
            if left < 0:
                break
            fitting.append(Document(self.texts[number], id=str(number)))
        return fitting


def run(
    *,
    full_manual: bool = False,
    prompt_tokens: int = 2000,
    runs: int = 3,
    cache_dir: str | os.PathLike[str],
    progress: bool = True,
    quick: bool = False,
    shape: str = "smollm2-135m",
    embedder: Embedder | None = None,
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
        A key of :data:`~ragcachekit.bench.shapes.SHAPES`.
    embedder : Embedder, optional
        Default all-MiniLM-L6-v2.
    seed : int
        Of the random weights.

    Returns
    -------
    BenchReport
        Rows ``policy, state, tier, prompt_tokens, recompute_ratio, ttft_ms, ttft_ms_min, ttft_ms_max,
        speedup, link_ms, runs``; ``state`` is cold where nothing was cached, warm where all chunks
        were, and ``runs`` the number of questions.

    Raises
    ------
    ValueError
        For numbers that are too small.
    RagCacheError
        The library's answer is not the model's own (no figure is given then), or the manual is too small.
    """
    if runs < 1:
        raise ValueError(f"runs must be at least 1, got {runs}")
    questions = QUESTIONS[:_QUICK_QUESTIONS] if quick else QUESTIONS
    runs = min(runs, 1 if quick else len(questions))
    prompt_tokens = min(prompt_tokens, _QUICK_TOKENS) if quick else prompt_tokens
    embedder = embedder or MiniLM()
    limit = _QUICK_CHUNKS if quick else manual.DEFAULT_CHUNKS
    texts = manual_texts(embedder.tokenizer, full_manual and not quick, limit)
    retriever = manual_retriever(embedder, texts, prompt_tokens, Path(cache_dir), progress)
    model = random_model(shape, seed=seed)
    with ExitStack() as stack:
        warm = {t: stack.enter_context(open_engine(model, t, embedder.tokenizer, cold="never")) for t in TIERS}
        cold = stack.enter_context(open_engine(model, "host", embedder.tokenizer, cold="never"))
        prompts = _prompts(retriever, embedder, [*warm.values(), cold], questions)
        _warm_up(warm, prompts, progress)
        timings = _measure(warm, cold, [text for text, _ in prompts], runs, progress)
    name = f"{describe(shape)} (timing only)"
    return BenchReport("demo-speed", name, seed, tuple(_with_state(row) for row in rows(timings)))


def manual_texts(tokenizer: Any, full: bool, limit: int = manual.DEFAULT_CHUNKS) -> tuple[str, ...]:
    """The manual's chunks of at most 256 wordpieces of ``tokenizer``, special ones included."""

    def count(text: str) -> int:
        return len(tokenizer(text, truncation=False, verbose=False).input_ids)

    return tuple(chunk.text for chunk in manual.chunks(count, full=full, limit=limit))


def manual_retriever(
    embedder: Embedder, texts: tuple[str, ...], prompt_tokens: int, cache_dir: Path, progress: bool
) -> ManualRetriever:
    """A LangChain retriever over a Faiss index of the texts.

    Raises
    ------
    ValueError
        If no chunk fits into ``prompt_tokens``.
    """

    def count(text: str) -> int:
        return len(embedder.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    around = count(PROMPT) + max(map(count, QUESTIONS)) + 1
    room = prompt_tokens - around
    if room < manual.MAX_WORDPIECES:
        raise ValueError(f"prompt_tokens must be at least {around + manual.MAX_WORDPIECES}, got {prompt_tokens}")
    rows = cached_embeddings(embedder, texts, cache_dir, progress)
    index = open_index("faiss-flat", rows.shape[1])
    index.add(range(len(texts)), rows)
    return ManualRetriever(embedder=embedder, index=index, texts=texts, room=room, count=count)


def cached_embeddings(
    embedder: Embedder, texts: Sequence[str], cache_dir: Path, progress: bool
) -> NDArray[np.float32]:
    """Embeddings ``[n, dim]`` from the file named by embedder and texts, or computed and written there."""
    digest = hashlib.sha256(type(embedder).__qualname__.encode())
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    path = cache_dir / f"manual-{digest.hexdigest()[:32]}.npy"
    rows = _read_rows(path, len(texts))
    if rows is None:
        rows = embedder.embed(texts, progress=progress)
        _write_rows(path, rows)
    return rows


def _read_rows(path: Path, count: int) -> NDArray[np.float32] | None:
    """What the file holds, or None where it is missing or damaged: it is computed again then."""
    try:
        rows = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    whole = rows.dtype == np.float32 and rows.ndim == 2 and len(rows) == count and np.isfinite(rows).all()
    return rows if whole else None


def _write_rows(path: Path, rows: NDArray[np.float32]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        np.save(file, rows, allow_pickle=False)
    os.replace(file.name, path)


def _prompts(
    retriever: ManualRetriever, embedder: Embedder, engines: Sequence[RagCache], questions: Sequence[str]
) -> list[tuple[str, list[str]]]:
    """Each question's prompt as the chain assembles it, and the chunks in it; all engines learn of these."""
    if not isinstance(embedder, Embeddings):
        raise TypeError("the embedder must be a LangChain Embeddings too: the query cache embeds questions with it")
    out = []
    for question in questions:
        for engine in engines:
            cached = RagCacheRetriever.wrap(retriever, embeddings=embedder, cache=engine)
            documents = cached.invoke(question)
            text = _chain(cached).invoke(question).to_string()  # its search is answered by the query cache
        out.append((text, [document.page_content for document in documents]))
    if not all(chunks for _, chunks in out):
        raise RagCacheError("a question found no chunk that fits into the prompt; allow more prompt tokens")
    return out


def _chain(retriever: BaseRetriever) -> Runnable[str, Any]:
    """The part of the user's chain before the language model."""

    def join(documents: Sequence[Document]) -> str:
        return _JOINT.join(document.page_content for document in documents)

    inputs: Any = {"context": retriever | join, "question": RunnablePassthrough()}
    return inputs | PromptTemplate.from_template(PROMPT)


def _warm_up(warm: dict[str, RagCache], prompts: Sequence[tuple[str, list[str]]], progress: bool) -> None:
    """Encode every chunk once per tier, then check on a short prompt that the answers are right."""
    chunks = list(dict.fromkeys(chunk for _, found in prompts for chunk in found))
    for rag in warm.values():
        rag.encode(chunks, progress=progress)
    context = _JOINT.join(prompts[0][1][:2])
    for rag in warm.values():
        check_exact(rag, PROMPT.format(context=context, question=QUESTIONS[0]))


def _measure(
    warm: dict[str, RagCache], cold: RagCache, prompts: Sequence[str], runs: int, progress: bool
) -> list[Timings]:
    full, unknown = Timings("full", NO_TIER), Timings("cold", NO_TIER)
    linked = {(p, tier): Timings(p, tier) for p in POLICIES for tier in warm}
    for number, prompt in enumerate(tqdm(prompts, disable=not progress, unit="question", desc="ttft")):
        if number < runs:
            _ask(cold, prompt, "full", full)
            _ask(cold, prompt, POLICIES[0], unknown)
        for (policy, tier), timings in linked.items():
            _ask(warm[tier], prompt, policy, timings)
    return [full, unknown, *linked.values()]


def _ask(rag: RagCache, prompt: str, policy: str, timings: Timings) -> None:
    """Ask the language model of the chain for one token, and note what its report says."""
    llm = RagCacheLLM(cache=rag, policy=policy, max_tokens=1)
    info = llm.generate([prompt]).generations[0][0].generation_info or {}
    report = info["ragcachekit"]
    link = report["link"]
    sources = {use["source"] for use in link["chunks"]}
    expected = set() if policy == "full" else {"computed"} if timings.tier == NO_TIER else {timings.tier}
    if sources != expected:
        raise RagCacheError(f"{timings.policy}: expected chunks from {sorted(expected)}, got {sorted(sources)}")
    timings.add(report["ttft_ms"], link["link_ms"], link["recompute_ratio"], link["prompt_tokens"])


def _with_state(row: dict[str, Any]) -> dict[str, Any]:
    return {"policy": row["policy"], "state": "cold" if row["tier"] == NO_TIER else "warm", **row}

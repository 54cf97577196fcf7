"""The demo's first table: the trained reader answers over the sample corpus, with both caches on.

Nothing here is a speed-up of the model: the reader is too small to show any. What counts is whether the
answers stay right, and what the query cache returns.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from transformers import AutoModelForCausalLM

from benchmarks.demo import calibrate as demo_calibrate
from benchmarks.demo import latency as demo_latency
from benchmarks.demo import score as demo_score
from benchmarks.demo.chain import Asked, Wording, ask, build_chain
from benchmarks.demo.store import ArticleStore, RememberedEmbeddings
from benchmarks.world.reader_folder import READER
from benchmarks.world.world import World, make_world
from langchain_ragcachekit import ChatRagCache, RagCacheRetriever
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.reading_prompt import prompt_for
from ragcachekit.config import StoreConfig
from ragcachekit.encode.neighbours import PrecedingChunks
from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.errors import RagCacheError
from ragcachekit.query.calibrate import Calibration
from ragcachekit.store.factory import open_store

POLICIES = ("full", "deep:0.1", "lego:16", "lego:4", "reuse", "lego0")
"""Over chunks that were encoded alone, as every policy's papers have it."""

CHAIN_POLICY, CHAIN_ENCODER = "lego:2", "similar:1"
"""What the chain runs on: chunks encoded behind the chunk that precedes them in their article."""

CHAIN = f"{CHAIN_POLICY} on {CHAIN_ENCODER}"
CHUNKS = 8  # four articles; the reader was trained on two to five
MAX_TOKENS = 16


@dataclass(frozen=True)
class Sizes:
    """How large the corpus is and how much is asked."""

    people: int = 200
    companies: int = 60
    towns: int = 48
    questions: int = 200
    calibration: int = 200


QUICK = Sizes(people=24, companies=8, towns=8, questions=15, calibration=24)


def run(
    embeddings: Embeddings,
    *,
    sizes: Sizes | None = None,
    seed: int = 0,
    progress: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
) -> BenchReport:
    """Ask the reader through a LangChain chain, once per policy and once with the query cache.

    Parameters
    ----------
    embeddings : Embeddings
        Embeds articles and questions.
    sizes : Sizes, optional
        Default 308 articles and 200 questions.
    seed : int
        Of the corpus, the choice of questions and their order.
    progress : bool
        Show bars.
    cache_dir : path, optional
        As for :class:`~ragcachekit.engine.rag_cache.RagCache`.

    Returns
    -------
    BenchReport
        Flat rows; ``part`` tells them apart. ``policy``: exact match by question type, every question
        once, each searched for. ``chain``: the same with the query cache on, every question in four
        wordings. ``query-cache``: hits, wrong hits, tolerance. ``retrieval``: recall and latency with
        and without the query cache. ``check``: ``full`` against the model's own generate.

    Raises
    ------
    RagCacheError
        ``full`` through the library is not what the model's own ``generate`` gives: no figure then.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the reader's tensors are tiny: threads would only wait for each other
    try:
        return _run(embeddings, sizes or Sizes(), seed, progress, cache_dir)
    finally:
        torch.set_num_threads(threads)


def _run(
    embeddings: Embeddings, sizes: Sizes, seed: int, progress: bool, cache_dir: str | os.PathLike[str] | None
) -> BenchReport:
    rng = random.Random(seed)
    world = make_world(seed, sizes.people, sizes.companies, sizes.towns)
    questions = demo_calibrate.choose_questions(world, sizes.questions, rng)
    others = demo_calibrate.calibration_questions(world, questions, sizes.calibration, rng)
    wordings = demo_calibrate.workload(questions, rng)
    known = RememberedEmbeddings(embeddings, progress)
    calibration = demo_calibrate.calibrated(others, known)
    store = ArticleStore.from_articles(world.articles, known)
    embed_ms = _embed([*(q.text for q in questions), *(w.text for w in wordings)], known)
    with _engine(world, cache_dir, progress) as rag, _chain_engine(world, cache_dir, progress) as chained:
        plain = store.as_retriever(search_kwargs={"k": CHUNKS})
        ways = [*((policy, rag, policy) for policy in POLICIES), (CHAIN, chained, CHAIN_POLICY)]
        rows, full = _policies(ways, plain, [Wording(q, q.text) for q in questions], seed, progress)
        rows.append(_check_full(rag, full))
        rows += _cached(chained, store, wordings, calibration, seed, progress)
        rows += demo_latency.latencies(store, wordings, calibration.tolerance, CHUNKS, embed_ms)
    return BenchReport("demo-answers", "the trained reader of the package", seed, tuple(rows))


def _engine(world: World, cache_dir: str | os.PathLike[str] | None, progress: bool) -> RagCache:
    """The reader, every chunk of the corpus encoded up front as each policy wants it."""
    store = open_store(StoreConfig())
    for policy in ("lego0", "lego:16"):  # their encoders differ
        rag = RagCache.from_pretrained(READER, policy=policy, store=store, cold="now", cache_dir=cache_dir)
        rag.encode(_chunks(world), progress=progress)
    return rag


def _chain_engine(world: World, cache_dir: str | os.PathLike[str] | None, progress: bool) -> RagCache:
    """The reader as an application would set it up that knows the order of its documents' chunks."""
    rag = RagCache.from_pretrained(
        READER,
        policy=CHAIN_POLICY,
        encoder=CHAIN_ENCODER,
        neighbours=PrecedingChunks(article.chunks for article in world.articles),
        cold="now",
        cache_dir=cache_dir,
    )
    before = prompt_for(rag.tokenizer).before
    rag.encode(_chunks(world), system=before, progress=progress)
    return rag


def _chunks(world: World) -> list[str]:
    return [chunk for article in world.articles for chunk in article.chunks]


def _embed(texts: Sequence[str], known: RememberedEmbeddings) -> float:
    """Embed all questions, one by one as they would come; mean milliseconds."""
    begun = time.perf_counter()
    known.remember(texts)
    return (time.perf_counter() - begun) * 1e3 / len(texts)


def _policies(
    ways: Sequence[tuple[str, RagCache, str]],
    retriever: BaseRetriever,
    wordings: Sequence[Wording],
    seed: int,
    progress: bool,
) -> tuple[list[dict[str, Any]], list[Asked]]:
    """One row per way (label, engine, policy) and question type, and the answers of ``full``."""
    answers = {}
    for label, rag, policy in ways:
        # Registers the chunks with the engine; tolerance 0, so that every question is searched for.
        searching = RagCacheRetriever.wrap(retriever, cache=rag)
        chain = build_chain(searching, ChatRagCache(cache=rag, policy=policy, max_tokens=MAX_TOKENS))
        answers[label] = ask(chain, wordings, label, progress)
    full = answers["full"]
    return [row for label in answers for row in _policy_rows(label, answers[label], full, seed)], full


def _policy_rows(
    policy: str, asked: Sequence[Asked], full: Sequence[Asked], seed: int
) -> list[dict[str, Any]]:
    out = []
    for score in demo_score.scores(asked, seed):
        pairs = [
            (one, other)
            for one, other in zip(asked, full, strict=True)
            if score.question_type in (demo_score.ALL, one.wording.question.kind)
        ]
        chosen = [one for one, _ in pairs]
        out.append(
            {
                "part": "policy",
                "policy": policy,
                "encoder": chosen[0].report["link"]["encoder"],
                **asdict(score),
                "agreement": fmean(one.answer == other.answer for one, other in pairs),
                "tokens_reused": demo_score.tokens_reused(chosen),
                "ratio_spent": demo_score.recompute_ratio(chosen),
            }
        )
    return out


@torch.no_grad()
def _check_full(rag: RagCache, asked: Sequence[Asked]) -> dict[str, Any]:
    """``full`` against ``generate`` of a second copy of the model that the library never touched."""
    own = AutoModelForCausalLM.from_pretrained(READER, local_files_only=True).eval()
    wrong = []
    for one in asked:
        ids = rag.link(list(one.messages), policy="full").input_ids
        output = own.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False
        )
        expected = tuple(output[0, ids.shape[1] :].tolist())
        answer = rag.generate(list(one.messages), policy="full", max_new_tokens=MAX_TOKENS)
        if answer.token_ids != expected or answer.text != one.answer:
            wrong.append(one.wording.text)
    if wrong:
        raise RagCacheError(
            f"full through the library differs from the model's own generate on {len(wrong)} of "
            f"{len(asked)} questions, the first being {wrong[0]!r}; do not trust any figure"
        )
    return {"part": "check", "name": "full equals the model's own generate", "n": len(asked), "mismatches": 0}


def _cached(
    rag: RagCache,
    store: ArticleStore,
    wordings: Sequence[Wording],
    calibration: Calibration,
    seed: int,
    progress: bool,
) -> list[dict[str, Any]]:
    """The whole chain with both caches on."""
    retriever = RagCacheRetriever.wrap(
        store.as_retriever(search_kwargs={"k": CHUNKS}),
        embeddings=store.embeddings,
        cache=rag,
        tolerance=calibration.tolerance,
    )
    chain = build_chain(retriever, ChatRagCache(cache=rag, max_tokens=MAX_TOKENS))
    asked = ask(chain, wordings, "both caches", progress)
    hits = demo_score.count_hits(asked)
    return [
        *({"part": "chain", "policy": CHAIN, **asdict(s)} for s in demo_score.scores(asked, seed)),
        {
            "part": "query-cache",
            "tolerance": calibration.tolerance,
            "max_false_hit_rate": demo_calibrate.MAX_FALSE_HITS,
            "calibration_pairs": calibration.different_pairs,
            "capacity": retriever.capacity,
            "n": hits.lookups,
            "hit_rate": hits.hit_rate,
            "hits": hits.hits,
            "wrong_hits": hits.wrong_hits,
            "harmful_hits": hits.harmful_hits,
            "evidence_recall": demo_score.evidence_recall(asked),
            "tokens_reused": demo_score.tokens_reused(asked),
            "ratio_spent": demo_score.recompute_ratio(asked),
        },
    ]

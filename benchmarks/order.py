"""``python -m benchmarks order``: what the order of retrieved documents does to exact reuse and answers."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Annotated, Any, Literal

import torch
import typer
from langchain_core.documents import Document
from tqdm.auto import tqdm
from transformers import AutoTokenizer

from benchmarks.datasets import Passages, load_dataset
from benchmarks.fidelity import few_shot
from langchain_ragcachekit import RagCacheRetriever
from langchain_ragcachekit.vector_store import RagCacheVectorStore
from ragcachekit import RagCache, TreeConfig
from ragcachekit.commands import options as opt
from ragcachekit.commands.console import quiet_loading, show, written
from ragcachekit.commands.embedding import MiniLM
from ragcachekit.commands.questions import PromptMaker, Question
from ragcachekit.commands.report import BenchReport, Bootstrap, table
from ragcachekit.model.loading import load_model, resolve_model
from ragcachekit.quality.compare import word_f1

Order = Literal["found", "by id", "cached"]
ORDERS: tuple[Order, ...] = ("found", "by id", "cached")

Row = dict[str, Any]
Trie = dict[int, "Trie"]


def order(
    dataset: Annotated[str, typer.Option(help="squad:FILE, musique:FILE.")],
    model: str = "sample",
    questions: Annotated[int, typer.Option(min=2)] = 120,
    k: opt.K = 4,
    users: Annotated[int, typer.Option(min=1, help="Who ask at the same time, each about one article.")] = 4,
    visit: Annotated[int, typer.Option(min=1, help="Questions of a user about an article.")] = 5,
    words: Annotated[
        int, typer.Option(min=0, help="Cut passages into parts of about this many; 0: whole.")
    ] = 0,
    tree_gib: Annotated[float, typer.Option(help="Budget of the tree.")] = 1.0,
    max_new_tokens: opt.MaxNewTokens = 16,
    only_count: Annotated[bool, typer.Option(help="No answers; a tree without limits, counted.")] = False,
    seed: opt.Seed = 0,
    json: opt.Json = None,
) -> None:
    """What the order of the retrieved documents does to exact reuse and to answers.

    No question is asked twice. Each is answered with its ``k`` nearest passages of all articles
    (all-MiniLM-L6-v2) under ``policy="prefix"``: in the order found, sorted by their number in the file (``by
    id``) and by ``order="cached"``, each with a tree of its own. ``share`` is that of all prompt tokens that
    the tree gave, ``moved`` that of the prompts in another order than found. F1 is against the right answers;
    intervals are 95 % bootstrap ones. Times to the first token are means.
    """
    quiet_loading()
    folder = resolve_model(model)
    every = load_dataset(dataset)
    asked = in_visits(every, users, visit, seed)[:questions]
    texts = list(dict.fromkeys(chain.from_iterable((*one.relevant, *one.others) for one in every)))
    if words:
        texts = list(dict.fromkeys(part for text in texts for part in parts_of(text, words)))
    store = RagCacheVectorStore(MiniLM())
    store.add_documents([Document(text, metadata={"number": n}) for n, text in enumerate(texts)])
    kind = dataset.partition(":")[0]
    name = f"{model}; {kind}: {len(asked)} questions, {k} of {len(texts)} passages"
    if only_count:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        sizes = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
        found = [numbers(store.similarity_search(one.question, k)) for one in asked]
        parts = {"counted": [{"order": order, **counted(found, sizes, order)} for order in ORDERS]}
    else:
        name += f", tree of {tree_gib:g} GiB"
        lm, tokenizer = load_model(folder, "cpu", dtype=torch.float32)
        tree = TreeConfig(host_bytes=round(tree_gib * 2**30))
        rows = list(measure(lm, tokenizer, store, asked, k=k, tree=tree, new_tokens=max_new_tokens))
        parts = {"summary": summary(rows, seed), "questions": rows}
    show(table(f"Order of documents: {name}", next(iter(parts.values()))))
    every_row = tuple({"part": part, **row} for part, own in parts.items() for row in own)
    written(BenchReport("order", name, seed, every_row), json)


def in_visits(questions: Sequence[Passages], users: int, visit: int, seed: int) -> list[Passages]:
    """The questions as several users ask them, who each read one article after another.

    A visit is up to ``visit`` random questions about one article; ``users`` visits take turns. Questions
    without an article are visits of their own.
    """
    rng, articles = random.Random(seed), dict[tuple[str, ...], list[Passages]]()
    for one in questions:
        articles.setdefault(one.document or (one.question, *one.relevant), []).append(one)
    visits = list[list[Passages]]()
    for about in articles.values():
        rng.shuffle(about)
        visits += [about[at : at + visit] for at in range(0, len(about), visit)]
    rng.shuffle(visits)
    out, now = list[Passages](), list[list[Passages]]()
    while visits or now:
        while visits and len(now) < users:
            now.append(visits.pop())
        out += [about.pop() for about in now]
        now = [about for about in now if about]
    return out


def parts_of(text: str, words: int) -> list[str]:
    """The text in parts of equal length, about ``words`` words each."""
    every = text.split()
    count = max(1, round(len(every) / words))
    return [" ".join(every[len(every) * n // count : len(every) * (n + 1) // count]) for n in range(count)]


def numbers(documents: Sequence[Document]) -> list[int]:
    """Their places in the file."""
    return [document.metadata["number"] for document in documents]


def counted(found: Sequence[Sequence[int]], sizes: Sequence[int], order: Order) -> Row:
    """The shares of the tokens after the same documents as in an earlier prompt, and of the prompts moved."""
    known: Trie = {}
    reused = moved = 0
    for own in found:
        ordered = sorted(own) if order == "by id" else list(own)
        if order == "cached":
            first = longest(own, known, sizes)
            ordered = [*first, *(one for one in own if one not in first)]
        moved += ordered != list(own)
        at = known
        for one in ordered:
            reused += sizes[one] if one in at else 0
            at = at.setdefault(one, {})
    total = sum(sizes[one] for own in found for one in own)
    return {"questions": len(found), "share": reused / total, "moved": moved / len(found)}


def longest(some: Sequence[int], known: Trie, sizes: Sequence[int]) -> list[int]:
    """The longest known beginning, in tokens, of the documents in any order."""
    chains = (
        [one, *longest([o for o in some if o != one], known[one], sizes)] for one in some if one in known
    )
    return max(chains, key=lambda own: sum(sizes[one] for one in own), default=[])


def measure(
    model: Any,
    tokenizer: Any,
    store: RagCacheVectorStore,
    asked: Sequence[Passages],
    *,
    k: int,
    tree: TreeConfig,
    new_tokens: int,
) -> Iterator[Row]:
    """A row per question and order; each order has an engine of its own, and they take turns to be first."""
    maker = PromptMaker(tokenizer, plain=few_shot, stop=("\n",))
    with ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="ragcachekit-bench-"))
        engines = {
            name: opened.enter_context(
                RagCache(model, tokenizer, policy="prefix", tree=tree, cache_dir=folder)
            )
            for name in ORDERS
        }
        retrievers = {
            name: RagCacheRetriever.wrap(
                store, rag=engines[name], k=k, order="cached" if name == "cached" else "found"
            )
            for name in ORDERS
        }
        for number, one in enumerate(tqdm(asked, unit="question")):
            found = {name: retrievers[name].invoke(one.question) for name in ORDERS}
            found["by id"].sort(key=lambda document: numbers([document]))
            for name in ORDERS if number % 2 else ORDERS[::-1]:
                rag, chunks = engines[name], [document.page_content for document in found[name]]
                begun = time.perf_counter()
                if name == "cached":  # once more, for its time
                    rag.cached_first(chunks)
                lookup = (time.perf_counter() - begun) * 1e3 if name == "cached" else None
                prompt = maker.prompt(Question(one.question, tuple(chunks))).prompt
                answer = rag.generate(
                    prompt, max_new_tokens=new_tokens, do_sample=False, stop=list(maker.stop)
                )
                rag.flush()
                link = answer.report.link
                yield {
                    "question": number + 1,
                    "order": name,
                    "prompt_tokens": link.prompt_tokens,
                    "exact_tokens": link.exact_tokens,
                    # Of text after all chunks the tree has a part as well.
                    "chunks_reused": min(k, sum(use.source.startswith("tree") for use in link.chunks)),
                    "moved": chunks != [document.page_content for document in found["found"]],
                    "f1": max(word_f1(answer.text, right) for right in one.answers),
                    "ttft_ms": answer.report.ttft_ms,
                    "lookup_ms": lookup,
                    "evictions": sum(tier.evictions for tier in rag.stats() if tier.tier == "tree:host"),
                }


def summary(rows: Sequence[Mapping[str, Any]], seed: int) -> list[Row]:
    """A row per order: shares of all tokens and prompts, means of F1, medians of times, differences."""
    by_order = {name: [row for row in rows if row["order"] == name] for name in ORDERS}
    first, bootstrap = by_order["found"], Bootstrap(len(by_order["found"]), seed)
    out = list[Row]()
    for name, own in by_order.items():
        tokens = sum(row["prompt_tokens"] for row in own)
        change = [row["f1"] - other["f1"] for row, other in zip(own, first, strict=True)]
        low, high = bootstrap.of_mean([row["f1"] for row in own])
        change_low, change_high = bootstrap.of_mean(change)
        out.append(
            {
                "order": name,
                "questions": len(own),
                "share": sum(row["exact_tokens"] for row in own) / tokens,
                "chunks_reused": statistics.fmean(row["chunks_reused"] for row in own),
                "moved": statistics.fmean(row["moved"] for row in own),
                "f1": statistics.fmean(row["f1"] for row in own),
                "f1_low": low,
                "f1_high": high,
                "f1_change": statistics.fmean(change),
                "f1_change_low": change_low,
                "f1_change_high": change_high,
                "ttft_ms": statistics.fmean(row["ttft_ms"] for row in own),
                "lookup_ms": statistics.median(row["lookup_ms"] for row in own) if name == "cached" else None,
                "evictions": own[-1]["evictions"],
            }
        )
    return out

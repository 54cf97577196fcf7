"""``python -m benchmarks novel-questions``: does reuse last when no prompt repeats and no two begin alike?"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Annotated, Any

import numpy as np
import torch
import typer
from tqdm.auto import tqdm

from benchmarks.serve.replay import check_same
from benchmarks.serve.systems import Served
from benchmarks.serve.workload import Documents, ServeRequest, text_documents
from ragcachekit import Prompt, RagCache, StoreConfig, TreeConfig
from ragcachekit.commands import options as opt
from ragcachekit.commands.console import quiet_loading, show, written
from ragcachekit.commands.report import BenchReport, table
from ragcachekit.errors import CorpusError
from ragcachekit.model.kv import KVLayout
from ragcachekit.model.loading import load_model

FULL, PREFIX = "full", "prefix"
TUNED = 8
"""Prompts that ``auto`` is chosen by; none of them is asked."""

Row = dict[str, Any]


def novel_questions(
    dataset: Annotated[str, typer.Option(help="squad:FILE, ...: documents and questions.")],
    model: str = "sample",
    policies: Annotated[str, typer.Option(help="Beside full.")] = "auto,prefix",
    questions: Annotated[int, typer.Option(min=1)] = 98,
    chunks: Annotated[int, typer.Option(min=1, help="Documents of a prompt.")] = 14,
    documents: Annotated[int, typer.Option(min=1)] = 56,
    chunk_tokens: Annotated[int, typer.Option(min=1)] = 128,
    budget: Annotated[float, typer.Option(help="Of the caches, in sizes of the corpus.")] = 2.0,
    max_new_tokens: opt.MaxNewTokens = 8,
    batch: Annotated[int, typer.Option(min=1, help="Questions of a row of the table.")] = 14,
    seed: opt.Seed = 0,
    json: opt.Json = None,
) -> None:
    """Does reuse last when no prompt repeats and no two begin alike?

    Every prompt has documents of a corpus, drawn and ordered at random, and a question that was never asked
    before. The corpus fits into the store; documents are cached beforehand. On such requests the CacheBlend
    of LMCache fell from 4.5 times the speed of a cold prefill to 1.07 within about 90 questions
    (https://github.com/LMCache/LMCache/issues/4663): each prompt stored its documents anew.

    Each question is asked under every policy in turn. ``prefix`` is an exact prefix cache with the same
    budget, and its answers must be those of ``full``. ``share`` is that of prompt tokens that were reused,
    ``speedup`` the time to the first token of ``full`` over that of the policy.
    """
    quiet_loading()
    lm, tokenizer = load_model(model, "cpu", dtype=torch.float32)
    lm.generation_config.eos_token_id = None  # all answers have the same length
    texts = text_documents(tokenizer, documents, chunk_tokens, dataset=dataset)
    prompts = list(novel_prompts(texts, TUNED + questions, chunks, seed))
    room = int(budget * documents * chunk_tokens * KVLayout.of(lm).token_bytes)
    with ExitStack() as opened:
        engines: dict[str, RagCache] = {}
        # One for all: the model is checked and timed once.
        folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="ragcachekit-bench-"))
        for name in tqdm(dict.fromkeys([FULL, *opt.names(policies)]), unit="policy", desc="warm-up"):
            tree = TreeConfig(host_bytes=room) if name == PREFIX else None
            options: dict[str, Any] = {"tree": tree, "encode_after": 1, "cache_dir": folder}
            options["encoder"] = "standalone"  # one entry per chunk, as the budget counts
            rag = RagCache(lm, tokenizer, policy=name, store=StoreConfig(host_bytes=room), **options)
            engines[name] = opened.enter_context(rag)
            warm_up(rag, texts, chunks, prompts[:TUNED])
        rows = list(measure(engines, prompts[TUNED:], max_new_tokens))
        chosen = ", ".join(dict.fromkeys(rag.policy for rag in engines.values()))
    name = (
        f"{model}; {texts.name}: {chunks} of {documents} documents of {chunk_tokens} tokens, "
        f"budget {budget:g} of them; {chosen}"
    )
    show(table(f"Sustained novel questions: {name}", batches(rows, batch)))
    written(BenchReport("novel-questions", name, seed, tuple(rows)), json)


def novel_prompts(documents: Documents, count: int, chunks: int, seed: int) -> Iterator[Prompt]:
    """Prompts of ``chunks`` documents in random order, each with a question of its own.

    CorpusError if there are too few questions or documents.
    """
    for name, have, need in (
        ("questions", len(documents.questions), count),
        ("documents", len(documents.chunks), chunks),
    ):
        if have < need:
            raise CorpusError(f"{documents.name} has {have} {name}, and {need} are needed")
    rng = np.random.default_rng(seed)
    for question in range(count):
        yield documents.prompt(rng.permutation(len(documents.chunks))[:chunks].tolist(), question)


def warm_up(rag: RagCache, documents: Documents, chunks: int, prompts: Sequence[Prompt]) -> None:
    """Choose the policy of ``auto``, then have every document cached; ``full`` needs one prefill."""
    if rag.policy.startswith("auto"):
        rag.tune(prompts=prompts)
    every = documents.each_once(chunks)
    for prompt in islice(every, 1) if rag.policy == FULL else every:
        rag.generate(prompt, max_new_tokens=1, do_sample=False)
        rag.flush()


def measure(engines: Mapping[str, RagCache], prompts: Sequence[Prompt], new_tokens: int) -> Iterator[Row]:
    """Rows of every prompt under every policy; RagCacheError if ``prefix`` answers otherwise than ``full``.

    The order of the policies changes from prompt to prompt. What a prompt leaves to be encoded is encoded
    before the next one.
    """
    names = list(engines)
    for number, prompt in enumerate(tqdm(prompts, unit="question")):
        turn, answers = number % len(names), {}
        for name in (*names[turn:], *names[:turn]):
            rag = engines[name]
            answers[name] = rag.generate(prompt, max_new_tokens=new_tokens, do_sample=False)
            rag.flush()
        expected = answers[FULL].token_ids
        if PREFIX in answers:
            served = Served(ServeRequest(0.0, prompt), 0.0, token_ids=answers[PREFIX].token_ids)
            check_same(engines[FULL].model, [expected], [served], PREFIX)
        for name in names:
            report, tiers = answers[name].report, engines[name].stats()
            link = report.link
            yield {
                "question": number + 1,
                "policy": name,
                "prompt_tokens": link.prompt_tokens,
                "exact_tokens": link.exact_tokens,
                "approximate_tokens": link.approximate_tokens,
                "recomputed_tokens": link.recomputed_tokens,
                "share": link.reused_tokens / link.prompt_tokens,
                "ttft_ms": report.ttft_ms,
                "speedup": answers[FULL].report.ttft_ms / report.ttft_ms,
                "same": answers[name].token_ids == expected,
                "entries": sum(tier.entries for tier in tiers),
                "evictions": sum(tier.evictions for tier in tiers),
            }


def batches(rows: Sequence[Row], size: int) -> list[Row]:
    """A row per policy and ``size`` questions: means, of times medians; of counters the last."""
    out = []
    for name in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == name]
        for start in range(0, len(own), size):
            part = own[start : start + size]
            out.append(
                {
                    "policy": name,
                    "questions": f"{part[0]['question']}-{part[-1]['question']}",
                    "share": statistics.fmean(row["share"] for row in part),
                    "ttft_ms": statistics.median(row["ttft_ms"] for row in part),
                    "speedup": statistics.median(row["speedup"] for row in part),
                    "same": statistics.fmean(row["same"] for row in part),
                    "entries": part[-1]["entries"],
                    "evictions": part[-1]["evictions"],
                }
            )
    return out

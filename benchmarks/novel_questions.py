"""Sustained novel questions: does reuse last when no prompt repeats and no two begin alike?

Every prompt has 14 documents of a corpus, drawn and ordered at random, and a question that was never asked
before. The corpus fits into the store (``--budget``, in corpus sizes); documents are cached beforehand. On
such requests the CacheBlend of LMCache fell from 4.5 times the speed of a cold prefill to 1.07 within
about 90 questions (https://github.com/LMCache/LMCache/issues/4663): each prompt stored its documents anew.

Each question is asked under every policy in turn. ``prefix`` is an exact prefix cache, a knowledge tree with
the same budget, and its answers must be those of ``full``. ``share`` is that of prompt tokens that were
reused, ``speedup`` the time to the first token of ``full`` over that of the policy.

    OMP_NUM_THREADS=1 python benchmarks/novel_questions.py --dataset squad:dev-v2.0.json --plot out.png
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from benchmarks.serve.replay import check_same
from benchmarks.serve.systems import Served
from benchmarks.serve.workload import Documents, ServeRequest, text_documents
from ragcachekit import Prompt, RagCache, StoreConfig, TreeConfig
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.console import quiet_loading, show
from ragcachekit.commands.sample_model import resolve_model
from ragcachekit.errors import CorpusError
from ragcachekit.model.layout import KVLayout
from ragcachekit.model.pretrained import load_model

FULL, PREFIX = "full", "prefix"
TUNED = 8
"""Prompts that ``auto`` is chosen by; none of them is asked."""

Row = dict[str, Any]


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
    """Choose what ``auto`` stands for, then have every document cached; ``full`` needs one prefill."""
    if rag.policy.startswith("auto"):
        rag.tune(prompts=prompts)
    every = documents.each_once(chunks)
    for prompt in islice(every, 1) if rag.policy == FULL else every:
        rag.generate(prompt, max_new_tokens=1, do_sample=False)
        rag.flush()


def asked(engines: Mapping[str, RagCache], prompts: Sequence[Prompt], new_tokens: int) -> Iterator[Row]:
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


def run(given: argparse.Namespace) -> BenchReport:
    """Every question under every policy."""
    model, tokenizer = load_model(resolve_model(given.model), "cpu", dtype=torch.float32)
    model.generation_config.eos_token_id = None  # all answers have the same length
    documents = text_documents(tokenizer, given.documents, given.chunk_tokens, dataset=given.dataset)
    tuned, *prompts = _split(novel_prompts(documents, TUNED + given.questions, given.chunks, given.seed))
    tokens = given.documents * given.chunk_tokens
    budget = int(given.budget * tokens * KVLayout.of(model).token_bytes)
    names = list(dict.fromkeys([FULL, *given.policies.split(",")]))
    with ExitStack() as opened:
        engines: dict[str, RagCache] = {}
        # One for all: the model is checked and timed once.
        folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="ragcachekit-bench-"))
        for name in tqdm(names, unit="policy", desc="warm-up"):
            tree = TreeConfig(host_bytes=budget) if name == PREFIX else None
            store = StoreConfig(host_bytes=budget)
            options: dict[str, Any] = {"store": store, "tree": tree, "encode_after": 1, "cache_dir": folder}
            engines[name] = opened.enter_context(RagCache(model, tokenizer, policy=name, **options))
            warm_up(engines[name], documents, given.chunks, tuned)
        rows = list(asked(engines, prompts, given.new_tokens))
        chosen = ", ".join(dict.fromkeys(rag.policy for rag in engines.values()))
    name = (
        f"{given.model}; {documents.name}: {given.chunks} of {given.documents} documents of "
        f"{given.chunk_tokens} tokens, budget {given.budget:g} of them; {chosen}"
    )
    return BenchReport("novel-questions", name, given.seed, tuple(rows))


def _split(prompts: Iterator[Prompt]) -> list[Any]:
    every = list(prompts)
    return [every[:TUNED], *every[TUNED:]]


def plot(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draw the reused share and the speed-up of every policy, question by question."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    figure = Figure(figsize=(11, 3.8), layout="constrained")
    shares, speeds = figure.subplots(1, 2)
    for name in dict.fromkeys(row["policy"] for row in report.rows):
        own = [row for row in report.rows if row["policy"] == name]
        at = [row["question"] for row in own]
        (line,) = shares.plot(at, [row["share"] for row in own], label=name)
        if name != FULL:
            speeds.plot(at, [row["speedup"] for row in own], label=name, color=line.get_color())
    shares.set(xlabel="question", ylabel="share of prompt tokens reused", ylim=(-0.02, 1.02))
    speeds.axhline(1.0, color="grey", linewidth=1)
    speeds.set(xlabel="question", ylabel="time to the first token: full over policy", ylim=(0, None))
    for axes in (shares, speeds):
        axes.legend(fontsize=8)
    figure.suptitle(report.model, fontsize=9, wrap=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="sample")
    parser.add_argument("--dataset", required=True, help="squad:FILE, ...: documents and questions")
    parser.add_argument("--policies", default="auto,prefix", help="beside full")
    parser.add_argument("--questions", type=int, default=98)
    parser.add_argument("--chunks", type=int, default=14, help="documents of a prompt")
    parser.add_argument("--documents", type=int, default=56)
    parser.add_argument("--chunk-tokens", type=int, default=128)
    parser.add_argument("--budget", type=float, default=2.0, help="of the caches, in sizes of the corpus")
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--batch", type=int, default=14, help="questions of a row of the table")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    quiet_loading()
    report = run(given)
    show(
        BenchReport(report.bench, report.model, report.seed, tuple(batches(report.rows, given.batch))).table(
            f"Sustained novel questions: {report.model}"
        )
    )
    if given.json:
        report.write_json(given.json)
    if given.plot:
        plot(report, given.plot)


if __name__ == "__main__":
    main()

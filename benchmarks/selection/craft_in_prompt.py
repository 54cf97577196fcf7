"""``python -m benchmarks craft-in-prompt``: Cache-Craft over chunks that were encoded inside other prompts.

Every question's chunks are first encoded in a prompt that holds them in another context, then asked. With
``whole`` contexts an article's chunks stand together in both; with ``scattered`` ones the first prompts
hold them in any order.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, Any

import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.demo.answers import wilson
from benchmarks.world.reader_folder import READER, READER_NAME, one_thread
from benchmarks.world.world import Question, make_world, messages
from ragcachekit import RagCache
from ragcachekit.commands import options as opt
from ragcachekit.commands.console import show, written
from ragcachekit.commands.report import BenchReport

POLICIES = (
    *("full", "reuse", "craft:0.5", "craft:1", "craft:2", "craft-focused:1", "query:0.1", "deep:0.1"),
)
ARTICLES = 4


def craft_in_prompt(
    questions: Annotated[int, typer.Option(min=3)] = 120, seed: opt.Seed = 0, json: opt.Json = None
) -> None:
    """Cache-Craft over chunks that were encoded inside other prompts: exact match and ratio spent."""
    rows = []
    with one_thread():
        for name in ("whole", "scattered"):
            rows += measure(name, contexts(seed, questions, name == "scattered"))
    report = BenchReport("craft-in-prompt", READER_NAME, seed, tuple(rows))
    show(report.table("Chunks encoded in another prompt, then asked"))
    written(report, json)


def contexts(seed: int, count: int, scattered: bool) -> list[tuple[Question, list[str], list[str]]]:
    """Questions with the chunks of the first prompt and of the one that is asked."""
    rng, world = random.Random(seed), make_world(seed, 60, 20, 16)
    by = {article.title: article for article in world.articles}

    def drawn(question: Question, whole: bool) -> list[str]:
        titles = list(dict.fromkeys(question.articles))
        titles += rng.sample([t for t in by if t not in titles], ARTICLES - len(titles))
        rng.shuffle(titles)
        chunks = [chunk for title in titles for chunk in by[title].chunks]
        if not whole:
            rng.shuffle(chunks)
        return chunks

    chosen = [
        question
        for kind in "abc"
        for question in rng.sample([q for q in world.questions if q.kind == kind], count // 3)
    ]
    return [(question, drawn(question, not scattered), drawn(question, True)) for question in chosen]


def measure(name: str, asked: Sequence[tuple[Question, list[str], list[str]]]) -> list[dict[str, Any]]:
    """One row per policy."""
    model = AutoModelForCausalLM.from_pretrained(READER, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(READER, local_files_only=True)
    rows = []
    for policy in POLICIES:
        # A new store each time: an answer encodes what its prompt missed, which would help the next policy.
        with (
            tempfile.TemporaryDirectory() as folder,
            RagCache(
                model, tokenizer, encoder="in-prompt", policy=policy, cold="now", cache_dir=folder
            ) as rag,
        ):
            rag.register(chunk for _, first, then in asked for chunk in (*first, *then))
            for question, first, _ in asked:
                rag.generate(messages(first, question.text), policy="reuse", max_new_tokens=1)
            answers = [rag.generate(messages(then, q.text), max_new_tokens=16) for q, _, then in asked]
        right = [answer.text.strip() == q.answer for answer, (q, _, _) in zip(answers, asked, strict=True)]
        low, high = wilson(sum(right), len(right))
        spent = fmean(answer.report.link.recompute_ratio for answer in answers)
        rows.append(
            {"contexts": name, "policy": policy, "encoder": "in-prompt", "ratio_spent": spent}
            | {"exact_match": fmean(right), "low": low, "high": high, "n": len(right)}
        )
    return rows

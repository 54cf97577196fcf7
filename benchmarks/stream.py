"""``python -m benchmarks stream``: CPU of a stream of new questions, from an empty cache on.

Every question has its own wording and four passages, drawn by Zipf. The bare model answers the same prompts,
before and after the library in turn, so that a machine whose speed changes favours neither.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from tqdm.auto import tqdm

from benchmarks.context_draws import passages
from benchmarks.output import Plot, written
from ragcachekit import RagCache
from ragcachekit.commands import options as opt
from ragcachekit.commands.console import quiet_loading, show
from ragcachekit.commands.estimate import RECOMPUTED, balance, break_even
from ragcachekit.commands.questions import bare_ids
from ragcachekit.commands.report import BenchReport, table
from ragcachekit.commands.workspace import load_checked

MIN_WORDS, MAX_WORDS = 100, 170
"""Of a passage."""

PER_PROMPT = 4
"""Passages in a prompt."""


def stream(
    dataset: Annotated[str, typer.Option(help="squad:FILE or musique:FILE, for its passages.")],
    model: str = "sample",
    zipf: Annotated[
        float, typer.Option(min=0, help="Exponent of how often passages return; 0: all alike.")
    ] = 0.8,
    chunks: Annotated[int, typer.Option(min=PER_PROMPT, help="Passages.")] = 500,
    questions: Annotated[int, typer.Option(min=2)] = 100,
    max_new_tokens: opt.MaxNewTokens = 16,
    seed: opt.Seed = 0,
    json: opt.Json = None,
    plot: Plot = None,
) -> None:
    """CPU seconds of new questions, all until then together, beside the bare model's and the estimate."""
    quiet_loading()
    texts = pieces(passages(dataset))[:chunks]
    if len(texts) < PER_PROMPT:
        raise ValueError(f"{dataset} has {len(texts)} passages of {MIN_WORDS} words or more; take another")
    lm, tokenizer = load_checked(model, None, "auto")
    drawn = list(draws(len(texts), questions, zipf, seed))
    sizes = {text: len(tokenizer(text, add_special_tokens=False).input_ids) for text in texts}
    rows, ours, bare, lengths = list[dict[str, Any]](), 0.0, 0.0, list[int]()
    with TemporaryDirectory() as folder, RagCache(lm, tokenizer, cache_dir=folder) as rag:
        for number, (places, asked) in enumerate(tqdm(drawn, unit="question"), 1):
            found = [texts[place] for place in places]
            prompt = messages(found, number, asked)
            lengths.append(len(bare_ids(tokenizer, prompt)))
            rag.register(found)
            for is_ours in (False, True) if number % 2 else (True, False):
                started_at = time.process_time()
                if is_ours:
                    rag.generate(prompt, max_new_tokens=max_new_tokens, do_sample=False)
                    rag.flush()
                else:
                    answer(lm, tokenizer, prompt, max_new_tokens)
                seconds = time.process_time() - started_at
                ours, bare = ours + seconds * is_ours, bare + seconds * (not is_ours)
            rows.append({"question": number, "cpu_s": ours, "bare_cpu_s": bare, "more": ours / bare - 1})
    names = [[texts[place] for place in places] for places, _ in drawn]
    computed = balance(names, sizes, lengths, RECOMPUTED)
    for row, share in zip(rows, computed, strict=True):
        row["estimated_rows"] = share
    last = max((row["question"] for row in rows if row["more"] >= 0), default=0)
    summary = f"cheaper from question {last + 1} on; the estimate says {break_even(computed)}"
    report = BenchReport("stream", model, seed, tuple(rows))
    shown = [row for row in rows if row["question"] in (1, 2, 3, 5, 10, 15, 30, 50, 100, 300, questions)]
    show(table(f"CPU so far, Zipf {zipf:g} over {len(texts)} passages; {summary}", shown))
    written(report, json, plot, draw)


def pieces(texts: Sequence[str]) -> list[str]:
    """The texts in pieces of at most 170 words; short ones are left out."""
    split = (text.split() for text in texts)
    cut = (words[at : at + MAX_WORDS] for words in split for at in range(0, len(words), MAX_WORDS))
    return list(dict.fromkeys(" ".join(words) for words in cut if len(words) > MIN_WORDS))


def draws(count: int, questions: int, zipf: float, seed: int) -> Iterator[tuple[list[int], int]]:
    """Places of the passages of each question, and a number that it asks about."""
    rng, weights = random.Random(seed), [(place + 1) ** -zipf for place in range(count)]
    for _ in range(questions):
        places = list[int]()
        while len(places) < PER_PROMPT:
            if (place := rng.choices(range(count), weights)[0]) not in places:
                places.append(place)
        yield places, rng.randint(0, 999)


def messages(texts: Sequence[str], number: int, asked: int) -> list[dict[str, Any]]:
    """A chat prompt of these passages."""
    content = "\n\n".join(["Answer from the context.", *texts])
    question = f"Question {number - 1}: what is said about number {asked}?"
    return [{"role": "system", "content": content}, {"role": "user", "content": question}]


@torch.no_grad()
def answer(model: Any, tokenizer: Any, prompt: list[dict[str, Any]], max_new_tokens: int) -> None:
    """Answer a prompt as without the library."""
    ids = torch.tensor([bare_ids(tokenizer, prompt)])
    model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False
    )


def draw(report: BenchReport, path: Path) -> None:
    """Draw how much more CPU was spent than without a cache."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([row["question"] for row in report.rows], [100 * row["more"] for row in report.rows])
    axes.axhline(0, color="#4d4d4d", linewidth=1)
    axes.set(xlabel="questions", ylabel="CPU beside no cache, %, all until then")
    axes.grid(alpha=0.25)
    figure.savefig(path, dpi=150)

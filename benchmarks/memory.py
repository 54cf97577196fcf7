"""What a process holds beside the host tier's budget, while it encodes in bulk and while it answers.

A model with random weights and 64 KiB of KV per token encodes chunks, then answers prompts of four. Each
budget has a process of its own. Linux only: resident memory is read from ``/proc/self/statm``.
``--json benchmarks/results/memory.json`` writes the figures.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from json import dumps, loads
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ragcachekit import Chunk, Prompt, RagCache, StoreConfig, Text
from ragcachekit.commands.console import show
from ragcachekit.commands.report import BenchReport

BUDGETS_MB = (50, 300)
CHUNKS, TOKENS, REQUESTS = 40, 384, 20
MB = 1 << 20


def resident() -> float:
    """Resident memory in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MB


@contextmanager
def growth(peak: list[float]) -> Iterator[None]:
    """Append by how much resident memory rose at most inside the block, read every 5 ms."""
    before, most, done = resident(), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            most[0] = max(most[0], resident())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        peak.append(max(most[0], resident()) - before)


def measure(budget_mb: int) -> list[dict[str, Any]]:
    """Rows for one budget: encoding, then answering."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=128,
        max_position_embeddings=4096,
    )
    model, rng, rows = LlamaForCausalLM(config).eval(), random.Random(0), []
    chunks = [" ".join(f"w{rng.randrange(512)}" for _ in range(TOKENS)) for _ in range(CHUNKS)]

    def encode() -> None:
        rag.encode(chunks)

    def answer() -> None:
        for _ in range(REQUESTS):
            picked = [Chunk(text) for text in rng.sample(chunks, 4)]
            rag.generate(Prompt([Text("w1 w2 "), *picked, Text(" w5 w6")]), max_new_tokens=2)

    with tempfile.TemporaryDirectory() as folder:
        store = StoreConfig(host_bytes=budget_mb * MB)
        with RagCache(model, words(), store=store, policy="reuse", cold="now", cache_dir=folder) as rag:
            rag.generate("w1 w2 w3", max_new_tokens=2)  # what is loaded once
            for phase, work in (("encode", encode), ("answer", answer)):
                peak: list[float] = []
                with growth(peak):
                    work()
                held = sum(tier.nbytes for tier in rag.stats()) / MB
                assert held <= budget_mb, "the tier is over its budget"
                rows.append({"phase": phase, "budget_mb": budget_mb, "stored_mb": held, "growth_mb": peak[0]})
    return rows


def words() -> PreTrainedTokenizerFast:
    """One token a word."""
    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(512)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--budget", type=int, help="in MiB; measures it in this process and prints JSON")
    given = parser.parse_args()
    if given.budget:
        print(dumps(measure(given.budget)))
        return
    rows: list[dict[str, Any]] = []
    for budget in BUDGETS_MB:
        command = [sys.executable, __file__, "--budget", str(budget)]
        rows += loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    report = BenchReport("memory", "64 KiB of KV per token, random weights", 0, tuple(rows))
    show(report.table("Growth of the process at a host tier's budget, in MiB"))
    if given.json:
        report.write_json(given.json)


if __name__ == "__main__":
    main()

"""One decoding step of several requests together, beside a token of ``model.generate``, in milliseconds.

Every request has ``--rows`` rows of made-up KV. The sizes of the batch take turns, so that a drifting machine
hits all alike. Before timing, a step of two requests must give the logits of each alone.

    OMP_NUM_THREADS=1 python benchmarks/decode_step.py --json out.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import DynamicCache

from ragcachekit.cli.console import quiet_loading, show
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.sample_model import resolve_model
from ragcachekit.errors import RagCacheError
from ragcachekit.forward.attention import install
from ragcachekit.forward.batch.decode import decode
from ragcachekit.forward.batch.request_kv import RequestKV
from ragcachekit.generate.batch_check import why_not_together
from ragcachekit.model.pretrained import load_model

GENERATE = "model.generate"


class _Times:
    """A streamer that notes when each token came."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, _: Any) -> None:
        self.at.append(time.perf_counter())

    def end(self) -> None: ...


def made_up(model: Any, rows: int) -> DynamicCache:
    """A cache ``[1, kv_heads, rows, head_dim]`` per layer of normal numbers."""
    config, cache = model.config.get_text_config(), DynamicCache()
    heads = config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(1, heads, rows, dim), torch.randn(1, heads, rows, dim), layer)
    return cache


def generated(model: Any, rows: int, tokens: int) -> Iterator[float]:
    """Seconds of each token of ``model.generate`` behind made-up KV, the first two left out."""
    ids, times = torch.randint(100, 1000, (1, rows + 1)), _Times()
    asked = {"max_new_tokens": tokens + 2, "min_new_tokens": tokens + 2, "do_sample": False}
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=made_up(model, rows),
        streamer=times,
        pad_token_id=0,
        **asked,
    )
    yield from (b - a for a, b in zip(times.at[2:], times.at[3:], strict=False))


def stepped(model: Any, batch: int, rows: int, steps: int) -> Iterator[float]:
    """Seconds of each step of a batch, the first left out."""
    kvs = [RequestKV(made_up(model, rows), rows, steps + 1) for _ in range(batch)]
    for step in range(steps + 1):
        begun = time.perf_counter()
        decode(model, kvs, [100 + step] * batch).argmax(-1).tolist()
        if step:
            yield time.perf_counter() - begun


def run(given: argparse.Namespace) -> BenchReport:
    """A row per size of the batch, and one for ``model.generate``."""
    model, _ = load_model(resolve_model(given.model), "cpu", dtype=torch.float32)
    install(model)
    if (why := why_not_together(model)) is not None:
        raise RagCacheError(why)
    spent = defaultdict[tuple[str, int], list[float]](list)
    sizes = [int(size) for size in given.batches.split(",")]
    for _ in tqdm(range(given.rounds), unit="round"):
        spent[GENERATE, 1] += generated(model, given.rows, given.steps)
        for size in sizes:
            spent["batch", size] += stepped(model, size, given.rows, given.steps)
    rows = []
    for (way, size), seconds in spent.items():
        low, median, high = statistics.quantiles([1e3 * s for s in seconds], n=4)
        figures = {"step_ms": median, "step_ms_p25": low, "step_ms_p75": high, "token_ms": median / size}
        rows.append({"way": way, "batch": size, **figures, "n": len(seconds)})
    return BenchReport("decode-step", f"{given.model}, {given.rows} rows per request", 0, tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="sample")
    parser.add_argument("--rows", type=int, default=1000, help="of KV per request")
    parser.add_argument("--batches", default="1,4,8,16", help="sizes, with commas")
    parser.add_argument("--steps", type=int, default=8, help="timed per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    quiet_loading()
    report = run(given)
    show(report.table(f"Decoding steps: {report.model}"))
    if given.json:
        report.write_json(given.json)


if __name__ == "__main__":
    main()

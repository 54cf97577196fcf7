"""``python -m benchmarks decode-step``: one decoding step of several requests, beside ``model.generate``."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Annotated, Any

import torch
import typer
from tqdm.auto import tqdm
from transformers import DynamicCache

from benchmarks.serve.systems import TokenTimes
from ragcachekit.commands import options as opt
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.console import quiet_loading, show, written
from ragcachekit.commands.sample_model import resolve_model
from ragcachekit.errors import RagCacheError
from ragcachekit.forward.attention import install
from ragcachekit.forward.batch import RequestKV, decode
from ragcachekit.generate.batch_check import why_not_together
from ragcachekit.model.pretrained import load_model


def decode_step(
    model: str = "sample",
    rows: Annotated[int, typer.Option(min=1, help="Of made-up KV per request.")] = 1000,
    batches: Annotated[str, typer.Option(help="Sizes, with commas.")] = "1,4,8,16",
    steps: Annotated[int, typer.Option(min=1, help="Timed per round.")] = 8,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    json: opt.Json = None,
) -> None:
    """Milliseconds of one decoding step of several requests together, beside a token of model.generate.

    The sizes of the batch take turns, so that a drifting machine hits all alike.
    """
    quiet_loading()
    lm, _ = load_model(resolve_model(model), "cpu", dtype=torch.float32)
    install(lm)
    if (why := why_not_together(lm)) is not None:
        raise RagCacheError(why)
    spent = defaultdict[tuple[str, int], list[float]](list)
    for _ in tqdm(range(rounds), unit="round"):
        spent["model.generate", 1] += generated(lm, rows, steps)
        for size in opt.numbers("--batches", batches):
            spent["batch", int(size)] += stepped(lm, int(size), rows, steps)
    found = []
    for (way, size), seconds in spent.items():
        low, median, high = statistics.quantiles([1e3 * s for s in seconds], n=4)
        figures = {"step_ms": median, "step_ms_p25": low, "step_ms_p75": high, "token_ms": median / size}
        found.append({"way": way, "batch": size, **figures, "n": len(seconds)})
    report = BenchReport("decode-step", f"{model}, {rows} rows per request", 0, tuple(found))
    show(report.table(f"Decoding steps: {report.model}"))
    written(report, json)


def made_up(model: Any, rows: int) -> DynamicCache:
    """A cache ``[1, kv_heads, rows, head_dim]`` per layer of normal numbers."""
    config, cache = model.config.get_text_config(), DynamicCache()
    heads = config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(1, heads, rows, dim), torch.randn(1, heads, rows, dim), layer)
    return cache


def generated(model: Any, rows: int, tokens: int) -> Iterator[float]:
    """Seconds of each token of ``model.generate`` over made-up KV, the first two left out."""
    ids, times = torch.randint(100, 1000, (1, rows + 1)), list[float]()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=made_up(model, rows),
        streamer=TokenTimes(times),
        pad_token_id=0,
        max_new_tokens=tokens + 2,
        min_new_tokens=tokens + 2,
        do_sample=False,
    )
    yield from (b - a for a, b in itertools.pairwise(times[1:]))


def stepped(model: Any, batch: int, rows: int, steps: int) -> Iterator[float]:
    """Seconds of each step of a batch, the first left out."""
    kvs = [RequestKV(made_up(model, rows), rows, steps + 1) for _ in range(batch)]
    for step in range(steps + 1):
        start = time.perf_counter()
        decode(model, kvs, [100 + step] * batch).argmax(-1).tolist()
        if step:
            yield time.perf_counter() - start

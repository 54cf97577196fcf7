"""Time to first token of one long prompt: ordinary prefill against linked chunk KV, in one run."""

from __future__ import annotations

import copy
import itertools
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import DynamicCache

from ragcachekit.commands.bench.prompts import corpus_prompt, random_prompt
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.bench.shapes import describe, dtype_named, random_model
from ragcachekit.commands.bench.timing import (
    COLD_DISK,
    KNOWN_TIERS,
    NO_TIER,
    ONE_TOKEN,
    Engines,
    Measured,
    Timings,
    check_exact,
    check_policy,
    open_engines,
    rows,
)
from ragcachekit.commands.sample_model import resolve_model
from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.errors import RagCacheError
from ragcachekit.model.pretrained import load_model
from ragcachekit.policies.registry import open_policy
from ragcachekit.types import Prompt

_SHAPE = "smollm2-135m"


def run(
    *,
    shape: str | None = None,
    model: str | os.PathLike[str] | None = None,
    corpus: str | os.PathLike[str] | None = None,
    prompt_tokens: Sequence[int] = (2048,),
    chunk_tokens: int = 490,
    question_tokens: int = 64,
    policies: Sequence[str] = ("full", "lego:16", "reuse"),
    encoder: str | None = None,
    dtypes: Sequence[str] = ("float32",),
    runs: int = 5,
    device: str = "cpu",
    tiers: Sequence[str] = ("host",),
    seed: int = 0,
    progress: bool = True,
) -> BenchReport:
    """Measure TTFT of prompts of system text, chunks and question, per dtype and prompt size.

    Every round asks once in every way, so that a drifting machine hits all alike. Beside the policies stand
    ``full`` (what ``speedup`` is over), ``cold`` (nothing cached), ``generate`` (the model's own) and
    ``prefix-cache``: generate over a transformers cache of all but the question, its copy not counted.

    Parameters
    ----------
    shape, model : str, optional
        A key of ``SHAPES`` for random weights (default smollm2-135m), or a model's folder or hub id.
    corpus : path, optional
        Folder of documents for ``model``'s prompts, whose question is then fixed; default: random tokens.
    tiers : sequence of str
        Where the chunk KV lies. ``disk`` is read through the system's page cache; ``disk-cold`` drops the
        files from it before each request.

    Returns
    -------
    BenchReport
        Times in ms: ``ttft_ms`` is the median of ``runs``; ``link_ms`` places kept rows, ``wait_ms`` waits
        for loads; ``overlap`` is the share of loading that was not waited for.

    Raises ValueError for unknown names or sizes that do not fit together; RagCacheError if the library's
    answer is not the model's own: no figure is given then.
    """
    _check_arguments(shape, model, corpus, policies, tiers, runs, dtypes)
    name = describe(shape or _SHAPE, ", ".join(dtypes))
    if model is not None:
        name = ", ".join([os.fspath(model), *dtypes])
    found: list[dict[str, Any]] = []
    with tqdm(
        total=len(dtypes) * len(prompt_tokens) * (runs + 1), disable=not progress, desc="ttft", unit="round"
    ) as bar:
        for dtype in dtypes:
            lm, tokenizer = _load(shape, model, dtype, device, seed)
            for count in prompt_tokens:
                if corpus is None:
                    vocab = lm.config.get_text_config().vocab_size
                    prompt = random_prompt(vocab, count, chunk_tokens, question_tokens, seed)
                else:
                    prompt = corpus_prompt(corpus, tokenizer, count, chunk_tokens, seed)
                for row in _measure(lm, prompt, policies, encoder, tiers, runs, bar):
                    used = "none" if row["tier"] == NO_TIER else _encoder(row["policy"], encoder)
                    found.append({"dtype": dtype, "policy": row["policy"], "encoder": used, **row})
    return BenchReport("ttft", name, seed, tuple(found))


def _encoder(policy: str, asked: str | None) -> str:
    return open_policy(policy).encoder or asked or "standalone"


def _load(
    shape: str | None, model: str | os.PathLike[str] | None, dtype: str, device: str, seed: int
) -> tuple[Any, Any]:
    if model is None:
        return random_model(shape or _SHAPE, dtype=dtype, device=device, seed=seed), None
    return load_model(resolve_model(os.fspath(model)), device, dtype=dtype_named(dtype))


def _measure(
    lm: Any,
    prompt: Prompt,
    policies: Sequence[str],
    encoder: str | None,
    tiers: Sequence[str],
    runs: int,
    bar: tqdm[Any],
) -> tuple[dict[str, Any], ...]:
    used = [policy for policy in dict.fromkeys(policies) if policy != "full"]

    def fill(rag: RagCache) -> None:
        for policy in ("reuse", *used):
            rag.generate(prompt, policy=policy, **ONE_TOKEN)

    with open_engines(lm, tiers, fill, encoder) as engines:
        check_exact(engines.warm[tiers[-1]], prompt)
        for rag, policy in itertools.product(engines.warm.values(), used):
            check_policy(rag, prompt, policy)
        bar.update()
        ways = _ways(lm, prompt, used, engines)
        if lm.device.type == "cuda":  # kernels are compiled at the first request
            for _, ask in ways:
                ask()
        for _ in range(runs):
            for timings, ask in ways:
                timings.samples.append(ask())
            bar.update()
        return rows([timings for timings, _ in ways])


def ask_engine(rag: RagCache, prompt: Prompt, policy: str, tier: str) -> Measured:
    """Time one request; RagCacheError if KV came from elsewhere than ``tier`` (``none``: from anywhere)."""
    report = rag.generate(prompt, policy=policy, **ONE_TOKEN).report
    link = report.link
    sources = {use.source for use in link.uses}
    served = sources == {tier.removesuffix("-cold")}
    if tier == NO_TIER:
        served = not link.reused_tokens + link.recomputed_tokens
    if not served:
        raise RagCacheError(f"expected KV from {tier}, but: {link}; sources {sorted(sources)}")
    cached = (link.recompute_ratio, link.prompt_tokens, link.wait_ms, link.overlap)
    return Measured(report.ttft_ms, link.link_ms, *cached)


def plot(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draw the rows as bars, with the range from least to greatest."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    bars = report.rows
    below = [r["ttft_ms"] - r["ttft_ms_min"] for r in bars]
    above = [r["ttft_ms_max"] - r["ttft_ms"] for r in bars]
    figure = Figure(figsize=(1.5 + 1.1 * len(bars), 4), layout="constrained")
    axes = figure.add_subplot()
    drawn = axes.bar(range(len(bars)), [r["ttft_ms"] for r in bars], yerr=[below, above], capsize=3)
    axes.bar_label(drawn, [f"{r['speedup']:.1f}x" for r in bars], padding=2)
    axes.set_xticks(range(len(bars)), [f"{r['policy']}\n{r['tier']}\n{r['dtype']}" for r in bars])
    axes.set_ylabel("time to first token (ms)")
    axes.set_title(f"{report.model}, {bars[0]['prompt_tokens']} prompt tokens", fontsize=9)
    figure.savefig(path)


def _ways(
    model: Any, prompt: Prompt, policies: Sequence[str], engines: Engines
) -> list[tuple[Timings, Callable[[], Measured]]]:
    """What one round measures, in order; ``policies`` without ``full``."""

    def of(rag: RagCache, policy: str, tier: str) -> Measured:
        if tier == COLD_DISK:
            engines.drop_pages()
        return ask_engine(rag, prompt, policy, tier)

    ids = [[i for segment in prompt.segments for i in segment.token_ids or ()]]
    prefix = _prefix_cache(model, ids, len(prompt.segments[-1].token_ids or ()))
    uncached = policies[0] if policies else "reuse"
    return [
        (Timings("generate", NO_TIER), lambda: _time_generate(model, ids)),
        (Timings("prefix-cache", NO_TIER), lambda: _time_generate(model, ids, prefix)),
        (Timings("full", NO_TIER), partial(of, engines.cold, "full", NO_TIER)),
        (Timings("cold", NO_TIER), partial(of, engines.cold, uncached, NO_TIER)),
        *(
            (Timings(p, tier), partial(of, rag, p, tier))
            for tier, rag in engines.warm.items()
            for p in policies
        ),
    ]


@torch.no_grad()
def _prefix_cache(model: Any, ids: list[list[int]], question: int) -> DynamicCache:
    """All but the question, as transformers keeps a prompt for several continuations."""
    cache = DynamicCache()
    prefix = torch.tensor(ids, device=model.device)[:, :-question]
    model(input_ids=prefix, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def _time_generate(model: Any, ids: list[list[int]], prefix: DynamicCache | None = None) -> Measured:
    cache = {} if prefix is None else {"past_key_values": copy.deepcopy(prefix)}
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    tensor = torch.tensor(ids, device=model.device)
    output = model.generate(
        input_ids=tensor, attention_mask=torch.ones_like(tensor), pad_token_id=0, **cache, **ONE_TOKEN
    )
    output[:, -1].tolist()  # waits for the device
    ratio = 1.0 if prefix is None else 0.0
    return Measured((time.perf_counter() - begun) * 1e3, 0.0, ratio, len(ids[0]))


def _check_arguments(
    shape: str | None,
    model: object,
    corpus: object,
    policies: Sequence[str],
    tiers: Sequence[str],
    runs: int,
    dtypes: Sequence[str],
) -> None:
    if shape is not None and model is not None:
        raise ValueError("give shape= (random weights) or model=, not both")
    if corpus is not None and model is None:
        raise ValueError("a corpus needs the tokenizer of a model=; random weights have none")
    for dtype in dtypes:
        dtype_named(dtype)
    if runs < 1:
        raise ValueError(f"runs must be at least 1, got {runs}")
    if not tiers or not set(tiers) <= set(KNOWN_TIERS):
        raise ValueError(f"unknown tiers {tuple(tiers)}; known: {', '.join(KNOWN_TIERS)}")
    for policy in policies:
        open_policy(policy)

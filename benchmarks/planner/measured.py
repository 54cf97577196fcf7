"""Is ``load="auto"`` ever slower than ``load="always"`` on this machine? Measured, on random weights."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from tqdm.auto import tqdm

from ragcachekit.commands.bench.prompts import random_prompt
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.bench.resample import Bootstrap
from ragcachekit.commands.bench.shapes import describe, random_model
from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.errors import RagCacheError
from ragcachekit.reports import Answer
from ragcachekit.store.disk import DiskStore
from ragcachekit.types import Prompt

SHAPES = ("tiny", "smollm2-135m")
PROMPT_TOKENS = (100, 256, 1024)

_QUESTION = 64
_LEARNING = 8
"""Requests before any is timed: the planner measures prefills behind the first and needs a few reads."""
_BYTES = 32 << 30
_ASKED: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False}


def run(
    *,
    shapes: Sequence[str] = SHAPES,
    prompt_tokens: Sequence[int] = PROMPT_TOKENS,
    runs: int = 15,
    seed: int = 0,
    progress: bool = True,
) -> BenchReport:
    """Ask one prompt again and again, in turn of both kinds of engine, over one disk tier.

    System text and one chunk encoded behind it, so that nothing is approximate and whichever way is taken
    must give the tokens of a full prefill.

    Returns
    -------
    BenchReport
        Rows ``shape, prompt_tokens, auto_ms, always_ms`` (median TTFT), ``ratio`` (geometric mean of auto /
        always, round by round) with its 95 % interval ``low, high``, ``loaded`` (share of auto's requests
        that loaded the chunk) and ``runs``.

    Raises
    ------
    RagCacheError
        If an answer is not that of the full prefill; no figure is given then.
    """
    if runs < 1:
        raise ValueError(f"runs must be at least 1, got {runs}")
    rows = []
    for shape in tqdm(shapes, disable=not progress, desc="auto against always", unit="model"):
        model = random_model(shape, seed=seed)
        rows += [_case(shape, model, tokens, runs, seed) for tokens in prompt_tokens]
    return BenchReport("planner-measured", ", ".join(map(describe, shapes)), seed, tuple(rows))


def _case(shape: str, model: Any, tokens: int, runs: int, seed: int) -> dict[str, Any]:
    prompt = random_prompt(model.config.vocab_size, tokens, tokens, _QUESTION, seed)
    with _engines(model, prompt) as (filler, auto, always):
        expected = filler.generate(prompt, policy="full", **_ASKED).token_ids
        for _ in range(_LEARNING):
            _asked(auto, prompt, expected)
            _asked(always, prompt, expected)
        pairs, loaded = [], 0
        for number in range(runs):
            # Each way is first in every other round: what the one leaves behind meets both.
            order = (auto, always) if number % 2 else (always, auto)
            answers = {id(rag): _asked(rag, prompt, expected) for rag in order}
            pairs.append(tuple(answers[id(rag)].report.ttft_ms for rag in (auto, always)))
            loaded += answers[id(auto)].report.link.chunks[-1].source == "disk"
    logs = [math.log(one / other) for one, other in pairs]
    low, high = Bootstrap(runs, seed).of_mean(logs)
    return {
        "shape": shape,
        "prompt_tokens": tokens,
        "auto_ms": median(one for one, _ in pairs),
        "always_ms": median(other for _, other in pairs),
        "ratio": math.exp(sum(logs) / runs),
        "low": math.exp(low),
        "high": math.exp(high),
        "loaded": loaded / runs,
        "runs": runs,
    }


def _asked(rag: RagCache, prompt: Prompt, expected: tuple[int, ...]) -> Answer:
    answer = rag.generate(prompt, **_ASKED)
    if answer.token_ids != expected:
        raise RagCacheError(f"exact KV gave the tokens {answer.token_ids}, a full prefill {expected}")
    rag.flush()  # what it loads or measures behind the answer is not to meet the next request
    return answer


@contextmanager
def _engines(model: Any, prompt: Prompt) -> Iterator[tuple[RagCache, RagCache, RagCache]]:
    """One that has filled the store, one that plans and one that loads whatever is there."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragcachekit-bench-")))
        store = DiskStore(folder / "kv", _BYTES)
        stack.callback(store.close)

        def engine(**options: Any) -> RagCache:
            rag = RagCache(
                model,
                store=store,
                namespace="bench",
                encoder="system",
                policy="reuse",
                cache_dir=folder,
                **options,
            )
            return stack.enter_context(rag)

        filler = engine(cold="now", load="always")
        filler.generate(prompt, **_ASKED)
        yield filler, engine(cold="never", load="auto"), engine(cold="never", load="always")

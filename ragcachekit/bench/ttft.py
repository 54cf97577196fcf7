"""Time to first token of one long prompt: ordinary prefill against linked chunk KV, in one run."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from ragcachekit.bench.report import BenchReport
from ragcachekit.bench.shapes import describe, dtype_named, random_model
from ragcachekit.config import StoreConfig
from ragcachekit.engine import PromptLike, RagCache
from ragcachekit.errors import RagCacheError
from ragcachekit.link.admission import tolerance_for
from ragcachekit.link.policies import open_policy
from ragcachekit.model.loading import load_model
from ragcachekit.types import Chunk, Prompt, Text

TIERS = ("host", "disk")
NO_TIER = "none"
SYSTEM_TOKENS = 24
_HOST_BYTES = 32 << 30  # nothing that is measured may be evicted
_ONE_TOKEN = {"max_new_tokens": 1, "do_sample": False}
_EVERYTHING = f"lego:{1 << 30}"  # through the linked path, at ratio 1.0


@dataclass
class Timings:
    """Samples of one row of the table, filled round by round."""

    policy: str
    tier: str
    ttft_ms: list[float] = field(default_factory=list)
    link_ms: list[float] = field(default_factory=list)
    recompute_ratio: list[float] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)

    def add(self, ttft_ms: float, link_ms: float, ratio: float, prompt_tokens: int) -> None:
        """One measured request."""
        self.ttft_ms.append(ttft_ms)
        self.link_ms.append(link_ms)
        self.recompute_ratio.append(ratio)
        self.prompt_tokens.append(prompt_tokens)

    def row(self, full_ms: float) -> dict[str, Any]:
        """The flat row; ``full_ms`` is the median of ``full`` in the same run."""
        median = statistics.median(self.ttft_ms)
        return {
            "policy": self.policy,
            "tier": self.tier,
            "prompt_tokens": round(statistics.median(self.prompt_tokens)),
            "recompute_ratio": statistics.median(self.recompute_ratio),
            "ttft_ms": median,
            "ttft_ms_min": min(self.ttft_ms),
            "ttft_ms_max": max(self.ttft_ms),
            "speedup": full_ms / median,
            "link_ms": statistics.median(self.link_ms),
            "runs": len(self.ttft_ms),
        }


def run(
    *,
    shape: str | None = None,
    model: str | os.PathLike[str] | None = None,
    prompt_tokens: int = 2048,
    chunk_tokens: int = 490,
    question_tokens: int = 64,
    policies: Sequence[str] = ("full", "lego:16", "reuse"),
    dtype: str = "float32",
    runs: int = 5,
    device: str = "cpu",
    tiers: Sequence[str] = ("host",),
    seed: int = 0,
    progress: bool = True,
) -> BenchReport:
    """Measure TTFT of one prompt of random tokens: system text, chunks, question.

    Every round asks the same prompt once in every way, so that a drifting machine hits all ways
    alike. ``full`` is always among them: it is what ``speedup`` is over. Beside the policies stand
    ``cold`` (the library with nothing cached and nothing being encoded) and ``generate`` (the model's
    own ``generate``, without the library).

    Parameters
    ----------
    shape : str, optional
        A key of :data:`~ragcachekit.bench.shapes.SHAPES`, for random weights; default smollm2-135m.
    model : path or hub id, optional
        A real model instead.
    prompt_tokens, chunk_tokens, question_tokens : int
        Tokens of the whole prompt, of a chunk (about), and of the question.
    policies : sequence of str
        Selection policies.
    dtype : {"float32", "bfloat16", "float16"}
    runs : int
        Rounds; a row has their median, least and greatest.
    device : str
    tiers : sequence of {"host", "disk"}
        Where the chunk KV lies. ``disk`` has no host tier before it, but the system's page cache.
    seed : int
        Of weights and prompt.
    progress : bool
        Show a bar.

    Returns
    -------
    BenchReport
        Rows ``policy, tier, prompt_tokens, recompute_ratio, ttft_ms, ttft_ms_min, ttft_ms_max,
        speedup, link_ms, runs``; the tier is ``none`` where nothing is reused. ``link_ms`` runs until
        generate is called (on a GPU, without waiting for the device).

    Raises
    ------
    ValueError
        For unknown names or sizes that do not fit together.
    RagCacheError
        The library's answer is not the model's own; no figure is given then.
    """
    _check_arguments(shape, model, policies, tiers, runs)
    name = describe(shape or "smollm2-135m", dtype) if model is None else f"{os.fspath(model)}, {dtype}"
    lm = _model(shape or "smollm2-135m", model, dtype, device, seed)
    prompt = random_prompt(
        lm.config.get_text_config().vocab_size, prompt_tokens, chunk_tokens, question_tokens, seed
    )
    used = [policy for policy in dict.fromkeys(policies) if policy != "full"]
    with ExitStack() as stack:
        warm = {tier: stack.enter_context(open_engine(lm, tier)) for tier in tiers}
        cold = stack.enter_context(open_engine(lm, "host", cold="never"))
        bar = stack.enter_context(tqdm(total=len(warm) + 1 + runs, disable=not progress, desc="ttft"))
        for rag in warm.values():
            for policy in ("reuse", *used):  # a miss is encoded behind the answer
                rag.generate(prompt, policy=policy, **_ONE_TOKEN)
            bar.update()
        check_exact(next(iter(warm.values())), prompt)
        bar.update()
        ways = _ways(lm, prompt, used, warm, cold)
        for _ in range(runs):
            for timings, ask in ways:
                timings.add(*ask())
            bar.update()
    return BenchReport("ttft", name, seed, rows([timings for timings, _ in ways]))


def rows(timings: Sequence[Timings]) -> tuple[dict[str, Any], ...]:
    """Rows of all timings, with speed-ups over the one called ``full``."""
    full_ms = next(statistics.median(t.ttft_ms) for t in timings if t.policy == "full")
    return tuple(t.row(full_ms) for t in timings)


def random_prompt(vocab: int, prompt_tokens: int, chunk_tokens: int, question_tokens: int, seed: int) -> Prompt:
    """A short system text, equal chunks of about ``chunk_tokens``, a question: random ids, sizes exact."""
    middle = prompt_tokens - question_tokens - SYSTEM_TOKENS
    if min(chunk_tokens, question_tokens) < 1 or middle < 1:
        raise ValueError(
            f"a prompt of {prompt_tokens} tokens has no room for a system text of {SYSTEM_TOKENS}, a chunk and "
            f"a question of {question_tokens}; ask for more prompt tokens"
        )
    count = max(1, round(middle / chunk_tokens))
    sizes = [middle // count + (i < middle % count) for i in range(count)]
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (prompt_tokens,), generator=generator).split(
        [SYSTEM_TOKENS, *sizes, question_tokens]
    )
    system, *chunks, question = (tuple(part.tolist()) for part in ids)
    return Prompt(
        [Text(token_ids=system), *(Chunk(token_ids=chunk) for chunk in chunks), Text(token_ids=question)]
    )


@contextmanager
def open_engine(model: Any, tier: str, tokenizer: Any = None, *, cold: Any = "now") -> Iterator[RagCache]:
    """An engine whose chunk KV lies in one tier; a disk tier lives in a temporary folder."""
    with ExitStack() as stack:
        store = StoreConfig(host_bytes=_HOST_BYTES)
        if tier == "disk":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ragcachekit-bench-"))
            store = StoreConfig(host_bytes=0, disk_path=Path(folder) / "kv")
        yield stack.enter_context(RagCache(model, tokenizer, store=store, namespace="bench", cold=cold))


def check_exact(rag: RagCache, prompt: PromptLike) -> None:
    """Compare the library's answers with the model's own ``generate`` on the same ids.

    ``full`` must give the same greedy token. The linked path with every cached row recomputed must
    give the same logits, but for rounding, with KV of the prompt's chunks in the store.

    Raises
    ------
    RagCacheError
        If they differ, or if nothing of the prompt was linked.
    """
    model = rag.model
    ids = rag.link(prompt, policy="full").input_ids
    expected = _first_logits(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    token = int(expected.argmax())
    full = rag.generate(prompt, policy="full", **_ONE_TOKEN).token_ids
    if full != (token,):
        raise RagCacheError(f"policy full gave the tokens {full}, model.generate gave {token}")
    linked = rag.link(prompt, policy=_EVERYTHING)
    report = linked.report
    if not report.recomputed_tokens or report.approximate_tokens:
        raise RagCacheError(f"the linked path was not checked: {report}")
    scale = float(expected.abs().max())
    allowed = tolerance_for(model.dtype) * scale
    difference = float((_first_logits(model, linked.inputs) - expected).abs().max())
    if not difference <= allowed:
        raise RagCacheError(f"at ratio 1.0 the logits differ by {difference:.2g}, allowed {allowed:.2g}")
    (found,) = rag.generate(prompt, policy=_EVERYTHING, **_ONE_TOKEN).token_ids
    # Two tokens whose logits are equal but for rounding may change places.
    if not float(expected[token] - expected[found]) <= allowed:
        raise RagCacheError(f"linked inside generate, the first token is {found}, not {token}")


def ask_engine(rag: RagCache, prompt: PromptLike, policy: str, tier: str) -> tuple[float, float, float, int]:
    """TTFT, link time, recompute ratio and prompt tokens of one request served as expected.

    Raises
    ------
    RagCacheError
        If the KV came from elsewhere than ``tier`` (``none``: if anything was reused).
    """
    report = rag.generate(prompt, policy=policy, **_ONE_TOKEN).report
    link = report.link
    sources = {use.source for use in link.chunks}
    served = sources == {tier} if tier != NO_TIER else not link.reused_tokens + link.recomputed_tokens
    if not served:
        raise RagCacheError(f"expected KV from {tier}, but: {link}; sources {sorted(sources)}")
    return report.ttft_ms, link.link_ms, link.recompute_ratio, link.prompt_tokens


def plot(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draw the rows as bars, with the range from least to greatest, into ``path``."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    bars = report.rows
    names = [r["policy"] if r["tier"] == NO_TIER else f"{r['policy']}\n{r['tier']}" for r in bars]
    heights = [r["ttft_ms"] for r in bars]
    spread = [
        [r["ttft_ms"] - r["ttft_ms_min"] for r in bars],
        [r["ttft_ms_max"] - r["ttft_ms"] for r in bars],
    ]
    figure = Figure(figsize=(1.5 + 1.1 * len(bars), 4), layout="constrained")
    axes = figure.add_subplot()
    drawn = axes.bar(range(len(bars)), heights, yerr=spread, capsize=3)
    axes.bar_label(drawn, [f"{r['speedup']:.1f}x" for r in bars], padding=2)
    axes.margins(y=0.15)
    axes.set_xticks(range(len(bars)), names)
    axes.set_ylabel("time to first token (ms)")
    axes.set_title(f"{report.model}, {bars[0]['prompt_tokens']} prompt tokens", fontsize=9)
    figure.savefig(path)


_Ask = Callable[[], tuple[float, float, float, int]]


def _ways(
    model: Any, prompt: Prompt, policies: Sequence[str], warm: dict[str, RagCache], cold: RagCache
) -> list[tuple[Timings, _Ask]]:
    """What one round measures, in order; ``policies`` without ``full``."""

    def of(rag: RagCache, policy: str, tier: str) -> _Ask:
        return lambda: ask_engine(rag, prompt, policy, tier)

    ids = [[i for segment in prompt.segments for i in segment.token_ids or ()]]
    return [
        (Timings("generate", NO_TIER), lambda: _time_generate(model, ids)),
        (Timings("full", NO_TIER), of(cold, "full", NO_TIER)),
        (Timings("cold", NO_TIER), of(cold, policies[0] if policies else "reuse", NO_TIER)),
        *((Timings(p, tier), of(rag, p, tier)) for tier, rag in warm.items() for p in policies),
    ]


def _time_generate(model: Any, ids: list[list[int]]) -> tuple[float, float, float, int]:
    begun = time.perf_counter()
    tensor = torch.tensor(ids, device=model.device)
    output = model.generate(
        input_ids=tensor, attention_mask=torch.ones_like(tensor), pad_token_id=0, **_ONE_TOKEN
    )
    output[:, -1].tolist()  # waits for the device
    return (time.perf_counter() - begun) * 1e3, 0.0, 1.0, len(ids[0])


def _first_logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """``[vocab]`` logits of the first new token, on the CPU."""
    output = model.generate(
        **inputs, **_ONE_TOKEN, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    logits: torch.Tensor = output.logits[0][0].float().cpu()
    return logits


def _model(shape: str, model: str | os.PathLike[str] | None, dtype: str, device: str, seed: int) -> Any:
    if model is None:
        return random_model(shape, dtype=dtype, device=device, seed=seed)
    return load_model(model, device, dtype=dtype_named(dtype))[0]


def _check_arguments(
    shape: str | None, model: object, policies: Sequence[str], tiers: Sequence[str], runs: int
) -> None:
    if shape is not None and model is not None:
        raise ValueError("give shape= (random weights) or model=, not both")
    if runs < 1:
        raise ValueError(f"runs must be at least 1, got {runs}")
    if not tiers or not set(tiers) <= set(TIERS):
        raise ValueError(f"unknown tiers {tuple(tiers)}; known: {', '.join(TIERS)}")
    for policy in policies:
        open_policy(policy)

"""Models of well-known shapes with random weights, and the time to their first token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.output import Plot, written
from ragcachekit.commands import options as opt
from ragcachekit.commands import ttft as shipped
from ragcachekit.commands.console import show
from ragcachekit.commands.report import BenchReport

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Shape(NamedTuple):
    """Sizes of a decoder, as its published configuration has them."""

    family: str
    vocab: int
    hidden: int
    inter: int
    layers: int
    heads: int
    kv_heads: int
    context: int
    theta: float
    tied: bool


SHAPES = {
    "smollm2-135m": Shape("llama", 49152, 576, 1536, 30, 9, 3, 8192, 100_000.0, True),
    "qwen2.5-0.5b": Shape("qwen2", 151936, 896, 4864, 24, 14, 2, 32768, 1_000_000.0, True),
    "llama-3.1-8b": Shape("llama", 128256, 4096, 14336, 32, 32, 8, 131072, 500_000.0, False),
    "tiny": Shape("llama", 32000, 64, 128, 2, 4, 2, 4096, 10_000.0, True),  # no figures: to try a bench out
}


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype called ``name``; ValueError for any but float32, bfloat16 and float16."""
    if name not in _DTYPES:
        raise ValueError(f"unknown dtype {name!r}; known: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def random_model(shape: str, *, dtype: str = "float32", device: str = "cpu", seed: int = 0) -> Any:
    """A causal LM of a shape with random weights, in eval mode and without an end token.

    Speed depends on the shape alone. The same seed gives the same weights on the same kind of device.
    Llama 3.1's frequency scaling, which costs no time, is left out. ValueError for an unknown shape.
    """
    if shape not in SHAPES:
        raise ValueError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}")
    chosen = SHAPES[shape]
    config = AutoConfig.for_model(
        chosen.family,
        vocab_size=chosen.vocab,
        hidden_size=chosen.hidden,
        intermediate_size=chosen.inter,
        num_hidden_layers=chosen.layers,
        num_attention_heads=chosen.heads,
        num_key_value_heads=chosen.kv_heads,
        max_position_embeddings=chosen.context,
        rope_parameters={"rope_type": "default", "rope_theta": chosen.theta},
        tie_word_embeddings=chosen.tied,
        bos_token_id=1,  # for encoders with sinks
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype_named(dtype)).eval()


@dataclass(frozen=True, kw_only=True)
class ShapeSettings(shipped.TtftSettings):
    """As :class:`~ragcachekit.commands.ttft.TtftSettings`, with random weights of a key of :data:`SHAPES`."""

    model: str = ""
    shape: str = "smollm2-135m"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "model", f"{self.shape} shape, random weights")

    def load(self, dtype: str) -> tuple[Any, Any]:
        """The model, and no tokenizer."""
        return random_model(self.shape, dtype=dtype, device=self.device or "cpu", seed=self.seed), None


def ttft(
    shape: Annotated[
        str, typer.Option(help="smollm2-135m, qwen2.5-0.5b, llama-3.1-8b; tiny, to try it out.")
    ] = "smollm2-135m",
    prompt_tokens: opt.PromptTokens = "2048",
    chunk_tokens: opt.PromptChunkTokens = 490,
    question_tokens: opt.QuestionTokens = 64,
    policies: opt.PolicyNames = "full,lego:16,reuse",
    encoder: opt.Encoder = None,
    tiers: opt.Tiers = "host",
    dtype: opt.Dtypes = "float32",
    runs: opt.Runs = 5,
    device: opt.DeviceOrCpu = "cpu",
    seed: opt.Seed = 0,
    json: opt.Json = None,
    plot: Plot = None,
) -> None:
    """``ragcachekit bench ttft`` of random weights: speed depends on the shape alone."""
    lists: dict[str, Any] = shipped.lists(prompt_tokens, policies, tiers, dtype)
    report = shipped.run(opt.settings_of(ShapeSettings, locals(), **lists), progress=True)
    show(report.table(f"Time to first token: {report.model}"))
    written(report, json, plot, draw)


def draw(report: BenchReport, path: Path) -> None:
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

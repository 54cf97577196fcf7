"""Models of well-known shapes with random weights: speed depends on the shape alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

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


def describe(shape: str, dtype: str = "float32") -> str:
    """The model's name in a report."""
    return f"{shape} shape, random weights, {dtype}"


def random_model(shape: str, *, dtype: str = "float32", device: str = "cpu", seed: int = 0) -> Any:
    """A causal LM of a shape with random weights, in eval mode and without an end token.

    The same seed gives the same weights on the same kind of device. Llama 3.1's frequency scaling, which
    costs no time, is left out. Raises ValueError for an unknown shape or dtype.
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

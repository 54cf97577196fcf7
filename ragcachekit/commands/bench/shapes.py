"""Models of well-known shapes with random weights: speed depends on the shape, not on what was learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}


@dataclass(frozen=True)
class Shape:
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
    "tiny": Shape("llama", 32000, 64, 128, 2, 4, 2, 4096, 10_000.0, True),
}
"""The shapes by name; ``tiny`` is for trying a bench out, not for figures."""


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype called ``name``.

    Raises ValueError for any other than float32, bfloat16 and float16.
    """
    if name not in _DTYPES:
        raise ValueError(f"unknown dtype {name!r}; known: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def describe(shape: str, dtype: str = "float32") -> str:
    """What to call such a model in a report: it says that the weights are random."""
    return f"{shape} shape, random weights, {dtype}"


def random_model(shape: str, *, dtype: str = "float32", device: str = "cpu", seed: int = 0) -> Any:
    """Build a causal LM of a shape with random weights, in eval mode.

    The same seed gives the same weights on the same kind of device. The configuration has no end
    token, so nothing ends a generation early. (Llama 3.1's frequency scaling is left out: it costs
    no time.) Raises ValueError for an unknown shape or dtype.
    """
    if shape not in SHAPES:
        raise ValueError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}")
    kind, config = _configuration(SHAPES[shape])
    # On the meta device first: the ordinary constructors would fill every weight twice.
    with torch.device("meta"):
        model: Any = kind._from_config(config, dtype=dtype_named(dtype))
    model.to_empty(device=device)
    model.tie_weights()
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=config).to(device)  # its frequencies are no weights
    _fill(model, torch.Generator(device).manual_seed(seed))
    return model.eval()


def _configuration(shape: Shape) -> tuple[Any, Any]:
    make, kind = _FAMILIES[shape.family]
    config = make(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inter,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context,
        rope_parameters={"rope_type": "default", "rope_theta": shape.theta},
        tie_word_embeddings=shape.tied,
        bos_token_id=1,  # for encoders with sinks
        eos_token_id=None,
        pad_token_id=None,
    )
    return kind, config


@torch.no_grad()
def _fill(model: torch.nn.Module, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.normal_(0, 0.02, generator=generator)

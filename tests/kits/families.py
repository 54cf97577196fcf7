"""Tiny random models of many families, and oracles that use nothing but plain transformers."""

import functools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from transformers import DynamicCache

from soak_kit import soaked

VOCAB = 101
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 64,
}
LONGROPE_THRESHOLD = 64
THRESHOLD = 160
"""Tokens after which the attention of ``ministral3`` and ``llama4`` depends on positions."""
WINDOW = 8
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (tf.LlamaConfig, {}),
    "llama3": (tf.LlamaConfig, {"rope_parameters": LLAMA3}),
    "qwen2-yarn": (tf.Qwen2Config, {"rope_parameters": YARN}),
    "mistral-sliding": (tf.MistralConfig, {"sliding_window": WINDOW}),
    "qwen2-sliding": (
        tf.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": (tf.Qwen3Config, {"head_dim": 32}),
    "phi3": (tf.Phi3Config, {"partial_rotary_factor": 0.5}),
    "phi3-longrope": (
        tf.Phi3Config,
        {"original_max_position_embeddings": LONGROPE_THRESHOLD, "rope_parameters": LONGROPE},
    ),
    "gemma2": (
        tf.Gemma2Config,
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "attn_implementation": "eager",
        },
    ),
    "gemma3": (tf.Gemma3TextConfig, {"head_dim": 16, "sliding_window": WINDOW, "layer_types": LAYER_TYPES}),
    "glm4": (tf.Glm4Config, {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "gpt-oss": (
        tf.GptOssConfig,
        {"head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "smollm3": (tf.SmolLM3Config, {"no_rope_layers": [1, 0, 1]}),
    "cohere": (tf.CohereConfig, {}),
    "ministral3": (
        tf.Ministral3Config,
        {
            "head_dim": 16,
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": THRESHOLD,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "llama4": (
        tf.Llama4TextConfig,
        {
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": THRESHOLD,
            "floor_scale": THRESHOLD + 1,
            "attn_scale": 1.0,
        },
    ),
}
ALWAYS = (
    *("llama", "mistral-sliding", "gemma2", "gemma3", "glm4", "gpt-oss", "phi3-longrope", "smollm3"),
    "llama4",
)
"""One of each kind: `make test` checks all families where they are admitted, and elsewhere these."""
EACH = soaked(FAMILIES, *ALWAYS)
BY_POSITION = ("ministral3", "llama4")
SLIDING = ("mistral-sliding", "qwen2-sliding", "gemma2", "gemma3", "gpt-oss")


@torch.no_grad()
def sharpened(model: Any) -> Any:
    """The model, with matrices so large that its logits are far from flat."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(4)
    return model.eval()


def build(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A fresh model of the family, the same weights each time."""
    kind, special = FAMILIES[name]
    config = kind(**{**SIZES, **special, **changes})
    torch.manual_seed(0)
    attention = special.get("attn_implementation")
    model = sharpened(tf.AutoModelForCausalLM.from_config(config, attn_implementation=attention))
    if name == "gpt-oss":
        # Sinks are initialised to zeros nearly; large ones make a forgotten sink visible.
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.sinks.copy_(torch.tensor([1.0, -1.0, 2.0, 0.5]))
    return model.to(dtype)


@functools.cache
def plain(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The oracle: a model of the family that our code never touches. Read only."""
    model = build(name, dtype)
    model.answers = {}
    return model


@functools.cache
def always_long() -> Any:
    """``phi3-longrope`` whose short frequencies are the long ones: the oracle for parts of long prompts."""
    factors = {**LONGROPE, "short_factor": LONGROPE["long_factor"]}
    return build("phi3-longrope", rope_parameters=factors)


def oracle(name: str, length: int) -> Any:
    """The plain model; with a prompt of ``length`` tokens' frequencies, whatever part of it is run."""
    return always_long() if name == "phi3-longrope" and length > LONGROPE_THRESHOLD else plain(name)


@functools.cache
def wrapped(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The family's model for our code. Tests that change a model build their own."""
    return build(name, dtype)


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    """Random ids without the special ones."""
    draw = random.Random(seed)
    return tuple(draw.randrange(3, VOCAB) for _ in range(count))


@dataclass(frozen=True)
class Prefill:
    """Logits ``[tokens, vocab]`` and per layer K, V ``[kv_heads, tokens, head_dim]``."""

    logits: torch.Tensor
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]


@torch.no_grad()
def prefill(model: Any, ids: Sequence[int], positions: Sequence[int] | None = None) -> Prefill:
    """An ordinary forward, at ``positions`` where given."""
    cache = DynamicCache()
    where = list(range(len(ids))) if positions is None else list(positions)
    logits = model(
        input_ids=torch.tensor([list(ids)]),
        position_ids=torch.tensor([where]),
        past_key_values=cache,
        use_cache=True,
    ).logits[0]
    return Prefill(
        logits,
        tuple(layer.keys[0] for layer in cache.layers),
        tuple(layer.values[0] for layer in cache.layers),
    )


Columns = Mapping[int, tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]
"""Position -> (keys, values) of that position, one ``[kv_heads, head_dim]`` per layer."""


def columns(run: Prefill, inside: Iterable[int], to: int) -> dict[int, Any]:
    """Columns ``inside`` of a run, as kept columns from position ``to`` on."""
    return {
        to + i: ([k[:, column] for k in run.keys], [v[:, column] for v in run.values])
        for i, column in enumerate(inside)
    }


@torch.no_grad()
def stepwise(model: Any, ids: Sequence[int], kept: Columns) -> Prefill:
    """What linking means, without any mask: compute the rows that are not kept one by one, in order.

    Each row runs alone, as a decoding step over a cache of exactly the positions before it (kept
    columns as given, others as computed). Kept positions have no logits (NaN).
    """
    layers = model.config.get_text_config().num_hidden_layers
    keys: list[list[torch.Tensor]] = [[] for _ in range(layers)]
    values: list[list[torch.Tensor]] = [[] for _ in range(layers)]
    logits = []
    for position, token in enumerate(ids):
        if position in kept:
            for index in range(layers):
                keys[index].append(kept[position][0][index])
                values[index].append(kept[position][1][index])
            logits.append(None)
            continue
        cache = DynamicCache()
        for index in range(layers if position else 0):
            cache.update(torch.stack(keys[index], 1)[None], torch.stack(values[index], 1)[None], index)
        out = model(
            input_ids=torch.tensor([[token]]),
            position_ids=torch.tensor([[position]]),
            past_key_values=cache,
            use_cache=True,
        )
        for index, layer in enumerate(cache.layers):
            keys[index].append(layer.keys[0, :, -1])
            values[index].append(layer.values[0, :, -1])
        logits.append(out.logits[0, -1])
    width = next(row.shape[0] for row in logits if row is not None)
    rows = [torch.full((width,), float("nan")) if row is None else row for row in logits]
    return Prefill(
        torch.stack(rows), tuple(torch.stack(k, 1) for k in keys), tuple(torch.stack(v, 1) for v in values)
    )


def off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, relative to the largest value; NaN counts as infinite."""
    assert ours.shape == theirs.shape
    size = float(theirs.float().abs().max()) or 1.0
    difference = float((ours.float() - theirs.float()).abs().max()) / size
    return difference if difference == difference else float("inf")


@torch.no_grad()
def greedy(model: Any, ids: Sequence[int], count: int, **options: Any) -> tuple[int, ...]:
    """New ids of an ordinary ``generate``; an oracle is asked once."""
    known = {} if options else getattr(model, "answers", {})
    if (*ids, count) in known:
        return known[*ids, count]
    batch = torch.tensor([list(ids)])
    options = {"do_sample": False, "max_new_tokens": count, **options}
    out = model.generate(batch, attention_mask=torch.ones_like(batch), **options)
    known[*ids, count] = tuple(out[0, len(ids) :].tolist())
    return known[*ids, count]

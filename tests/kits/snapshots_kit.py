"""Tiny random models whose chunks cannot be linked: hybrids, state-space, no RoPE, chunked attention."""

import functools
import tempfile
from typing import Any

import torch
import transformers as tf

from benchmarks.families import dialogues
from families import SIZES, sharpened
from ragcachekit import Prompt, RagCache

Dialogues = dialogues.Dialogues

LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 16,
}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3_5": (tf.Qwen3_5TextConfig, LINEAR),
    "lfm2": (tf.Lfm2Config, {"layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 96}),
    "mamba2": (
        tf.Mamba2Config,
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16},
    ),
    "gpt2": (tf.GPT2Config, {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}),
    "bloom": (tf.BloomConfig, {"n_layer": 3, "n_head": 4}),
}
STATEFUL = ("qwen3_5", "lfm2", "mamba2")

FOLDER = tempfile.TemporaryDirectory(prefix="ragcachekit-tests-")


@functools.cache
def model_of(name: str) -> Any:
    """The family's model, with logits far from flat."""
    kind, special = FAMILIES[name]
    sizes = (
        SIZES if name in ("qwen3_5", "lfm2") else {k: v for k, v in SIZES.items() if k != "intermediate_size"}
    )
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(kind(**{**sizes, **special})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    model.generation_config.eos_token_id = None
    return model


def hybrid_speaker(seed: int = 0, **changes: Any) -> Any:
    """A fresh tiny hybrid over the byte-level vocabulary of ``speaking``."""
    torch.manual_seed(seed)
    sizes = {**SIZES, **LINEAR, "vocab_size": 340, **changes}
    return sharpened(tf.Qwen3_5ForCausalLM(tf.Qwen3_5TextConfig(**sizes)))


def rag_of(name: str, **options: Any) -> RagCache:
    """An engine around the family's shared model."""
    return RagCache(model_of(name), **{"cache_dir": FOLDER.name, **options})


def bare(name: str, prompt: Prompt, count: int = 6) -> tuple[int, ...]:
    """What transformers' own generate answers, greedily."""
    return dialogues.bare(model_of(name), prompt, max_new_tokens=count)

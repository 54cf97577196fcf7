"""Tiny random models whose chunks cannot be linked: hybrids, state-space, no RoPE, chunked attention."""

from __future__ import annotations

import functools
import random
import tempfile
from typing import Any

import torch
import transformers as tf

from families import sharpened
from ragcachekit import Chunk, Prompt, RagCache, Text

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
    "mamba2": (tf.Mamba2Config, {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2}),
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


def ids_of(prompt: Prompt) -> list[int]:
    return [token for segment in prompt.segments for token in segment.token_ids or ()]


def bare(name: str, prompt: Prompt, count: int = 6) -> tuple[int, ...]:
    """What transformers' own generate answers, greedily."""
    ids = torch.tensor([ids_of(prompt)])
    out = model_of(name).generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
    )
    return tuple(out[0, ids.shape[1] :].tolist())


class Dialogues:
    """Random prompts over a few system texts and chunks; every chunk has tokens of its own."""

    def __init__(self, seed: int, chunks: int = 4) -> None:
        self.draw = random.Random(seed)
        self.systems = [self.tokens(count) for count in (20, 40)]
        self.chunks = [self.tokens(self.draw.randrange(8, 40)) for _ in range(chunks)]

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.draw.randrange(5, VOCAB - 1) for _ in range(count))

    def prompt(self, *chunks: int, system: int = 0, question: int = 5) -> Prompt:
        """The chunks of these numbers after a system text; a new question of so many tokens."""
        parts = [Chunk(token_ids=self.chunks[number]) for number in chunks]
        return Prompt([Text(token_ids=self.systems[system]), *parts, Text(token_ids=self.tokens(question))])

    def any(self) -> Prompt:
        some = self.draw.sample(range(len(self.chunks)), self.draw.randrange(4))
        return self.prompt(*some, system=self.draw.randrange(2), question=self.draw.randrange(2, 70))

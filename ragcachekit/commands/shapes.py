"""Models of well-known shapes with random weights, and prompts of an exact size, to measure times on."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ragcachekit.commands.corpus import read_corpus
from ragcachekit.errors import CorpusError
from ragcachekit.types import Chunk, Prompt, Text

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SYSTEM_TOKENS = 24
SYSTEM = "Answer the question from the documents below.\n\n"
QUESTION = "\n\nQuestion: What do these documents say, and what do they leave open?\nAnswer:"


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


def random_prompt(
    vocab: int, prompt_tokens: int, chunk_tokens: int, question_tokens: int, seed: int
) -> Prompt:
    """A short system text, equal chunks of about ``chunk_tokens``, a question: random ids, sizes exact."""
    ids = torch.randint(vocab, (prompt_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    stop = prompt_tokens - question_tokens
    return _prompt(ids[:SYSTEM_TOKENS], ids[SYSTEM_TOKENS:stop], ids[stop:], chunk_tokens)


def corpus_prompt(
    folder: str | os.PathLike[str], tokenizer: Any, prompt_tokens: int, chunk_tokens: int, seed: int
) -> Prompt:
    """As :func:`random_prompt`, of :data:`SYSTEM`, adjacent text of the folder's documents and a question.

    Where the text begins is drawn. CorpusError if the folder has too little text.
    """
    system, question = (tokenizer(text, add_special_tokens=False).input_ids for text in (SYSTEM, QUESTION))
    size = prompt_tokens - len(system) - len(question)
    text = "\n\n".join(read_corpus(folder, chunk_tokens=1 << 30).texts)
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    if len(ids) < size:
        raise CorpusError(f"{os.fspath(folder)} has {len(ids)} tokens of text, and the prompt needs {size}")
    draw = torch.Generator().manual_seed(seed)
    start = int(torch.randint(len(ids) - max(size, 0) + 1, (1,), generator=draw))
    return _prompt(system, ids[start : start + max(size, 0)], question, chunk_tokens)


def _prompt(
    system: Sequence[int], documents: Sequence[int], question: Sequence[int], chunk_tokens: int
) -> Prompt:
    if min(len(documents), len(question), chunk_tokens) < 1:
        raise ValueError(
            "the prompt has no room for a system text, a chunk and a question; ask for more tokens"
        )
    count = max(1, round(len(documents) / chunk_tokens))
    sizes = [len(documents) // count + (i < len(documents) % count) for i in range(count)]
    ends = [0, *itertools.accumulate(sizes)]
    chunks = [Chunk(token_ids=tuple(documents[a:b])) for a, b in itertools.pairwise(ends)]
    return Prompt([Text(token_ids=tuple(system)), *chunks, Text(token_ids=tuple(question))])

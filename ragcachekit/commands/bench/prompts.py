"""Prompts of an exact size for the TTFT bench: random tokens, or a folder's documents."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import torch

from ragcachekit.commands.corpus import read_corpus
from ragcachekit.errors import CorpusError
from ragcachekit.types import Chunk, Prompt, Text

SYSTEM_TOKENS = 24
SYSTEM = "Answer the question from the documents below.\n\n"
QUESTION = "\n\nQuestion: What do these documents say, and what do they leave open?\nAnswer:"


def random_prompt(
    vocab: int, prompt_tokens: int, chunk_tokens: int, question_tokens: int, seed: int
) -> Prompt:
    """A short system text, equal chunks of about ``chunk_tokens``, a question: random ids, sizes exact."""
    _check(prompt_tokens, SYSTEM_TOKENS, min(chunk_tokens, question_tokens), question_tokens)
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
    _check(prompt_tokens, len(system), chunk_tokens, len(question))
    size = prompt_tokens - len(system) - len(question)
    text = "\n\n".join(read_corpus(folder, chunk_tokens=1 << 30).texts)
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    if len(ids) < size:
        raise CorpusError(f"{os.fspath(folder)} has {len(ids)} tokens of text, and the prompt needs {size}")
    draw = torch.Generator().manual_seed(seed)
    start = int(torch.randint(len(ids) - size + 1, (1,), generator=draw))
    return _prompt(system, ids[start : start + size], question, chunk_tokens)


def _check(prompt_tokens: int, system: int, least: int, question: int) -> None:
    if least < 1 or prompt_tokens - system - question < 1:
        raise ValueError(
            f"a prompt of {prompt_tokens} tokens has no room for a system text of {system}, a chunk "
            f"and a question of {question}; ask for more prompt tokens"
        )


def _prompt(
    system: Sequence[int], documents: Sequence[int], question: Sequence[int], chunk_tokens: int
) -> Prompt:
    count = max(1, round(len(documents) / chunk_tokens))
    sizes = [len(documents) // count + (i < len(documents) % count) for i in range(count)]
    ends = [0, *itertools.accumulate(sizes)]
    chunks = [Chunk(token_ids=tuple(documents[a:b])) for a, b in itertools.pairwise(ends)]
    return Prompt([Text(token_ids=tuple(system)), *chunks, Text(token_ids=tuple(question))])

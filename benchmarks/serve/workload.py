"""Requests at random times over documents drawn by Zipf's law (RAGCache, section 7)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.datasets import load_dataset
from ragcachekit.commands.corpus import read_corpus
from ragcachekit.commands.ttft import QUESTION, SYSTEM, SYSTEM_TOKENS
from ragcachekit.errors import CorpusError
from ragcachekit.types import Chunk, Prompt, Text

QUESTION_TOKENS = 24  # of a random question

Ids = tuple[int, ...]


@dataclass(frozen=True)
class ServeRequest:
    """A prompt and its arrival, in mean gaps between arrivals."""

    arrival: float
    prompt: Prompt

    @property
    def token_ids(self) -> Ids:
        """The prompt as the model sees it."""
        return tuple(i for segment in self.prompt.segments for i in segment.token_ids or ())


@dataclass(frozen=True)
class Documents:
    """Token ids of what prompts are made of: a system text, equally long documents, questions."""

    name: str
    system: Ids
    chunks: tuple[Ids, ...]
    questions: tuple[Ids, ...]

    def requests(
        self, count: int, chunks: int, alpha: float, seed: Sequence[int]
    ) -> tuple[ServeRequest, ...]:
        """``count`` requests of ``chunks`` different documents each, arriving as a Poisson process.

        The document of rank r is drawn with a weight of ``r ** -alpha``. The ranks do not depend on the seed,
        so that all draws have the same popular documents.
        """
        if chunks > len(self.chunks):
            raise ValueError(f"a prompt has {chunks} documents, and there are {len(self.chunks)} in all")
        rng, size = np.random.default_rng(seed), len(self.chunks)
        weights = (1.0 + np.random.default_rng(0).permutation(size)) ** -alpha
        requests = []
        for arrival in np.cumsum(rng.exponential(size=count)):
            drawn = rng.choice(size, chunks, replace=False, p=weights / weights.sum())
            question = int(rng.integers(len(self.questions)))
            requests.append(ServeRequest(float(arrival), self.prompt(drawn.tolist(), question)))
        return tuple(requests)

    def each_once(self, chunks: int) -> Iterator[Prompt]:
        """Prompts that have every document once."""
        for start in range(0, len(self.chunks), chunks):
            yield self.prompt(range(len(self.chunks))[start : start + chunks], 0)

    def prompt(self, places: Sequence[int], question: int) -> Prompt:
        """The prompt of these documents, in order, and one of the questions."""
        documents = [Chunk(token_ids=self.chunks[place]) for place in places]
        return Prompt([Text(token_ids=self.system), *documents, Text(token_ids=self.questions[question])])


def random_documents(vocab: int, count: int, chunk_tokens: int, seed: int) -> Documents:
    """Documents and questions of random token ids below ``vocab``."""
    rng = np.random.default_rng(seed)

    def draw(rows: int, size: int) -> tuple[Ids, ...]:
        return tuple(map(tuple, rng.integers(vocab, size=(rows, size)).tolist()))

    return Documents(
        "random tokens", draw(1, SYSTEM_TOKENS)[0], draw(count, chunk_tokens), draw(count, QUESTION_TOKENS)
    )


def text_documents(
    tokenizer: Any,
    count: int,
    chunk_tokens: int,
    *,
    dataset: str | None = None,
    corpus: str | os.PathLike[str] | None = None,
) -> Documents:
    """Documents cut from the text of a dataset (``squad:FILE``), with its questions, or of a folder.

    CorpusError if there are fewer than ``count`` pieces of ``chunk_tokens``; ValueError, OSError where the
    dataset or the folder cannot be read.
    """
    if dataset is not None:
        passages = load_dataset(dataset)
        texts = list(dict.fromkeys(text for one in passages for text in (*one.relevant, *one.others)))
        questions = [f"\n\nQuestion: {one.question}\nAnswer:" for one in passages]
        name = dataset.rpartition("/")[2]
    elif corpus is not None:
        texts, questions, name = read_corpus(corpus, chunk_tokens=1 << 30).texts, [QUESTION], str(corpus)
    else:
        raise ValueError("give a dataset= or a corpus= that the documents are cut from")

    def ids(text: str) -> Ids:
        return tuple(tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)

    whole = ids("\n\n".join(texts))
    if len(whole) < count * chunk_tokens:
        raise CorpusError(
            f"{name} has text for {len(whole) // chunk_tokens} documents of {chunk_tokens} tokens, not for "
            f"{count}; ask for fewer documents or shorter chunks"
        )
    pieces = tuple(
        whole[start : start + chunk_tokens] for start in range(0, count * chunk_tokens, chunk_tokens)
    )
    return Documents(name, ids(SYSTEM), pieces, tuple(map(ids, dict.fromkeys(questions))))

"""Random dialogues on a model whose chunks cannot be linked, against an untouched copy of it.

Prompts share beginnings. In between, chunks are forgotten and the engine is made anew over its folder.
Budgets are so small that snapshots are evicted.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ragcachekit.config import StoreConfig
from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.types import Chunk, Prompt, Text, chunk_id

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
DIALOGUES = 20
IDS = range(5, 100)
"""Of random tokens: without special ones."""


class Dialogues:
    """Random prompts over a few system texts and chunks; every chunk has tokens of its own."""

    def __init__(self, seed: int, chunks: int = 4) -> None:
        self.draw = random.Random(seed)
        self.systems = [self.tokens(count) for count in (20, 40)]
        self.chunks = [self.tokens(self.draw.randrange(8, 40)) for _ in range(chunks)]

    def tokens(self, count: int) -> tuple[int, ...]:
        """New random tokens."""
        return tuple(self.draw.choices(IDS, k=count))

    def prompt(self, *chunks: int, system: int = 0, question: int = 5) -> Prompt:
        """The chunks of these numbers after a system text; a new question of so many tokens."""
        parts = [Chunk(token_ids=self.chunks[number]) for number in chunks]
        return Prompt([Text(token_ids=self.systems[system]), *parts, Text(token_ids=self.tokens(question))])

    def any(self) -> Prompt:
        """A random prompt."""
        some = self.draw.sample(range(len(self.chunks)), self.draw.randrange(4))
        return self.prompt(*some, system=self.draw.randrange(2), question=self.draw.randrange(2, 70))


def bare(model: Any, prompt: Prompt, **options: Any) -> tuple[int, ...]:
    """What transformers' own generate answers, greedily."""
    ids = torch.tensor([[token for segment in prompt.segments for token in segment.token_ids or ()]])
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **{**GREEDY, **options})
    return tuple(out[0, ids.shape[1] :].tolist())


class Course(NamedTuple):
    """How many dialogues reused something, how many snapshots were evicted, and the first wrong answer."""

    hits: int = 0
    evicted: int = 0
    wrong: str = ""


def converse(
    open_engine: Callable[..., RagCache], oracle: Any, prompt_bytes: int, *, count: int = DIALOGUES
) -> Course:
    """Dialogues over the engines that ``open_engine(store=...)`` makes of one model.

    ``prompt_bytes`` is what is stored of one prompt, about.
    """
    talks, hits, evicted = Dialogues(2), 0, 0
    with tempfile.TemporaryDirectory(prefix="ragcachekit-") as folder:
        store = StoreConfig(
            host_bytes=2 * prompt_bytes + 1, disk_path=Path(folder), disk_bytes=6 * prompt_bytes + 1
        )
        rag = open_engine(store=store)
        try:
            for number in range(count):
                prompt = talks.any()
                answer, expected = rag.generate(prompt, **GREEDY), bare(oracle, prompt)
                if answer.token_ids != expected:
                    wrong = f"dialogue {number}: {answer.token_ids} instead of {expected}"
                    return Course(hits, evicted, wrong)
                hits += answer.report.link.exact_tokens > 0
                if number % 6 == 3:
                    rag.flush()
                    rag.forget([chunk_id(talks.draw.choice(talks.chunks), "default")])
                elif number % 6 == 5:
                    evicted += _evicted(rag)
                    rag.close()
                    rag = open_engine(store=store)
            return Course(hits, evicted + _evicted(rag))
        finally:
            rag.close()


def _evicted(rag: RagCache) -> int:
    rag.flush()
    return sum(tier.evictions for tier in rag.stats())

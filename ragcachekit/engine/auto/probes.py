"""Prompts for the check of ``auto``, made of the namespace's own chunks."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

CHUNKS = 4
"""Chunks per prompt: two that were registered one after the other, among random others."""

LEAST_TEXTS = 2
"""Fewest chunks of which prompts can be made."""

_SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n+")
_LEAST_CHARS, _MOST_CHARS = 24, 400


@dataclass(frozen=True)
class Probe:
    """Chunk texts in prompt order, and the beginning of a sentence of one, which the model continues."""

    texts: tuple[str, ...]
    beginning: str


def probes(texts: Iterable[str], number: int, seed: int = 0) -> list[Probe]:
    """Prompts, each about another chunk until all had their turn.

    Raises ValueError for fewer than :data:`LEAST_TEXTS` different texts.
    """
    pool = list(dict.fromkeys(text.strip() for text in texts if text.strip()))
    if len(pool) < LEAST_TEXTS:
        raise ValueError(
            f"a check needs at least {LEAST_TEXTS} chunks, got {len(pool)}: give texts=, or register more"
        )
    return list(islice(_probes(pool, random.Random(seed)), number))


def _probes(pool: list[str], rng: random.Random) -> Iterator[Probe]:
    while True:
        for at in rng.sample(range(len(pool)), len(pool)):
            group = [pool[at - 1], pool[at]] if at else [pool[at]]
            rest = [text for text in rng.sample(pool, min(CHUNKS + 2, len(pool))) if text not in group]
            others = rest[: CHUNKS - len(group)]
            place = rng.randint(0, len(others))
            yield Probe((*others[:place], *group, *others[place:]), _beginning(pool[at], rng))


def _beginning(text: str, rng: random.Random) -> str:
    """The first half of a random sentence, cut between words where there are any."""
    found = [s for s in _SENTENCE.split(text) if _LEAST_CHARS <= len(s) <= _MOST_CHARS]
    sentence = rng.choice(found) if found else text[:_MOST_CHARS]
    half = (len(sentence) + 1) // 2
    return sentence[: max(sentence.rfind(" ", 0, half), 0) or half]

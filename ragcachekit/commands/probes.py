"""Questions made of a corpus: the model continues half a sentence of one chunk."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import NamedTuple

CHUNKS = 4
"""Chunks per probe: one and its predecessor in the document, among random others."""

MIN_CHARS, MAX_CHARS = 24, 400
"""Length of the sentence that a probe cuts in half."""

_SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n+")


class Probe(NamedTuple):
    """Chunk texts in prompt order, and a sentence of one of them, cut in half."""

    chunks: tuple[str, ...]
    beginning: str
    rest: str


def probes(documents: Sequence[Sequence[str]], number: int, seed: int = 0) -> list[Probe]:
    """At most ``number`` probes, each about another chunk; ValueError for fewer than two different chunks.

    ``documents`` are lists of chunks. The other chunks of a prompt are those of other probes where there are
    enough, so that few have to be encoded.
    """
    rng = random.Random(seed)
    places = [(texts, at) for texts in documents for at, text in enumerate(texts) if text.strip()]
    pool = list(dict.fromkeys(texts[at].strip() for texts, at in places))
    if len(pool) < 2:
        raise ValueError(f"at least two chunks are needed to make prompts of, got {len(pool)}")
    rng.shuffle(places)
    groups = [[text.strip() for text in texts[max(0, at - 1) : at + 1]] for texts, at in places[:number]]
    asked = list(dict.fromkeys(text for group in groups for text in group if text))
    pool = asked if len(asked) >= CHUNKS else pool
    return [_probe(list(dict.fromkeys(filter(None, group))), pool, rng) for group in groups]


def _probe(group: list[str], pool: Sequence[str], rng: random.Random) -> Probe:
    others = [text for text in pool if text not in group]
    others = rng.sample(others, min(CHUNKS - len(group), len(others)))
    place = rng.randint(0, len(others))
    text = group[-1]
    found = [part for part in _SENTENCE.split(text) if MIN_CHARS <= len(part) <= MAX_CHARS]
    sentence = rng.choice(found) if found else text[:MAX_CHARS]
    half = (len(sentence) + 1) // 2
    half = max(sentence.rfind(" ", 0, half), 0) or half
    return Probe((*others[:place], *group, *others[place:]), sentence[:half], sentence[half:].strip())

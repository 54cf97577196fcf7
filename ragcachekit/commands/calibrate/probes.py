"""Cloze and continuation questions made from a corpus, for calibration without questions."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from ragcachekit.commands.bench.fidelity.questions import FidelityQuestion
from ragcachekit.commands.corpus import CorpusChunk, documents
from ragcachekit.errors import CorpusError

CHUNKS = 4
"""Chunks per prompt: two neighbours of one document among random others."""

CLOZE, CONTINUATION = "cloze", "continuation"
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
_LEAST_WORDS, _MOST_WORDS = 8, 40
_ASK = {
    CONTINUATION: 'How does the sentence go on that begins with "{}"?',
    CLOZE: 'Which words are missing at ____ in "{}"?',
}


def probes(chunks: Sequence[CorpusChunk], number: int, seed: int) -> list[FidelityQuestion]:
    """Up to ``number`` questions, each about a sentence of one chunk, half of them of either kind.

    The prompt holds that chunk, preceded by the one before it in its document, among chunks of other
    questions, so that few chunks are encoded.

    Raises CorpusError if no chunk holds a sentence of eight words or more.
    """
    rng = random.Random(seed)
    places = [(texts, at) for texts in documents(chunks) for at in range(len(texts))]
    rng.shuffle(places)
    drawn: list[tuple[list[str], list[str]]] = []
    for texts, at in places:
        if len(drawn) == number:
            break
        sentences = [s for s in _SENTENCE.split(texts[at]) if _LEAST_WORDS <= len(s.split()) <= _MOST_WORDS]
        if sentences:
            drawn.append((list(texts[max(0, at - 1) : at + 1]), rng.choice(sentences).split()))
    if not drawn:
        raise CorpusError(
            f"no chunk holds a sentence of {_LEAST_WORDS} words to ask about; give your own --questions"
        )
    everything = list(dict.fromkeys(text for group, _ in drawn for text in group))
    if len(everything) < CHUNKS:
        everything = [texts[at] for texts, at in places]
    out: list[FidelityQuestion] = []
    for group, words in drawn:
        kind = CLOZE if len(out) % 2 else CONTINUATION
        question, answer = _asked(kind, words, rng)
        out.append(FidelityQuestion(question, _prompt(group, everything, rng), answer, kind))
    return out


def _asked(kind: str, words: list[str], rng: random.Random) -> tuple[str, str]:
    half = len(words) // 2
    if kind == CONTINUATION:
        return _ASK[kind].format(" ".join(words[:half])), " ".join(words[half:])
    start = rng.randrange(half, len(words) - 1)
    blank = words[start : start + 2]
    return _ASK[kind].format(" ".join([*words[:start], "____", *words[start + 2 :]])), " ".join(blank)


def _prompt(group: Sequence[str], everything: Sequence[str], rng: random.Random) -> tuple[str, ...]:
    pool = [text for text in everything if text not in group]
    others = rng.sample(pool, min(CHUNKS - len(group), len(pool)))
    place = rng.randint(0, len(others))
    return (*others[:place], *group, *others[place:])

"""Contexts that chunks are encoded after: earlier prompts, drawn for :mod:`benchmarks.contexts`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.datasets import load_dataset
from ragcachekit.commands.questions import Question

DOCUMENT, NEAR, CORPUS, OTHER = "same document", "similar passages", "same corpus", "another subject"
OWN = "its own prompt (control)"
USES = {"second use": 1, "third use": 2, "fourth use": 3, "tenth use": 9}
"""Earlier prompts that computed a chunk."""

VARIANTS = "fourth use"
"""Its contexts are those of Cache-Craft's variants."""

MAX_EARLIER = 3
"""Passages before a chunk in an earlier prompt."""

MAX_CHARS = 800
"""Of passages of another subject, which may be much longer than those that are measured."""


class Context(NamedTuple):
    """Passages before a chunk in an earlier prompt, and what that asked; None: any question.

    ``summed``: the attention between them is kept, which Cache-Craft reads.
    """

    passages: tuple[str, ...]
    question: str | None = None
    summed: bool = False


def passages(spec: str) -> list[str]:
    """All passages of a dataset, each once."""
    found = load_dataset(spec)
    return list(dict.fromkeys(text for one in found for text in (*one.relevant, *one.others)))


def draw_contexts(
    question: Question,
    questions: Sequence[Question],
    corpus: Sequence[str],
    far: Sequence[str],
    seed: int,
    companions: int = 2,
    near: Callable[[str], Sequence[str]] = lambda _: (),
) -> dict[str, dict[str, list[Context]]]:
    """Contexts of each chunk, by their kind; only those of the control hold passages of the prompt.

    ``near`` gives passages like one, the most similar first; ``companions`` is the ``n`` of ``average:n``.
    """
    rng, measured = random.Random(f"{seed} {question.question}"), set(question.chunks)
    document = [text for text in dict.fromkeys(question.document) if text not in measured]
    away = [text for text in corpus if text not in measured and text not in question.document]
    pools = {DOCUMENT: document, CORPUS: away, OTHER: [text for text in far if text not in measured]}
    asked = [one.question for one in questions if one != question] or [question.question]
    out: dict[str, dict[str, list[Context]]] = {}
    for chunk in question.chunks:
        groups = {name: rng.sample(pool, min(companions, len(pool))) for name, pool in pools.items() if pool}
        groups[NEAR] = [text for text in near(chunk) if text not in measured][companions - 1 :: -1]
        groups[OWN] = [text for text in question.chunks if text != chunk]
        # As average:n has them: the last one, the last two, ...
        own = {
            name: [Context(tuple(group[-n:])) for n in range(1, len(group) + 1)]
            for name, group in groups.items()
        }
        earlier = []
        for number in range(max(USES.values())):
            before = rng.sample(document or away, min(rng.randint(1, MAX_EARLIER), len(document or away)))
            earlier.append(Context(tuple(before), rng.choice(asked), number < USES[VARIANTS]))
        out[chunk] = own | {name: earlier[:count] for name, count in USES.items()}
    return out

"""Pairs of questions, near misses and true rewordings, half of them to develop on and half to report."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.demo.corpus import calibration_questions, questions
from benchmarks.near_misses.alterations import ALTERATIONS, names_in
from benchmarks.query_cache.workload import variants
from ragcachekit.commands.embedding import MiniLM

ADVERSARIAL = "by crowd workers"
DEVELOP, REPORT = "develop", "report"
_REWORDINGS = Path(__file__).parent / "rewordings.jsonl"


@dataclass(frozen=True)
class Pair:
    """Two questions, and whether the second asks the same as the first."""

    kind: str
    half: str
    same: bool
    one: str
    other: str


@dataclass(frozen=True)
class Article:
    """An article of SQuAD 2: its text, and per paragraph the questions with and without an answer."""

    title: str
    text: str
    paragraphs: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]


def articles(path: str | os.PathLike[str]) -> list[Article]:
    """Articles of a file in the format of SQuAD 2.0; ValueError for another format."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))["data"]
        return [_article(one) for one in data]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is not in the format of SQuAD 2.0 (https://rajpurkar.github.io): {error!r}"
        ) from error


def made_pairs(found: Sequence[Article], embedder: MiniLM, seed: int, progress: bool) -> list[Pair]:
    """Pairs made by rules, and unanswerable questions beside the nearest answerable one of their paragraph.

    The article with most questions is to develop on, and every third after it.
    """
    out = dict[tuple[str, str], Pair]()
    order = sorted(found, key=lambda one: -sum(len(a) + len(b) for a, b in one.paragraphs))
    for place, article in enumerate(order):
        half, rng = REPORT if place % 3 else DEVELOP, random.Random(f"{seed} {article.title}")
        for pair in (*_by_rules(article, half, rng), *_adversarial(article, half, embedder, progress)):
            out.setdefault((pair.one, pair.other), pair)
    return list(out.values())


def rewordings(near: Sequence[Pair]) -> Iterator[Pair]:
    """By hand, those of the demo, and short prefixes before questions of near misses."""
    lines = [json.loads(line) for line in _REWORDINGS.read_text(encoding="utf-8").splitlines()]
    for place, wordings in enumerate(lines):
        yield from (_same("by hand", place, *pair) for pair in combinations(wordings, 2))
    for place, question in enumerate(questions()):
        yield from (_same("demo", place, *pair) for pair in combinations(question.wordings, 2))
    yield from (_same("demo", 0, *pair) for pair in calibration_questions())
    for one, half in dict.fromkeys((pair.one, pair.half) for pair in near if pair.kind == ADVERSARIAL):
        plain, *prefixed = variants(one)
        yield from (Pair("prefix", half, True, plain, other) for other in prefixed)


def lower(pair: Pair) -> Pair:
    """The pair as somebody types it who uses no capitals."""
    return Pair(pair.kind, pair.half, pair.same, pair.one.lower(), pair.other.lower())


def distances(pairs: Sequence[Pair], embedder: MiniLM, progress: bool) -> NDArray[np.float64]:
    """Cosine distance of each pair's embeddings: float64 ``[pairs]``."""
    texts = list(dict.fromkeys(text for pair in pairs for text in (pair.one, pair.other)))
    rows = dict(zip(texts, embedder.embed(texts, progress=progress).astype(np.float64), strict=True))
    return np.array([1.0 - rows[pair.one] @ rows[pair.other] for pair in pairs])


def _same(kind: str, place: int, one: str, other: str) -> Pair:
    return Pair(kind, REPORT if place % 2 else DEVELOP, True, one, other)


def _article(raw: Any) -> Article:
    paragraphs = []
    for paragraph in raw["paragraphs"]:
        split: tuple[list[str], list[str]] = ([], [])
        for one in paragraph["qas"]:
            split[bool(one["is_impossible"])].append(" ".join(one["question"].split()))
        paragraphs.append((tuple(split[0]), tuple(split[1])))
    text = "\n".join(paragraph["context"] for paragraph in raw["paragraphs"])
    return Article(raw["title"], text, tuple(paragraphs))


def _by_rules(article: Article, half: str, rng: random.Random) -> Iterator[Pair]:
    names = names_in(article.text)
    for answered, _ in article.paragraphs:
        for question in answered:
            for kind, alter in ALTERATIONS.items():
                for other in alter(question, names, rng):
                    yield Pair(kind, half, False, question, other)


def _adversarial(article: Article, half: str, embedder: MiniLM, progress: bool) -> Iterator[Pair]:
    texts = [text for paragraph in article.paragraphs for side in paragraph for text in side]
    rows = dict(zip(texts, embedder.embed(texts, progress=progress), strict=True))
    for answered, unanswerable in article.paragraphs:
        for other in unanswerable if answered else ():
            nearest = max(answered, key=lambda text: float(rows[text] @ rows[other]))
            yield Pair(ADVERSARIAL, half, False, nearest, other)

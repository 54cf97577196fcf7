"""Scores of answers in words, compared as in SQuAD: lower case, without punctuation and articles."""

from __future__ import annotations

import re

from ragcachekit.quality.compare import bag_f1

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = re.compile(r"[^\w\s]")


def words(text: str) -> list[str]:
    """Words without articles and punctuation."""
    return _ARTICLES.sub(" ", _PUNCTUATION.sub("", text.lower())).split()


def exact_match(answer: str, right: str) -> float:
    """1 if it is the same words in the same order, else 0."""
    return float(words(answer) == words(right))


def word_f1(answer: str, right: str) -> float:
    """Harmonic mean of precision and recall of words, as bags; two empty texts agree."""
    return bag_f1(words(answer), words(right))

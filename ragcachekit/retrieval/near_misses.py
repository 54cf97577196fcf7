"""The near-miss guard: two questions that look alike and ask for different things.

Embeddings hardly move with a negation, a number, a name or exchanged roles. The guard compares these in the
text of the two questions. It has no grammar, and its only vocabulary are a dozen English negations and the
words of leads such as "One more question:". What is in doubt counts as another question and is searched.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

Guard: TypeAlias = Callable[[str, str], bool]
"""Called with the question and the cached one; True if the cached results may answer it."""

NEGATIONS = frozenset(
    {
        *("not", "no", "never", "none", "nor", "neither", "nobody", "nothing"),
        *("without", "except", "unless", "cannot"),
    }
)

# Whatever has a digit is one token up to the next blank, so that 3.1 is not 3.10, nor 3/4 4/3.
_NUMBER = r"(?:[^\s?.,;:]|[.,](?=\d))*\d(?:\S*[^\s?.,;:])?"
_WORD = r"(?:[A-Za-z]\.){2,}|\w+(?:['’]\w+)?[+#]*"  # C, C# and C++ are three
_SIGN = r"(?<!\S)[-<>=+*/%^|&~]+(?!\S)"
_TOKEN = re.compile(rf"({_NUMBER}|{_SIGN})|({_WORD})|[?!:;]")
_LEAD = re.compile(
    r"(?i)\s*(?:(?:hello|hi)\b[,!]?|(?=[^:]*\b(?:i|me|my|you|question|curious)\b)[^:?\d]{1,40}:)"
)

# Chosen on one article of SQuAD 2.0 and half of the hand-written rewordings (benchmarks/near_misses).
_SAME_ENDS = 0.5  # share of words before and after the only difference, from which on it counts


class _Parsed(NamedTuple):
    """What is compared of a question.

    ``numbers`` are as written, in order; ``words`` are all words in lower case; ``names`` are those
    that are capitalised inside a sentence.
    """

    negations: int
    numbers: tuple[str, ...]
    words: tuple[str, ...]
    names: frozenset[str]


def near_miss(question: str, cached: str) -> str | None:
    """Why two questions of near embeddings ask for different things; None if nothing shows it.

    The reason is "negation", "number", "name", "word" (one replaced or added while the rest stays) or
    "order" (of the words that both have). The order of the two questions does not matter.
    """
    one, other = _parse(question), _parse(cached)
    if one.words == other.words:
        return None
    if one.negations != other.negations:
        return "negation"
    if one.numbers != other.numbers:
        return "number"
    if one.names.difference(other.words) or other.names.difference(one.words):
        return "name"
    lengths = len(one.words), len(other.words)
    same = _equal_at_the_ends(one.words, other.words)
    if same == min(lengths) or same >= _SAME_ENDS * max(lengths):
        return "word"
    common = set(one.words).intersection(other.words)
    orders = ([word for word in dict.fromkeys(each.words) if word in common] for each in (one, other))
    return None if next(orders) == next(orders) else "order"


@functools.lru_cache(4096)
def _parse(text: str) -> _Parsed:
    lead = _LEAD.match(text)
    found = _TOKEN.finditer(text, lead.end() if lead else 0)
    numbers, words, names, negations, starts = list[str](), list[str](), set[str](), 0, True
    cased = not (text.islower() or text.isupper())
    for one in found:
        token = one[0].replace("’", "'")
        if one[1]:
            numbers.append(token.lower())
            words.append(token.lower())
        elif one[2]:
            word = token.lower()
            negations += word in NEGATIONS or word.endswith("n't")
            words.append(word.removesuffix("'s"))
            inner = token[1:] != token[1:].lower() or "_" in token  # NATO, bisect_left
            if cased and (inner or (not starts and token[0] != token[0].lower())):
                names.add(words[-1])
        starts = not (one[1] or one[2])
    return _Parsed(negations, tuple(numbers), tuple(words), frozenset(names))


def _equal_at_the_ends(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """Number of equal words before and after the difference."""
    before, shorter = 0, min(len(one), len(other))
    while before < shorter and one[before] == other[before]:
        before += 1
    after = 0
    while after < shorter - before and one[-1 - after] == other[-1 - after]:
        after += 1
    return before + after

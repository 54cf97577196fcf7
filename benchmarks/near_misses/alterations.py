"""Rules that make a near miss out of a question: it looks alike, and has another answer."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

Alteration: TypeAlias = Callable[[str, Sequence[str], random.Random], Iterator[str]]
"""Called with a question, names of its article and a random state; gives altered questions."""

_OPPOSITES = """before after; more less; more fewer; most least; highest lowest; higher lower;
largest smallest; larger smaller; biggest smallest; first last; earliest latest; earlier later;
oldest newest; best worst;
above below; maximum minimum; longest shortest; longer shorter; upper lower; northern southern; north south;
east west; input output; increase decrease; begin end; started ended; major minor; faster slower;
greatest smallest; simple complex; easy hard; win lose; won lost"""
_NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
_UNITS = """kilometers miles; miles kilometers; km miles; meters feet; feet meters; million billion;
billion million; hours minutes; years months; days weeks; months years; percent people"""
_AUXILIARY = re.compile(r"\b(did|does|do|is|was|were|are|can|could|will|would|has|have|had|should)\b", re.I)
_NAME = re.compile(r"(?<=[a-z,] )[A-Z][\w'’.-]*\w(?: [A-Z][\w'’-]*\w)*")
_ASKED = {
    "who": ("When", "Where"), "when": ("Where", "Why", "How"), "where": ("When", "Why", "How"),
    "why": ("When", "How"), "how": ("Why", "When"),
}  # fmt: skip


def names_in(text: str) -> list[str]:
    """Runs of capitalised words that begin no sentence, each once, in order."""
    return list(dict.fromkeys(_NAME.findall(text)))


def numbers(question: str, _names: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Another number, ordinal or unit in the place of each."""
    for found in re.finditer(r"\d+", question):
        value = int(found[0])
        other = rng.choice([value + 1, max(0, value - 1), value + 10, value * 2 + 1])
        yield _replaced(question, found, str(other))
    for words in (_NUMBERS, _ORDINALS):
        for found in re.finditer(rf"\b({'|'.join(words)})\b", question, re.I):
            yield _replaced(question, found, rng.choice([one for one in words if one != found[0].lower()]))
    for unit, another in map(str.split, _UNITS.split(";")):
        for found in re.finditer(rf"\b{unit}\b", question, re.I):
            yield _replaced(question, found, another)


def other_names(question: str, names: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Another name of the article in the place of each, twice."""
    for found in _NAME.finditer(question):
        here = {word.removesuffix("'s") for word in question.rstrip("?").split()}
        others = [name for name in names if not here & {word.removesuffix("'s") for word in name.split()}]
        for other in rng.sample(others, min(2, len(others))):
            yield _replaced(question, found, other)


def negation(question: str, _names: Sequence[str], _rng: random.Random) -> Iterator[str]:
    """A "not" after the first auxiliary verb, or the one that is there taken away."""
    if re.search(r"\bnot\b", question):
        yield re.sub(r"\bnot ", "", question, count=1)
    elif found := _AUXILIARY.search(question):
        yield _replaced(question, found, f"{found[0]} not")


def roles(question: str, _names: Sequence[str], _rng: random.Random) -> Iterator[str]:
    """Two names change places, unless both belong to one list."""
    found = list(_NAME.finditer(question))
    for one, other in pairwise(found):
        between = question[one.end() : other.start()]
        if one[0] != other[0] and not re.fullmatch(r",? ?(and|or|&)? ?", between):
            yield question[: one.start()] + other[0] + between + one[0] + question[other.end() :]


def opposites(question: str, _names: Sequence[str], _rng: random.Random) -> Iterator[str]:
    """The opposite of each comparative, superlative or direction."""
    for pair in map(str.split, _OPPOSITES.split(";")):
        for one, other in (pair, pair[::-1]):
            for found in re.finditer(rf"\b{one}\b", question, re.I):
                yield _replaced(question, found, other)


def asked(question: str, _names: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Another question word at the beginning."""
    first, _, rest = question.partition(" ")
    if first.lower() in _ASKED and _AUXILIARY.match(rest):
        yield f"{rng.choice(_ASKED[first.lower()])} {rest}"


ALTERATIONS: dict[str, Alteration] = {
    "number": numbers,
    "name": other_names,
    "negation": negation,
    "swapped roles": roles,
    "opposite": opposites,
    "question word": asked,
}
"""By what they change."""


def _replaced(text: str, found: re.Match[str], other: str) -> str:
    if found[0][0].isupper() and other[0].islower():
        other = other.capitalize()
    return text[: found.start()] + other + text[found.end() :]

"""What the near-miss guard reads in a question: names, numbers, negations, opposites, what is asked for."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

from ragcachekit.query.near_misses.words import (
    ASKED_BY_NOUN,
    ASKING,
    AUXILIARIES,
    CONSUMED,
    DIRECTED,
    EMBEDDING,
    EMPHASIS,
    FUNCTION,
    LEAD,
    NEGATIONS,
    NUMBERS,
    POLES,
    PREPOSITIONS,
    SYNONYMS,
)

# Whatever has a digit is one token up to the next blank, so that 3.1 is not 3.10, nor 3/4 4/3.
_NUMBER = r"(?:[^\s?.,;:]|[.,](?=\d))*\d(?:\S*[^\s?.,;:])?"
_WORD = r"(?:[A-Za-z]\.){2,}|\w+(?:['’]\w+)?[+#]*"  # C, C# and C++ are three
_SIGN = r"(?<!\S)[-<>=+*/%^|&~]+(?!\S)"
_TOKEN = re.compile(rf"{_NUMBER}|{_WORD}|{_SIGN}|[?!:;]")
_LONGEST_LEAD = 8  # tokens
_ENDINGS = (("ing", 6), ("ed", 5), ("ation", 8), ("ion", 7), ("or", 7), ("ly", 6))


class Kind(NamedTuple):
    """What a token is, whatever stands around it: its lower-case word and one or two of the others."""

    word: str
    lemma: str = ""  # of a content word
    number: bool = False  # in digits or words, or a sign of arithmetic
    pole: tuple[int, int] | None = None
    negation: bool = False
    asked: str = ""
    mark: bool = False


class ParsedQuestion(NamedTuple):
    """A question as the guard compares it; see :func:`parse`.

    ``asked`` is what it asks for ("who", "count", ...; "" in a yes/no question). ``numbers`` are as written,
    in order. ``words`` are the stems of all content words, ``names`` those of names. ``poles`` counts the
    words of each side of each group of opposites. ``order`` has what must stand in one order in two
    questions, each once; ``tokens`` is all words in lower case.
    """

    text: str
    asked: str
    negations: int
    numbers: tuple[str, ...]
    names: frozenset[str]
    words: frozenset[str]
    poles: dict[tuple[int, int], int]
    order: tuple[str, ...]
    tokens: tuple[str, ...]


def parse(text: str) -> ParsedQuestion:
    """Read a question; about 15 µs for a dozen words, so keep the result beside a cached question."""
    tokens = _without_lead(_TOKEN.findall(text))
    kinds = [kind_of(token) for token in tokens]
    asked, consumed = _what_is_asked(kinds)
    cased = not (text.islower() or text.isupper())
    names = _names(tokens, kinds) if cased else []
    words = {kind.lemma for at, kind in enumerate(kinds) if kind.lemma and at != consumed}
    poles: dict[tuple[int, int], int] = {}
    for at, kind in enumerate(kinds):
        if kind.pole and not (asked == "degree" and kinds[at - 1].word == "how"):  # "how large" is neutral
            poles[kind.pole] = poles.get(kind.pole, 0) + 1
    order = ["not" if kind.negation else kind.lemma or kind.word for kind in kinds if _is_ordered(kind)]
    return ParsedQuestion(
        text,
        asked,
        sum([kind.negation for kind in kinds]),
        tuple([kind.word for kind in kinds if kind.number]),
        frozenset(names),
        frozenset(words.union(names)),
        poles,
        tuple(dict.fromkeys(order)),
        tuple([kind.word for kind in kinds if not kind.mark]),
    )


def _is_ordered(kind: Kind) -> bool:
    return bool(kind.lemma) or kind.number or kind.negation or kind.word in DIRECTED


@functools.lru_cache(8192)
def kind_of(token: str) -> Kind:
    """What a token is; the least recently seen of 8,192 are worked out again."""
    word = token.lower().replace("’", "'")
    if word in "?!:;":
        return Kind(word, mark=True)
    if any(map(str.isdecimal, word)) or not any(map(str.isalnum, word)):
        return Kind(word, number=True)
    if word.endswith("n't") or word in NEGATIONS:
        return Kind(word, negation=True)
    word = word.removesuffix("'s").replace("'", "")
    if word in ASKING:
        return Kind(word, asked=ASKING[word])
    word = word.replace(".", "")
    if word in NUMBERS:
        return Kind(word, number=True)
    if word in FUNCTION or word in PREPOSITIONS:
        return Kind(word, pole=POLES.get(word))
    stem = _stem(word)
    return Kind(word, _SYNONYMS.get(stem, stem), pole=POLES.get(word))


def _without_lead(tokens: list[str]) -> list[str]:
    """Without a clause such as "One more question:", or an "And"."""
    if tokens and tokens[0].lower() in ("and", "so"):
        tokens = tokens[1:]
    if ":" in tokens[:_LONGEST_LEAD]:
        at = tokens.index(":")
        if all(word in LEAD or word in FUNCTION for word in map(str.lower, tokens[:at])):
            return tokens[at + 1 :]
    return tokens


def _what_is_asked(kinds: Sequence[Kind]) -> tuple[str, int]:
    """What the first question word asks for, and the place of a noun that is part of it, else -1."""
    last, embedded = len(kinds) - 1, ""
    for at, kind in enumerate(kinds):
        if not kind.asked:
            continue
        behind = next((i for i in range(at + 1, last + 1) if kinds[i].word not in EMPHASIS), last + 1)
        following = kinds[behind].word if behind <= last else ""
        if kind.asked == "how":
            if following in ("many", "much"):
                return "count", -1
            return ("how" if following in AUXILIARIES else "degree"), -1
        if kind.asked in ("when", "where") and following and following not in AUXILIARIES:
            if at and kinds[at - 1].word in EMBEDDING:  # "do you know where she was born"
                embedded = embedded or kind.asked
            continue  # a conjunction
        if kind.asked == "what":
            return _asked_by_noun(kinds, at)
        return kind.asked, -1
    return embedded, -1


def _asked_by_noun(kinds: Sequence[Kind], at: int) -> tuple[str, int]:
    """ "What year", "in which place" and "what is the number of" are "when", "where" and "how many"."""
    noun = next((i for i in range(at + 1, len(kinds)) if kinds[i].lemma), -1)
    if noun < 0:
        return "what", -1
    word, behind = kinds[noun].word, kinds[noun + 1].word if noun + 1 < len(kinds) else ""
    found = ASKED_BY_NOUN.get(word, "what")
    if noun > at + 1 and not (found in ("count", "why") and behind in ("of", "that", "for")):
        return "what", -1
    if found == "where" and not (at and kinds[at - 1].word in PREPOSITIONS):
        return "what", -1  # "which country won"
    return found, noun if word in CONSUMED else -1


def _names(tokens: Sequence[str], kinds: Sequence[Kind]) -> list[str]:
    names, start = [], True
    for token, kind in zip(tokens, kinds, strict=True):
        if kind.mark:
            start = True
            continue
        shouted = len(token) > 1 and token.isupper()
        inner = "_" in token or not (shouted or token.islower() or token.istitle())
        if not kind.number and (shouted or (kind.lemma and (inner or (not start and token[0].isupper())))):
            names.append(kind.lemma or kind.word)
        start = False
    return names


def _stem(word: str) -> str:
    if len(word) > 3 and "_" not in word:
        if word.endswith("ies"):
            word = word[:-3] + "y"
        elif word.endswith(("sses", "xes", "ches", "shes")):
            word = word[:-2]
        elif word[-1] == "s" and word[-2] not in "sui":
            word = word[:-1]
        for ending, least in _ENDINGS:
            if word.endswith(ending) and len(word) >= least:
                word = word.removesuffix(ending)
                break
        if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "sl":
            word = word[:-1]
    return word.removesuffix("e") if len(word) > 3 else word


_SYNONYMS = {_stem(word): _stem(group) for word, group in SYNONYMS.items()}

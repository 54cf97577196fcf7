"""The near-miss guard: two questions that look alike and ask for different things.

Embeddings hardly move with a negation, a number, a name or exchanged roles. The guard compares these in the
text. It is made for English; of other languages it sees numbers, names and replaced words.
"""

from __future__ import annotations

from ragcachekit.query.near_misses.parsing import ParsedQuestion
from ragcachekit.query.near_misses.words import DIRECTED

_ALIKE = frozenset(map(frozenset, (("count", "degree"), ("when", "degree"), ("when", "count"))))
_OPPOSING = ("un", "in", "im", "ir", "il", "non", "dis", "mis")

# Chosen on one article of SQuAD 2.0 and half of the hand-written rewordings (benchmarks/near_misses).
_NAME_ADDED, _WORD_REPLACED, _WORD_ADDED = 0.5, 0.6, 0.85  # shares of common words
_SAME_ENDS = 0.5  # share of words before and behind the only difference


def near_miss(one: ParsedQuestion, other: ParsedQuestion) -> str | None:
    """Why two questions of near embeddings ask for different things; None if nothing shows it.

    The reason is "negation", "number", "question word", "opposite", "name", "another word" or "roles". The
    order of the two does not matter.
    """
    if one.text == other.text:
        return None
    if one.negations != other.negations:
        return "negation"
    if one.numbers != other.numbers:
        return "number"
    if not _ask_alike(one.asked, other.asked):
        return "question word"
    if one.poles != other.poles and _opposed(one.poles, other.poles):
        return "opposite"
    if _another_name(one, other):
        return "name"
    if found := _another_word(one, other):
        return found
    is_same_way = one.words != other.words or _directed(one) == _directed(other)
    return None if is_same_way and _in_one_order(one.order, other.order) else "roles"


def _ask_alike(one: str, other: str) -> bool:
    return one == other or "what" in (one, other) or frozenset((one, other)) in _ALIKE


def _opposed(one: dict[tuple[int, int], int], other: dict[tuple[int, int], int]) -> bool:
    """Whether one question has more words of one side of a group, the other more of the other side."""
    for group, _ in one:
        here = one.get((group, 1), 0) - other.get((group, 1), 0)
        there = one.get((group, -1), 0) - other.get((group, -1), 0)
        if here * there < 0:
            return True
    return False


def _another_name(one: ParsedQuestion, other: ParsedQuestion) -> bool:
    """A name on either side that the other lacks; one that is only added counts in an equal frame."""
    missing, added = one.names - other.words, other.names - one.words
    return bool((missing and added) or ((missing or added) and _alike(one, other) >= _NAME_ADDED))


def _another_word(one: ParsedQuestion, other: ParsedQuestion) -> str | None:
    """A content word replaced, added or turned by a prefix, while the rest stays as it is."""
    left, right = one.words - other.words, other.words - one.words
    if not left and not right:
        return None
    for words, others in ((left, other.words), (right, one.words)):
        if any(w.startswith(p) and w.removeprefix(p) in others for w in words for p in _OPPOSING):
            return "opposite"
    sizes, alike = (len(left), len(right)), _alike(one, other)
    if alike >= _WORD_REPLACED and (sizes == (1, 1) or (sum(sizes) == 1 and alike >= _WORD_ADDED)):
        return "another word"
    lengths, same = (len(one.tokens), len(other.tokens)), _equal_at_the_ends(one.tokens, other.tokens)
    replaced = left and right and same >= _SAME_ENDS * max(lengths)
    return "another word" if replaced or same == min(lengths) else None


def _equal_at_the_ends(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """Number of equal words before and behind the difference."""
    ahead, shorter = 0, min(len(one), len(other))
    while ahead < shorter and one[ahead] == other[ahead]:
        ahead += 1
    behind = 0
    while behind < shorter - ahead and one[-1 - behind] == other[-1 - behind]:
        behind += 1
    return ahead + behind


def _alike(one: ParsedQuestion, other: ParsedQuestion) -> float:
    """Share of words that both have."""
    words, others = set(one.tokens), set(other.tokens)
    return len(words & others) / len(words | others)


def _directed(question: ParsedQuestion) -> list[str]:
    return sorted(DIRECTED.intersection(question.tokens))


def _in_one_order(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether the words that both have stand in the same order in both.

    In another order they may mean the same ("was Rome attacked by Carthage"). Only a grammar could tell that
    from exchanged roles, so such rewordings are searched.
    """
    common = set(one).intersection(other)
    return [word for word in one if word in common] == [word for word in other if word in common]

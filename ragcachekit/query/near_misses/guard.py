"""The near-miss guard: two questions that look alike and ask for different things.

Embeddings hardly move with a negation, a number, a name or exchanged roles. The guard compares these in the
text. It is made for English; of other languages it sees numbers, names and replaced words.
"""

from __future__ import annotations

from ragcachekit.query.near_misses.parsing import ParsedQuestion, kind_of
from ragcachekit.query.near_misses.words import AUXILIARIES, BE, PREPOSITIONS, SYMMETRIC

_ALIKE = frozenset(map(frozenset, (("count", "degree"), ("when", "degree"), ("when", "count"))))
_OPPOSING = ("un", "in", "im", "ir", "il", "non", "dis", "mis")
_DO = frozenset(("do", "does", "did"))

# Chosen on one article of SQuAD 2.0 and half of the hand-written rewordings (benchmarks/near_misses).
_NAME_ADDED, _WORD_REPLACED, _WORD_ADDED = 0.5, 0.6, 0.85  # shares of common words
_SAME_ENDS = 0.5  # share of words before and behind the only difference


def near_miss(one: ParsedQuestion, other: ParsedQuestion) -> str | None:
    """Why two questions of near embeddings ask for different things; None if nothing shows it.

    The reason is "negation", "number", "unit", "question word", "opposite", "name", "another word" or
    "roles". The order of the two does not matter.
    """
    if one.text == other.text:
        return None
    if one.negations != other.negations:
        return "negation"
    if one.numbers != other.numbers and sorted(one.numbers) != sorted(other.numbers):
        return "number"
    if one.units != other.units and one.units and other.units:
        return "unit"
    if not _ask_alike(one.asked, other.asked):
        return "question word"
    if one.poles != other.poles and _opposed(one.poles, other.poles):
        return "opposite"
    if one.tokens == other.tokens:
        return "roles" if one.order != other.order and _rearranged(one.order, other.order) else None
    alike = len(one.tokens & other.tokens) / len(one.tokens | other.tokens)
    if _another_name(one, other, alike):
        return "name"
    return _another_word(one, other, alike) or ("roles" if _exchanged(one, other) else None)


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


def _another_name(one: ParsedQuestion, other: ParsedQuestion, alike: float) -> bool:
    """A name on either side that the other lacks; one that is only added counts in an equal frame."""
    missing, added = one.names - other.words, other.names - one.words
    return bool((missing and added) or ((missing or added) and alike >= _NAME_ADDED))


def _another_word(one: ParsedQuestion, other: ParsedQuestion, alike: float) -> str | None:
    """A content word replaced, added or turned by a prefix, while the rest stays as it is."""
    left, right = one.words - other.words, other.words - one.words
    if not left and not right:
        return None
    for words, others in ((left, other.words), (right, one.words)):
        if any(w.startswith(p) and w.removeprefix(p) in others for w in words for p in _OPPOSING):
            return "opposite"
    sizes = len(left), len(right)
    if alike >= _WORD_REPLACED and (sizes == (1, 1) or (sum(sizes) == 1 and alike >= _WORD_ADDED)):
        return "another word"
    lengths, same = (len(one.order), len(other.order)), _equal_at_the_ends(one.order, other.order)
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


def _rearranged(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether equal words in another order mean something else.

    They do not if a phrase moved from the end to the beginning, or if a list with "and" is reordered.
    """
    here, there = _governed(one), _governed(other)
    if here.keys() == there.keys():
        for word, place in here.items():
            now = there[word]
            if now != place and any(here[w] == now and there[w] == place for w in here):
                return True
    words, others = _listed(one), _listed(other)
    return words != others and not any(words[i:] + words[:i] == others for i in range(len(words)))


def _governed(order: tuple[str, ...]) -> dict[str, str]:
    """The preposition that governs each word, if one does."""
    places: dict[str, str] = {}
    governing = ""
    for word in order:
        kind = kind_of(word)
        if word in PREPOSITIONS:
            governing = word
        elif governing and (kind.lemma or kind.number is not None):
            places[kind.lemma or word] = governing
        elif word in AUXILIARIES or kind.asked:
            governing = ""
    return places


def _listed(order: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Content words in order; those joined by "and" or "or", or parts of a date, as one sorted item."""
    out: list[tuple[str, ...]] = []
    joined, adjacent, was_number = False, False, False
    for word in order:
        kind = kind_of(word)
        number = kind.number is not None
        if kind.lemma or number:
            joins = out and (joined or (adjacent and (number or was_number)))
            out.append(tuple(sorted((*(out.pop() if joins else ()), kind.lemma or word))))
            joined, adjacent, was_number = False, True, number
        else:
            joined = word in ("and", "or") or (joined and word in ("a", "an", "the"))
            adjacent = False
    return out


def _exchanged(one: ParsedQuestion, other: ParsedQuestion) -> bool:
    """Whether a name that acts in one question is acted upon in the other."""
    if not one.names or len(one.words ^ other.words) > 2 or one.words & SYMMETRIC:
        return False
    agents, patients = _acting(one)
    other_agents, other_patients = _acting(other)
    return bool(agents & other_patients or patients & other_agents)


def _acting(question: ParsedQuestion) -> tuple[set[str], set[str]]:
    """Names that do what is asked about, and names to which it is done.

    "Who beat Rome" and "was Rome beaten by": done to Rome. "Did Rome beat", "beaten by Rome": Rome acts.
    """
    order, roles = question.order, (set[str](), set[str]())
    passive, does = "by" in order and not BE.isdisjoint(order), not _DO.isdisjoint(order)
    subject = not passive and question.asked in ("who", "what") and AUXILIARIES.isdisjoint(order[:4])
    previous, after_verb = "", False
    for word in order:
        lemma = kind_of(word).lemma
        if lemma in question.names:
            by = passive and previous == "by"
            if by or ((passive or subject or does) and previous not in PREPOSITIONS):
                roles[not by and (passive or subject or after_verb)].add(lemma)
        elif lemma or word in AUXILIARIES or word in PREPOSITIONS:
            previous = word
            after_verb = bool(lemma) or (after_verb and word not in _DO)
    return roles

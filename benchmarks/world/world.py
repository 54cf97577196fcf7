"""The sample world: short articles about people, companies and towns, and questions with known answers.

Everything is drawn from a seed, so that a corpus of any size can be made anywhere, and so that the reader
model (`benchmarks/world/reader`) is trained on worlds other than the one it is asked about. Needs the
standard library only.

The questions come in three kinds, which suffer differently when a chunk's KV cache is reused elsewhere:

``a``
    answered by one chunk, which names its subject;
``b``
    answered by a chunk that says "This person", the subject being named only in the chunk before it;
``c``
    answered by two articles, the first naming the second ("the company that Anna Baird works for").
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ArticleKind = Literal["person", "company", "town"]
QuestionKind = Literal["a", "b", "c"]

DEFAULT_SEED = 0
TRAINING_SEEDS = 1 << 32
"""Training draws its worlds from seeds at or above this one, everybody else from below."""
# As the prompts of `ask`: the reader was trained on them.
INSTRUCTION = "Answer the question from the context."
SEPARATOR = "\n\n"


def _data(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return found


WORDS = {name: tuple(text.split()) for name, text in _data("words.json").items()}
"""Names and values, every one a single token of the reader."""
_FACTS = _data("facts.json")


@dataclass(frozen=True)
class Article:
    """One article: its subject's unique ``title``, and the titles that it mentions as ``links``.

    ``chunks`` are pieces of about 30 words; only the first one names the subject.
    """

    title: str
    kind: ArticleKind
    chunks: tuple[str, ...]
    links: tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """A question and its only right answer, to be matched exactly.

    ``articles`` are the titles that are needed, the one that the question names first; ``evidence`` the
    chunks that hold the answer, as (title, index), in the order in which they are needed. ``relation`` is the
    fact that is asked for.
    """

    text: str
    answer: str
    kind: QuestionKind
    articles: tuple[str, ...]
    evidence: tuple[tuple[str, int], ...]
    relation: str


@dataclass(frozen=True)
class World:
    """A corpus and all questions that can be asked about it."""

    articles: tuple[Article, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class _Relation:
    """One fact as the articles and the questions word it; ``{v}`` is the value, ``{s}`` the subject.

    Without ``values`` the value is another article's title.
    """

    name: str
    phrase: str
    questions: Sequence[str]
    values: Sequence[str]


def _relations(part: str) -> dict[ArticleKind, tuple[_Relation, ...]]:
    return {
        kind: tuple(
            _Relation(one["name"], one["phrase"], one["questions"], WORDS.get(one.get("values", ""), ()))
            for one in relations
        )
        for kind, relations in _FACTS[part].items()
    }


_NAMED, _UNNAMED = _relations("named"), _relations("unnamed")


@dataclass(frozen=True)
class _Subject:
    title: str
    kind: ArticleKind
    facts: Mapping[str, str]
    links: tuple[str, ...]


def make_world(
    seed: int = DEFAULT_SEED,
    people: int = 200,
    companies: int = 60,
    towns: int = 48,
    names: int | None = None,
) -> World:
    """Draw a world: articles in random order, and every question that they answer, each in one wording.

    The same seed and sizes give the same world on every machine. Every person works for one of the companies
    and was born in one of the towns; every company is based in one of the towns. Only the first ``names`` of
    the last names, companies and towns are used (None: all). ValueError for impossible numbers.
    """
    rng = random.Random(seed)
    subjects = _subjects(
        rng,
        _sample(rng, "towns", WORDS["TOWNS"][:names], towns),
        _sample(rng, "companies", WORDS["COMPANIES"][:names], companies),
        _sample(rng, "people", WORDS["LAST_NAMES"][:names], people),
    )
    articles = tuple(_article(rng, subject) for subject in subjects)
    by_title = {subject.title: subject for subject in subjects}
    questions = tuple(question for subject in subjects for question in _questions(rng, subject, by_title))
    return World(articles, questions)


def system_text(chunks: Sequence[str]) -> str:
    """Return the system message that the reader was trained on: the instruction, then the chunks."""
    return SEPARATOR.join((INSTRUCTION, *chunks))


def messages(chunks: Sequence[str], question: str) -> list[dict[str, str]]:
    """Return the chat messages that ask `question` about `chunks`, in the form that the reader knows."""
    return [{"role": "system", "content": system_text(chunks)}, {"role": "user", "content": question}]


def _sample(rng: random.Random, what: str, names: Sequence[str], number: int) -> list[str]:
    if not 1 <= number <= len(names):
        raise ValueError(f"{what} must be between 1 and {len(names)}, not {number}")
    return rng.sample(names, number)


def _subjects(
    rng: random.Random, towns: Sequence[str], companies: Sequence[str], last_names: Sequence[str]
) -> list[_Subject]:
    subjects = [_subject(rng, name, "town", {}) for name in towns]
    subjects += [_subject(rng, name, "company", {"base": rng.choice(towns)}) for name in companies]
    for last_name in last_names:
        name = f"{rng.choice(WORDS['FIRST_NAMES'])} {last_name}"
        given = {"employer": rng.choice(companies), "birthplace": rng.choice(towns)}
        subjects.append(_subject(rng, name, "person", given))
    rng.shuffle(subjects)
    return subjects


def _subject(rng: random.Random, title: str, kind: ArticleKind, given: Mapping[str, str]) -> _Subject:
    drawn = {r.name: rng.choice(r.values) for r in (*_NAMED[kind], *_UNNAMED[kind]) if r.values}
    return _Subject(title, kind, {**drawn, **given}, tuple(given.values()))


def _article(rng: random.Random, subject: _Subject) -> Article:
    named = _chunk(rng, subject.title, subject.title, _NAMED[subject.kind], subject.facts)
    unnamed = _chunk(
        rng, f"This {subject.kind} also", f"this {subject.kind}", _UNNAMED[subject.kind], subject.facts
    )
    return Article(subject.title, subject.kind, (named, unnamed), subject.links)


def _chunk(
    rng: random.Random, first: str, again: str, relations: Sequence[_Relation], facts: Mapping[str, str]
) -> str:
    one, two, three, four = (r.phrase.format(v=facts[r.name]) for r in rng.sample(relations, len(relations)))
    opener, other = rng.sample(_FACTS["openers"], 2)
    lower = other[0].lower() + other[1:]
    if rng.random() < 0.5:
        return f"{first} {one} and {two}. {opener} {again} {three}, and {lower} {again} {four}."
    started = first[0].lower() + first[1:] if first.startswith("This ") else first
    capital = again[0].upper() + again[1:]
    return f"{opener} {started} {one}, and {lower} {again} {two}. {capital} {three} and {four}."


def _questions(rng: random.Random, subject: _Subject, by_title: Mapping[str, _Subject]) -> list[Question]:
    title = subject.title
    found = []
    parts: tuple[tuple[QuestionKind, int, Sequence[_Relation]], ...] = (
        ("a", 0, _NAMED[subject.kind]),
        ("b", 1, _UNNAMED[subject.kind]),
    )
    for kind, index, relations in parts:
        for relation in relations:
            text = rng.choice(relation.questions).format(s=title)
            answer = subject.facts[relation.name]
            found.append(Question(text, answer, kind, (title,), ((title, index),), relation.name))
    for hop in _FACTS["hops"][subject.kind]:  # `first` leads to another article, `second` is answered there
        middle = by_title[subject.facts[hop["first"]]]
        answer = hop["answer"].format(m=middle.title, v=middle.facts[hop["second"]])
        text = rng.choice(hop["questions"]).format(s=title)
        relation_name = f"{hop['first']}/{hop['second']}"
        evidence = ((title, 0), (middle.title, 0))
        found.append(Question(text, answer, "c", (title, middle.title), evidence, relation_name))
    return found

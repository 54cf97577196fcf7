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

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.world import words
from benchmarks.world.facts import HOPS, NAMED, OPENERS, UNNAMED, ArticleKind, Relation

QuestionKind = Literal["a", "b", "c"]

DEFAULT_SEED = 0
TRAINING_SEEDS = (
    1 << 32
)  # training draws its worlds from seeds at or above this one, everybody else from below
# As the prompts of `ask`: the reader was trained on them.
INSTRUCTION = "Answer the question from the context."
SEPARATOR = "\n\n"


@dataclass(frozen=True)
class Article:
    """One article of the corpus.

    Attributes
    ----------
    title
        Name of the subject, unique in the corpus.
    kind
        What the subject is.
    chunks
        The text, cut in pieces of about 30 words; only the first one names the subject.
    links
        Titles of the articles that this one mentions.
    """

    title: str
    kind: ArticleKind
    chunks: tuple[str, ...]
    links: tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """A question about the world.

    Attributes
    ----------
    text, answer
        The question and the only right answer, to be matched exactly.
    kind
        ``a``, ``b`` or ``c``, as the module says.
    articles
        Titles of the articles that are needed, the one that the question names first.
    evidence
        The chunks that hold the answer, as (title, index of the chunk), in the order in which they are
        needed.
    relation
        Which fact is asked for, for grouping results.
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
    """Draw a world.

    Parameters
    ----------
    seed
        The same seed and sizes give the same world on every machine.
    people, companies, towns
        Number of articles of each kind. Every person works for one of the companies and was born in one of
        the towns; every company is based in one of the towns.
    names
        Use only so many of the last names, of the companies and of the towns that there are; None for all.

    Returns
    -------
    World
        Articles in random order, and every question that they answer, each in one wording.

    Raises
    ------
    ValueError
        If a number is below one or above the number of names that there are.
    """
    rng = random.Random(seed)
    subjects = _subjects(
        rng,
        _sample(rng, "towns", words.TOWNS[:names], towns),
        _sample(rng, "companies", words.COMPANIES[:names], companies),
        _sample(rng, "people", words.LAST_NAMES[:names], people),
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
        name = f"{rng.choice(words.FIRST_NAMES)} {last_name}"
        given = {"employer": rng.choice(companies), "birthplace": rng.choice(towns)}
        subjects.append(_subject(rng, name, "person", given))
    rng.shuffle(subjects)
    return subjects


def _subject(rng: random.Random, title: str, kind: ArticleKind, given: Mapping[str, str]) -> _Subject:
    drawn = {r.name: rng.choice(r.values) for r in (*NAMED[kind], *UNNAMED[kind]) if r.values}
    return _Subject(title, kind, {**drawn, **given}, tuple(given.values()))


def _article(rng: random.Random, subject: _Subject) -> Article:
    named = _chunk(rng, subject.title, subject.title, NAMED[subject.kind], subject.facts)
    unnamed = _chunk(
        rng, f"This {subject.kind} also", f"this {subject.kind}", UNNAMED[subject.kind], subject.facts
    )
    return Article(subject.title, subject.kind, (named, unnamed), subject.links)


def _chunk(
    rng: random.Random, first: str, again: str, relations: Sequence[Relation], facts: Mapping[str, str]
) -> str:
    one, two, three, four = (r.phrase.format(v=facts[r.name]) for r in rng.sample(relations, len(relations)))
    opener, other = rng.sample(OPENERS, 2)
    lower = other[0].lower() + other[1:]
    if rng.random() < 0.5:
        return f"{first} {one} and {two}. {opener} {again} {three}, and {lower} {again} {four}."
    started = first[0].lower() + first[1:] if first.startswith("This ") else first
    capital = again[0].upper() + again[1:]
    return f"{opener} {started} {one}, and {lower} {again} {two}. {capital} {three} and {four}."


def _questions(rng: random.Random, subject: _Subject, by_title: Mapping[str, _Subject]) -> list[Question]:
    title = subject.title
    found = []
    parts: tuple[tuple[QuestionKind, int, Sequence[Relation]], ...] = (
        ("a", 0, NAMED[subject.kind]),
        ("b", 1, UNNAMED[subject.kind]),
    )
    for kind, index, relations in parts:
        for relation in relations:
            text = rng.choice(relation.questions).format(s=title)
            answer = subject.facts[relation.name]
            found.append(Question(text, answer, kind, (title,), ((title, index),), relation.name))
    for hop in HOPS[subject.kind]:
        middle = by_title[subject.facts[hop.first]]
        answer = hop.answer.format(m=middle.title, v=middle.facts[hop.second])
        text = rng.choice(hop.questions).format(s=title)
        relation_name = f"{hop.first}/{hop.second}"
        evidence = ((title, 0), (middle.title, 0))
        found.append(Question(text, answer, "c", (title, middle.title), evidence, relation_name))
    return found

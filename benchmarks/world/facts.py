"""What can be said and asked about the subjects of the sample world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from benchmarks.world import words

ArticleKind = Literal["person", "company", "town"]

OPENERS = (
    "People say that",
    "The records show that",
    "It is known that",
    "Everyone knows that",
    "The newspaper wrote that",
    "Neighbors say that",
    "Friends say that",
    "We hear that",
)


@dataclass(frozen=True)
class Relation:
    """One fact about a subject, as the articles say it and as the questions ask for it."""

    name: str
    phrase: str  # "{v}" stands for the value
    questions: tuple[str, ...]  # "{s}" stands for the subject
    values: tuple[str, ...] = ()  # empty: the value is another article's title


@dataclass(frozen=True)
class Hop:
    """A question of kind c: `first` leads from the subject to another article, `second` is answered there."""

    first: str
    second: str
    answer: str
    questions: tuple[str, ...]


NAMED: Mapping[ArticleKind, tuple[Relation, ...]] = {
    "person": (
        Relation("birthplace", "was born in {v}", ("Where was {s} born?", "In which town was {s} born?")),
        Relation("employer", "works for {v}", ("Which company does {s} work for?", "Who employs {s}?")),
        Relation(
            "job",
            "was trained as a {v}",
            ("What was {s} trained as?", "Which trade did {s} learn?"),
            words.JOBS,
        ),
        Relation(
            "language",
            "speaks {v}",
            ("Which language does {s} speak?", "What language can {s} speak?"),
            words.LANGUAGES,
        ),
    ),
    "company": (
        Relation("base", "is based in {v}", ("Where is {s} based?", "In which town is {s} based?")),
        Relation(
            "product", "makes {v}", ("What does {s} make?", "Which product does {s} make?"), words.PRODUCTS
        ),
        Relation(
            "market",
            "sells to {v}",
            ("Where does {s} sell?", "Which country does {s} sell to?"),
            words.MARKETS,
        ),
        Relation(
            "year",
            "was founded in {v}",
            ("When was {s} founded?", "In which year was {s} founded?"),
            words.YEARS,
        ),
    ),
    "town": (
        Relation(
            "region", "lies in {v}", ("In which region does {s} lie?", "Where does {s} lie?"), words.REGIONS
        ),
        Relation(
            "landmark",
            "is famous for its {v}",
            ("What is {s} famous for?", "Which sight is {s} famous for?"),
            words.LANDMARKS,
        ),
        Relation(
            "river",
            "stands on the {v}",
            ("Which river does {s} stand on?", "On which river does {s} stand?"),
            words.RIVERS,
        ),
        Relation("crop", "grows {v}", ("What does {s} grow?", "Which crop does {s} grow?"), words.CROPS),
    ),
}
UNNAMED: Mapping[ArticleKind, tuple[Relation, ...]] = {
    "person": (
        Relation(
            "instrument",
            "plays the {v}",
            ("Which instrument does {s} play?", "What does {s} play?"),
            words.INSTRUMENTS,
        ),
        Relation(
            "pet", "keeps a {v}", ("Which animal does {s} keep?", "What pet does {s} keep?"), words.PETS
        ),
        Relation(
            "food",
            "likes to eat {v}",
            ("Which food does {s} like?", "What does {s} like to eat?"),
            words.FOODS,
        ),
        Relation(
            "collection",
            "collects {v}",
            ("What does {s} collect?", "Which things does {s} collect?"),
            words.COLLECTIBLES,
        ),
    ),
    "company": (
        Relation(
            "carrier",
            "delivers by {v}",
            ("How does {s} deliver?", "By which means does {s} deliver?"),
            words.CARRIERS,
        ),
        Relation(
            "team",
            "pays for a {v} team",
            ("Which sport does {s} pay for?", "What team does {s} pay for?"),
            words.SPORTS,
        ),
        Relation(
            "sign",
            "uses the {v} as its sign",
            ("Which animal is the sign of {s}?", "What is the sign of {s}?"),
            words.SIGNS,
        ),
        Relation(
            "canteen",
            "serves {v} to visitors",
            ("What does {s} serve to visitors?", "Which food does {s} serve?"),
            words.FOODS,
        ),
    ),
    "town": (
        Relation(
            "festival",
            "holds a {v} festival",
            ("Which festival does {s} hold?", "What festival is held in {s}?"),
            words.FESTIVALS,
        ),
        Relation(
            "hall",
            "has a hall of {v}",
            ("What is the hall of {s} made of?", "Which material is the hall of {s} made of?"),
            words.MATERIALS,
        ),
        Relation(
            "access",
            "is reached by {v}",
            ("How is {s} reached?", "By which means is {s} reached?"),
            words.CARRIERS,
        ),
        Relation(
            "flag",
            "shows the {v} on its flag",
            ("Which animal is on the flag of {s}?", "What is on the flag of {s}?"),
            words.SIGNS,
        ),
    ),
}
HOPS: Mapping[ArticleKind, tuple[Hop, ...]] = {
    "person": (
        Hop(
            "employer",
            "base",
            "{m} in {v}",
            ("Where is the company that {s} works for based?", "In which town is the employer of {s} based?"),
        ),
        Hop(
            "employer",
            "product",
            "{m} makes {v}",
            (
                "What does the company that {s} works for make?",
                "Which product does the employer of {s} make?",
            ),
        ),
        Hop(
            "birthplace",
            "region",
            "{m} in {v}",
            (
                "In which region does the town where {s} was born lie?",
                "Where does the birthplace of {s} lie?",
            ),
        ),
    ),
    "company": (
        Hop(
            "base",
            "region",
            "{m} in {v}",
            ("In which region does the town where {s} is based lie?", "Where does the home town of {s} lie?"),
        ),
    ),
    "town": (),
}

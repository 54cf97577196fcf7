"""A changing collection of documents asked through caches, and an independent model of what is fresh."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

from ragcachekit.retrieval.cached_retrieval import CachedRetrieval

Point = tuple[float, float]
Rows = dict[str, tuple[Point, str]]
"""Point and text of each document by its id."""

K = 3


def change_and_ask(
    retrievals: Sequence[CachedRetrieval[str]], seed: int, threads: int, operations: int
) -> tuple[int, list[object]]:
    """Hits, and answers that were stale, of random questions and changes (one in twenty).

    A change happens in the collection, then it is told to one of the caches. An answer is stale if it is
    right for no state since the last one of which a cache had been told when the question was asked.
    """
    model = _Model(retrievals, random.Random(seed))
    work = [
        threading.Thread(target=model.work, args=(random.Random(f"{seed} {i}"), operations // threads))
        for i in range(threads)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    return model.hits, model.stale


class _Model:
    def __init__(self, retrievals: Sequence[CachedRetrieval[str]], rng: random.Random) -> None:
        self.retrievals = retrievals
        self.rows: Rows = {f"d{number}": (_point(rng), f"text {number}.0") for number in range(30)}
        self.questions = [_point(rng) for _ in range(40)]
        self.told = [dict(self.rows)]
        self.reading, self.changing = threading.Lock(), threading.Lock()
        self.hits, self.serial = 0, 0
        self.stale: list[object] = []

    def work(self, rng: random.Random, operations: int) -> None:
        for _ in range(operations):
            (self.change if rng.random() < 0.05 else self.ask)(rng)

    def ask(self, rng: random.Random) -> None:
        asked, retrieval = rng.choice(self.questions), rng.choice(self.retrievals)
        begun = len(self.told) - 1
        lookup = retrieval.lookup(list(asked), "p")
        documents = lookup.result.documents
        if lookup.result.hit:
            self.hits += 1
        else:
            with self.reading:
                ranked = _ranked(self.rows, asked)
            found = [(one, text) for _, one, text in ranked[:K]]
            documents = retrieval.insert(lookup, found).documents
        if not self.is_right(documents, asked, begun):
            with self.changing:  # a change was half done
                if not self.is_right(documents, asked, begun):
                    self.stale.append((asked, documents))

    def is_right(self, documents: Sequence[str], asked: Point, begun: int) -> bool:
        with self.reading:
            states = [*self.told[begun:], dict(self.rows)]
        return any([text for *_, text in _ranked(rows, asked)[:K]] == list(documents) for rows in states)

    def change(self, rng: random.Random) -> None:
        with self.changing:
            retrieval, one = rng.choice(self.retrievals), rng.choice([*self.rows])
            kind = rng.choice(("add", "delete", "update", "forget")) if len(self.rows) > 9 else "add"
            self.serial += 1
            point, text = _point(rng), f"text {self.serial}.1"
            before = self.rows[one][1]
            with self.reading:
                if kind == "add":
                    self.rows[f"n{self.serial}"] = (point, text)
                elif kind == "update":
                    self.rows[one] = (point, text)
                else:
                    del self.rows[one]
            if kind in ("add", "update"):
                retrieval.clear()
            if kind == "forget":
                retrieval.invalidate(texts=[before])
            elif kind != "add":
                retrieval.invalidate(ids=[one])
            self.told.append(dict(self.rows))


def _ranked(rows: Rows, asked: Point) -> list[tuple[float, str, str]]:
    return sorted(
        ((x - asked[0]) ** 2 + (y - asked[1]) ** 2, one, text) for one, ((x, y), text) in rows.items()
    )


def _point(rng: random.Random) -> Point:
    return rng.uniform(-1, 1), rng.uniform(-1, 1)

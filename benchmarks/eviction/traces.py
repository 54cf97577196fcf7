"""Requests to replay: ordered documents after a system prompt, drawn or read from a file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

POPULAR_SHARE, REQUEST_SHARE = 0.03, 0.60
"""3 % of documents take 60 % of requests (RAGCache section 3.2, MMLU)."""

MEAN_TOKENS = 3718
"""Of a document in RAGCache's Wikipedia corpus (section 3.1)."""

_SPREAD = 0.8  # of the logarithm of sizes; the paper draws the distribution, but gives only its mean
_NEIGHBOURS = 4
_SWAPPED = 0.1
_PHASES = 4
_REPEATED, _RECENT = 1 / 3, 100


@dataclass(frozen=True)
class Trace:
    """What is replayed: ``tokens`` of each document, ``requests`` as document numbers in the prompt's order.

    ``corpus_tokens`` is what capacities are a share of.
    """

    name: str
    tokens: tuple[int, ...]
    requests: tuple[tuple[int, ...], ...]
    corpus_tokens: int


@dataclass(frozen=True)
class TraceShape:
    """Sizes of the drawn traces; ``top_k`` documents per request (the paper's default is 2)."""

    documents: int = 2000
    requests: int = 4000
    top_k: int = 2
    mean_tokens: int = MEAN_TOKENS

    def __post_init__(self) -> None:
        if self.top_k * 2 > self.documents:
            raise ValueError(f"top_k = {self.top_k} needs more documents than {self.documents}")


def exponent(documents: int, popular: float = POPULAR_SHARE, share: float = REQUEST_SHARE) -> float:
    """The exponent s of a Zipf law (rank to the power -s) whose ``popular`` part takes ``share``."""
    top = max(1, round(popular * documents))
    low, high = 0.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        weights = np.arange(1, documents + 1) ** -middle
        low, high = (middle, high) if weights[:top].sum() < share * weights.sum() else (low, middle)
    return low


def zipf(shape: TraceShape, seed: int) -> Trace:
    """Popularity by Zipf's law, calibrated to 3 % : 60 %; documents of unequal size.

    The first document is drawn by popularity. The others come from its four neighbours, the nearest
    one twice as often as the next (questions on one subject find the same documents), and one request
    in ten has the first two in the other order.
    """
    world = _World(shape, seed)
    return world.trace("zipf", world.requests(shape.requests))


def zipf_equal(shape: TraceShape, seed: int) -> Trace:
    """As :func:`zipf` with documents of equal size, for which Belady's algorithm is optimal."""
    drawn = zipf(shape, seed)
    tokens = (shape.mean_tokens,) * shape.documents
    return Trace("zipf-equal", tokens, drawn.requests, sum(tokens))


def shifting(shape: TraceShape, seed: int) -> Trace:
    """As :func:`zipf`, but after each quarter other documents are the popular ones."""
    world, requests = _World(shape, seed), []
    for phase in np.array_split(np.arange(shape.requests), _PHASES):
        requests += world.requests(len(phase))
        world.shuffle()
    return world.trace("shifting", requests)


def local(shape: TraceShape, seed: int) -> Trace:
    """As :func:`zipf`, but one request in three repeats one of the last hundred (users ask in spells)."""
    world, rng = _World(shape, seed), np.random.default_rng((seed, 1))
    requests: list[tuple[int, ...]] = []
    for fresh in world.requests(shape.requests):
        repeats = requests and rng.random() < _REPEATED
        requests.append(
            requests[-int(rng.integers(1, min(_RECENT, len(requests)) + 1))] if repeats else fresh
        )
    return world.trace("local", requests)


def scan(shape: TraceShape, seed: int) -> Trace:
    """As :func:`zipf`, with three runs of documents that nobody asks for again: a quarter of the requests."""
    world = _World(shape, seed)
    scanned = shape.requests // 4
    usual = world.requests(shape.requests - scanned)
    once = world.new_documents(scanned * shape.top_k).reshape(scanned, shape.top_k).tolist()
    requests: list[tuple[int, ...]] = []
    runs, pauses = np.array_split(np.arange(scanned), 3), np.array_split(np.arange(len(usual)), 4)
    for number, pause in enumerate(pauses):
        requests += [usual[at] for at in pause]
        requests += [tuple(once[at]) for at in runs[number]] if number < len(runs) else []
    return world.trace("scan", requests)


TRACES: dict[str, Callable[[TraceShape, int], Trace]] = {
    "zipf": zipf,
    "zipf-equal": zipf_equal,
    "local": local,
    "shifting": shifting,
    "scan": scan,
}


def open_trace(name: str, shape: TraceShape, seed: int) -> Trace:
    """Draw the trace called ``name``; ValueError for an unknown one."""
    if name not in TRACES:
        raise ValueError(f"unknown trace {name!r}; known: {', '.join(TRACES)}, or --trace FILE")
    return TRACES[name](shape, seed)


def read_trace(path: str | os.PathLike[str], default_tokens: int) -> Trace:
    """A user's trace: per line ``{"docs": [...]}``, each an id or ``{"id": ..., "tokens": ...}``.

    Documents whose size the file never says have ``default_tokens``. ValueError for another line, with its
    number, or a file without requests.
    """
    numbers: dict[str, int] = {}
    sizes: dict[int, int] = {}
    requests = []
    for at, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            requests.append(_request(json.loads(line), numbers, sizes))
        except ValueError as error:
            raise ValueError(f"{path}, line {at}: {error}") from error
    if not requests:
        raise ValueError(f'{path} holds no requests; write one per line, as {{"docs": ["id", ...]}}')
    tokens = tuple(sizes.get(number, default_tokens) for number in range(len(numbers)))
    return Trace(Path(path).stem, tokens, tuple(requests), sum(tokens))


def _request(found: Any, numbers: dict[str, int], sizes: dict[int, int]) -> tuple[int, ...]:
    try:
        docs = [doc if isinstance(doc, dict) else {"id": doc} for doc in found["docs"]]
        request = []
        for doc in docs:
            request.append(numbers.setdefault(str(doc["id"]), len(numbers)))
            if "tokens" in doc:
                sizes[request[-1]] = int(doc["tokens"])
    except (TypeError, KeyError) as error:
        raise ValueError('expected {"docs": ["id", {"id": "...", "tokens": 123}, ...]}') from error
    if not request or len(set(request)) < len(request) or min(sizes.values(), default=1) < 1:
        raise ValueError("give at least one document, none twice, with at least one token each")
    return tuple(request)


class _World:
    """Documents with sizes, popularity and neighbours."""

    def __init__(self, shape: TraceShape, seed: int) -> None:
        self._shape, self._rng = shape, np.random.default_rng(seed)
        self._tokens = self._sizes(shape.documents)
        weights = np.arange(1, shape.documents + 1) ** -exponent(shape.documents)
        self._weights: NDArray[np.float64] = weights / weights.sum()
        self.shuffle()

    def shuffle(self) -> None:
        """Deal popularity and neighbours anew."""
        count, others = self._shape.documents, max(_NEIGHBOURS, self._shape.top_k - 1)
        self._by_rank = self._rng.permutation(count)
        # Neighbours are drawn by popularity too, so that the second documents are as skewed as the first.
        self._near = self._by_rank[self._rng.choice(count, (count, 4 * others), p=self._weights)]

    def new_documents(self, count: int) -> NDArray[np.int64]:
        first = len(self._tokens)
        self._tokens = np.concatenate([self._tokens, self._sizes(count)])
        return np.arange(first, first + count)

    def requests(self, count: int) -> list[tuple[int, ...]]:
        firsts = self._by_rank[self._rng.choice(self._shape.documents, count, p=self._weights)]
        return [self._request(int(first)) for first in firsts]

    def trace(self, name: str, requests: list[tuple[int, ...]]) -> Trace:
        corpus = int(self._tokens[: self._shape.documents].sum())
        return Trace(name, tuple(self._tokens.tolist()), tuple(requests), corpus)

    def _request(self, first: int) -> tuple[int, ...]:
        others = list(dict.fromkeys(int(n) for n in self._near[first] if n != first))
        wanted = min(self._shape.top_k - 1, len(others))
        chosen = [first]
        for _ in range(wanted):
            place = min(int(self._rng.geometric(0.5)) - 1, min(len(others), _NEIGHBOURS) - 1)
            chosen.append(others.pop(place))
        if len(chosen) > 1 and self._rng.random() < _SWAPPED:
            chosen[:2] = chosen[1::-1]
        return tuple(chosen)

    def _sizes(self, count: int) -> NDArray[np.int64]:
        middle = np.log(self._shape.mean_tokens) - _SPREAD**2 / 2
        drawn = self._rng.lognormal(middle, _SPREAD, count)
        return np.maximum(1, np.rint(drawn)).astype(np.int64)

"""A user's own questions replayed over their own documents, without generating an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from ragcachekit.commands.ask import Say, corpus_index
from ragcachekit.commands.checks import check_writable
from ragcachekit.commands.corpus import Corpus
from ragcachekit.commands.embedding import MiniLM, model_folder
from ragcachekit.commands.estimate.log import LoggedQuery, read_log
from ragcachekit.commands.estimate.replay import Served, Tiers, replay
from ragcachekit.commands.estimate.requests import Request, Requests, Retrievals, retrieve
from ragcachekit.commands.estimate.speed import Speeds, assumed, measured
from ragcachekit.commands.own_files import OwnFiles, at_least_1, one_token
from ragcachekit.commands.workspace import load_checked
from ragcachekit.config import StoreConfig
from ragcachekit.model.rope.probe import describe_rope
from ragcachekit.policies.base import LayerwisePolicy, VariantPolicy
from ragcachekit.policies.registry import open_policy
from ragcachekit.query.proximity import ProximityCache
from ragcachekit.store.eviction.registry import open_eviction

SHARES = (0.1, 0.25, 0.5, 1.0)
"""Host budgets, as shares of the KV that the log touches; at least what one prompt uses."""

EVICTIONS = ("lru", StoreConfig().eviction)


@dataclass(frozen=True)
class EstimateSettings(OwnFiles):
    """What ``ragcachekit estimate`` takes.

    ``k`` chunks are retrieved where the log names none; ``shares`` are host budgets, as shares of the KV
    that the log touches; ``evictions`` are compared in the host tier; without ``measure`` hardware is
    assumed; ``disk_gbps`` is the disk's speed, measured where it is None.
    """

    log: str = field(kw_only=True)
    k: int = 4
    tolerance: float = 0.0
    shares: tuple[float, ...] = SHARES
    evictions: tuple[str, ...] = EVICTIONS
    measure: bool = True
    disk_gbps: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        policy = open_policy(self.policy)
        if not policy.reads_cache:
            raise ValueError(
                f"policy {policy.name} reuses nothing, so there is nothing to estimate; try lego:16"
            )
        if isinstance(policy, LayerwisePolicy | VariantPolicy):
            raise ValueError(
                f"estimate cannot say how many rows policy {policy.name} computes without running the model; "
                "give lego:k, deep:r, query:r, heavy:r, random:r or reuse, at the ratio that you expect"
            )
        if (self.encoder or "").partition(":")[0] in ("similar", "in-prompt"):
            raise ValueError(
                f"estimate does not replay encoder {self.encoder!r}; give standalone, sinks:n or system "
                "(same sizes)"
            )
        ProximityCache(1, self.tolerance)
        at_least_1(self, "k")
        if not self.shares or min(self.shares) <= 0:
            raise ValueError(f"host sizes are shares > 0 of the KV that the log touches, got {self.shares}")
        if not self.evictions:
            raise ValueError("name at least one eviction policy to replay, such as lru")
        for eviction in self.evictions:
            open_eviction(eviction)
        if self.disk_gbps is not None and not self.disk_gbps > 0:
            raise ValueError(f"the disk must give more than 0 GB/s, got {self.disk_gbps}")


@dataclass(frozen=True, eq=False)
class Outcome:
    """One replay: its tiers, what came from where, seconds to the first token of every request."""

    tiers: Tiers
    served: tuple[Served, ...]
    seconds: NDArray[np.float64]

    def rate(self, tier: str) -> float:
        """Share of chunk uses that came from a tier."""
        chunks = sum(len(served.request.chunks) for served in self.served)
        found = sum(not use.is_prefix for served in self.served for use in served.from_tier(tier))
        return found / chunks if chunks else 0.0

    @property
    def mean(self) -> float:
        """Mean time to the first token, in seconds."""
        return float(self.seconds.mean())


@dataclass(frozen=True, eq=False)
class Estimate:
    """Requests of a log, the outcome of every replay, and sizes of the KV.

    ``touched_bytes`` is the KV of all entries that the log's prompts use, ``foreign_chunks`` counts chunks
    of the log that the corpus lacks, ``encode_seconds`` is the time to encode the corpus ahead.
    """

    settings: EstimateSettings
    log: tuple[LoggedQuery, ...]
    retrievals: Retrievals
    requests: tuple[Request, ...]
    speeds: Speeds
    outcomes: tuple[Outcome, ...]
    corpus_chunks: int
    corpus_bytes: int
    touched_bytes: int
    foreign_chunks: int
    encode_seconds: float
    notes: tuple[str, ...]

    @property
    def touched_chunks(self) -> int:
        """Different chunks in the log's prompts."""
        return len(_chunk_ids(self.requests))

    @property
    def chunk_uses(self) -> int:
        """Chunks in all prompts."""
        return sum(len(request.chunks) for request in self.requests)

    @property
    def chunk_share(self) -> float:
        """Share of all prompts' tokens that are chunks."""
        tokens = sum(use.chunk.tokens for request in self.requests for use in request.chunks)
        return tokens / sum(request.tokens for request in self.requests)

    @property
    def reuse(self) -> float:
        """Share of chunk uses that are not the first one of their chunk."""
        return 1 - self.touched_chunks / self.chunk_uses if self.chunk_uses else 0.0

    @property
    def mean_full(self) -> float:
        """Mean time of an ordinary prefill, in seconds."""
        return float(np.mean([self.speeds.full(request.tokens) for request in self.requests]))


def _chunk_ids(requests: tuple[Request, ...]) -> set[str]:
    return {use.key.chunk_id for request in requests for use in request.chunks}


def run(settings: EstimateSettings, say: Say = lambda _: None, *, progress: bool = False) -> Estimate:
    """Read the log and the corpus, retrieve, plan every prompt, replay them through tiers.

    Raises ValueError for a bad line of the log or a prompt longer than the model's context, with the line's
    number; CorpusError, RetrievalError, RagCacheError, ModelNotSupported as ``ask``.
    """
    log, folder = read_log(settings.log), settings.folder
    model_folder()
    check_writable(folder.path)
    corpus = settings.read_corpus()
    model, tokenizer = load_checked(settings.model, settings.device, settings.dtype)
    rope, policy = describe_rope(model), open_policy(settings.policy)
    token = one_token(model, rope)
    prompts = Requests(model, tokenizer, rope, policy, settings.encoder, token.nbytes)
    retrievals = _retrieved(settings, log, corpus, say, progress)
    lines = list(zip(log, retrievals.texts, strict=True))
    bar = tqdm(lines, unit="prompt", desc="planning", disable=not progress)
    requests = tuple(prompts.request(query, texts) for query, texts in bar)
    items = prompts.precomputed(corpus.texts)
    keys = {item.key for item in items}

    disk = None if settings.disk_gbps is None else settings.disk_gbps * 1e9
    if settings.measure:
        speeds = measured(model, rope, token, folder.path, disk, say)
    else:
        speeds = assumed(model, disk)
    touched = sum({use.key: use.nbytes for request in requests for use in request.uses}.values())
    # Below what one prompt uses, a tier would refuse what the prompt misses.
    least = max(sum({use.key: use.nbytes for use in request.uses}.values()) for request in requests)
    budgets = sorted({max(least, round(share * touched), 1) for share in settings.shares})
    tiers = [
        Tiers(budget, eviction, *way)
        for way in ((False, False), (True, False), (True, True))
        for eviction in dict.fromkeys(settings.evictions)
        for budget in budgets
    ]
    prefill, ttft = cache(speeds.full), cache(lambda served: speeds.served(served, policy))
    outcomes = []
    for each in tqdm(tiers, unit="set of tiers", desc="replaying", disable=not progress):
        served = replay(requests, each, keys, prefill)
        outcomes.append(Outcome(each, served, np.array([ttft(one) for one in served])))
    return Estimate(
        settings,
        log,
        retrievals,
        requests,
        speeds,
        tuple(outcomes),
        len(items),
        sum(token.nbytes * len(item.token_ids) for item in items),
        touched,
        len(_chunk_ids(requests) - {key.chunk_id for key in keys}),
        sum(speeds.full(len(item.encoding.behind) + len(item.token_ids)) for item in items),
        corpus.notes,
    )


def _retrieved(
    settings: EstimateSettings, log: tuple[LoggedQuery, ...], corpus: Corpus, say: Say, progress: bool
) -> Retrievals:
    embedder = MiniLM()
    questions = list(dict.fromkeys(query.query for query in log))
    rows = embedder.embed(questions, progress=progress and len(questions) > 100)
    vectors = dict(zip(questions, rows, strict=True))
    texts = {chunk.id: chunk.text for chunk in corpus.chunks}

    @cache
    def index() -> Any:  # not built where every line names its documents
        return corpus_index(corpus, Path(settings.corpus), embedder, settings.folder.indexes, say)

    def search(vector: NDArray[Any]) -> tuple[str, ...]:
        return tuple(texts[id] for id in index().search(vector, settings.k).ids)

    return retrieve(
        log, corpus, np.stack([vectors[query.query] for query in log]), search, settings.tolerance
    )

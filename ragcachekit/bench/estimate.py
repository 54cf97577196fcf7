"""Will it help me: a user's own questions replayed over their own documents, without generating."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from ragcachekit.bench.ask import IndexRetriever, corpus_index
from ragcachekit.bench.checks import check_writable
from ragcachekit.bench.corpus import Corpus
from ragcachekit.bench.embedding import MiniLM, model_folder
from ragcachekit.bench.estimate_log import LoggedQuery, read_log
from ragcachekit.bench.estimate_replay import Served, Tiers, replay
from ragcachekit.bench.estimate_requests import Request, Requests, plan_all
from ragcachekit.bench.estimate_retrieval import KnownVectors, Retrievals, retrieve, search_of
from ragcachekit.bench.estimate_speed import Speeds, assumed, measured
from ragcachekit.bench.own_files import OwnFiles, at_least_1
from ragcachekit.bench.workspace import CacheFolder, explained, model_path
from ragcachekit.config import StoreConfig
from ragcachekit.link.base import LayerwisePolicy, SelectionPolicy, VariantPolicy
from ragcachekit.link.planned import Missing
from ragcachekit.link.policies import open_policy
from ragcachekit.model.encoding import Encoding
from ragcachekit.model.loading import load_model
from ragcachekit.model.rope_probe import describe_rope
from ragcachekit.query.proximity import ProximityCache
from ragcachekit.store.eviction.registry import open_eviction

Say = Callable[[str], object]

SHARES = (0.1, 0.25, 0.5, 1.0)
"""Host budgets, as shares of the KV that the log touches; at least what one prompt uses."""

EVICTIONS = ("lru", StoreConfig().eviction)


@dataclass(frozen=True)
class EstimateSettings(OwnFiles):
    """What ``ragcachekit estimate`` is told; the other names are as for ``ask``.

    Attributes
    ----------
    log : str
        The questions, see :func:`~ragcachekit.bench.estimate_log.read_log`.
    k : int
        Chunks that are retrieved where the log does not name any.
    tolerance : float
        Of the query cache.
    shares : tuple of float
        Host budgets, as shares of the KV that the log touches.
    evictions : tuple of str
        The policies to compare in the host tier.
    measure : bool
        Measure this machine; False for arithmetic over assumed hardware.
    disk_gbps : float or None
        GB/s that the disk gives; None to measure it.
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
        _check_policy(open_policy(self.policy))
        _check_encoder(self.encoder)
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


def _check_policy(policy: SelectionPolicy) -> None:
    if not policy.reads_cache:
        raise ValueError("policy 'full' reuses nothing, so there is nothing to estimate; try lego:16")
    if isinstance(policy, LayerwisePolicy | VariantPolicy):
        raise ValueError(
            f"estimate cannot say how many rows policy {policy.name} computes without running the model; "
            "give lego:k, deep:r, query:r, heavy:r, random:r or reuse, at the ratio that you expect"
        )


def _check_encoder(encoder: str | None) -> None:
    kind = (encoder or "").partition(":")[0]
    if kind in ("similar", "in-prompt"):
        raise ValueError(
            f"estimate does not replay encoder {encoder!r}; give standalone, sinks:n or system (same sizes)"
        )


@dataclass(frozen=True, eq=False)
class Outcome:
    """One replay: its tiers, what came from where, seconds to the first token of every request."""

    tiers: Tiers
    served: tuple[Served, ...]
    seconds: np.ndarray[Any, np.dtype[np.float64]]

    def rate(self, tier: str) -> float:
        """Share of chunk uses that came from a tier."""
        chunks = sum(len(served.request.chunks) for served in self.served)
        return sum(served.count(tier) for served in self.served) / chunks if chunks else 0.0

    @property
    def mean(self) -> float:
        """Seconds."""
        return float(self.seconds.mean())


@dataclass(frozen=True, eq=False)
class Estimate:
    """All that was found; :mod:`ragcachekit.bench.estimate_report` makes rows and words of it.

    Attributes
    ----------
    log : tuple of LoggedQuery
    retrievals : Retrievals
    requests : tuple of Request
    speeds : Speeds
    outcomes : tuple of Outcome
        By host size, eviction policy, with and without disk, precomputed or not.
    full : ndarray
        Seconds of every request's ordinary prefill.
    corpus_chunks : int
    corpus_bytes, touched_bytes : int
        KV of the whole corpus, and of all entries that the log's prompts use.
    foreign_chunks : int
        Different chunks in the log's prompts that the corpus does not have, so that encoding it ahead
        leaves them out.
    encode_seconds : float
        To encode the corpus ahead.
    notes : tuple of str
        What of the corpus was skipped.
    """

    settings: EstimateSettings
    log: tuple[LoggedQuery, ...]
    retrievals: Retrievals
    requests: tuple[Request, ...]
    speeds: Speeds
    outcomes: tuple[Outcome, ...]
    full: np.ndarray[Any, np.dtype[np.float64]]
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
    def mean_full(self) -> float:
        """Seconds of an ordinary prefill."""
        return float(self.full.mean())

    @property
    def chunk_uses(self) -> int:
        """Chunks in all prompts."""
        return sum(len(request.chunks) for request in self.requests)

    @property
    def reuse(self) -> float:
        """Share of chunk uses that are not the first one of their chunk."""
        return 1 - self.touched_chunks / self.chunk_uses if self.chunk_uses else 0.0


def _chunk_ids(requests: Sequence[Request]) -> set[str]:
    return {use.item.key.chunk_id for request in requests for use in request.chunks}


def run(settings: EstimateSettings, say: Say = lambda _: None, *, progress: bool = False) -> Estimate:
    """Read the log and the corpus, retrieve, plan every prompt, replay them through tiers.

    Raises
    ------
    ValueError
        A bad line of the log, with its number; a prompt that does not fit into the model's context.
    CorpusError, RetrievalError, RagCacheError, ModelNotSupported
        As ``ask``.
    """
    log, folder = read_log(settings.log), settings.folder
    model_folder()
    check_writable(folder.path)
    corpus = settings.read_corpus()
    with explained(settings.model):
        model, tokenizer = load_model(model_path(settings.model), settings.device, dtype=settings.dtype)
    rope, policy = describe_rope(model), open_policy(settings.policy)
    prompts = Requests(model, tokenizer, rope, policy, settings.encoder)
    retrievals = _retrieved(settings, log, corpus, folder, say, progress)
    with tqdm(total=len(log), unit="prompt", desc="planning", disable=not progress) as bar:
        requests = plan_all(prompts, log, retrievals.texts, bar.update)
    ahead = prompts.ahead(corpus.texts)

    disk = None if settings.disk_gbps is None else settings.disk_gbps * 1e9
    if settings.measure:
        token = prompts.encoder.token(Encoding("standalone"))
        speeds = measured(model, rope, token, folder.path, disk, say)
    else:
        speeds = assumed(model, disk)
    touched = {use.item.key: use.kv.nbytes for request in requests for use in request.uses}
    # Below what one prompt uses, a tier would refuse what the prompt misses.
    least = max(request.nbytes for request in requests)
    budgets = sorted({max(least, round(share * sum(touched.values())), 1) for share in settings.shares})
    outcomes = _replays(settings, prompts, requests, ahead, budgets, speeds, progress)
    return Estimate(
        settings,
        log,
        retrievals,
        requests,
        speeds,
        outcomes,
        np.array([speeds.full(request.tokens) for request in requests]),
        len(ahead),
        sum(prompts.encoder.kv(item.encoding, len(item.token_ids)).nbytes for item in ahead),
        sum(touched.values()),
        len(_chunk_ids(requests) - {item.key.chunk_id for item in ahead}),
        sum(speeds.full(len(item.encoding.behind) + len(item.token_ids)) for item in ahead),
        corpus.notes,
    )


def _retrieved(
    settings: EstimateSettings,
    log: Sequence[LoggedQuery],
    corpus: Corpus,
    folder: CacheFolder,
    say: Say,
    progress: bool,
) -> Retrievals:
    embedder = MiniLM()
    questions = list(dict.fromkeys(query.query for query in log))
    rows = embedder.embed(questions, progress=progress and len(questions) > 100)
    vectors = dict(zip(questions, rows, strict=True))

    search: Callable[[str], tuple[str, ...]] | None = None
    if any(query.docs is None for query in log):
        index = corpus_index(corpus, Path(settings.corpus), embedder, folder.indexes, say)
        known = KnownVectors(vectors)
        search = search_of(IndexRetriever(index=index, corpus=corpus, embedder=known, k=settings.k))
    each = np.stack([vectors[query.query] for query in log])
    return retrieve(log, corpus, each, search, settings.tolerance)


def _replays(
    settings: EstimateSettings,
    prompts: Requests,
    requests: Sequence[Request],
    ahead: Sequence[Missing],
    budgets: Sequence[int],
    speeds: Speeds,
    progress: bool,
) -> tuple[Outcome, ...]:
    ways = [(False, False), (True, False), (True, True)]
    policy = open_policy(settings.policy)
    tiers = [Tiers(b, e, *way) for way in ways for e in dict.fromkeys(settings.evictions) for b in budgets]
    out = []
    with tqdm(total=len(tiers) * len(requests), unit="prompt", desc="replaying", disable=not progress) as bar:
        for each in tiers:
            served = replay(requests, each, prompts.encoder, ahead, bar.update)
            known: dict[tuple[int, tuple[str, ...]], float] = {}
            for one in served:
                at = (id(one.request), one.tiers)
                if at not in known:
                    known[at] = speeds.served(one, policy)
            seconds = [known[id(one.request), one.tiers] for one in served]
            out.append(Outcome(each, served, np.array(seconds)))
    return tuple(out)

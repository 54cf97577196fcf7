"""Will it help me: a user's own questions replayed over their own documents, without generating."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from ragcachekit.commands.ask import corpus_index
from ragcachekit.commands.checks import check_writable
from ragcachekit.commands.corpus import Corpus
from ragcachekit.commands.embedding import MiniLM, model_folder
from ragcachekit.commands.estimate.log import LoggedQuery, read_log
from ragcachekit.commands.estimate.replay import Served, Tiers, replay
from ragcachekit.commands.estimate.requests import Request, Requests, plan_all
from ragcachekit.commands.estimate.retrieval import Retrievals, retrieve
from ragcachekit.commands.estimate.speed import Speeds, assumed, measured
from ragcachekit.commands.own_files import OwnFiles, at_least_1, one_token
from ragcachekit.commands.workspace import load_checked
from ragcachekit.config import StoreConfig
from ragcachekit.model.rope.probe import describe_rope
from ragcachekit.policies.base import LayerwisePolicy, SelectionPolicy, VariantPolicy
from ragcachekit.policies.registry import open_policy
from ragcachekit.query.proximity import ProximityCache
from ragcachekit.store.eviction.registry import open_eviction
from ragcachekit.types import KVKey

Say = Callable[[str], object]

SHARES = (0.1, 0.25, 0.5, 1.0)
"""Host budgets, as shares of the KV that the log touches; at least what one prompt uses."""

EVICTIONS = ("lru", StoreConfig().eviction)


@dataclass(frozen=True)
class EstimateSettings(OwnFiles):
    """What ``ragcachekit estimate`` is told.

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
    seconds: NDArray[np.float64]

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
    """All that was found; :mod:`ragcachekit.commands.estimate.report` makes rows of it.

    ``full`` are seconds of every request's ordinary prefill, ``encode_seconds`` those to encode the
    corpus ahead; ``touched_bytes`` is the KV of all entries that the log's prompts use; ``foreign_chunks``
    are different chunks of the log that the corpus does not have; ``notes`` say what was skipped.
    """

    settings: EstimateSettings
    log: tuple[LoggedQuery, ...]
    retrievals: Retrievals
    requests: tuple[Request, ...]
    speeds: Speeds
    outcomes: tuple[Outcome, ...]
    full: NDArray[np.float64]
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
    def reuse(self) -> float:
        """Share of chunk uses that are not the first one of their chunk."""
        return 1 - self.touched_chunks / self.chunk_uses if self.chunk_uses else 0.0

    @property
    def mean_full(self) -> float:
        """Seconds of an ordinary prefill."""
        return float(self.full.mean())


def _chunk_ids(requests: Sequence[Request]) -> set[str]:
    return {use.key.chunk_id for request in requests for use in request.chunks}


def run(settings: EstimateSettings, say: Say = lambda _: None, *, progress: bool = False) -> Estimate:
    """Read the log and the corpus, retrieve, plan every prompt, replay them through tiers.

    Raises ValueError: A bad line of the log, with its number; a prompt that does not fit into the model's
    context; CorpusError, RetrievalError, RagCacheError, ModelNotSupported: as ``ask``.
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
    with tqdm(total=len(log), unit="prompt", desc="planning", disable=not progress) as bar:
        requests = plan_all(prompts, log, retrievals.texts, bar.update)
    ahead = prompts.ahead(corpus.texts)

    disk = None if settings.disk_gbps is None else settings.disk_gbps * 1e9
    if settings.measure:
        speeds = measured(model, rope, token, folder.path, disk, say)
    else:
        speeds = assumed(model, disk)
    touched = sum({use.key: use.nbytes for request in requests for use in request.uses}.values())
    # Below what one prompt uses, a tier would refuse what the prompt misses.
    least = max(request.nbytes for request in requests)
    budgets = sorted({max(least, round(share * touched), 1) for share in settings.shares})
    keys = {item.key for item in ahead}
    return Estimate(
        settings,
        log,
        retrievals,
        requests,
        speeds,
        _replays(settings, requests, keys, budgets, speeds, progress),
        np.array([speeds.full(request.tokens) for request in requests]),
        len(ahead),
        sum(token.nbytes * len(item.token_ids) for item in ahead),
        touched,
        len(_chunk_ids(requests) - {key.chunk_id for key in keys}),
        sum(speeds.full(len(item.encoding.behind) + len(item.token_ids)) for item in ahead),
        corpus.notes,
    )


def _retrieved(
    settings: EstimateSettings, log: Sequence[LoggedQuery], corpus: Corpus, say: Say, progress: bool
) -> Retrievals:
    embedder = MiniLM()
    questions = list(dict.fromkeys(query.query for query in log))
    rows = embedder.embed(questions, progress=progress and len(questions) > 100)
    vectors = dict(zip(questions, rows, strict=True))
    texts = {chunk.id: chunk.text for chunk in corpus.chunks}

    @cache
    def index() -> Any:  # not built where every line names what it found
        return corpus_index(corpus, Path(settings.corpus), embedder, settings.folder.indexes, say)

    def search(vector: NDArray[Any]) -> tuple[str, ...]:
        return tuple(texts[id] for id in index().search(vector, settings.k).ids)

    return retrieve(
        log, corpus, np.stack([vectors[query.query] for query in log]), search, settings.tolerance
    )


def _replays(
    settings: EstimateSettings,
    requests: Sequence[Request],
    ahead: Collection[KVKey],
    budgets: Sequence[int],
    speeds: Speeds,
    progress: bool,
) -> tuple[Outcome, ...]:
    ways = [(False, False), (True, False), (True, True)]
    policy = open_policy(settings.policy)
    tiers = [Tiers(b, e, *way) for way in ways for e in dict.fromkeys(settings.evictions) for b in budgets]
    known: dict[tuple[int, tuple[str, ...]], float] = {}
    out = []
    with tqdm(total=len(tiers) * len(requests), unit="prompt", desc="replaying", disable=not progress) as bar:
        for each in tiers:
            served = replay(requests, each, ahead, bar.update)
            for one in served:
                if (id(one.request), one.tiers) not in known:
                    known[id(one.request), one.tiers] = speeds.served(one, policy)
            out.append(Outcome(each, served, np.array([known[id(one.request), one.tiers] for one in served])))
    return tuple(out)

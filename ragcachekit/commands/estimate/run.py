"""A user's own questions replayed over their own documents, without generating an answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from ragcachekit.commands.estimate.requests import Request, Requests, Retrievals, Use, retrieve
from ragcachekit.commands.estimate.speed import Speeds, assumed, measured
from ragcachekit.commands.own_files import OwnFiles, at_least_1, one_token
from ragcachekit.commands.workspace import load_checked
from ragcachekit.config import StoreConfig
from ragcachekit.model.rope.probe import describe_rope
from ragcachekit.plan.link_plan import Missing
from ragcachekit.policies.base import LayerwisePolicy
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
        if isinstance(policy, LayerwisePolicy):
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


@dataclass(frozen=True)
class LogFigures:
    """Counts, shares, median tokens, bytes and seconds of a log and its corpus."""

    questions: int
    repeated: int
    prompt_tokens: float
    chunk_token_share: float
    chunk_uses: int
    chunks_touched: int
    chunk_reuse: float
    chunks_not_in_corpus: int
    chunks_in_corpus: int
    kv_bytes_corpus: int
    kv_bytes_touched: int
    encode_corpus_s: float
    full_s_mean: float


@dataclass(frozen=True, eq=False)
class Estimate:
    """Figures of a log, query cache hits by tolerance, and the outcome of every replay."""

    settings: EstimateSettings
    figures: LogFigures
    near: dict[float, int]
    requests: tuple[Request, ...]
    speeds: Speeds
    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...]


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

    disk = None if settings.disk_gbps is None else settings.disk_gbps * 1e9
    if settings.measure:
        speeds = measured(model, rope, token, folder.path, disk, say)
    else:
        speeds = assumed(model, disk)
    figures = _figures(log, requests, items, token.nbytes, speeds)
    # Below what one prompt uses, a tier would refuse what the prompt misses.
    least = max(_nbytes(request.uses) for request in requests)
    budgets = sorted({max(least, round(s * figures.kv_bytes_touched), 1) for s in settings.shares})
    tiers = [
        Tiers(budget, eviction, *way)
        for way in ((False, False), (True, False), (True, True))
        for eviction in dict.fromkeys(settings.evictions)
        for budget in budgets
    ]
    prefill, ttft = cache(speeds.full), cache(lambda served: speeds.served(served, policy))
    keys, outcomes = {item.key for item in items}, []
    for each in tqdm(tiers, unit="set of tiers", desc="replaying", disable=not progress):
        served = replay(requests, each, keys, prefill)
        outcomes.append(Outcome(each, served, np.array([ttft(one) for one in served])))
    return Estimate(settings, figures, retrievals.near, requests, speeds, tuple(outcomes), corpus.notes)


def _figures(
    log: Sequence[LoggedQuery],
    requests: Sequence[Request],
    corpus: Sequence[Missing],
    token_bytes: int,
    speeds: Speeds,
) -> LogFigures:
    uses = [use for request in requests for use in request.chunks]
    touched = {use.key.chunk_id for use in uses}
    tokens = [request.tokens for request in requests]
    return LogFigures(
        questions=len(log),
        repeated=len(log) - len({query.query for query in log}),
        prompt_tokens=float(np.median(tokens)),
        chunk_token_share=sum(use.chunk.tokens for use in uses) / sum(tokens),
        chunk_uses=len(uses),
        chunks_touched=len(touched),
        chunk_reuse=1 - len(touched) / len(uses) if uses else 0.0,
        chunks_not_in_corpus=len(touched - {item.key.chunk_id for item in corpus}),
        chunks_in_corpus=len(corpus),
        kv_bytes_corpus=sum(len(item.token_ids) for item in corpus) * token_bytes,
        kv_bytes_touched=_nbytes(use for request in requests for use in request.uses),
        encode_corpus_s=sum(speeds.full(len(i.encoding.behind) + len(i.token_ids)) for i in corpus),
        full_s_mean=float(np.mean([speeds.full(count) for count in tokens])),
    )


def _nbytes(uses: Iterable[Use]) -> int:
    """KV bytes of the different entries."""
    return sum({use.key: use.nbytes for use in uses}.values())


def _retrieved(
    settings: EstimateSettings, log: tuple[LoggedQuery, ...], corpus: Corpus, say: Say, progress: bool
) -> Retrievals:
    embedder = MiniLM()
    questions = list(dict.fromkeys(query.query for query in log))
    rows = embedder.embed(questions, progress=progress and len(questions) > 100)
    vectors = dict(zip(questions, rows, strict=True))

    @cache
    def index() -> Any:  # not built where every line names its documents
        return corpus_index(corpus, Path(settings.corpus), embedder, settings.folder.indexes, say)

    def search(vector: NDArray[Any]) -> tuple[str, ...]:
        return tuple(corpus.by_id[id].text for id in index().search(vector, settings.k).ids)

    return retrieve(
        log, corpus, np.stack([vectors[query.query] for query in log]), search, settings.tolerance
    )

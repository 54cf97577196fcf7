"""A user's own questions replayed over their own documents, without generating an answer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from ragcachekit.commands.ask import AskSettings, CorpusSearch, Say
from ragcachekit.commands.corpus import Corpus
from ragcachekit.commands.estimate.log import LoggedQuestion, read_log
from ragcachekit.commands.estimate.quality import quality_of
from ragcachekit.commands.estimate.replay import Request, Served, Tiers, Use, replay
from ragcachekit.commands.estimate.speed import Speeds, speeds_of
from ragcachekit.commands.own_files import one_token
from ragcachekit.commands.reading_prompt import SEPARATOR, ReadingPrompt, prompt_for
from ragcachekit.commands.workspace import load_checked
from ragcachekit.errors import PromptTooLong
from ragcachekit.model.kv import ChunkKV
from ragcachekit.model.rope.probe import describe_rope
from ragcachekit.plan.link_plan import Missing
from ragcachekit.plan.planner import Planner
from ragcachekit.plan.row_cost import row_cost_of
from ragcachekit.policies.base import LayerwisePolicy, PlacedChunk
from ragcachekit.policies.registry import open_policy
from ragcachekit.prompt.parser import PromptParser
from ragcachekit.store.eviction import open_eviction

_CHUNK_NAME = re.compile(r"\S+#\d+")

Row = dict[str, Any]


@dataclass(frozen=True)
class EstimateSettings(AskSettings):
    """What ``ragcachekit estimate`` takes; ``k`` chunks are retrieved where the log names none.

    ``shares`` are host budgets, as shares of the KV that the log touches, at least what one prompt uses;
    ``evictions`` are compared in the host tier; without ``measure`` the speed of prefills is assumed, without
    ``disk_gbps`` that of the disk.
    """

    log: str = field(kw_only=True)
    shares: tuple[float, ...] = (0.1, 0.25, 0.5, 1.0)
    evictions: tuple[str, ...] = ("lru", "pgdsf")
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
        if (self.encoder or "").partition(":")[0] in ("similar", "average", "in-prompt"):
            raise ValueError(
                f"estimate does not replay encoder {self.encoder!r}; give standalone, sinks:n or system "
                "(same sizes)"
            )
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

    def share(self, tier: str) -> float:
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
    """The outcome of every replay, and counts, shares, median tokens, bytes and seconds of the log.

    ``quality`` says in a line what is known about the answers.
    """

    settings: EstimateSettings
    log: Row
    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...]
    quality: str


def run(settings: EstimateSettings, say: Say = lambda _: None, *, progress: bool = False) -> Estimate:
    """Read the log and the corpus, retrieve, plan every prompt, replay them through tiers.

    Raises ValueError for a bad line of the log or a prompt longer than the model's context, with the line's
    number; CorpusError, RetrievalError, RagCacheError, ModelNotSupported as ``ask``.
    """
    log, corpus = read_log(settings.log), settings.checked_corpus()
    model, tokenizer = load_checked(settings.model, settings.device, settings.dtype)
    rope, policy, prompt = describe_rope(model), open_policy(settings.policy), prompt_for(tokenizer)
    token = one_token(model, rope)
    parser = PromptParser(tokenizer)
    planner = settings.planner(model, parser, "estimate", corpus)
    ahead = planner.missing(corpus.texts, settings.namespace, policy, prompt.before)
    retrieved = _retrieved(settings, log, corpus, say)
    lines = tqdm(zip(log, retrieved, strict=True), "planning", len(log), unit="prompt", disable=not progress)
    requests = [_request(settings, parser, planner, prompt, token, *line) for line in lines]

    disk = settings.disk_gbps and settings.disk_gbps * 1e9
    speeds = speeds_of(model, context=rope.context, layers=token.layers, measure=settings.measure, disk=disk)
    figures = _figures(log, requests, ahead, token.nbytes, speeds)
    figures |= {"measured": settings.measure, "disk_gb_per_s": speeds.disk / 1e9}
    # Below what one prompt uses, a tier would refuse what the prompt misses.
    least = max(_nbytes(request.uses) for request in requests)
    budgets = sorted({max(least, round(s * figures["kv_bytes_touched"]), 1) for s in settings.shares})
    tiers = [
        Tiers(budget, eviction, on_disk, precomputed)
        for on_disk, precomputed in ((False, False), (True, False), (True, True))
        for eviction in dict.fromkeys(settings.evictions)
        for budget in budgets
    ]
    keys, outcomes = {item.key for item in ahead}, []
    for each in tqdm(tiers, unit="set of tiers", desc="replaying", disable=not progress):
        served = replay(requests, each, keys, speeds.full)
        outcomes.append(Outcome(each, served, np.array([speeds.served(one, policy) for one in served])))
    notes = [*corpus.notes, speeds.note]
    if fallbacks := [request.fallback for request in requests if request.fallback]:
        notes.append(f"{len(fallbacks)} prompts cannot be taken apart into chunks ({fallbacks[0]})")
    quality = quality_of(settings, model, tokenizer)
    return Estimate(settings, figures, tuple(outcomes), tuple(notes), quality)


def _retrieved(
    settings: EstimateSettings, log: Sequence[LoggedQuestion], corpus: Corpus, say: Say
) -> Iterator[tuple[str, ...]]:
    """Texts for every question, as its line names them or as ``ask`` finds them."""
    named = {f"{chunk.source}#{chunk.number}": chunk.text for chunk in corpus.chunks}
    # Nothing is embedded where every line names its documents.
    search = CorpusSearch(settings, corpus, say) if any(query.chunks is None for query in log) else None
    for query in log:
        if search is not None and query.chunks is None:
            yield tuple(chunk.text for chunk in search(query.question).documents)
            continue
        for doc in query.chunks or ():
            if doc not in named and _CHUNK_NAME.fullmatch(doc):
                raise ValueError(
                    f"line {query.line} of the log: the corpus has no chunk {doc}; numbers count a file's "
                    "chunks from 0, as `ask` names its sources, and depend on --chunk-tokens"
                )
        yield tuple(named.get(doc, doc) for doc in query.chunks or ())


def _request(
    settings: EstimateSettings,
    parser: PromptParser,
    planner: Planner,
    prompt: ReadingPrompt,
    token: ChunkKV,
    query: LoggedQuestion,
    texts: tuple[str, ...],
) -> Request:
    """What a plan over an empty store misses is all that the prompt could use."""
    parser.registry.add(settings.namespace, texts)
    filled, policy = prompt.filled(SEPARATOR.join(texts), query.question), open_policy(settings.policy)
    try:
        request = planner.look_up(planner.prepare(parser.parse(filled, settings.namespace), policy))
    except PromptTooLong as error:
        raise ValueError(f"line {query.line} of the log: {error}") from error
    missing = {item.key: item for item in planner.plan(request).missing}
    uses = []
    for want in request.wanted:
        key = want.to_encode.key
        if key in missing:
            tokens, item = len(want.token_ids), missing[key]
            chunk = PlacedChunk(key.chunk_id, want.start, tokens, want.exact)
            nbytes = len(item.token_ids) * token.nbytes + item.id_bytes
            uses.append(Use(key, tokens, nbytes, row_cost_of(policy, chunk, token.layers)))
    return Request(len(request.token_ids), tuple(uses), request.fallback)


def _figures(
    log: Sequence[LoggedQuestion],
    requests: Sequence[Request],
    corpus: Sequence[Missing],
    token_bytes: int,
    speeds: Speeds,
) -> Row:
    uses = [use for request in requests for use in request.chunks]
    touched = {use.key.chunk_id for use in uses}
    tokens = [request.tokens for request in requests]
    return {
        "questions": len(log),
        "repeated": len(log) - len({query.question for query in log}),
        "prompt_tokens": float(np.median(tokens)),
        "chunk_token_share": sum(use.tokens for use in uses) / sum(tokens),
        "chunk_uses": len(uses),
        "chunks_touched": len(touched),
        "chunk_reuse": 1 - len(touched) / len(uses) if uses else 0.0,
        "chunks_not_in_corpus": len(touched - {item.key.chunk_id for item in corpus}),
        "chunks_in_corpus": len(corpus),
        "kv_bytes_corpus": sum(len(item.token_ids) * token_bytes + item.id_bytes for item in corpus),
        "kv_bytes_touched": _nbytes(use for request in requests for use in request.uses),
        "encode_corpus_s": sum(speeds.full(len(i.encoding.behind) + len(i.token_ids)) for i in corpus),
        "full_s_mean": float(np.mean([speeds.full(count) for count in tokens])),
    }


def _nbytes(uses: Iterable[Use]) -> int:
    """KV bytes of the different entries."""
    return sum({use.key: use.nbytes for use in uses}.values())

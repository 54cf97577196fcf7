"""The check of ``auto``: what reuse under each candidate does to the model's next tokens."""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm.auto import tqdm

from ragcachekit.encode.background import BackgroundEncoder
from ragcachekit.errors import RagCacheError
from ragcachekit.forward.prefill import link_ahead
from ragcachekit.generate.options import end_tokens
from ragcachekit.model.rope import Rope
from ragcachekit.plan.encodings import VariantPool
from ragcachekit.plan.link_plan import Missing
from ragcachekit.plan.planner import Planner, make_plan
from ragcachekit.policies.base import SelectionPolicy
from ragcachekit.policies.measured import PolicyAndEncoder
from ragcachekit.prompt.segments import TokenSegment
from ragcachekit.quality.compare import Continuation, Reference, compare
from ragcachekit.store.base import KVStore
from ragcachekit.store.memory import HostStore
from ragcachekit.types import Ids

CANDIDATES = (
    PolicyAndEncoder("impact:0.1", "system"),
    PolicyAndEncoder("deep:0.1", "system"),
    PolicyAndEncoder("impact:0.1", "standalone"),
    PolicyAndEncoder("reuse", "average:3"),
    PolicyAndEncoder("impact:0.1", "average:3"),
    PolicyAndEncoder("deep:0.1", "average:3"),
)
"""What the check measures; of two equally good ones, the one whose encoder is named first is cheaper."""

NEIGHBOUR_CANDIDATES = tuple(
    PolicyAndEncoder(policy, "similar:1") for policy in ("reuse", "impact:0.1", "deep:0.1")
)
"""Measured as well where neighbours are known."""

DEFAULT = PolicyAndEncoder("impact:0.1", "average:3")
"""Used before the check."""

MAX_RATIO = 0.15
"""Candidates that recompute more than this share of cached rows are not chosen."""

MAX_PROMPTS, MIN_PROMPTS = 16, 3
"""Prompts of one check at most, and before a candidate is dropped for its KL."""

MAX_SECONDS = 60.0
"""Time budget of one check; a prompt that would not end within it is dropped."""

ANSWER_TOKENS = 8
"""Tokens that the full prefill generates, and every candidate is measured on."""

WORSE = 2.0
"""A candidate with more than this multiple of the least KL is dropped."""

NEAR, NEGLIGIBLE = 1.05, 0.001
"""Candidates within this multiple of the least KL, or this many nats, count as equally good."""

CHUNKS = 4
"""Chunks per probe: one and its predecessor in the document, among random others."""

MIN_CHARS, MAX_CHARS = 24, 400
"""Length of the sentence that a probe cuts in half."""

_SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n+")
_NO_LIMIT = 1 << 60  # bytes of the private store, which holds one prompt's chunks


def candidates(encoder: str | None, neighbours: bool) -> tuple[PolicyAndEncoder, ...]:
    """What to measure, the default first: over ``encoder`` alone if one is given.

    ``neighbours``: whether chunks have known neighbours.
    """
    pairs = (DEFAULT, *CANDIDATES, *(NEIGHBOUR_CANDIDATES if neighbours else ()))
    if encoder is not None:
        pairs = tuple(PolicyAndEncoder(pair.policy, encoder) for pair in pairs)
    elif neighbours:
        pairs = (PolicyAndEncoder(DEFAULT.policy, NEIGHBOUR_CANDIDATES[0].encoder), *pairs)
    return tuple(dict.fromkeys(pairs))


@dataclass(frozen=True)
class CheckPrompt:
    """A tokenised prompt, and its chunks' texts by their ids, as far as known."""

    segments: tuple[TokenSegment, ...]
    texts: Mapping[Ids, str] = field(default_factory=dict, compare=False)

    @property
    def token_ids(self) -> Ids:
        """The whole prompt."""
        return tuple(chain.from_iterable(segment.token_ids for segment in self.segments))

    @property
    def is_informative(self) -> bool:
        """Whether candidates can differ on it: it has two chunks or more, and text after them."""
        chunks = sum(segment.is_chunk for segment in self.segments)
        return chunks > 1 and not self.segments[-1].is_chunk


class Measured(NamedTuple):
    """KL per answer token in nats, and recomputed / cached rows, of one candidate on one prompt."""

    kl: float
    ratio: float


Results = Mapping[PolicyAndEncoder, Sequence[Measured]]
"""Per candidate, its prompts in order; candidates that were dropped have fewer."""


class PolicyCheck:
    """Measures candidates on one model; nothing of it is stored.

    ``encoder_over`` makes an encoder of chunks over a store. ``clock`` returns seconds.
    """

    def __init__(
        self,
        model: Any,
        rope: Rope,
        planner: Planner,
        encoder_over: Callable[[KVStore], BackgroundEncoder],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._rope, self._planner = model, rope, planner
        self._encoder_over, self._clock = encoder_over, clock

    def run(
        self,
        prompts: Iterable[CheckPrompt],
        policies: Mapping[PolicyAndEncoder, SelectionPolicy],
        namespace: str,
        *,
        wait: Callable[[], object] = lambda: None,
        progress: bool = False,
    ) -> tuple[Results, float]:
        """Results by candidate and prompt, and the seconds that it took without ``wait``.

        The first :data:`MAX_PROMPTS` that fit the context are measured. ``wait`` is called before every
        forward and may block. All results are empty if not even one prompt was measured within
        :data:`MAX_SECONDS`. Raises Cancelled in a cancelled scope.
        """
        timer = _Timer(self._clock, wait)
        results: dict[PolicyAndEncoder, list[Measured]] = {pair: [] for pair in policies}
        longest = self._planner.context - ANSWER_TOKENS
        fitting = (prompt for prompt in prompts if len(prompt.token_ids) <= longest)
        chosen = islice(fitting, MAX_PROMPTS)
        for prompt in tqdm(chosen, total=MAX_PROMPTS, unit="prompt", disable=not progress):
            try:
                left = {pair: policies[pair] for pair in contenders(results)}
                measured = self._measure(prompt, left, namespace, timer)
            except _OutOfTime:
                break
            for pair, found in measured.items():
                results[pair].append(found)
        return results, timer.seconds

    def _measure(
        self,
        prompt: CheckPrompt,
        policies: Mapping[PolicyAndEncoder, SelectionPolicy],
        namespace: str,
        timer: _Timer,
    ) -> dict[PolicyAndEncoder, Measured]:
        """All ``policies`` on one prompt, over encodings in a private store."""
        ids = torch.tensor([prompt.token_ids], device=self._model.device)
        full = Continuation(self._model, {"input_ids": ids}, timer.before_forward)
        answer, rows = full.greedy(ANSWER_TOKENS, end_tokens({}, self._model.generation_config))
        # What follows the last token of the answer was not computed.
        reference, out = Reference((answer[:-1],), (rows,)), dict[PolicyAndEncoder, Measured]()
        with closing(HostStore(_NO_LIMIT)) as store:
            encoder = self._encoder_over(store)
            for pair, policy in policies.items():
                asked = store, prompt.segments, prompt.texts, policy, namespace
                wanted = [want.to_encode for want in self._planner.request_over(*asked).wanted]
                # Not as a plan has them missing: its own rows would be exact here.
                missing = [Missing(w.key, w.token_ids, w.encoding) for w in wanted if w.key not in store]
                if missing:
                    timer.before_forward()
                    encoder.now(missing, lambda _: timer.before_forward())
                plan = make_plan(self._planner.request_over(*asked), VariantPool())
                if plan.missing or not plan.pieces:
                    raise RagCacheError(f"chunks of a check could not be encoded for {pair}")
                timer.before_forward()
                linked, plan = link_ahead(self._model, self._rope, plan)
                found = compare(Continuation(self._model, linked.inputs, timer.before_forward), reference)
                out[pair] = Measured(found.kl, plan.report.recompute_ratio)
        return out


def means(measured: Sequence[Measured]) -> Measured:
    """The mean KL and ratio; NaN without prompts."""
    kl, ratio = np.mean(measured, axis=0).tolist() if measured else (math.nan, math.nan)
    return Measured(kl, ratio)


def contenders(results: Results) -> list[PolicyAndEncoder]:
    """Candidates that took part in every prompt and may still be chosen; all of them before the first."""
    most = max(map(len, results.values()))
    left = {pair: means(found) for pair, found in results.items() if len(found) == most}
    if not most:
        return list(left)
    cheap = {pair: mean for pair, mean in left.items() if mean.ratio <= MAX_RATIO} or left
    if most < MIN_PROMPTS:
        return list(cheap)
    least = min(mean.kl for mean in cheap.values())
    return [pair for pair, mean in cheap.items() if mean.kl <= max(WORSE * least, least + NEGLIGIBLE)]


def choice(results: Results) -> PolicyAndEncoder:
    """The cheapest of the contenders that are as good as the one with the least mean KL.

    As good: within 5 %, 0.001 nats, or one standard error of the mean difference, paired by prompt. Cheapest:
    fewest recomputed rows in whole percent, then the encoder that :data:`CANDIDATES` names first.
    """
    pairs = contenders(results)
    mean = {pair: means(results[pair]) for pair in pairs}
    best = min(pairs, key=lambda pair: mean[pair].kl)
    encoders = [pair.encoder for pair in CANDIDATES]

    def cost(pair: PolicyAndEncoder) -> tuple[float, int, float]:
        rank = encoders.index(pair.encoder) if pair.encoder in encoders else len(encoders)
        return round(mean[pair].ratio, 2), rank, mean[pair].kl

    return min((pair for pair in pairs if _as_good(results[pair], results[best])), key=cost)


def _as_good(found: Sequence[Measured], best: Sequence[Measured]) -> bool:
    worse = np.array([one.kl - other.kl for one, other in zip(found, best, strict=True)])
    error = worse.std(ddof=1) / math.sqrt(len(worse)) if len(worse) > 1 else 0.0
    return bool(worse.mean() <= max(error, (NEAR - 1) * means(best).kl, NEGLIGIBLE))


class _OutOfTime(Exception):
    """Ends the prompt that runs."""


class _Timer:
    """Counts the seconds of forwards against the budget, and waits between them.

    A forward may take as long as the longest one so far: none begins that would not end in time.
    """

    def __init__(self, clock: Callable[[], float], wait: Callable[[], object]) -> None:
        self._clock, self._wait, self._waited = clock, wait, 0.0
        self._started_at = clock()
        self._last = self._longest = 0.0

    @property
    def seconds(self) -> float:
        """Since the start, without waiting."""
        return self._clock() - self._started_at - self._waited

    def before_forward(self) -> None:
        """Wait; raises _OutOfTime if a forward would end after the budget."""
        now = self.seconds
        self._longest, self._last = max(self._longest, now - self._last), now
        if now + self._longest > MAX_SECONDS:
            raise _OutOfTime
        started_at = self._clock()
        self._wait()
        self._waited += self._clock() - started_at


class Probe(NamedTuple):
    """Chunk texts in prompt order, and a sentence of one of them, cut in half."""

    chunks: tuple[str, ...]
    beginning: str
    rest: str


def probes(documents: Sequence[Sequence[str]], number: int, seed: int = 0) -> list[Probe]:
    """At most ``number`` probes, each about another chunk; ValueError for fewer than two different chunks.

    ``documents`` are lists of chunks. The other chunks of a prompt are those of other probes where there are
    enough, so that few have to be encoded.
    """
    rng = random.Random(seed)
    places = [(texts, at) for texts in documents for at, text in enumerate(texts) if text.strip()]
    pool = list(dict.fromkeys(texts[at].strip() for texts, at in places))
    if len(pool) < 2:
        raise ValueError(f"at least two chunks are needed to make prompts of, got {len(pool)}")
    rng.shuffle(places)
    groups = [[text.strip() for text in texts[max(0, at - 1) : at + 1]] for texts, at in places[:number]]
    asked = list(dict.fromkeys(text for group in groups for text in group if text))
    pool = asked if len(asked) >= CHUNKS else pool
    return [_probe(list(dict.fromkeys(filter(None, group))), pool, rng) for group in groups]


def _probe(group: list[str], pool: Sequence[str], rng: random.Random) -> Probe:
    others = [text for text in pool if text not in group]
    others = rng.sample(others, min(CHUNKS - len(group), len(others)))
    place = rng.randint(0, len(others))
    text = group[-1]
    found = [part for part in _SENTENCE.split(text) if MIN_CHARS <= len(part) <= MAX_CHARS]
    sentence = rng.choice(found) if found else text[:MAX_CHARS]
    half = (len(sentence) + 1) // 2
    half = max(sentence.rfind(" ", 0, half), 0) or half
    return Probe((*others[:place], *group, *others[place:]), sentence[:half], sentence[half:].strip())

"""The check of ``auto``: what reuse under each candidate does to the model's next tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm.auto import tqdm

from ragcachekit.encode.background import BackgroundEncoder
from ragcachekit.errors import RagCacheError
from ragcachekit.forward.prefill import link_ahead
from ragcachekit.model.rope import Rope
from ragcachekit.plan.link_plan import Missing, make_plan
from ragcachekit.plan.planner import Planner
from ragcachekit.plan.variants import VariantPool
from ragcachekit.policies.base import PolicyAndEncoder, SelectionPolicy
from ragcachekit.policies.measured import BOUND
from ragcachekit.prompt.segments import TokenSegment, token_count
from ragcachekit.quality.compare import ANSWER_TOKENS, Continuation, compare, full_answer
from ragcachekit.store.base import KVStore
from ragcachekit.store.memory import HostStore
from ragcachekit.types import DEFAULT_ENCODER, DEFAULT_POLICY, Ids

CANDIDATES = (
    *(PolicyAndEncoder(policy, "system") for policy in ("lego:8", "impact:0.1", "deep:0.1")),
    *(PolicyAndEncoder(policy, "standalone") for policy in ("lego:16", "impact:0.1")),
    *(
        PolicyAndEncoder(policy, DEFAULT_ENCODER)
        for policy in ("reuse", "lego:4", "lego:8", "sensitive:0.05", "sensitive:0.1", "impact:0.1")
    ),
)
"""What the check measures; of two as quick ones, the one whose encoder is named first is cheaper."""

NEIGHBOUR_CANDIDATES = tuple(
    PolicyAndEncoder(name, "similar:1") for name in ("sensitive:0.1", "reuse", "impact:0.1", "deep:0.1")
)
"""Measured as well where neighbours are known."""

DEFAULT = PolicyAndEncoder(DEFAULT_POLICY, DEFAULT_ENCODER)
"""Used before the check."""

MAX_RATIO = 0.15
"""Candidates that recompute more than this share of cached rows are not chosen."""

MAX_PROMPTS, MIN_PROMPTS = 16, 3
"""Prompts of one check at most, and before a candidate is dropped for its KL."""

MAX_SECONDS = 60.0
"""Time budget of one check; the prompt that runs when it ends is dropped."""

WORSE = 2.0
"""A candidate with more than this multiple of the least KL is dropped."""

NEGLIGIBLE = 0.001
"""A difference of this many nats per token is none."""

AS_QUICK = 1.1
"""Candidates within this multiple of the least time count as equally quick."""


def candidates(encoder: str | None, neighbours: bool) -> tuple[PolicyAndEncoder, ...]:
    """What to measure, the default first: over ``encoder`` alone if one is given."""
    near = NEIGHBOUR_CANDIDATES if neighbours else ()
    pairs = (*near[:1], DEFAULT, *CANDIDATES, *near)
    if encoder is not None:
        pairs = tuple(PolicyAndEncoder(pair.policy, encoder) for pair in pairs)
    return tuple(dict.fromkeys(pairs))


@dataclass(frozen=True)
class CheckPrompt:
    """A tokenised prompt, and its chunks' texts by their ids, as far as known."""

    segments: tuple[TokenSegment, ...]
    texts: Mapping[Ids, str] = field(default_factory=dict, compare=False)


class Measured(NamedTuple):
    """Of one candidate on one prompt: KL per answer token in nats, recomputed / cached rows, prefill time."""

    kl: float
    ratio: float
    seconds: float


Results = Mapping[PolicyAndEncoder, Sequence[Measured]]
"""Per candidate, its prompts in order; candidates that were dropped have fewer."""


class PolicyCheck:
    """Measures candidates on one model; nothing of it is stored."""

    def __init__(
        self,
        model: Any,
        rope: Rope,
        planner: Planner,
        encoder_over: Callable[[KVStore], BackgroundEncoder],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._rope, self._planner = model, rope, planner
        self._encoder_over, self.clock = encoder_over, clock

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
        timer = _Timer(self.clock, wait)
        results: dict[PolicyAndEncoder, list[Measured]] = {pair: [] for pair in policies}
        longest = self._planner.context - ANSWER_TOKENS
        fitting = (prompt for prompt in prompts if token_count(prompt.segments) <= longest)
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

    def _synchronise(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)

    def _measure(
        self,
        prompt: CheckPrompt,
        policies: Mapping[PolicyAndEncoder, SelectionPolicy],
        namespace: str,
        timer: _Timer,
    ) -> dict[PolicyAndEncoder, Measured]:
        """All ``policies`` on one prompt, over encodings in a private store."""
        tokens = [token for segment in prompt.segments for token in segment.token_ids]
        reference = full_answer(self._model, tokens, timer.before_forward)
        out = dict[PolicyAndEncoder, Measured]()
        with closing(HostStore(1 << 60)) as store:
            encoder = self._encoder_over(store)
            for pair, policy in policies.items():
                asked = store, prompt.segments, prompt.texts, policy, namespace
                wanted = [want.to_encode for want in self._planner.request_over(*asked).wanted]
                # Not as a plan has them missing: its own rows would be exact here.
                missing = [Missing(w.key, w.token_ids, w.encoding) for w in wanted if w.key not in store]
                if missing:
                    timer.before_forward()
                    encoder.now(missing, lambda *_: timer.before_forward())
                plan = make_plan(self._planner.request_over(*asked), VariantPool())
                if plan.missing or not plan.pieces:
                    raise RagCacheError(f"chunks of a check could not be encoded for {pair}")
                timer.before_forward()
                self._synchronise()
                started_at = time.perf_counter()
                linked, plan = link_ahead(self._model, self._rope, plan)
                self._synchronise()
                seconds = time.perf_counter() - started_at
                found = compare(Continuation(self._model, linked.inputs, timer.before_forward), reference)
                out[pair] = Measured(found.kl, plan.report.recompute_ratio, seconds)
        return out


def means(measured: Sequence[Measured]) -> Measured:
    """The mean KL and ratio, and the median of the seconds; NaN without prompts."""
    if not measured:
        return Measured(math.nan, math.nan, math.nan)
    kl, ratio, _ = np.mean(measured, axis=0).tolist()
    return Measured(kl, ratio, float(np.median([one.seconds for one in measured])))


def contenders(results: Results) -> list[PolicyAndEncoder]:
    """Candidates that took part in every prompt and may still be chosen; all of them before the first."""
    most = max(map(len, results.values()))
    left = {pair: means(found) for pair, found in results.items() if len(found) == most}
    cheap = {pair: mean for pair, mean in left.items() if mean.ratio <= MAX_RATIO} or left
    least = min(mean.kl for mean in cheap.values())
    near = max(WORSE * least, least + NEGLIGIBLE)
    return [pair for pair, mean in cheap.items() if most < MIN_PROMPTS or mean.kl <= near]


def choice(results: Results, bound: float = BOUND) -> PolicyAndEncoder:
    """The quickest of the contenders whose mean KL is at most ``bound`` times the least.

    One that is worse by at most 0.001 nats, or by one standard error of the mean difference, paired by
    prompt, counts as well. Of those that take at most 1.1 times as long as the quickest, the one is chosen
    whose encoder :data:`CANDIDATES` names first, then the one of least KL.
    """
    pairs = contenders(results)
    mean = {pair: means(results[pair]) for pair in pairs}
    best = min(pairs, key=lambda pair: mean[pair].kl)
    good = [pair for pair in pairs if _as_good(results[pair], results[best], bound)]
    quickest = min(mean[pair].seconds for pair in good)
    encoders = [pair.encoder for pair in CANDIDATES]

    def cost(pair: PolicyAndEncoder) -> tuple[int, float]:
        rank = encoders.index(pair.encoder) if pair.encoder in encoders else len(encoders)
        return rank, mean[pair].kl

    return min((pair for pair in good if mean[pair].seconds <= AS_QUICK * quickest), key=cost)


def _as_good(found: Sequence[Measured], best: Sequence[Measured], bound: float) -> bool:
    worse = np.array([one.kl - other.kl for one, other in zip(found, best, strict=True)])
    error = worse.std(ddof=1) / math.sqrt(len(worse)) if len(worse) > 1 else 0.0
    return bool(worse.mean() <= max(error, (bound - 1) * means(best).kl, NEGLIGIBLE))


class _OutOfTime(Exception):
    """Ends the prompt that runs."""


class _Timer:
    """Counts the seconds of forwards against the budget, and waits between them."""

    def __init__(self, clock: Callable[[], float], wait: Callable[[], object]) -> None:
        self._clock, self._wait, self._waited, self._started_at = clock, wait, 0.0, clock()

    @property
    def seconds(self) -> float:
        return self._clock() - self._started_at - self._waited

    def before_forward(self) -> None:
        """Wait; raises _OutOfTime once the budget is spent."""
        if self.seconds > MAX_SECONDS:
            raise _OutOfTime
        started_at = self._clock()
        self._wait()
        self._waited += self._clock() - started_at

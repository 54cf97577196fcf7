"""What to do about an estimate, in plain words: a configuration to copy, or why not to bother."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ragcachekit.commands.estimate.replay import DISK
from ragcachekit.commands.estimate.run import Estimate, Outcome
from ragcachekit.commands.estimate.speed import rows_chosen
from ragcachekit.config import StoreConfig
from ragcachekit.policies.registry import open_policy

LEAST_SPEEDUP = 1.1
"""Of the mean time to first token; below it nothing is advised."""

ALIKE = 1.03
"""Tiers whose mean times differ by less are equal; then the simpler ones are advised."""

LOGS = 10
"""Encoding ahead pays if it has saved its time after so many logs like this one."""


@dataclass(frozen=True)
class Advice:
    """What is advised.

    ``outcome`` is the best simple way, also where it does not help enough, and ``speedup`` is that of its
    mean time to first token; ``config`` is the ``StoreConfig(...)`` to copy, None where nothing helps.
    """

    helps: bool
    outcome: Outcome
    speedup: float
    config: str | None
    precompute: bool
    lines: tuple[str, ...]


def advise(estimate: Estimate) -> Advice:
    """The simplest tiers that are about as good as the best, and whether that is good enough."""
    plain, disk, ahead = (
        _simplest([o for o in estimate.outcomes if (o.tiers.disk, o.tiers.precomputed) == way])
        for way in ((False, False), (True, False), (True, True))
    )
    saved = float(disk.seconds.sum() - ahead.seconds.sum())
    chosen = plain if plain.mean <= ALIKE * disk.mean else disk
    if saved * LOGS >= estimate.encode_seconds and ahead.mean * ALIKE < chosen.mean:
        chosen = ahead
    speedup = estimate.mean_full / chosen.mean
    if speedup < LEAST_SPEEDUP:
        return Advice(False, chosen, speedup, None, False, tuple(_why_not(estimate, chosen, ahead)))
    precompute, config = chosen.tiers.precomputed, _config(estimate, chosen)
    only = precompute and estimate.mean_full < LEAST_SPEEDUP * disk.mean
    lines = (
        f"it will help you{', but only if you run precompute first' if only else ''}:",
        f"the mean time to the first token falls from {_ms(estimate.mean_full)} to {_ms(chosen.mean)}, "
        f"{speedup:.1f} times as quick",
        f"RagCache(..., policy={estimate.settings.policy!r}, store={config})",
        _about_precompute(estimate, saved, precompute),
    )
    return Advice(True, chosen, speedup, config, precompute, lines)


def _simplest(outcomes: Sequence[Outcome]) -> Outcome:
    """The smallest host tier, with the default policy, that is about as good as the best."""
    best = min(outcome.mean for outcome in outcomes)
    good = [outcome for outcome in outcomes if outcome.mean <= ALIKE * best]
    return min(good, key=lambda o: (o.tiers.host_bytes, o.tiers.eviction != StoreConfig().eviction))


def _config(estimate: Estimate, chosen: Outcome) -> str:
    tiers = chosen.tiers
    parts = [f"host_bytes={_rounded(tiers.host_bytes):_}"]
    if tiers.disk:
        held = estimate.touched_bytes + estimate.corpus_bytes * tiers.precomputed
        parts += ['disk_path="..."', f"disk_bytes={_rounded(round(1.25 * held)):_}"]
    if tiers.eviction != StoreConfig().eviction:
        parts.append(f'eviction="{tiers.eviction}"')
    return f"StoreConfig({', '.join(parts)})"


def _rounded(nbytes: int) -> int:
    """Up to two digits, and to whole megabytes."""
    step = max(int(10 ** (len(str(nbytes)) - 2)), 1_000_000)
    return -(-nbytes // step) * step


def _about_precompute(estimate: Estimate, saved: float, advised: bool) -> str:
    cost = f"about {duration(estimate.encode_seconds)}"
    if saved <= 0:
        return f"precompute does not pay: it takes {cost} and no question is answered sooner"
    count = math.ceil(estimate.encode_seconds / (saved / len(estimate.log)))
    after = f"it takes {cost} and has saved that after about {count} questions like these"
    return f"precompute {'pays' if advised else 'is not needed'}: {after}"


def _why_not(estimate: Estimate, chosen: Outcome, ahead: Outcome) -> Iterator[str]:
    yield (
        f"it will not help you: the mean time to the first token would be {_ms(chosen.mean)} instead of "
        f"{_ms(estimate.mean_full)} ({estimate.mean_full / chosen.mean:.2f} times as quick), because"
    )
    reasons = list(_reasons(estimate))
    yield from reasons or ["what is saved is small beside what is computed anyway"]
    if estimate.mean_full / ahead.mean >= LEAST_SPEEDUP:
        yield (
            f"encoding the corpus ahead would bring {_ms(ahead.mean)}, but takes about "
            f"{duration(estimate.encode_seconds)}, more than {LOGS} logs like this one would save"
        )


def _reasons(estimate: Estimate) -> Iterator[str]:
    uses, tokens = estimate.chunk_uses, sum(request.tokens for request in estimate.requests)
    fallbacks = [request.fallback for request in estimate.requests if request.fallback]
    if fallbacks:
        count = f"{len(fallbacks)} of {len(estimate.requests)}"
        yield f"{count} prompts cannot be taken apart into chunks ({fallbacks[0]})"
    if not uses:
        yield "there are no chunks in the prompts"
        return
    if estimate.reuse < 0.1:
        yield (
            f"chunks hardly come back: {estimate.touched_chunks} different ones in {uses} uses "
            f"({estimate.reuse:.0%} of the uses find a chunk that was used before)"
        )
    share = sum(use.chunk.tokens for request in estimate.requests for use in request.chunks) / tokens
    if share < 0.5:
        yield f"only {share:.0%} of the prompts' tokens are retrieved text; the rest is computed every time"
    policy = open_policy(estimate.settings.policy)
    again = sum(rows_chosen(policy, [u.chunk for u in r.chunks], r.tokens) for r in estimate.requests)
    if again > 0.3 * share * tokens:
        yield (
            f"policy {policy.name} recomputes {again / (share * tokens):.0%} of what is reused, as the "
            "chunks are short; longer ones (--chunk-tokens) or a policy that recomputes less would help"
        )
    found = [use for o in estimate.outcomes for served in o.served for use in served.from_tier(DISK)]
    reading = sum(use.nbytes for use in found) / estimate.speeds.disk
    if found and reading > sum(estimate.speeds.full(use.chunk.tokens) for use in found):
        yield "reading KV from the disk takes longer than computing it on this machine"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


def duration(seconds: float) -> str:
    """Seconds for people, in minutes if there are many."""
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds / 60:,.0f} minutes"

"""What to do about an estimate, in plain words: a configuration to copy, or why not to bother."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ragcachekit.bench.estimate import Estimate, Outcome
from ragcachekit.bench.estimate_replay import DISK
from ragcachekit.bench.estimate_speed import rows_chosen
from ragcachekit.config import DEFAULT_HOST_BYTES, StoreConfig
from ragcachekit.link.policies import open_policy

WORTH = 1.1
"""Below this speed-up of the mean time to first token it is not worth your while."""

ALIKE = 1.03
"""Ways whose mean times differ by less are as good as each other; then the simpler one is advised."""

PATIENCE = 10
"""Encoding ahead pays if it has earned its time after so many logs like this one."""


@dataclass(frozen=True)
class Advice:
    """What is advised.

    Attributes
    ----------
    helps : bool
    outcome : Outcome
        The best simple way, also where it does not help enough.
    speedup : float
        Of the mean time to first token, by that way.
    config : str or None
        The ``StoreConfig(...)`` to copy; None where it does not help.
    precompute : bool
    lines : tuple of str
    """

    helps: bool
    outcome: Outcome
    speedup: float
    config: str | None
    precompute: bool
    lines: tuple[str, ...]


def advise(estimate: Estimate) -> Advice:
    """The simplest way that is about as good as the best, and whether that is good enough."""
    plain, disk, ahead = (
        _simplest([o for o in estimate.outcomes if (o.tiers.disk, o.tiers.precomputed) == way])
        for way in ((False, False), (True, False), (True, True))
    )
    pays = _pays(estimate, disk, ahead)
    chosen = plain if plain.mean <= ALIKE * disk.mean else disk
    if pays and ahead.mean * ALIKE < chosen.mean:
        chosen = ahead
    speedup = estimate.mean_full / chosen.mean
    helps, precompute = speedup >= WORTH, chosen.tiers.precomputed
    config = _config(estimate, chosen) if helps else None
    if not helps:
        return Advice(False, chosen, speedup, None, False, tuple(_why_not(estimate, chosen, ahead)))
    only = precompute and estimate.mean_full < WORTH * disk.mean
    lines = [
        f"it will help you{', but only if you run precompute first' if only else ''}:",
        f"the mean time to the first token falls from {_ms(estimate.mean_full)} to {_ms(chosen.mean)}, "
        f"{speedup:.1f} times as quick",
        f"RagCache(..., policy={estimate.settings.policy!r}, store={config})",
        _about_eviction(estimate, chosen),
        _about_precompute(estimate, disk, ahead, precompute),
    ]
    if not chosen.tiers.disk:
        lines.append(
            "a disk tier would gain little within this log; give disk_path= to keep KV over restarts"
        )
    if estimate.touched_bytes <= DEFAULT_HOST_BYTES and not chosen.tiers.disk:
        lines.append(
            f"the default host tier ({DEFAULT_HOST_BYTES / 1e9:.1f} GB) holds all of this log's KV, too"
        )
    return Advice(True, chosen, speedup, config, precompute, tuple(lines))


def _simplest(outcomes: Sequence[Outcome]) -> Outcome:
    """The smallest host tier, with the default policy, that is about as good as the best."""
    best = min(outcome.mean for outcome in outcomes)
    good = [outcome for outcome in outcomes if outcome.mean <= ALIKE * best]
    return min(good, key=lambda o: (o.tiers.host_bytes, o.tiers.eviction != StoreConfig().eviction))


def _saved(disk: Outcome, ahead: Outcome) -> float:
    """Seconds that requests of this log wait less if the corpus is encoded ahead."""
    return float(disk.seconds.sum() - ahead.seconds.sum())


def _pays(estimate: Estimate, disk: Outcome, ahead: Outcome) -> bool:
    return _saved(disk, ahead) * PATIENCE >= estimate.encode_seconds


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


def _about_eviction(estimate: Estimate, chosen: Outcome) -> str:
    alike = {
        o.tiers.eviction: o.mean
        for o in estimate.outcomes
        if (o.tiers.host_bytes, o.tiers.disk, o.tiers.precomputed)
        == (chosen.tiers.host_bytes, chosen.tiers.disk, chosen.tiers.precomputed)
    }
    others = ", ".join(f"{name} {_ms(mean)}" for name, mean in alike.items() if name != chosen.tiers.eviction)
    return f"eviction {chosen.tiers.eviction}: {_ms(chosen.mean)} on average" + (
        f" (at the same size: {others})" if others else ""
    )


def _about_precompute(estimate: Estimate, disk: Outcome, ahead: Outcome, advised: bool) -> str:
    saved, cost = _saved(disk, ahead), f"about {duration(estimate.encode_seconds)}"
    if saved <= 0:
        return f"precompute does not pay: it takes {cost} and no question is answered sooner"
    count = math.ceil(estimate.encode_seconds / (saved / len(estimate.log)))
    after = f"it takes {cost} and has earned that after about {count} questions like these"
    if advised:
        return f"precompute pays: {after}"
    if _pays(estimate, disk, ahead):
        return f"precompute is not needed: {after}, but it makes the mean less than 3 % better"
    return f"precompute does not pay: {after}"


def _why_not(estimate: Estimate, chosen: Outcome, ahead: Outcome) -> Iterator[str]:
    yield (
        f"it will not help you: the mean time to the first token would be {_ms(chosen.mean)} instead of "
        f"{_ms(estimate.mean_full)} ({estimate.mean_full / chosen.mean:.2f} times as quick), because"
    )
    reasons = list(_reasons(estimate))
    yield from reasons or ["what is saved is small beside what is computed anyway"]
    if estimate.mean_full / ahead.mean >= WORTH:
        yield (
            f"encoding the corpus ahead would bring {_ms(ahead.mean)}, but takes about "
            f"{duration(estimate.encode_seconds)}, more than {PATIENCE} logs like this one would save"
        )


def _reasons(estimate: Estimate) -> Iterator[str]:
    uses, tokens = estimate.chunk_uses, sum(request.tokens for request in estimate.requests)
    refused = sum(request.fallback is not None for request in estimate.requests)
    if refused:
        why = next(request.fallback for request in estimate.requests if request.fallback)
        yield f"{refused} of {len(estimate.requests)} prompts cannot be taken apart into chunks ({why})"
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
    if _reading_is_slow(estimate):
        yield "reading KV from the disk takes longer than computing it on this machine"


def _reading_is_slow(estimate: Estimate) -> bool:
    """Whether what the disk tier found was slower to read than to compute."""
    found = [use for o in estimate.outcomes for served in o.served for use in served.from_tier(DISK)]
    reading = sum(use.nbytes for use in found) / estimate.speeds.disk
    return bool(found) and reading > sum(estimate.speeds.full(use.chunk.tokens) for use in found)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


def duration(seconds: float) -> str:
    """Seconds for people, in minutes if there are many."""
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds / 60:,.0f} minutes"

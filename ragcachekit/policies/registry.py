"""The registry of selection policies: adding one is one file and one line here."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ragcachekit.config import check_type
from ragcachekit.policies.base import SelectionPolicy
from ragcachekit.policies.cacheblend import CacheBlend, CacheBlendGradual
from ragcachekit.policies.compose import union
from ragcachekit.policies.craft import Craft, CraftFocused
from ragcachekit.policies.deep import Deep
from ragcachekit.policies.full import Full
from ragcachekit.policies.heavy import Heavy
from ragcachekit.policies.impact import TokenImpact
from ragcachekit.policies.lego import Lego
from ragcachekit.policies.measured import Auto, Budget
from ragcachekit.policies.prefix import Prefix
from ragcachekit.policies.query import Query
from ragcachekit.policies.random_tokens import Random
from ragcachekit.policies.reuse import Reuse


@dataclass(frozen=True)
class _Named:
    make: Callable[[str], SelectionPolicy]
    example: str | None = None  # None for a policy without an argument


_POLICIES: dict[str, _Named] = {
    "full": _Named(lambda _: Full()),
    "reuse": _Named(lambda _: Reuse()),
    "prefix": _Named(lambda _: Prefix()),
    "lego0": _Named(lambda _: Reuse("lego0", encoder="sinks:4")),
    "lego": _Named(lambda k: Lego(int(k)), "lego:16"),
    "cacheblend": _Named(lambda r: CacheBlend(float(r)), "cacheblend:0.15"),
    "cacheblend-gradual": _Named(lambda r: CacheBlendGradual(float(r)), "cacheblend-gradual:0.15"),
    "craft": _Named(lambda a: Craft(float(a)), "craft:1"),
    "craft-focused": _Named(lambda a: CraftFocused(float(a)), "craft-focused:1"),
    "query": _Named(lambda r: Query(float(r)), "query:0.15"),
    "deep": _Named(lambda r: Deep(float(r)), "deep:0.1"),
    "impact": _Named(lambda r: TokenImpact(float(r)), "impact:0.1"),
    "heavy": _Named(lambda r: Heavy(float(r)), "heavy:0.15"),
    "random": _Named(lambda r: Random(float(r)), "random:0.15"),
    "budget": _Named(lambda x: Budget(float(x)), "budget:0.05"),
    "auto": _Named(lambda _: Auto()),
}


_NO_NUMBER = re.compile("invalid literal for int|could not convert string to float")
"""Messages of ``int`` and ``float``, which are replaced by ours."""


def known_policies() -> tuple[str, ...]:
    """Names of all policies, with example arguments."""
    return tuple(named.example or name for name, named in _POLICIES.items())


def open_policy(policy: str | SelectionPolicy) -> SelectionPolicy:
    """The policy called ``name`` or ``name:argument``, several joined by ``+``; an object passes through.

    ValueError for an unknown name (the known ones are listed), a bad argument, or parts that cannot be
    joined; TypeError for what is neither a name nor a policy.
    """
    if not isinstance(policy, str):
        check_type("policy", policy, SelectionPolicy, "a name such as 'lego:16', or a SelectionPolicy")
        return policy
    parts = [_open(part.strip(), policy) for part in policy.split("+")]
    try:
        return parts[0] if len(parts) == 1 else union(parts)
    except ValueError as error:
        raise ValueError(f"policy {policy!r}: {error}") from error


def _open(part: str, policy: str) -> SelectionPolicy:
    name, colon, argument = part.partition(":")
    named = _POLICIES.get(name)
    if named is None:
        raise ValueError(
            f"unknown policy {policy!r}; known: {', '.join(known_policies())}, and sums with '+'"
        )
    if bool(colon) != bool(named.example):
        raise ValueError(f"policy {policy!r}: write {named.example or name!r}")
    try:
        return named.make(argument)
    except ValueError as error:
        known = _NO_NUMBER.match(str(error))
        why = f"{argument!r} is no number; write for example {named.example!r}" if known else str(error)
        raise ValueError(f"policy {policy!r}: {why}") from error

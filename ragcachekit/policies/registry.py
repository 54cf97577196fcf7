"""The registry of selection policies: adding one is one file and one line here."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ragcachekit.types import check_type

if TYPE_CHECKING:
    from ragcachekit.policies.base import SelectionPolicy


def _of(module: str, name: str) -> Any:
    """A class of this folder. They import torch, which an unknown name should not cost."""
    return getattr(importlib.import_module(f"ragcachekit.policies.{module}"), name)


_POLICIES: dict[str, tuple[Callable[[str], SelectionPolicy], str]] = {
    "full": (lambda _: _of("baselines", "Full")(), ""),
    "reuse": (lambda _: _of("baselines", "Reuse")(), ""),
    "prefix": (lambda _: _of("baselines", "Prefix")(), ""),
    "lego0": (lambda _: _of("baselines", "Reuse")("lego0", encoder="sinks:4"), ""),
    "lego": (lambda k: _of("baselines", "Lego")(int(k)), "lego:16"),
    "cacheblend": (lambda r: _of("cacheblend", "CacheBlend")(float(r)), "cacheblend:0.15"),
    "cacheblend-gradual": (
        lambda r: _of("cacheblend", "CacheBlend")(float(r), gradual=True),
        "cacheblend-gradual:0.15",
    ),
    "craft": (lambda a: _of("craft", "Craft")(float(a)), "craft:1"),
    "craft-focused": (lambda a: _of("craft", "CraftFocused")(float(a)), "craft-focused:1"),
    "query": (lambda r: _of("attention", "Query")(float(r)), "query:0.15"),
    "deep": (lambda r: _of("attention", "Deep")(float(r)), "deep:0.1"),
    "sensitive": (lambda r: _of("sensitive", "Sensitive")(float(r)), "sensitive:0.1"),
    "impact": (lambda r: _of("sensitive", "TokenImpact")(float(r)), "impact:0.1"),
    "random": (lambda r: _of("baselines", "Random")(float(r)), "random:0.15"),
    "budget": (lambda x: _of("measured", "Budget")(float(x)), "budget:0.05"),
    "auto": (lambda x: _of("measured", "Auto")(float(x)) if x else _of("measured", "Auto")(), ""),
}
"""By name, how a policy is made from its argument, and an example; empty for one without an argument."""

_NO_NUMBER = re.compile("invalid literal for int|could not convert string to float")
"""Messages of ``int`` and ``float``, which are replaced by ours."""


def known_policies() -> tuple[str, ...]:
    """Names of all policies, with example arguments."""
    return tuple(example or name for name, (_, example) in _POLICIES.items())


def open_policy(policy: str | SelectionPolicy) -> SelectionPolicy:
    """The policy called ``name`` or ``name:argument``; an object passes through.

    ValueError for an unknown name (the known ones are listed) or a bad argument; TypeError for what is
    neither a name nor a policy.
    """
    if not isinstance(policy, str):
        from ragcachekit.policies.base import SelectionPolicy

        check_type("policy", policy, SelectionPolicy, "a name such as 'lego:16', or a SelectionPolicy")
        return policy
    name, colon, argument = policy.strip().partition(":")
    if name not in _POLICIES:
        raise ValueError(f"unknown policy {policy!r}; known: {', '.join(known_policies())}")
    make, example = _POLICIES[name]
    if bool(colon) != bool(example) and not (name == "auto" and argument):
        raise ValueError(f"policy {policy!r}: write {example or name!r}")
    try:
        return make(argument)
    except ValueError as error:
        known = _NO_NUMBER.match(str(error))
        why = f"{argument!r} is no number; write for example {example!r}" if known else str(error)
        raise ValueError(f"policy {policy!r}: {why}") from error

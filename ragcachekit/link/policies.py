"""The registry of selection policies: adding one is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable

from ragcachekit.link.base import SelectionPolicy
from ragcachekit.link.full import Full
from ragcachekit.link.lego import Lego
from ragcachekit.link.reuse import Reuse

_POLICIES: dict[str, Callable[[str], SelectionPolicy]] = {
    "full": lambda _: Full(),
    "reuse": lambda _: Reuse(),
    "lego0": lambda _: Reuse("lego0", encoder="sinks:4"),
    "lego": lambda k: Lego(int(k)),
}
_TAKES_ARGUMENT = {"lego": "lego:16"}


def known_policies() -> tuple[str, ...]:
    """Names as a user would write them."""
    return tuple(_TAKES_ARGUMENT.get(name, name) for name in _POLICIES)


def open_policy(policy: str | SelectionPolicy) -> SelectionPolicy:
    """The policy called ``name`` or ``name:argument``; a policy object passes through.

    Raises
    ------
    ValueError
        For an unknown name (the known ones are listed) or a bad argument.
    """
    if not isinstance(policy, str):
        return policy
    name, colon, argument = policy.partition(":")
    if name not in _POLICIES:
        raise ValueError(f"unknown policy {policy!r}; known: {', '.join(known_policies())}")
    if bool(colon) != (name in _TAKES_ARGUMENT):
        raise ValueError(f"policy {policy!r}: write {_TAKES_ARGUMENT.get(name, name)!r}")
    try:
        return _POLICIES[name](argument)
    except ValueError as error:
        raise ValueError(f"policy {policy!r}: {error}") from error

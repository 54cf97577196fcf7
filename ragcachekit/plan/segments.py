"""Segments of a tokenised prompt."""

from __future__ import annotations

from dataclasses import dataclass

from ragcachekit.model.encoding import Encoding, Ids
from ragcachekit.types import KVKey


@dataclass(frozen=True)
class TokenSegment:
    """A tokenised segment; ``is_chunk`` marks retrieved text."""

    token_ids: Ids
    is_chunk: bool


@dataclass(frozen=True)
class Wanted:
    """A cacheable segment of a prompt; ``exact``: its KV is exact at ``start``.

    ``before`` are the ids of all preceding segments, texts too, in order.
    """

    start: int
    token_ids: Ids
    key: KVKey
    encoding: Encoding
    exact: bool
    before: tuple[str, ...] = ()

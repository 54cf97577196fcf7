"""The words of the knowledge tree: where a tree begins, a step down in it, and what a look-up gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragcachekit.model.kv import ChunkKV
from ragcachekit.types import KVKey

ENCODING_PATH = "path"
"""The encoding of nodes in a store: behind exactly the ids of the key's context, at exactly that position."""

Cost = Callable[[int, int], float]
"""Estimated seconds of a prefill, from (cached, new) tokens (RAGCache section 5.1, T(alpha, beta))."""


@dataclass(frozen=True, slots=True)
class Root:
    """Where exact KV may be shared: one model, one tenant, one set of RoPE frequencies.

    Attributes
    ----------
    fingerprint, namespace : str
        As in :class:`ragcachekit.types.KVKey`.
    regime : str
        Which frequencies the whole prompt is turned by, where that depends on its length; else empty.
    """

    fingerprint: str
    namespace: str
    regime: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One step down the tree: a chunk together with the fixed text in front of it.

    Attributes
    ----------
    ids : tuple of str
        Ids of the segments, in order; the chunk's is the last. They say which tokens these are.
    tokens : int
        Rows of all of them.
    document : bool
        False for the system text, which no ``keep_first`` counts.
    """

    ids: tuple[str, ...]
    tokens: int
    document: bool = True


Path = Sequence[Step]
"""From the start of a prompt down; the first step is the system text where the prompt begins with text."""


@dataclass(frozen=True, slots=True, eq=False)
class Reused:
    """One node as a look-up found it: its exact KV (``kv.start`` is its position) and the tier it is in."""

    step: Step
    kv: ChunkKV
    tier: str


@dataclass(frozen=True, eq=False)
class Match:
    """The longest known beginning of a path. While it is held its nodes are not evicted.

    Attributes
    ----------
    root : Root
    path : tuple of Step
        What was asked for.
    found : tuple of Reused
        Its first steps, in order.
    epoch : int
        How often the namespace had been told to forget; what became of a request that began before a
        ``forget`` is not taken in after it.
    """

    root: Root
    path: tuple[Step, ...]
    found: tuple[Reused, ...]
    epoch: int = 0

    def __len__(self) -> int:
        return len(self.found)

    @property
    def tokens(self) -> int:
        """Rows of the prompt that need not be computed."""
        return sum(reused.step.tokens for reused in self.found)


def key_of(root: Root, path: Path) -> KVKey:
    """The store key of the path's last node; ``forget`` of any id on the path concerns it."""
    ids = tuple(i for step in path for i in step.ids)
    name = f"{ENCODING_PATH}@{root.regime}" if root.regime else ENCODING_PATH
    return KVKey(root.fingerprint, root.namespace, ids[-1], name, ids[:-1])


def fault(kv: ChunkKV, step: Step, start: int) -> str | None:
    """Why ``kv`` cannot be the exact KV of a step at ``start``; None if it may be."""
    if kv.quantised:
        return f"it was rounded to {kv.quantised}, and the tree holds exact KV only"
    if kv.start != start:
        return f"its keys are turned for position {kv.start}, the step stands at {start}"
    if kv.tokens != step.tokens:
        return f"it has {kv.tokens} tokens, the step {step.tokens}"
    return None

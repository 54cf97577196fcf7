"""Types of the knowledge tree: roots, steps, nodes, and the result of a look-up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from ragcachekit.model.kv import ChunkKV
from ragcachekit.types import KVKey, chunk_id

ENCODING_PATH = "path"
"""Encoding of nodes in a store: after exactly the key's context, at exactly that position."""

BLOCK = 32
"""Tokens of a step of text. Prompts that part inside a block share the blocks before it."""

Cost = Callable[[int, int], float]
"""Estimated seconds of a prefill, from (cached, new) tokens (RAGCache section 5.1, T(alpha, beta))."""


@dataclass(frozen=True, slots=True)
class Root:
    """Scope in which exact KV may be shared: one model, one namespace, one set of RoPE frequencies."""

    fingerprint: str
    namespace: str
    regime: str = ""  # the frequencies, where they depend on the prompt's length


@dataclass(frozen=True, slots=True)
class Step:
    """One step down the tree: a block of text, or a chunk with the text before it that fills no block."""

    ids: tuple[str, ...]  # of the segments, in order; the chunk's is the last. They identify the tokens
    tokens: int  # rows of all of them
    document: bool = True  # False for text alone, which ``keep_first`` does not count
    token_ids: tuple[int, ...] = field(default=(), compare=False, repr=False)  # for ``forget``; () if unknown


Path = Sequence[Step]
"""Steps from the start of a prompt down."""


@dataclass(frozen=True, slots=True, eq=False)
class Reused:
    """One node as a look-up found it: its exact KV (``kv.start`` is its position) and its tier."""

    step: Step
    kv: ChunkKV
    tier: str


@dataclass(frozen=True, eq=False)
class Match:
    """Longest known beginning of a path, its nodes pinned while this object lives."""

    root: Root
    path: tuple[Step, ...]  # as requested
    found: tuple[Reused, ...]  # its first steps, in order
    epoch: int = 0  # ``forget`` calls on the namespace; KV of a request begun before one is not inserted

    def __len__(self) -> int:
        return len(self.found)

    @property
    def tokens(self) -> int:
        """Rows of the prompt that need not be computed."""
        return sum(reused.step.tokens for reused in self.found)


def documents_first(path: Path, most: int | None) -> int:
    """Number of steps of a path up to its first ``most`` documents; None: all of them."""
    if most is None:
        return len(path)
    documents = 0
    for number, step in enumerate(path):
        documents += step.document
        if documents > most:
            return number
    return len(path)


def blocks_of(token_ids: Sequence[int], namespace: str) -> list[Step]:
    """The whole blocks of a text, as steps."""
    ends = range(BLOCK, len(token_ids) + 1, BLOCK)
    return [text_step(tuple(token_ids[end - BLOCK : end]), namespace) for end in ends]


def text_step(token_ids: tuple[int, ...], namespace: str) -> Step:
    """Text alone as one step."""
    return Step((chunk_id(token_ids, namespace),), len(token_ids), False, token_ids)


def key_of(root: Root, path: Path) -> KVKey:
    """Store key of the path's last node; ``forget`` of any id on the path drops it."""
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


def check_exact(match: Match, kvs: Sequence[ChunkKV]) -> None:
    """Raise ValueError unless ``kvs`` can be the exact KV of the first steps that ``match`` did not find."""
    steps = match.path[len(match) :]
    if len(kvs) > len(steps):
        raise ValueError(f"{len(kvs)} KVs for the {len(steps)} steps that the tree did not have")
    start = match.tokens
    for step, kv in zip(steps, kvs, strict=False):
        if reason := fault(kv, step, start):
            raise ValueError(f"not the exact KV of this step: {reason}")
        start += step.tokens


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """One step at its position in the tree."""

    root: Root
    parent: Node | None  # None exactly at the start of a prompt
    step: Step
    nbytes: int  # of one copy of its KV
    children: dict[tuple[str, ...], Node] = field(default_factory=dict)  # by the ids of their steps
    copies: int = 0  # tiers that have its KV now
    pins: int = 0  # requests that use it now
    digest: bytes = field(init=False)  # of its path, chained: equal after eviction and recomputation

    def __post_init__(self) -> None:
        root = self.root
        top = repr((root.fingerprint, root.namespace, root.regime)).encode()
        above = self.parent.digest if self.parent is not None else top
        self.digest = blake2b(above + b"\0" + repr(self.step.ids).encode(), digest_size=16).digest()

    @property
    def tokens(self) -> int:
        """Rows of the step."""
        return self.step.tokens

    def path(self) -> list[Step]:
        """Steps from the start of the prompt to this one."""
        node: Node | None = self
        steps = []
        while node is not None:
            steps.append(node.step)
            node = node.parent
        return steps[::-1]

    def subtree(self) -> Iterator[Node]:
        """This node and all below it, parents before children."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

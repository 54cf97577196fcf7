"""Nodes of the tree; the tiers hold their KV."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

from ragcachekit.prefix_tree.base import Root, Step


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

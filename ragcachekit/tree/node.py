"""A node of the tree: what it is and who is beside it, not where its KV is."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

from ragcachekit.store.eviction.base import MISS, Access
from ragcachekit.tree.base import Root, Step


class Node:
    """One step at its place in the tree.

    Attributes
    ----------
    step : Step
    parent : Node or None
        None for what stands at the start of a prompt, and for nothing else.
    root : Root
    start, tokens, nbytes : int
        Position of its first row, its rows, and bytes of one copy of its KV.
    children : dict of tuple of str to Node
        By the ids of their steps.
    copies : int
        Tiers that have its KV now.
    pins : int
        Requests that use it now.
    uses : int
        Requests that used it so far.
    missed : Access
        The last time that it had to be computed.
    digest : bytes
        Says which path this is, also after the node was evicted and computed anew. It is chained, so
        that a new node costs one hash of its own ids however deep it stands.
    """

    __slots__ = (
        "children",
        "copies",
        "digest",
        "missed",
        "nbytes",
        "parent",
        "pins",
        "root",
        "start",
        "step",
        "tokens",
        "uses",
    )

    def __init__(self, root: Root, parent: Node | None, step: Step, nbytes: int) -> None:
        self.root, self.parent, self.step = root, parent, step
        self.start: int = parent.start + parent.tokens if parent is not None else 0
        self.tokens: int = step.tokens
        self.nbytes = nbytes
        self.children: dict[tuple[str, ...], Node] = {}
        self.copies = 0
        self.pins = 0
        self.uses = 0
        self.missed: Access = MISS
        self.digest = _digest(root, parent, step)

    def path(self) -> list[Step]:
        """All steps from the start of the prompt to this one."""
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


def _digest(root: Root, parent: Node | None, step: Step) -> bytes:
    if parent is not None:
        above = parent.digest
    else:
        above = repr((root.fingerprint, root.namespace, root.regime)).encode()
    return blake2b(above + b"\0" + repr(step.ids).encode(), digest_size=16).digest()

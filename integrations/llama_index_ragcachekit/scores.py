"""Scores of cached nodes for another question than the one they were found for."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
from llama_index.core.schema import BaseNode, NodeWithScore

SCORE_NOTE = "ragcachekit_score"
"""Metadata key of a node whose score is that of the cached question; hidden from model and embedder."""


def _cosine(question: Any, node: Any) -> float:
    return float(question @ node / (np.linalg.norm(question) * np.linalg.norm(node)))


def _dot(question: Any, node: Any) -> float:
    return float(question @ node)


class ScoredNode(NamedTuple):
    """A node as it was found, and how its score comes from its float32 ``[dim]`` vector, where known."""

    node: BaseNode
    score: float | None
    vector: Any = None
    formula: Callable[[Any, Any], float] | None = None

    @classmethod
    def of(cls, item: NodeWithScore, question: Any, vector: Any) -> ScoredNode:
        """A copy of what a search with the embedding ``question`` found; ``vector`` is that of the node."""
        node = copy_node(item.node)
        if vector is None or item.score is None:
            return cls(node, item.score)
        try:
            vector = np.asarray(vector, np.float32)
        except (TypeError, ValueError):  # not every store's get() gives an embedding
            return cls(node, item.score)
        if vector.shape == question.shape:
            for formula in (_cosine, _dot):
                with np.errstate(all="ignore"):
                    if np.isclose(formula(question, vector), item.score, 1e-4):
                        return cls(node, item.score, vector, formula)
        return cls(node, item.score)

    def exact(self) -> NodeWithScore:
        """The node for the very question that it was found for."""
        return NodeWithScore(node=copy_node(self.node), score=self.score)

    def near(self, question: Any) -> NodeWithScore:
        """The node for a near question; where its score cannot be computed, the old one and a mark."""
        found = self.exact()
        if self.formula is not None:
            found.score = self.formula(question, self.vector)
        elif self.score is not None:
            found.node.metadata[SCORE_NOTE] = "of the cached question"
            found.node.excluded_llm_metadata_keys.append(SCORE_NOTE)
            found.node.excluded_embed_metadata_keys.append(SCORE_NOTE)
        return found


def copy_node(node: BaseNode) -> BaseNode:
    """A copy of a node; a query engine that an index node points to is shared."""
    target = getattr(node, "obj", None)
    try:
        return deepcopy(node, {id(target): target})
    except Exception:  # metadata with a lock, a client: whoever put it there shares it
        return node.model_copy(update={"metadata": dict(node.metadata)})

"""Scores of cached nodes for another question than the one they were found for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
from llama_index.core.schema import BaseNode, NodeWithScore

SCORE_NOTE = "ragcachekit_score"
"""Metadata key of a node whose score is that of the cached question; hidden from model and embedder."""


def _cosine(question: Any, node: Any) -> float:
    return float(question @ node / (np.linalg.norm(question) * np.linalg.norm(node)))


def _dot(question: Any, node: Any) -> float:
    return float(question @ node)


FORMULAS: Mapping[str, Callable[[Any, Any], float]] = {"cosine": _cosine, "dot product": _dot}


@dataclass(frozen=True)
class ScoredNode:
    """A node as it was found.

    Attributes
    ----------
    node : BaseNode
    score : float or None
        Of the question that was searched.
    vector : numpy.ndarray or None
        The node's embedding, float32 ``[dim]``, if a formula gives the score from it.
    formula : str or None
        Name of that formula.
    """

    node: BaseNode
    score: float | None
    vector: Any = None
    formula: str | None = None

    def exact(self) -> NodeWithScore:
        """The node for the very question that it was found for."""
        return NodeWithScore(node=copy_node(self.node), score=self.score)

    def near(self, question: Any) -> NodeWithScore:
        """The node for a near question; where its score cannot be computed, the old one and a mark."""
        found = self.exact()
        if self.formula is not None:
            found.score = FORMULAS[self.formula](question, self.vector)
        elif self.score is not None:
            found.node.metadata[SCORE_NOTE] = "of the cached question"
            found.node.excluded_llm_metadata_keys.append(SCORE_NOTE)
            found.node.excluded_embed_metadata_keys.append(SCORE_NOTE)
        return found


def scored_nodes(
    found: Sequence[NodeWithScore], question: Any, vector_of: Callable[[BaseNode], Any] | None
) -> list[ScoredNode]:
    """Copies of what a search found, with what is needed to score them for other questions.

    ``question`` is the embedding that was searched, float32 ``[dim]``; ``vector_of`` gives a node's
    embedding, or None. Without it scores are not computed anew.
    """
    return [_scored(item, question, vector_of) for item in found]


def _scored(item: NodeWithScore, question: Any, vector_of: Callable[[BaseNode], Any] | None) -> ScoredNode:
    node = copy_node(item.node)
    vector = vector_of(item.node) if vector_of is not None else None
    if vector is None or item.score is None:
        return ScoredNode(node, item.score)
    try:
        vector = np.asarray(vector, np.float32)
    except (TypeError, ValueError):  # not every store's get() gives an embedding
        return ScoredNode(node, item.score)
    for name, formula in FORMULAS.items():
        with np.errstate(all="ignore"):
            fits = vector.shape == question.shape and np.isclose(formula(question, vector), item.score, 1e-4)
        if fits:
            return ScoredNode(node, item.score, vector, name)
    return ScoredNode(node, item.score)


def copy_node(node: BaseNode) -> BaseNode:
    """A copy of a node; a query engine that an index node points to is shared."""
    target = getattr(node, "obj", None)
    try:
        return deepcopy(node, {id(target): target})
    except Exception:  # metadata with a lock, a client: whoever put it there shares it
        return node.model_copy(update={"metadata": dict(node.metadata)})

"""Which chunks of a document follow each other, from the relationships and places that node parsers write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llama_index.core.schema import BaseNode, MetadataMode


def note_order(engine: Any, namespace: str, nodes: Iterable[BaseNode]) -> None:
    """Give the engine the order of chunks by their PREVIOUS relationships, else by place or arrival.

    Nodes without a source document have no order.
    """
    groups: dict[str, list[BaseNode]] = {}
    for node in nodes:
        if node.ref_doc_id is not None:
            groups.setdefault(node.ref_doc_id, []).append(node)
    for document, chunks in groups.items():
        texts = [chunk.get_content(metadata_mode=MetadataMode.NONE) for chunk in chunks]
        engine.order(document, texts, starts=_places(chunks), namespace=namespace)


def stored_nodes(retriever: Any) -> tuple[int, Iterable[BaseNode]]:
    """Number of nodes, and the nodes of the index that a retriever searches, where its docstore has them."""
    docstore = getattr(getattr(retriever, "_index", None), "docstore", None)
    held = getattr(docstore, "docs", None)
    return (len(held), held.values()) if isinstance(held, dict) else (0, ())


def _places(nodes: Sequence[BaseNode]) -> list[int] | None:
    starts = [getattr(node, "start_char_idx", None) for node in nodes]
    if all(isinstance(start, int) for start in starts):
        return [start for start in starts if isinstance(start, int)]
    return _places_by_previous(nodes)


def _places_by_previous(nodes: Sequence[BaseNode]) -> list[int] | None:
    """How many nodes stand before each one; None where the relationships do not tell."""
    before = {node.node_id: getattr(node.prev_node, "node_id", None) for node in nodes}
    if not any(before.values()):
        return None
    places: dict[str, int] = {}
    for one in before:
        chain: list[str] = []
        at: str | None = one
        while at is not None and at in before and at not in places:
            if at in chain:  # a circle
                return None
            chain.append(at)
            at = before[at]
        place = -1 if at is None or at not in places else places[at]
        for number, name in enumerate(reversed(chain), place + 1):
            places[name] = number
    return [places[node.node_id] for node in nodes]

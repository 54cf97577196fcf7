"""Which chunks of a document follow each other, from the relationships and places that node parsers write."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

from llama_index_ragcachekit.search import own_index_of
from llama_index_ragcachekit.vector_store import as_node
from ragcachekit.retrieval.plumbing import NotedOrder


def note_order(engine: Any, namespace: str, nodes: Iterable[BaseNode]) -> None:
    """Give the engine the order of chunks by their PREVIOUS relationships, else by place or arrival.

    Nodes without a source document have no order.
    """
    groups: dict[str, list[BaseNode]] = {}
    for node in nodes:
        if node.ref_doc_id is not None:
            groups.setdefault(node.ref_doc_id, []).append(node)
    for document, chunks in groups.items():
        engine.order(
            document, [text_of(chunk) for chunk in chunks], starts=_places(chunks), namespace=namespace
        )


def noted_order(
    retriever: Any, engine: Any, namespace: str, version: Callable[[object], Hashable]
) -> NotedOrder[BaseNode] | None:
    """The order of the nodes that a retriever searches; None where they cannot be listed."""
    if (index := own_index_of(retriever)) is not None:
        return NotedOrder(
            engine,
            namespace,
            text_of,
            note_order,
            version=lambda: index.version,
            revisions=index.revisions,
            get=lambda ids: {found.id: as_node(found) for found in index.get(ids)},
        )
    docstore: Any = getattr(getattr(retriever, "_index", None), "docstore", None)
    if not isinstance(getattr(docstore, "docs", None), dict):
        return None
    return NotedOrder(
        engine,
        namespace,
        text_of,
        note_order,
        version=lambda: version(docstore),
        revisions=lambda: {one: text_of(node) for one, node in list(docstore.docs.items())},
        get=lambda ids: {one: docstore.docs[one] for one in ids if one in docstore.docs},
    )


def texts_and_sources(found: Iterable[NodeWithScore]) -> tuple[list[str], list[str | None]]:
    """Texts of nodes as they are registered with the engine, without empty ones, and their documents."""
    nodes = [item.node for item in found]
    pairs = [(text, node.ref_doc_id) for node in nodes if (text := text_of(node)).strip()]
    return [text for text, _ in pairs], [source for _, source in pairs]


def text_of(node: BaseNode) -> str:
    """The bare text, as it is registered with the engine."""
    return node.get_content(metadata_mode=MetadataMode.NONE)


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

"""Which chunks of a document follow each other, from the metadata that loaders and splitters write."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore

from langchain_ragcachekit.vector_store import RagCacheVectorStore, as_document
from ragcachekit.retrieval.plumbing import NotedOrder

SOURCES = ("source", "document_id", "doc_id", "file_path", "url")
"""Metadata keys that name a document; the first one that is there counts."""

_PAGE = 10_000_000  # characters: ``start_index`` counts from the beginning of its page


def note_order(engine: Any, namespace: str, documents: Iterable[Document]) -> None:
    """Give the engine the order of chunks by ``start_index`` (and ``page``), else by arrival.

    Documents without a source have no order.
    """
    groups: dict[str, list[Document]] = {}
    for document in documents:
        if (source := source_of(document)) is not None:
            groups.setdefault(source, []).append(document)
    for source, chunks in groups.items():
        known = [start for start in map(_start_of, chunks) if start is not None]
        starts = known if len(known) == len(chunks) else None
        engine.order(source, [text_of(chunk) for chunk in chunks], starts=starts, namespace=namespace)


def noted_order(
    store: Any, engine: Any, namespace: str, version: Callable[[object], Hashable]
) -> NotedOrder[Document] | None:
    """The order of an embedded store's documents, or of one in memory; None where they cannot be listed."""
    if isinstance(store, RagCacheVectorStore):
        index = store.index
        return NotedOrder(
            engine,
            namespace,
            text_of,
            note_order,
            version=lambda: index.version,
            revisions=index.revisions,
            get=lambda ids: {found.id: as_document(found) for found in index.get(ids)},
        )
    held = store.store if isinstance(store, InMemoryVectorStore) else None
    if held is None:  # FAISS of langchain-community
        held = getattr(getattr(store, "docstore", None), "_dict", None)
    if not isinstance(held, dict):
        return None
    return NotedOrder(
        engine,
        namespace,
        text_of,
        note_order,
        version=lambda: version(store),
        revisions=lambda: {one: text_of(_as_document(document)) for one, document in list(held.items())},
        get=lambda ids: {one: _as_document(held[one]) for one in ids if one in held},
    )


def text_of(document: Document) -> str:
    """The text that prompts show."""
    return document.page_content


def source_of(document: Document) -> str | None:
    """The document that a chunk is of, as its loader named it."""
    named = (document.metadata.get(name) for name in SOURCES)
    return next((str(one) for one in named if isinstance(one, str | int) and one != ""), None)


def _as_document(held: Any) -> Document:
    return held if isinstance(held, Document) else Document(held["text"], metadata=held["metadata"])


def _start_of(document: Document) -> int | None:
    start, page = document.metadata.get("start_index"), document.metadata.get("page", 0)
    if not isinstance(start, int) or start < 0 or not isinstance(page, int):
        return None
    return page * _PAGE + start

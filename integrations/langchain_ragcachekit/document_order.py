"""Which chunks of a document follow each other, from the metadata that loaders and splitters write."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from langchain_ragcachekit.vector_store import RagCacheVectorStore, as_document
from ragcachekit import NotedOrder

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
        starts = [_start_of(chunk) for chunk in chunks]
        known = [start for start in starts if start is not None]
        engine.order(
            source,
            [chunk.page_content for chunk in chunks],
            starts=known if len(known) == len(chunks) else None,
            namespace=namespace,
        )


def noted_order(
    store: Any, engine: Any, namespace: str, version: Callable[[VectorStore], Hashable]
) -> NotedOrder[Document] | None:
    """The order of an embedded store's documents, or of one in memory; None where they cannot be listed."""
    if engine is None:
        return None
    if isinstance(store, RagCacheVectorStore):
        index = store.index
        return NotedOrder(
            engine,
            namespace,
            version=lambda: index.version,
            ids=lambda: index.ids,
            get=lambda ids: [(one.id, as_document(one)) for one in index.get(ids)],
            text=text_of,
            note=note_order,
        )
    held = store.store if isinstance(store, InMemoryVectorStore) else None
    if held is None:  # FAISS of langchain-community
        held = getattr(getattr(store, "docstore", None), "_dict", None)
    if not isinstance(held, dict):
        return None
    return NotedOrder(
        engine,
        namespace,
        version=lambda: version(store),
        ids=lambda: list(held),
        get=lambda ids: [(one, _as_document(held[one])) for one in ids if one in held],
        text=text_of,
        note=note_order,
        may_replace=True,
    )


def text_of(document: Document) -> str:
    """The text that prompts show."""
    return document.page_content


def _as_document(held: Any) -> Document:
    return held if isinstance(held, Document) else Document(held["text"], metadata=held["metadata"])


def source_of(document: Document) -> str | None:
    """The document that a chunk is of, as its loader named it."""
    for name in SOURCES:
        value = document.metadata.get(name)
        if isinstance(value, str | int) and value != "":
            return str(value)
    return None


def _start_of(document: Document) -> int | None:
    start, page = document.metadata.get("start_index"), document.metadata.get("page", 0)
    if not isinstance(start, int) or start < 0 or not isinstance(page, int):
        return None
    return page * _PAGE + start

"""Which chunks of a document follow each other, from the metadata that loaders and splitters write."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

SOURCES = ("source", "document_id", "doc_id", "file_path", "url")
"""Metadata keys that name a document; the first one that is there counts."""

_PAGE = 10_000_000  # characters: ``start_index`` counts from the beginning of its page


def note_order(engine: Any, namespace: str, documents: Iterable[Document]) -> None:
    """Give the engine the order of chunks by ``start_index`` (and ``page``), else by arrival.

    Documents without a source have no order.
    """
    groups: dict[str, list[Document]] = {}
    for document in documents:
        if (source := _source_of(document)) is not None:
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


def stored_documents(store: VectorStore) -> tuple[int, Iterable[Document]]:
    """Number of documents, and the documents of a store that keeps them in memory; none of others."""
    if isinstance(store, InMemoryVectorStore):
        held = list(store.store.values())
        return len(held), (Document(one["text"], metadata=one["metadata"]) for one in held)
    kept = getattr(getattr(store, "docstore", None), "_dict", None)  # FAISS of langchain-community
    documents = list(kept.values()) if isinstance(kept, dict) else []
    return len(documents), documents


def _source_of(document: Document) -> str | None:
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

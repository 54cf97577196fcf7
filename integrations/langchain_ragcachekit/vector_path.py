"""Searching a vector store with the embedding that the cache lookup has already computed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever

from langchain_ragcachekit.arguments import RULES, takes
from ragcachekit import Identity

logger = logging.getLogger(__name__)


class VectorPath:
    """Decides whether ``similarity_search_by_vector`` may replace a retriever's own search.

    The store must be of a known library and embed with the very same object: a search of one's own may
    leave out documents that its search by vector gives. Its two searches must also be shown to agree,
    since the text search of some stores adds keywords to the vectors. For every store and set of argument
    names the first search therefore goes both ways.

    Parameters
    ----------
    embeddings : Embeddings
        What computes the vectors.
    """

    def __init__(self, embeddings: Embeddings) -> None:
        self._embeddings = embeddings
        self._agrees: dict[tuple[Identity, frozenset[str]], bool] = {}

    def by_text(self, retriever: Any, kwargs: Mapping[str, Any]) -> bool:
        """Whether only the retriever's own search will do with these arguments."""
        return not (self.store_for(retriever, kwargs) or self.candidate_for(retriever, kwargs))

    def store_for(self, retriever: Any, kwargs: Mapping[str, Any]) -> VectorStore | None:
        """The store to search by vector with these arguments, or None where only text will do."""
        store = self._store_of(retriever)
        return store if store is not None and self._agrees.get(_searched(store, kwargs)) else None

    def candidate_for(self, retriever: Any, kwargs: Mapping[str, Any]) -> VectorStore | None:
        """The store if it is yet to be shown that its two searches agree under these arguments."""
        store = self._store_of(retriever)
        if store is None or _searched(store, kwargs) in self._agrees:
            return None
        return store if takes(store.similarity_search_by_vector, frozenset(kwargs)) else None

    @contextmanager
    def comparing(
        self, store: VectorStore, kwargs: Mapping[str, Any], by_text: list[Document]
    ) -> Iterator[list[Document]]:
        """Compare ``by_text`` with what the block adds to the list; text alone from now on if it fails."""
        by_vector: list[Document] = []
        try:
            yield by_vector
        except Exception as error:
            logger.info("searching by vector failed, searching by text from now on: %s", error)
            self._agrees[_searched(store, kwargs)] = False
            return
        agrees = _contents(by_text) == _contents(by_vector)
        if by_text or not agrees:  # two empty results prove nothing: compare at the next search, too
            self._agrees[_searched(store, kwargs)] = agrees

    def _store_of(self, retriever: Any) -> VectorStore | None:
        """The retriever's store, where a search by vector could be the same; its fields may change."""
        if type(retriever) is not VectorStoreRetriever or retriever.search_type != "similarity":
            return None
        store = retriever.vectorstore
        by_vector = type(store).similarity_search_by_vector is not VectorStore.similarity_search_by_vector
        usable = by_vector and RULES.is_library(type(store).__module__)
        return store if usable and _embeddings_of(store) is self._embeddings else None


def _searched(store: VectorStore, kwargs: Mapping[str, Any]) -> tuple[Identity, frozenset[str]]:
    return Identity(store), frozenset(kwargs)


def _embeddings_of(store: VectorStore) -> Embeddings | None:
    try:
        return store.embeddings
    except Exception:  # a property of the store, which is read here alone
        return None


def _contents(documents: list[Document]) -> list[tuple[str | None, str]]:
    return [(document.id, document.page_content) for document in documents]

"""Searching a vector store with the embedding that the cache lookup has already computed."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever

logger = logging.getLogger(__name__)


class VectorPath:
    """Decides whether ``similarity_search_by_vector`` may stand in for a retriever's own search.

    The store must embed with the very same object, and its two searches must be shown to agree:
    stores exist whose text search adds keywords to the vectors. For every set of argument names the
    first search therefore goes both ways, and only after equal results does the vector alone do.

    Parameters
    ----------
    retriever : runnable
        What the search would otherwise be asked of.
    embeddings : Embeddings
        What computed the vectors.
    """

    def __init__(self, retriever: Any, embeddings: Embeddings) -> None:
        self._retriever = retriever
        self._store = _store_of(retriever, embeddings)
        self._agrees: dict[frozenset[str], bool] = {}

    def store_for(self, kwargs: Mapping[str, Any]) -> VectorStore | None:
        """The store to search by vector with these arguments, or None where only text will do."""
        return self._unchanged() if self._agrees.get(frozenset(kwargs)) else None

    def candidate_for(self, kwargs: Mapping[str, Any]) -> VectorStore | None:
        """The store if it is yet to be shown that its two searches agree under these arguments."""
        names, store = frozenset(kwargs), self._unchanged()
        return store if store and names not in self._agrees and _takes(store, names) else None

    def compare(self, kwargs: Mapping[str, Any], by_text: list[Document], by_vector: list[Document]) -> None:
        """Remember whether both searches found the same."""
        agrees = _contents(by_text) == _contents(by_vector)
        if by_text or not agrees:  # two empty results prove nothing: compare again next time
            self._agrees[frozenset(kwargs)] = agrees

    def give_up(self, kwargs: Mapping[str, Any], error: Exception) -> None:
        """Search by text from now on: the store cannot search by vector with these arguments."""
        logger.info("searching by vector failed, searching by text from now on: %s", error)
        self._agrees[frozenset(kwargs)] = False

    def _unchanged(self) -> VectorStore | None:
        # A retriever's fields may be set after wrapping.
        if self._store is None or self._retriever.search_type != "similarity":
            return None
        return self._store if self._retriever.vectorstore is self._store else None


def _store_of(retriever: Any, embeddings: Embeddings) -> VectorStore | None:
    if not isinstance(retriever, VectorStoreRetriever):
        return None
    kind, store = type(retriever), type(retriever.vectorstore)
    own_search = kind._get_relevant_documents is not VectorStoreRetriever._get_relevant_documents
    by_vector = store.similarity_search_by_vector is not VectorStore.similarity_search_by_vector
    same_embeddings = retriever.vectorstore.embeddings is embeddings
    return retriever.vectorstore if by_vector and same_embeddings and not own_search else None


def _takes(store: VectorStore, names: frozenset[str]) -> bool:
    # By name, not through **kwargs: a filter that is swallowed there would be ignored in silence.
    parameters = inspect.signature(store.similarity_search_by_vector).parameters.values()
    return names <= {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}


def _contents(documents: list[Document]) -> list[tuple[str | None, str]]:
    return [(document.id, document.page_content) for document in documents]

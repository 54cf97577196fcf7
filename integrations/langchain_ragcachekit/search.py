"""The search of one question, with the vector already computed for the lookup where that is the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from langchain_core.callbacks import BaseCallbackManager
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import patch_config
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever

from langchain_ragcachekit.arguments import RULES, search_arguments, takes, with_arguments
from ragcachekit import Identity

logger = logging.getLogger(__name__)


class VectorPath:
    """Decides whether ``similarity_search_by_vector`` may replace a retriever's own search.

    The store must be of a known library and embed with the very same object. Its two searches must also be
    shown to agree, since the text search of some stores adds keywords to the vectors. For every store and set
    of argument names the first search therefore goes both ways.
    """

    def __init__(self, embeddings: Embeddings) -> None:
        self._embeddings = embeddings
        self._agrees: dict[tuple[Identity, frozenset[str]], bool] = {}

    def store_for(self, retriever: Any, kwargs: Mapping[str, Any]) -> tuple[VectorStore | None, bool]:
        """The store to search by vector, and whether its two searches agree; None where only text will do."""
        store = self._store_of(retriever)
        if store is None:
            return None, False
        agrees = self._agrees.get(_searched(store, kwargs))
        if agrees is None and takes(store.similarity_search_by_vector, frozenset(kwargs)):
            return store, False
        return (store if agrees else None), bool(agrees)

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
        if not by_vector or not RULES.is_library(type(store).__module__):
            return None
        try:
            return store if store.embeddings is self._embeddings else None
        except Exception:  # a property of the store, which is read here alone
            return None


def _searched(store: VectorStore, kwargs: Mapping[str, Any]) -> tuple[Identity, frozenset[str]]:
    return Identity(store), frozenset(kwargs)


def _contents(documents: list[Document]) -> list[tuple[str | None, str]]:
    return [(document.id, document.page_content) for document in documents]


class Search:
    """The search of one question.

    ``callbacks`` makes the callback manager of a child run; a search by vector has none.
    """

    def __init__(
        self,
        retriever: Runnable[Any, Any],
        path: VectorPath,
        query: str,
        overrides: Mapping[str, Any],
        config: RunnableConfig,
        callbacks: Callable[[], BaseCallbackManager],
    ) -> None:
        self.retriever, self.query, self.overrides, self.config = retriever, query, overrides, config
        self._path, self._callbacks = path, callbacks
        self._arguments = search_arguments(retriever, overrides)
        self._asked, self._kwargs = with_arguments(retriever, overrides)

    @property
    def is_by_text(self) -> bool:
        """Whether what is found depends on more of the question than its embedding."""
        return self._path.store_for(self.retriever, self._arguments)[0] is None

    def run(self, embedding: Any) -> list[Document]:
        """Search by vector where that is known to be the same, else by text; by text without an embedding."""
        store, agrees = self._store(embedding)
        if store and agrees:
            return store.similarity_search_by_vector(embedding, **self._arguments)
        found: list[Document] = self._asked.invoke(self.query, self._child(), **self._kwargs)
        if store:
            with self._path.comparing(store, self._arguments, found) as other:
                other += store.similarity_search_by_vector(embedding, **self._arguments)
        return found

    async def arun(self, embedding: Any) -> list[Document]:
        """:meth:`run`, awaited."""
        store, agrees = self._store(embedding)
        if store and agrees:
            return await store.asimilarity_search_by_vector(embedding, **self._arguments)
        found: list[Document] = await self._asked.ainvoke(self.query, self._child(), **self._kwargs)
        if store:
            with self._path.comparing(store, self._arguments, found) as other:
                other += await store.asimilarity_search_by_vector(embedding, **self._arguments)
        return found

    def _store(self, embedding: Any) -> tuple[VectorStore | None, bool]:
        return (None, False) if embedding is None else self._path.store_for(self.retriever, self._arguments)

    def _child(self) -> RunnableConfig:
        return patch_config(self.config, callbacks=self._callbacks())

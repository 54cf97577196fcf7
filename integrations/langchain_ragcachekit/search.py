"""One question to a wrapped retriever: by its text, or by the vector already computed for the lookup."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from langchain_core.callbacks import BaseCallbackManager
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import patch_config

from langchain_ragcachekit.arguments import search_arguments, with_arguments
from langchain_ragcachekit.vector_path import VectorPath

logger = logging.getLogger(__name__)

Callbacks = Callable[[], BaseCallbackManager]
"""Makes the callback manager of a child run; called only if there is one: a search by vector has none."""


class Search:
    """The search behind one call of the wrapper.

    Parameters
    ----------
    retriever : Runnable
        What is asked.
    embeddings : Embeddings
    path : VectorPath
    query : str
    overrides : mapping
        Search arguments of the call.
    config : dict
        The call's, for the retriever's run; its callbacks are replaced by those of a child run.

    Attributes
    ----------
    vector : numpy.ndarray or None
        The question's embedding, float32 ``[dim]``; None before :meth:`embed` or where it failed.
    """

    def __init__(
        self,
        retriever: Runnable[Any, Any],
        embeddings: Embeddings,
        path: VectorPath,
        query: str,
        overrides: Mapping[str, Any],
        config: RunnableConfig,
    ) -> None:
        self._embeddings, self._path, self._query, self._config = embeddings, path, query, config
        self._arguments = search_arguments(retriever, overrides)
        self._asked = retriever
        self._retriever, self._kwargs = with_arguments(retriever, overrides)
        self._embedding: list[float] = []
        self.vector: Any = None

    @property
    def is_by_text(self) -> bool:
        """Whether what is found depends on more of the question than its embedding."""
        return self._path.by_text(self._asked, self._arguments)

    def embed(self) -> None:
        """Embed the question; a failure leaves ``vector`` None, and the search goes on by text."""
        try:
            self._set(self._embeddings.embed_query(self._query))
        except Exception:
            _warn_not_embedded()

    async def aembed(self) -> None:
        """:meth:`embed`, awaited."""
        try:
            self._set(await self._embeddings.aembed_query(self._query))
        except Exception:
            _warn_not_embedded()

    def by_text(self, callbacks: Callbacks) -> list[Document]:
        """Ask the wrapped retriever."""
        found: list[Document] = self._retriever.invoke(self._query, self._child(callbacks), **self._kwargs)
        return found

    async def aby_text(self, callbacks: Callbacks) -> list[Document]:
        """:meth:`by_text`, awaited."""
        config = self._child(callbacks)
        found: list[Document] = await self._retriever.ainvoke(self._query, config, **self._kwargs)
        return found

    def run(self, callbacks: Callbacks) -> list[Document]:
        """Search by vector where that is known to be the same, else by text."""
        if store := self._path.store_for(self._asked, self._arguments):
            return store.similarity_search_by_vector(self._embedding, **self._arguments)
        found = self.by_text(callbacks)
        if store := self._path.candidate_for(self._asked, self._arguments):
            try:
                other = store.similarity_search_by_vector(self._embedding, **self._arguments)
                self._path.compare(store, self._arguments, found, other)
            except Exception as error:
                self._path.give_up(store, self._arguments, error)
        return found

    async def arun(self, callbacks: Callbacks) -> list[Document]:
        """:meth:`run`, awaited."""
        if store := self._path.store_for(self._asked, self._arguments):
            return await store.asimilarity_search_by_vector(self._embedding, **self._arguments)
        found = await self.aby_text(callbacks)
        if store := self._path.candidate_for(self._asked, self._arguments):
            try:
                other = await store.asimilarity_search_by_vector(self._embedding, **self._arguments)
                self._path.compare(store, self._arguments, found, other)
            except Exception as error:
                self._path.give_up(store, self._arguments, error)
        return found

    def _child(self, callbacks: Callbacks) -> RunnableConfig:
        return patch_config(self._config, callbacks=callbacks())

    def _set(self, embedding: list[float]) -> None:
        with np.errstate(over="ignore"):  # too large for float32: infinite, which the lookup refuses
            self.vector = np.asarray(embedding, np.float32)  # once: lookup and insert both need it
        self._embedding = embedding


def _warn_not_embedded() -> None:
    logger.warning("embedding the question failed, searching without the query cache", exc_info=True)

"""One question to a wrapped retriever: by its text, or by the vector already computed for the lookup."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from langchain_core.callbacks import BaseCallbackManager
from langchain_core.documents import Document
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import patch_config

from langchain_ragcachekit.arguments import search_arguments, with_arguments
from langchain_ragcachekit.vector_path import VectorPath


class Search:
    """The search of one question.

    Parameters
    ----------
    retriever : Runnable
        The retriever to ask.
    path : VectorPath
    query : str
    overrides : mapping
        Search arguments of the call.
    config : dict
        The call's, for the retriever's run.
    callbacks : callable
        Makes the callback manager of a child run; called only if there is one. A search by vector has none.
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
        return self._path.by_text(self.retriever, self._arguments)

    def by_text(self) -> list[Document]:
        """Ask the wrapped retriever."""
        found: list[Document] = self._asked.invoke(self.query, self._child(), **self._kwargs)
        return found

    async def aby_text(self) -> list[Document]:
        """:meth:`by_text`, awaited."""
        found: list[Document] = await self._asked.ainvoke(self.query, self._child(), **self._kwargs)
        return found

    def run(self, embedding: list[float]) -> list[Document]:
        """Search by vector where that is known to be the same, else by text."""
        if store := self._path.store_for(self.retriever, self._arguments):
            return store.similarity_search_by_vector(embedding, **self._arguments)
        found = self.by_text()
        if store := self._path.candidate_for(self.retriever, self._arguments):
            with self._path.comparing(store, self._arguments, found) as other:
                other += store.similarity_search_by_vector(embedding, **self._arguments)
        return found

    async def arun(self, embedding: list[float]) -> list[Document]:
        """:meth:`run`, awaited."""
        if store := self._path.store_for(self.retriever, self._arguments):
            return await store.asimilarity_search_by_vector(embedding, **self._arguments)
        found = await self.aby_text()
        if store := self._path.candidate_for(self.retriever, self._arguments):
            with self._path.comparing(store, self._arguments, found) as other:
                other += await store.asimilarity_search_by_vector(embedding, **self._arguments)
        return found

    def _child(self) -> RunnableConfig:
        return patch_config(self.config, callbacks=self._callbacks())

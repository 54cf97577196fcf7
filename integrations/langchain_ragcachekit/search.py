"""What a LangChain retriever searches, and what its results depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseLanguageModel
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig, RunnableWithFallbacks
from langchain_core.runnables.config import patch_config
from langchain_core.runnables.configurable import DynamicRunnable
from langchain_core.stores import BaseStore
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever

from langchain_ragcachekit.vector_store import RagCacheVectorStore, as_document, as_where
from ragcachekit.retrieval.plumbing import Framework, KeyRules, OwnSearch

LIBRARIES = frozenset(
    {
        *("langchain_core", "langchain_classic", "langchain_community", "langchain_ragcachekit"),
        *("langchain_chroma", "langchain_elasticsearch", "langchain_milvus", "langchain_pinecone"),
        *("langchain_postgres", "langchain_qdrant", "langchain_text_splitters", "sqlalchemy"),
    }
)
"""Packages whose retrievers and stores depend on their fields and on nothing else."""

SOURCES = ("source", "document_id", "doc_id", "file_path", "url")
"""Metadata keys that name a document; the first one that is there counts."""

RULES = KeyRules(
    libraries=LIBRARIES,
    indexes=(VectorStore, BaseStore),
    retrievers=(Runnable,),
    models=(Embeddings, BaseLanguageModel),
    ignored=(BaseCallbackHandler, BaseCallbackManager),
    uncached=(RunnableWithFallbacks,),
)


def source_of(document: Document) -> str | None:
    """The document that a chunk is of, as its loader named it."""
    named = (document.metadata.get(name) for name in SOURCES)
    return next((str(one) for one in named if isinstance(one, str | int) and one != ""), None)


LANGCHAIN = Framework(
    RULES,
    lambda document: document.id,
    lambda document: document.page_content,
    source_of,
    lambda record, _distance, _metric: as_document(record),
    lambda document: {
        "id": document.id,
        "text": document.page_content,
        "metadata": document.metadata,
    },
    lambda value: Document(value["text"], id=value["id"], metadata=value["metadata"]),
)

BY_VECTOR = frozenset(
    {
        "langchain_chroma.vectorstores.Chroma",
        "langchain_community.vectorstores.faiss.FAISS",
        "langchain_core.vectorstores.in_memory.InMemoryVectorStore",
        "langchain_postgres.vectorstores.PGVector",
        "langchain_ragcachekit.vector_store.RagCacheVectorStore",
    }
)
"""Stores whose ``similarity_search`` embeds the question and does nothing else with its text.

Others add keywords to the vector, at times by a setting; they are always asked with the text.
"""

DEFAULT_K = 4
"""Of LangChain's vector stores."""


class Search:
    """The search of one question, with the lookup's vector where that is known to give the same.

    ``callbacks`` makes the callback manager of a child run; a search by vector has none.
    """

    def __init__(
        self,
        retriever: Runnable[Any, Any],
        embeddings: Embeddings,
        query: str,
        overrides: Mapping[str, Any],
        config: RunnableConfig,
        callbacks: Callable[[], BaseCallbackManager],
    ) -> None:
        self.retriever, self.query, self.overrides, self.config = retriever, query, overrides, config
        self._callbacks = callbacks
        self._asked, self._kwargs = _with_arguments(retriever, overrides)
        self.store, self.arguments = _by_vector(retriever, embeddings, overrides)
        self.own: OwnSearch | None = None  # unless there are arguments that it ignores
        if isinstance(self.store, RagCacheVectorStore) and not self.arguments.keys() - {"k", "filter"}:
            k, where = self.arguments.get("k", DEFAULT_K), self.arguments.get("filter")
            self.own = OwnSearch(self.store.index, k, as_where(where))

    def run(self, embedding: Any, is_async: bool = False) -> Any:
        """Documents, or an awaitable of them; found by text without an embedding."""
        if self.store is not None and embedding is not None:
            find: Any = self.store.similarity_search_by_vector
            if is_async:
                find = self.store.asimilarity_search_by_vector
            return find(embedding, **self.arguments)
        child = patch_config(self.config, callbacks=self._callbacks())
        ask = self._asked.ainvoke if is_async else self._asked.invoke
        return ask(self.query, child, **self._kwargs)


def vector_store_of(retriever: Any) -> VectorStore | None:
    """The store of a vector store's own retriever, configurable or not."""
    while isinstance(retriever, DynamicRunnable):
        retriever = retriever.default
    return retriever.vectorstore if isinstance(retriever, VectorStoreRetriever) else None


def _by_vector(
    retriever: Any, embeddings: Embeddings, overrides: Mapping[str, Any]
) -> tuple[VectorStore | None, dict[str, Any]]:
    """The store to search by vector and the arguments, read at every call; None where only text will do."""
    if type(retriever) is not VectorStoreRetriever or retriever.search_type != "similarity":
        return None, {}
    store, kind = retriever.vectorstore, type(retriever.vectorstore)
    if f"{kind.__module__}.{kind.__qualname__}" not in BY_VECTOR or store.embeddings is not embeddings:
        return None, {}
    return store, {**retriever.search_kwargs, **overrides}


def _with_arguments(
    retriever: Runnable[Any, Any], overrides: Mapping[str, Any]
) -> tuple[Runnable[Any, Any], dict[str, Any]]:
    """The retriever to ask, and the keyword arguments of its ``invoke``.

    ``k`` is set as a field of a copy where the retriever has one. ValueError for arguments that the retriever
    would silently drop.
    """
    # LangChain's own record of whether a retriever's search has parameters beside the question.
    if not overrides or not isinstance(retriever, BaseRetriever) or retriever._expects_other_args:
        return retriever, dict(overrides)
    dropped = sorted(overrides.keys() - ({"k"} & type(retriever).model_fields.keys()))
    if dropped:
        raise ValueError(f"{type(retriever).__name__} takes no {', '.join(dropped)}; set it on the retriever")
    return retriever.model_copy(update=dict(overrides)), {}

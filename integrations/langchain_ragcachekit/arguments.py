"""Search arguments: which ones a retriever takes, and the partition of the query cache that a call uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Set
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseLanguageModel
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig, RunnableWithFallbacks
from langchain_core.runnables.configurable import DynamicRunnable
from langchain_core.stores import BaseStore
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever

from ragcachekit import KeyRules

UNSTATED_K = 1  # of a partition where none was given

LIBRARIES = frozenset(
    """
    langchain langchain_anthropic langchain_astradb langchain_aws langchain_azure_ai langchain_cassandra
    langchain_chroma langchain_classic langchain_cohere langchain_community langchain_core langchain_couchbase
    langchain_elasticsearch langchain_experimental langchain_google_genai langchain_google_vertexai
    langchain_huggingface langchain_milvus langchain_mistralai langchain_mongodb langchain_neo4j
    langchain_nvidia_ai_endpoints langchain_ollama langchain_openai langchain_opensearch langchain_pinecone
    langchain_postgres langchain_qdrant langchain_ragcachekit langchain_redis langchain_text_splitters
    langchain_unstructured langchain_voyageai langchain_weaviate
    aiohttp asyncpg astrapy bson cassandra chromadb cohere couchbase elastic_transport elasticsearch faiss
    fsspec hnswlib httpcore httpx langgraph langsmith motor neo4j ollama openai opensearchpy pgvector pinecone
    psycopg psycopg2 psycopg_pool pymilvus pymongo qdrant_client rank_bm25 ragcachekit redis redisvl requests
    sklearn sqlalchemy tenacity tiktoken tokenizers torch transformers weaviate
    """.split()  # noqa: SIM905
)
"""Packages whose retrievers, stores and clients depend on their attributes and on nothing else."""

RULES = KeyRules(
    libraries=LIBRARIES,
    indexes=(VectorStore, BaseStore),
    delegating=(VectorStore, BaseStore),
    embedders=(Embeddings,),
    opaque=(BaseLanguageModel,),
    ignored=(BaseCallbackHandler, BaseCallbackManager),
    searching=(Runnable, VectorStore, BaseStore),
    configurable=(Runnable,),
    unconfigurable=(VectorStoreRetriever,),
    uncached=(RunnableWithFallbacks,),
)

CustomPartition = Callable[[str, RunnableConfig], object]
"""Gives what counts for a question and the config of its call, or None: do not cache."""

INTERNAL = "__pregel"  # prefix of LangGraph's own names among the configurable values of a run


def search_arguments(retriever: Runnable[Any, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a search in the retriever's own store, read at every call: fields change."""
    own = retriever.search_kwargs if isinstance(retriever, VectorStoreRetriever) else {}
    return {**own, **overrides}


def called_with(overrides: Mapping[str, Any]) -> tuple[int, tuple[object, ...] | None]:
    """``k`` of a call, and its other search arguments; None if their content cannot be read."""
    k = overrides.get("k", UNSTATED_K)
    if any(map(_has_function, overrides.values())):  # what it lets through may depend on anything
        return k, None
    return k, ("k" in overrides, dict(overrides))


def with_arguments(
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


def vector_store_of(retriever: Any) -> VectorStore | None:
    """The store of a vector store's own retriever, configurable or not."""
    while isinstance(retriever, DynamicRunnable):
        retriever = retriever.default
    return retriever.vectorstore if isinstance(retriever, VectorStoreRetriever) else None


def takes(function: Callable[..., Any], names: frozenset[str]) -> bool:
    """Whether a function has parameters of these names; ``**kwargs`` might swallow a filter in silence."""
    parameters = inspect.signature(function).parameters.values()
    return names <= {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}


def _has_function(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_function(item) for item in value.values())
    if isinstance(value, list | tuple | Set):
        return any(_has_function(item) for item in value)
    return callable(value) and not isinstance(value, type)

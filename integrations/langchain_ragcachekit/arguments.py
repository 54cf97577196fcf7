"""Search arguments: which ones a retriever takes, and the partition of the query cache that a call uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Set
from contextvars import ContextVar
from typing import Any, cast

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseLanguageModel
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.runnables.configurable import DynamicRunnable
from langchain_core.stores import BaseStore
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever

from ragcachekit import KeyRules, Partition, Partitioner

UNSTATED_K = 1
"""Stands in the partition where nobody said ``k``; that nobody did is part of the partition too."""

LIBRARIES = frozenset(
    """
    langchain langchain_anthropic langchain_astradb langchain_aws langchain_chroma langchain_classic
    langchain_community langchain_core langchain_elasticsearch langchain_experimental langchain_google_genai
    langchain_google_vertexai langchain_huggingface langchain_milvus langchain_mistralai langchain_mongodb
    langchain_neo4j langchain_ollama langchain_openai langchain_pinecone langchain_postgres langchain_qdrant
    langchain_ragcachekit langchain_redis langchain_text_splitters langchain_unstructured langchain_weaviate
    anyio chromadb faiss hnswlib langgraph langsmith numpy openai opentelemetry pydantic pydantic_core
    qdrant_client rank_bm25 ragcachekit scipy sentence_transformers sklearn sniffio tenacity tokenizers torch
    transformers
    """.split()  # noqa: SIM905
)
"""Packages whose retrievers, stores and clients depend on their attributes and on nothing else."""

RULES = KeyRules(
    libraries=LIBRARIES,
    indexes=(VectorStore, BaseStore),
    opaque=(Embeddings, BaseLanguageModel),
    ignored=(BaseCallbackHandler, BaseCallbackManager),
)

CustomPartition = Callable[[str, RunnableConfig], object]
"""Gives what counts for a question and the config of its call, or None: do not cache."""


def prepared(
    retriever: Runnable[Any, Any], config: RunnableConfig
) -> tuple[Runnable[Any, Any], RunnableConfig]:
    """The retriever that a configurable one becomes under this config, and the config to call it with."""
    return retriever.prepare(config) if isinstance(retriever, DynamicRunnable) else (retriever, config)


def search_arguments(retriever: Runnable[Any, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of the search that ``retriever`` makes, read at every call: fields change."""
    return {**(getattr(retriever, "search_kwargs", None) or {}), **overrides}


def partitioner(custom: CustomPartition | None) -> Partitioner:
    """Makes the partitions of one wrapper's calls; ``custom`` as :class:`RagCacheRetriever` takes it."""
    variable = cast("ContextVar[object]", var_child_runnable_config)  # the config is part of each call
    return Partitioner(RULES, (variable,), custom)


def called_with(
    retriever: Runnable[Any, Any], overrides: Mapping[str, Any], config: RunnableConfig, custom: bool
) -> tuple[int, tuple[object, ...] | None]:
    """``k``, and the rest of a call that its results depend on; None if that cannot be known.

    Raises
    ------
    ValueError, TypeError
        For a ``k`` that is no positive integer.
    """
    arguments = search_arguments(retriever, overrides)
    k = arguments.get("k", getattr(retriever, "k", None))
    number = Partition.of("any", UNSTATED_K if k is None else k).k
    functions = {name for name, value in arguments.items() if _has_function(value)}
    if custom:  # the user names what counts, and saw the config
        plain = {name: value for name, value in overrides.items() if name not in functions}
        return number, (k is None, plain)
    if functions:  # what a function lets through may depend on who asks
        return number, None
    return number, (k is None, overrides, config.get("configurable"))


def with_arguments(
    retriever: Runnable[Any, Any], overrides: Mapping[str, Any]
) -> tuple[Runnable[Any, Any], dict[str, Any]]:
    """The retriever to ask, and the keyword arguments of its ``invoke``.

    LangChain drops keyword arguments that a retriever does not take without a word. Here ``k`` is set
    as a field of a copy where the retriever has one.

    Raises
    ------
    ValueError
        For arguments that the retriever would drop.
    """
    # LangChain's own record of whether a retriever's search has parameters beside the question.
    if not overrides or not isinstance(retriever, BaseRetriever) or retriever._expects_other_args:
        return retriever, dict(overrides)
    dropped = sorted(overrides.keys() - ({"k"} & type(retriever).model_fields.keys()))
    if dropped:
        raise ValueError(f"{type(retriever).__name__} takes no {', '.join(dropped)}; set it on the retriever")
    return retriever.model_copy(update=dict(overrides)), {}


def vector_store_of(retriever: Any) -> VectorStore | None:
    """The store behind a vector store's own retriever, configurable or not."""
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

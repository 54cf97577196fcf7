"""What a LlamaIndex retriever's results depend on."""

from __future__ import annotations

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.graph_stores.types import PropertyGraphStore
from llama_index.core.indices.base import BaseIndex
from llama_index.core.retrievers import BaseRetriever, VectorIndexRetriever
from llama_index.core.storage.docstore import BaseDocumentStore
from llama_index.core.storage.index_store.types import BaseIndexStore
from llama_index.core.storage.kvstore.types import BaseKVStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore, VectorStoreQueryMode

from ragcachekit import KeyRules

LIBRARIES = frozenset(
    """
    asyncpg chromadb elasticsearch faiss fsspec hnswlib httpx llama_index llama_index_instrumentation
    llama_index_ragcachekit openai pgvector pinecone psycopg psycopg2 pymilvus pymongo qdrant_client rank_bm25
    ragcachekit redis requests sklearn sqlalchemy tenacity tiktoken tokenizers torch transformers weaviate
    workflows
    """.split()  # noqa: SIM905
)
"""Packages whose retrievers, stores and clients depend on their attributes and on nothing else."""

RULES = KeyRules(
    libraries=LIBRARIES,
    indexes=(
        *(BaseIndex, BasePydanticVectorStore, BaseDocumentStore),
        *(BaseKVStore, BaseIndexStore, PropertyGraphStore),
    ),
    delegating=(BasePydanticVectorStore,),
    embedders=(BaseEmbedding,),
    opaque=(BaseLLM,),
    ignored=(CallbackManager, BaseCallbackHandler),
    searching=(BaseRetriever, BaseIndex),
)


def is_by_embedding(retriever: BaseRetriever, embed_model: BaseEmbedding) -> bool:
    """Whether a retriever finds the same for every question of one embedding by ``embed_model``."""
    return (
        type(retriever) is VectorIndexRetriever
        and retriever._embed_model is embed_model
        and retriever._vector_store_query_mode == VectorStoreQueryMode.DEFAULT
        and bool(retriever._vector_store.is_embedding_query)
        and RULES.is_library(type(retriever._vector_store).__module__)
    )

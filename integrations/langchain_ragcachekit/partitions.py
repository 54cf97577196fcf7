"""What a LangChain retriever's results depend on."""

from __future__ import annotations

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import Runnable, RunnableWithFallbacks
from langchain_core.stores import BaseStore
from langchain_core.vectorstores import VectorStore

from ragcachekit import KeyRules

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
    uncached=(RunnableWithFallbacks,),
)

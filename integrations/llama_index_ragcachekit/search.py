"""What a LlamaIndex retriever searches, and what its results depend on."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.graph_stores.types import PropertyGraphStore
from llama_index.core.indices.base import BaseIndex
from llama_index.core.retrievers import BaseRetriever, VectorIndexRetriever
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore
from llama_index.core.storage.docstore import BaseDocumentStore
from llama_index.core.storage.docstore.utils import doc_to_json, json_to_doc
from llama_index.core.storage.index_store.types import BaseIndexStore
from llama_index.core.storage.kvstore.types import BaseKVStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore, VectorStoreQueryMode

from llama_index_ragcachekit.vector_store import RagCacheVectorStore, as_node, as_predicate, similarity
from ragcachekit import DocumentIndex
from ragcachekit.retrieval.plumbing import Framework, KeyRules, OwnSearch

RULES = KeyRules(
    libraries=frozenset(
        {"llama_index", "llama_index_ragcachekit", "fsspec"}
    ),  # storage contexts hold a filesystem
    indexes=(
        *(BaseIndex, BasePydanticVectorStore, BaseDocumentStore),
        *(BaseKVStore, BaseIndexStore, PropertyGraphStore),
    ),
    retrievers=(BaseRetriever,),
    models=(BaseEmbedding, BaseLLM),
    ignored=(CallbackManager, BaseCallbackHandler),
)


def is_by_embedding(retriever: BaseRetriever, embed_model: BaseEmbedding) -> bool:
    """Whether a retriever finds the same for every question of one embedding by ``embed_model``."""
    return (
        type(retriever) is VectorIndexRetriever
        and retriever._embed_model is embed_model
        and retriever._vector_store_query_mode == VectorStoreQueryMode.DEFAULT
        and bool(retriever._vector_store.is_embedding_query)
        and RULES.is_library(type(retriever._vector_store))
    )


def own_index_of(retriever: Any) -> DocumentIndex | None:
    """The index of a vector index's own retriever, if that is an embedded one."""
    store = getattr(retriever, "_vector_store", None)
    return store.client if isinstance(store, RagCacheVectorStore) else None


def own_search(retriever: BaseRetriever, embed_model: BaseEmbedding) -> OwnSearch | None:
    """The search without LlamaIndex around it; None where that does more than search an embedded index."""
    index = own_index_of(retriever)
    if index is None or not isinstance(retriever, VectorIndexRetriever):
        return None
    more = retriever._node_ids, retriever._doc_ids, retriever._kwargs, retriever.object_map
    if any(more) or not is_by_embedding(retriever, embed_model):
        return None
    where = as_predicate(retriever._filters) if retriever._filters else None
    return OwnSearch(index, retriever._similarity_top_k, where)


def text_of(node: BaseNode) -> str:
    """The bare text, as it is registered with the engine."""
    return node.get_content(metadata_mode=MetadataMode.NONE)


def _found(record: Any, distance: float, metric: str) -> NodeWithScore:
    return NodeWithScore(node=as_node(record), score=similarity(metric, distance))


LLAMA_INDEX = Framework[NodeWithScore](
    RULES,
    lambda item: item.node.node_id,
    lambda item: text_of(item.node),
    lambda item: item.node.ref_doc_id,
    _found,
    lambda item: {"node": doc_to_json(item.node), "score": item.score},
    lambda value: NodeWithScore(node=json_to_doc(value["node"]), score=value["score"]),
)

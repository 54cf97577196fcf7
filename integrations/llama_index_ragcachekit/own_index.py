"""The search of a LlamaIndex retriever in an embedded vector store."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.retrievers import BaseRetriever, VectorIndexRetriever
from llama_index.core.schema import NodeWithScore

from llama_index_ragcachekit.partitions import is_by_embedding
from llama_index_ragcachekit.vector_store import RagCacheVectorStore, as_node, as_predicate, similarity
from ragcachekit import DocumentIndex, OwnSearch


def own_index_of(retriever: BaseRetriever) -> DocumentIndex | None:
    """The index of a vector index's own retriever, if that is an embedded one."""
    store = getattr(retriever, "_vector_store", None)
    return store.client if isinstance(store, RagCacheVectorStore) else None


def own_search(retriever: BaseRetriever, embed_model: BaseEmbedding) -> OwnSearch[NodeWithScore] | None:
    """The search without LlamaIndex around it; None where that does more than to ask an embedded index."""
    index = own_index_of(retriever)
    if index is None or not isinstance(retriever, VectorIndexRetriever):
        return None
    more = retriever._node_ids, retriever._doc_ids, retriever._kwargs, retriever.object_map
    if any(more) or not is_by_embedding(retriever, embed_model):
        return None
    where = as_predicate(retriever._filters) if retriever._filters else None
    metric = index.metric

    def found(record: Any, distance: float) -> NodeWithScore:
        return NodeWithScore(node=as_node(record), score=similarity(metric, distance))

    return OwnSearch(index, retriever._similarity_top_k, where, found)


def filters_of(retriever: Any) -> Any:
    """The filters of a vector index's retriever, as JSON."""
    return None if retriever._filters is None else retriever._filters.model_dump(mode="json")

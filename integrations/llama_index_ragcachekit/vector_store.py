"""A LlamaIndex vector store over an embedded index of its own: Faiss, nodes beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode, MetadataMode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)
from llama_index.core.vector_stores.utils import (
    build_metadata_filter_fn,
    metadata_dict_to_node,
    node_to_metadata_dict,
)

from ragcachekit import DocumentIndex
from ragcachekit.frameworks import NotPickled


class RagCacheVectorStore(NotPickled, BasePydanticVectorStore):
    """Nodes and their vectors in one process, in memory or in a folder.

    Every change is on disk when its method returns, and other processes on the folder see it at their next
    query. Similarities are ``1 - distance`` under ``cosine``, else ``-distance``.

    Parameters and errors are those of :class:`ragcachekit.DocumentIndex`: ``index`` is ``faiss-flat``
    or ``faiss-hnsw`` (extra ``faiss``). What ``path`` holds already is opened.
    """

    stores_text: bool = True
    _index: DocumentIndex = PrivateAttr()

    def __init__(
        self,
        *,
        index: str = "faiss-flat",
        path: str | os.PathLike[str] | None = None,
        metric: str = "cosine",
        embedder: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(stores_text=True)
        self._index = DocumentIndex(index, metric, path, embedder=embedder, **options)

    def cache_key_parts(self) -> tuple[object, ...]:
        """What results depend on beside the object: changes of other processes and objects on the folder."""
        return (self._index.version,)

    @property
    def client(self) -> DocumentIndex:
        """The index below."""
        return self._index

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Add embedded nodes, or replace those of the same ids; returns the ids."""
        ids = [node.node_id for node in nodes]
        texts = [node.get_content(metadata_mode=MetadataMode.NONE) for node in nodes]
        embeddings = [node.get_embedding() for node in nodes]
        metadata = [node_to_metadata_dict(node, remove_text=True) for node in nodes]
        self._index.add(ids, embeddings, texts, metadata, replace=True)
        return ids

    def changed(self, nodes: Sequence[BaseNode]) -> list[BaseNode]:
        """Those nodes that are not there with the same text and metadata, under their id or another one.

        Parsers give new ids to the same nodes in every run.
        """
        stored = [as_node(found) for found in self._index.get(self._index.ids if nodes else ())]
        known, by_id = {_content_of(node) for node in stored}, {node.node_id: node for node in stored}

        def is_there(node: BaseNode) -> bool:
            held = by_id.get(node.node_id)
            return _content_of(node) in known if held is None else _content_of(held) == _content_of(node)

        return [node for node in nodes if not is_there(node)]

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete the nodes of a document."""
        found = self._index.get(self._index.ids)
        self._index.delete([one.id for one in found if one.metadata.get("ref_doc_id") == ref_doc_id])

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Delete nodes by id, by filter, or by both."""
        self._index.delete([node.node_id for node in self.get_nodes(node_ids, filters)])

    def get_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Nodes by id, by filter, or by both; none of the two means all."""
        accepts = as_predicate(filters)
        found = self._index.get(self._index.ids if node_ids is None else node_ids)
        return [as_node(one) for one in found if accepts(one)]

    def clear(self) -> None:
        """Delete everything."""
        self._index.delete(self._index.ids)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """The nearest nodes; ValueError for a mode other than the default, or no embedding."""
        if query.mode != VectorStoreQueryMode.DEFAULT or query.query_embedding is None:
            raise ValueError("RagCacheVectorStore searches by embedding; use the default query mode")
        # LlamaIndex's retriever gives empty lists for no choice.
        nodes, documents = frozenset(query.node_ids or ()), frozenset(query.doc_ids or ())
        accepts = as_predicate(query.filters)

        def where(found: Any) -> bool:
            if (nodes and found.id not in nodes) or (
                documents and found.metadata.get("ref_doc_id") not in documents
            ):
                return False
            return accepts(found)

        chosen = where if query.filters or nodes or documents else None
        found = self._index.search(query.query_embedding, query.similarity_top_k, chosen)
        return VectorStoreQueryResult(
            nodes=[as_node(one) for one, _ in found],
            similarities=[similarity(self._index.metric, distance) for _, distance in found],
            ids=[str(one.id) for one, _ in found],
        )

    def close(self) -> None:
        """Write the index and close its files."""
        self._index.close()


def _content_of(node: BaseNode) -> tuple[str, str]:
    content = node.get_content(metadata_mode=MetadataMode.NONE)
    return content, json.dumps(node.metadata, sort_keys=True, default=str)


def similarity(metric: str, distance: float) -> float:
    """What LlamaIndex shows as score: larger is nearer."""
    return 1.0 - distance if metric == "cosine" else -distance


def as_node(found: Any) -> BaseNode:
    """A document of the index as a node."""
    return metadata_dict_to_node(found.metadata, found.text)


def as_predicate(filters: MetadataFilters | None) -> Callable[[Any], bool]:
    """Filters as the index takes them."""

    def accepts(found: Any) -> bool:
        return bool(build_metadata_filter_fn(lambda _: found.metadata, filters)(str(found.id)))

    return accepts

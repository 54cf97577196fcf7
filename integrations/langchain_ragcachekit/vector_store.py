"""A LangChain vector store over an embedded index of its own: Faiss, documents beside it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

from ragcachekit import DocumentIndex
from ragcachekit.retrieval.plumbing import name_of

_TOGETHER = 256  # documents that are embedded and stored at once

Filter = Mapping[str, Any] | Callable[[Document], bool]


class RagCacheVectorStore(VectorStore):
    """Documents and their vectors in one process, in memory or in a folder.

    Every change is on disk when its method returns, and other processes on the folder see it at their next
    search. Metadata must be JSON. Errors are those of the index. A document without an id gets the digest of
    its text and metadata, so that adding it again changes nothing and embeds nothing.

    Parameters
    ----------
    embedding : Embeddings
        Embeds documents and questions.
    index, metric, path, **options
        Those of :class:`ragcachekit.DocumentIndex`: ``faiss-flat`` or ``faiss-hnsw`` (extra ``faiss``). What
        the folder ``path`` holds already is opened.
    """

    def __init__(
        self,
        embedding: Embeddings,
        *,
        index: str = "faiss-flat",
        path: str | os.PathLike[str] | None = None,
        metric: str = "cosine",
        **options: Any,
    ) -> None:
        self._embedding = embedding
        named = None if path is None else name_of(embedding)
        self.index = DocumentIndex(index, metric, path, embedder=named, **options)

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **settings: Any,
    ) -> Self:
        """A store with these texts; ``settings`` are those of the class."""
        store = cls(embedding, **settings)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    def cache_key_parts(self) -> tuple[object, ...]:
        """What results depend on beside the object: changes of other processes and objects on the folder."""
        return (self.index.version,)

    @property
    def embeddings(self) -> Embeddings:
        """What embeds documents and questions."""
        return self._embedding

    def add_documents(
        self,
        documents: list[Document],
        ids: Sequence[str | None] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add documents, or replace those of the same ids; returns the ids.

        Only documents that are not there with the same text are embedded, some at a time: what an error or
        an interrupt leaves is kept.
        """
        given = ids or [None] * len(documents)
        if len(given) != len(documents):
            raise ValueError(f"{len(given)} ids for {len(documents)} documents")
        names = [name or one.id or _digest(one) for name, one in zip(given, documents, strict=True)]
        todo = dict(zip(names, documents, strict=True))
        for known in self.index.get(list(todo)):
            document = todo[str(known.id)]
            if (known.text, known.metadata) == (document.page_content, document.metadata):
                del todo[str(known.id)]
        new = list(todo)
        for at in range(0, len(new), _TOGETHER):
            block = new[at : at + _TOGETHER]
            texts = [todo[name].page_content for name in block]
            vectors = self._embedding.embed_documents(texts)
            self.index.add(block, vectors, texts, [todo[name].metadata for name in block], replace=True)
        return names

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Delete documents by id, None: all of them. Whether any was there."""
        return self.index.delete(self.index.ids if ids is None else ids) > 0

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """The documents of these ids that are there."""
        return [as_document(found) for found in self.index.get(ids)]

    def similarity_search(
        self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """The ``k`` documents nearest to a question.

        ``filter`` maps metadata keys to the values they must have, or is a function of the document.
        """
        return [document for document, _ in self.similarity_search_with_score(query, k, filter)]

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """:meth:`similarity_search` with the embedding of the question."""
        return [as_document(one) for one, _ in self.index.search(embedding, k, as_where(filter))]

    def similarity_search_with_score(
        self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """Documents and their distances in the unit of the metric, nearest first."""
        found = self.index.search(self._embedding.embed_query(query), k, as_where(filter))
        return [(as_document(one), score) for one, score in found]

    def close(self) -> None:
        """Write the index and close its files."""
        self.index.close()

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        if self.index.metric == "l2":
            return self._euclidean_relevance_score_fn
        return lambda distance: 1.0 - distance if self.index.metric == "cosine" else -distance


def as_where(filter: Filter | None) -> Any:
    """A filter as the index takes it."""
    return (lambda found: filter(as_document(found))) if callable(filter) else filter


def as_document(found: Any) -> Document:
    """A document of the index as one of LangChain."""
    return Document(found.text, id=str(found.id), metadata=found.metadata)


def _digest(document: Document) -> str:
    parts = (document.page_content, *sorted(f"{name}={value!r}" for name, value in document.metadata.items()))
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]

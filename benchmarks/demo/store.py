"""The demo's retrieval: a LangChain vector store that returns whole articles and those they link to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Self
from uuid import uuid4

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore
from tqdm.auto import tqdm

from benchmarks.world.world import Article
from ragcachekit.search.registry import open_index

TITLE, CHUNK, SEARCH = "title", "chunk", "search"
_CANDIDATES = 8  # articles that a search looks at; few are needed, as each brings its links along
_BATCH = 64


class RememberedEmbeddings(Embeddings):
    """Another ``Embeddings``, and the vectors of questions that were embedded beforehand.

    The demo asks the same questions several times, of several policies, and measures embedding apart
    from the search.
    """

    def __init__(self, embeddings: Embeddings, progress: bool = False) -> None:
        self._embeddings, self._progress = embeddings, progress
        self._known: dict[str, list[float]] = {}

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """As LangChain asks for it; nothing is remembered."""
        rows = list[list[float]]()
        with tqdm(total=len(texts), desc="embedding", unit="text", disable=not self._progress) as bar:
            for at in range(0, len(texts), _BATCH):
                rows += self._embeddings.embed_documents(texts[at : at + _BATCH])
                bar.update(len(rows) - bar.n)
        return rows

    def embed_query(self, text: str) -> list[float]:
        """As LangChain asks for it."""
        known = self._known.get(text)
        return known if known is not None else self._embeddings.embed_query(text)

    def remember(self, texts: Sequence[str]) -> None:
        """Embed questions one by one now, so that asking for them later takes no time."""
        for text in tqdm(texts, desc="embedding questions", unit="text", disable=not self._progress):
            self._known[text] = self._embeddings.embed_query(text)


class ArticleStore(VectorStore):
    """Searches articles, returns their chunks.

    The unit of search is the article: the second chunk of one says "This person also ..." and means
    nothing alone. Found articles come in order of relevance, each followed by the ones it links to;
    the chunks of an article stay together and in order. Every search numbers its documents
    (``metadata["search"]``), so that a document served from a query cache tells which search found it.
    """

    def __init__(self, embeddings: Embeddings) -> None:
        self._embeddings = embeddings
        # Not Faiss: its threads cost more than so small a search, and would flatter the query cache.
        self._index = open_index("brute", len(embeddings.embed_query("width")))
        self._chunks: dict[str, tuple[str, ...]] = {}
        self._links: dict[str, tuple[str, ...]] = {}
        self._searches = itertools.count()
        self._name = uuid4().hex

    @classmethod
    def from_articles(cls, articles: Sequence[Article], embeddings: Embeddings) -> Self:
        """The store over a world's articles."""
        texts = [(chunk, article) for article in articles for chunk in article.chunks]
        return cls.from_texts(
            [chunk for chunk, _ in texts],
            embeddings,
            [{TITLE: article.title, "links": article.links} for _, article in texts],
        )

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Chunks with their article's ``title`` and ``links``; those of one title are one article, in order.

        Raises
        ------
        ValueError
            Without titles, or with arguments that this store does not know.
        """
        if ids or kwargs:
            raise ValueError("chunks are named by title and number; ids and other arguments are not taken")
        if metadatas is None or len(metadatas) != len(texts):
            raise ValueError("give one metadata dict with title and links per text")
        store = cls(embedding)
        for text, about in zip(texts, metadatas, strict=True):
            title = about[TITLE]
            store._chunks[title] = (*store._chunks.get(title, ()), text)
            store._links[title] = tuple(about.get("links", ()))
        titles = list(store._chunks)
        vectors = embedding.embed_documents(["\n\n".join(store._chunks[title]) for title in titles])
        store._index.add(titles, vectors)
        return store

    def cache_key_parts(self) -> tuple[object, ...]:
        """What decides about results, for the query cache: the store, which never changes once it is made."""
        return (self._name,)

    @property
    def embeddings(self) -> Embeddings:
        """What embeds articles and questions."""
        return self._embeddings

    def similarity_search(self, query: str, k: int = 8, **kwargs: Any) -> list[Document]:
        """The chunks for a question, at most ``k``, whole articles only."""
        if kwargs:
            raise ValueError(f"unknown search arguments: {', '.join(sorted(kwargs))}")
        return self.similarity_search_by_vector(self._embeddings.embed_query(query), k)

    def similarity_search_by_vector(self, embedding: list[float], k: int = 8) -> list[Document]:  # type: ignore[override]
        """The chunks for an embedded question, at most ``k``, whole articles only."""
        number, found = next(self._searches), list[Document]()
        for title in self._articles(embedding):
            chunks = self._chunks[title]
            if len(found) + len(chunks) > k:
                break
            found += [
                Document(text, id=f"{title}#{at}", metadata={TITLE: title, CHUNK: at, SEARCH: number})
                for at, text in enumerate(chunks)
            ]
        return found

    def _articles(self, embedding: list[float]) -> Iterator[str]:
        """Titles in the order of the prompt, each once."""
        best = self._index.search(np.asarray(embedding, np.float32), _CANDIDATES).ids
        linked = (name for title in best for name in (str(title), *self._links[str(title)]))
        return iter(dict.fromkeys(name for name in linked if name in self._chunks))

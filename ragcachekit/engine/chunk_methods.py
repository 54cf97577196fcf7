"""The methods of RagCache that give it chunks and take them away."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from ragcachekit.engine.chunk_manager import ChunkManager
from ragcachekit.policies.base import SelectionPolicy
from ragcachekit.policies.budgets.calibrated import Chosen
from ragcachekit.query.retrieval import CachedRetrieval


class ChunkMethods(ABC):
    """Register, prefetch, encode and forget chunks; the base of :class:`ragcachekit.RagCache`."""

    _chunks: ChunkManager

    @abstractmethod
    def _checked(self, namespace: str | None) -> str: ...

    @abstractmethod
    def _chosen(self, policy: str | SelectionPolicy | None, namespace: str) -> Chosen: ...

    def register(self, texts: Iterable[str], *, namespace: str | None = None) -> int:
        """Make texts known as chunks, so that prompts are searched for them. Costs no model work.

        Returns how many can be found (texts too short to be told apart are left out).
        """
        return self._chunks.register(texts, self._checked(namespace))

    def add_query_cache(self, cache: CachedRetrieval[Any]) -> None:
        """Let :meth:`forget` reach cached search results too. The cache is not kept alive.

        Retrievers that were given this engine call it.
        """
        self._chunks.add_query_cache(cache)

    def prefetch(
        self, chunks: Iterable[str], *, namespace: str | None = None, system: str | None = None
    ) -> None:
        """Begin to load chunks from slow tiers for a prompt that will come; returns at once.

        A retriever calls it. Chunks that are not stored, or in memory already, cost next to nothing. Those
        that then stand in a prompt in altered form are named in its report.

        Parameters
        ----------
        chunks : iterable of str
            Chunk texts, or ids as :meth:`encode` returned them.
        system : str, optional
            The text before the prompt's first chunk, for encoders that need it; by default the last one
            that was seen in the namespace.
        """
        namespace = self._checked(namespace)
        self._chunks.prefetch(chunks, namespace, self._chosen(None, namespace).policy, system)

    def encode(
        self,
        texts: Iterable[str],
        *,
        namespace: str | None = None,
        system: str | None = None,
        progress: bool = False,
    ) -> list[str]:
        """Register chunks and compute their KV now; what is stored already is skipped.

        What :meth:`forget` drops meanwhile is neither stored nor registered, nor is what would be encoded
        behind that.

        Parameters
        ----------
        system : str, optional
            The text before a prompt's first chunk, as the model sees it; the encoders ``system`` and
            ``similar:n`` need it here.
        progress : bool
            Show a progress bar over tokens.

        Returns
        -------
        list of str
            Chunk ids of all texts, in order.

        Raises
        ------
        Cancelled
            If a :class:`ragcachekit.CancelScope` around it was; what was encoded before is kept.
        ValueError
            For an empty chunk, one longer than the model's context, or a missing ``system``.
        ModelChanged
            If the model is no longer the one that this object was made for.
        """
        return self._chunks.encode(texts, self._checked(namespace), system, progress)

    def forget(
        self,
        ids: Iterable[str] | None = None,
        *,
        texts: Iterable[str] | None = None,
        namespace: str | None = None,
    ) -> int:
        """Drop stored KV of chunks, and KV that was encoded behind them, from all tiers.

        Cached search results that name such a chunk go too, in every retriever that was given this engine.
        Delete the document from its index first: what a search finds is registered again.
        Work that began before this returns, in any thread, brings no forgotten chunk back. Until it is
        registered or encoded again, it is no chunk's neighbour either.
        Another process on the same disk folder keeps what its own host memory holds; its knowledge tree
        follows at the next request in the namespace.

        Parameters
        ----------
        ids : iterable of str, optional
            Chunk ids, as :meth:`encode` returned them. Their texts stay known as chunks: a later prompt that
            has one encodes it again.
        texts : iterable of str, optional
            Chunk texts; also forgets them as chunks to look for, in every form a chain may give them.
        namespace : str, optional
            With neither ids nor texts, all of it is dropped.

        Returns
        -------
        int
            Entries dropped.

        Raises
        ------
        StoreError
            If a tier cannot say that nothing is left; all others have forgotten. Forget again.
        """
        return self._chunks.forget(ids, texts, self._checked(namespace))

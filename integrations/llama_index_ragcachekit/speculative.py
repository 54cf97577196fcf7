"""A LlamaIndex query engine whose answer begins while its nodes are still searched for."""

from __future__ import annotations

import weakref
from typing import Any

from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks import CallbackManager
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_ragcachekit.llm import RagCacheLLM
from llama_index_ragcachekit.retriever import RagCacheRetriever
from llama_index_ragcachekit.synthesis import RagCacheSynthesizer
from ragcachekit import Speculation, SpeculativePipeline
from ragcachekit.frameworks import check_pair


class SpeculativeQueryEngine(RetrieverQueryEngine):
    """A ``RetrieverQueryEngine`` that starts to answer before the search has ended; its answers are the same.

    The first prompt of the nodes of each stage of the search is submitted, and cancelled when they change
    (RAGCache, section 5.3); postprocessors run at every stage. A question in the query cache needs neither.
    Other stores than :class:`RagCacheVectorStore` have no stages. :class:`ChunkReuseEvent` tells.

    The retriever and the synthesizer's :class:`RagCacheLLM` need the same engine; TypeError or ValueError for
    others. ``max_waiting`` is that of :class:`ragcachekit.SpeculativePipeline`, whose figures are in
    ``pipeline.stats``.

    >>> engine = SpeculativeQueryEngine(retriever, RagCacheSynthesizer(llm))  # doctest: +SKIP
    """

    def __init__(
        self,
        retriever: RagCacheRetriever,
        response_synthesizer: RagCacheSynthesizer,
        node_postprocessors: list[BaseNodePostprocessor] | None = None,
        callback_manager: CallbackManager | None = None,
        *,
        max_waiting: int = 1,
    ) -> None:
        if not isinstance(response_synthesizer, RagCacheSynthesizer):
            given = type(response_synthesizer).__name__
            raise TypeError(f"SpeculativeQueryEngine needs RagCacheSynthesizer(llm), got {given}")
        self._llm = llm = response_synthesizer.llm
        check_pair("SpeculativeQueryEngine", (retriever, RagCacheRetriever), (llm, RagCacheLLM))
        super().__init__(retriever, response_synthesizer, node_postprocessors, callback_manager)
        self.pipeline = SpeculativePipeline(llm.rag, max_waiting=max_waiting)

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        with self._begin() as speculation:
            response = self._asking(query_bundle, speculation)._query(query_bundle)
            return _followed(response, speculation)

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        with self._begin() as speculation:
            response = await self._asking(query_bundle, speculation)._aquery(query_bundle)
            return _followed(response, speculation)

    def _begin(self) -> Speculation:
        return self.pipeline.begin(**self._llm.call_options({}))

    def _asking(self, query_bundle: QueryBundle, speculation: Speculation) -> RetrieverQueryEngine:
        """The plain engine of one question."""
        retriever: Any = self._retriever
        synthesizer: Any = self._response_synthesizer

        def prompt_of(nodes: tuple[NodeWithScore, ...]) -> Any:
            kept = self._apply_node_postprocessors(list(nodes), query_bundle)
            return synthesizer.first_prompt(query_bundle.query_str, kept)

        return RetrieverQueryEngine(
            retriever.watched(speculation.watch(prompt_of)),
            synthesizer.with_llm(self._llm.speculating(speculation)),
            self._node_postprocessors,
            self.callback_manager,
        )


def _followed(response: RESPONSE_TYPE, speculation: Speculation) -> RESPONSE_TYPE:
    """The response; what is not read any more is cancelled."""
    stream = getattr(response, "response_gen", None)
    if stream is None:
        speculation.close()
    else:  # submitted when it is first read
        weakref.finalize(stream, speculation.close).atexit = False
    return response

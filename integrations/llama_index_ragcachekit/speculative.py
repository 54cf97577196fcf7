"""A LlamaIndex query engine whose answer begins while its nodes are still searched for."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks import CallbackManager
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index_ragcachekit.llm import RagCacheLLM
from llama_index_ragcachekit.retriever import RagCacheRetriever
from llama_index_ragcachekit.synthesis import RagCacheSynthesizer
from ragcachekit import SpeculativePipeline
from ragcachekit.engine.speculation import Speculation


class SpeculativeQueryEngine(RetrieverQueryEngine):
    """A ``RetrieverQueryEngine`` that starts to answer before the search has ended; its answers are the same.

    While the index is searched in stages, the first prompt of the nodes found so far is submitted, and
    cancelled when they change (RAGCache, section 5.3). Postprocessors are called for every stage. A question
    in the query cache needs no search and no speculation. Other stores than :class:`RagCacheVectorStore` are
    searched in one go. :class:`ChunkReuseEvent` says how it was.

    Parameters
    ----------
    retriever : RagCacheRetriever
    response_synthesizer : RagCacheSynthesizer, optional
        Its model is on the same engine as the retriever; by default around ``Settings.llm``.
    node_postprocessors, callback_manager : optional
        As for every ``RetrieverQueryEngine``.
    max_waiting : int
        As of :class:`ragcachekit.SpeculativePipeline`, whose figures are in ``pipeline.stats``.

    Raises
    ------
    TypeError, ValueError
        For another retriever, synthesizer or model, or two engines.
    """

    def __init__(
        self,
        retriever: RagCacheRetriever,
        response_synthesizer: RagCacheSynthesizer | None = None,
        node_postprocessors: list[BaseNodePostprocessor] | None = None,
        callback_manager: CallbackManager | None = None,
        *,
        max_waiting: int = 1,
    ) -> None:
        synthesizer = response_synthesizer or RagCacheSynthesizer(callback_manager=callback_manager)
        for name, given, kind in (
            ("retriever", retriever, RagCacheRetriever),
            ("response_synthesizer", synthesizer, RagCacheSynthesizer),
            ("the synthesizer's llm", getattr(synthesizer, "_llm", None), RagCacheLLM),
        ):
            if not isinstance(given, kind):
                raise TypeError(
                    f"SpeculativeQueryEngine needs a {kind.__name__} as {name}, got {type(given).__name__}"
                )
        if retriever.query_cache.rag is not synthesizer.llm.rag:
            raise ValueError(
                "the retriever and the synthesizer's llm need the same engine: give rag= to both"
            )
        super().__init__(retriever, synthesizer, node_postprocessors, callback_manager)
        self.pipeline = SpeculativePipeline(synthesizer.llm.rag, max_waiting=max_waiting)

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        speculation, engine = self._begin(query_bundle)
        try:
            return _followed(engine._query(query_bundle), speculation)
        except BaseException:
            speculation.close()
            raise

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        speculation, engine = self._begin(query_bundle)
        try:
            return _followed(await engine._aquery(query_bundle), speculation)
        except BaseException:
            speculation.close()
            raise

    def _begin(self, query_bundle: QueryBundle) -> tuple[Speculation, RetrieverQueryEngine]:
        """One question's speculation, and the plain engine that asks it."""
        synthesizer: Any = self._response_synthesizer
        speculation = self.pipeline.begin(**synthesizer.llm.call_options({}))

        def on_stage(nodes: tuple[NodeWithScore, ...] | None) -> None:
            if nodes is None:
                speculation.search = "not staged"
                return
            with suppress(Exception):  # of these nodes; the prompt of the last ones is made once more
                kept = self._apply_node_postprocessors(list(nodes), query_bundle)
                speculation.offer(synthesizer.first_prompt(query_bundle.query_str, kept))

        retriever: Any = self._retriever
        return speculation, RetrieverQueryEngine(
            retriever.watched(on_stage),
            synthesizer.with_llm(synthesizer.llm.speculating(speculation)),
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

"""Nodes into prompts as they are: what LlamaIndex would cut, join or replace stays a chunk that is found."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, Self

from llama_index.core.indices.prompt_helper import DEFAULT_PADDING, PromptHelper
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.response_synthesizers import CompactAndRefine
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from llama_index.core.settings import Settings
from llama_index.core.tools import BaseTool
from pydantic import Field, SkipValidation, model_validator

from llama_index_ragcachekit.llm import RagCacheLLM
from llama_index_ragcachekit.search import LLAMA_INDEX
from ragcachekit.frameworks import NotPickled, check_engine, refuse_cache

SEPARATOR = "\n\n"
TEMPLATE_TOKENS = 64
"""Left free in a prompt for the control tokens of chat templates, which LlamaIndex does not count."""


class RagCachePromptHelper(PromptHelper):
    """Puts as many whole nodes into a prompt as fit, unaltered, counted by the model's own tokenizer.

    LlamaIndex's own helper joins all nodes and cuts the text where a prompt is full; the node there is
    then no chunk any more. Only a node that is longer than a prompt is cut here.

    For any response mode: ``get_response_synthesizer(prompt_helper=...)``, or ``Settings.prompt_helper`` for
    everything, chat engines included.

    >>> helper = RagCachePromptHelper.from_llm(llm)  # doctest: +SKIP
    >>> get_response_synthesizer(llm, helper, response_mode="tree_summarize")  # doctest: +SKIP
    """

    @classmethod
    def from_llm(cls, llm: RagCacheLLM, **settings: Any) -> Self:
        """A helper with the model's context window (tokens), answer length and tokenizer.

        ``settings`` are other arguments of ``PromptHelper``.
        """
        metadata, count = llm.metadata, llm.rag.count_tokens
        defaults: dict[str, Any] = {
            "context_window": metadata.context_window - TEMPLATE_TOKENS,
            "num_output": metadata.num_output,
            "tokenizer": lambda text: list(range(count(text))),
        }
        return cls(**defaults | settings)

    def repack(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = DEFAULT_PADDING,
        llm: Any = None,
        tools: list[BaseTool] | None = None,
    ) -> list[str]:
        """Texts joined by blank lines, as few as possible, none longer than the prompt leaves room for.

        ValueError where the template and the answer leave no room.
        """
        splitter = self.get_text_splitter_given_prompt(prompt, padding=padding, llm=llm, tools=tools)
        packs: list[str] = []
        for text in filter(str.strip, text_chunks):
            joined = packs[-1] + SEPARATOR + text if packs else text
            if self._token_counter.get_string_tokens(joined) <= splitter.chunk_size:
                packs[-1:] = [joined]
            elif self._token_counter.get_string_tokens(text) <= splitter.chunk_size:
                packs.append(text)
            else:
                packs += splitter.split_text(text)
        return packs or [""]


class RagCachePostprocessor(NotPickled, BaseNodePostprocessor):
    """Registers the nodes' bare texts with the engine and returns the nodes as they are.

    For the end of ``node_postprocessors`` where nodes are not what :class:`RagCacheRetriever` found: sentence
    windows (``MetadataReplacementPostProcessor``), retrievers that merge nodes, and those that are not
    wrapped. What it registered, such as a window, is forgotten by its own text (``rag.forget``).

    ``namespace`` is the engine's own if None. ValueError where ``rag`` is no engine.
    """

    rag: SkipValidation[Any] = Field(exclude=True, repr=False)
    namespace: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _require_engine(cls, values: dict[str, Any]) -> dict[str, Any]:
        refuse_cache(values)
        check_engine(cls.__name__, values.get("rag"))
        return values

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        found = [item for item in nodes if LLAMA_INDEX.text(item).strip()]
        texts, sources = list(map(LLAMA_INDEX.text, found)), list(map(LLAMA_INDEX.source, found))
        self.rag.register(texts, namespace=self.namespace, sources=sources)
        return nodes


class RagCacheSynthesizer(CompactAndRefine):
    """Answers from whole nodes: puts as many as fit into a prompt, refines with the others.

    COMPACT with a :class:`RagCachePromptHelper`. Where postprocessors replaced the text of nodes, put a
    :class:`RagCachePostprocessor` after them.

    ``llm`` is a :class:`RagCacheLLM`, or a structured model around one (TypeError for another), and
    ``Settings.llm`` by default. ``settings`` are those of LlamaIndex's ``CompactAndRefine``, such as
    ``streaming``, ``text_qa_template`` and ``output_cls``.

    >>> synthesizer = RagCacheSynthesizer(llm)  # doctest: +SKIP
    >>> RetrieverQueryEngine.from_args(retriever, llm, synthesizer)  # doctest: +SKIP
    """

    def __init__(self, llm: Any = None, **settings: Any) -> None:
        llm = llm or Settings.llm
        model = getattr(llm, "llm", llm)
        if not isinstance(model, RagCacheLLM):
            raise TypeError(f"RagCacheSynthesizer needs llm=RagCacheLLM(...), got {type(llm).__name__}")
        defaults: dict[str, Any] = {
            "prompt_helper": RagCachePromptHelper.from_llm(model),
            "response_padding_size": model.max_tokens,
        }
        super().__init__(llm, **defaults | settings)

    @property
    def llm(self) -> Any:
        """The model that answers."""
        return self._llm

    def with_llm(self, llm: Any) -> Self:
        """A copy around another model."""
        synthesizer = copy(self)
        synthesizer._llm = llm
        if self._program_factory == self._default_program_factory:  # which has the model of its object
            synthesizer._program_factory = synthesizer._default_program_factory
        return synthesizer

    def first_prompt(self, question: str, nodes: Sequence[NodeWithScore]) -> Any:
        """What the model submits first for a question, unless the answer is structured."""
        texts = [item.node.get_content(metadata_mode=MetadataMode.LLM) for item in nodes]
        first, *_ = self._make_compact_text_chunks(question, texts)
        template = self._text_qa_template.partial_format(query_str=question)
        return self.llm.prompt_of(template, context_str=first)

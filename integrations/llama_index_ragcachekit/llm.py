"""A LlamaIndex model on :class:`ragcachekit.RagCache`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import closing
from typing import Any, Self, TypeVar

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.core.prompts import BasePromptTemplate
from pydantic import Field, SkipValidation, model_validator

from llama_index_ragcachekit.messages import as_chat, as_completion, to_dicts
from ragcachekit import Answer, agenerate, astream
from ragcachekit.frameworks import GenerationSettings, NotPickled, check_engine, model_name

Response = TypeVar("Response")


class RagCacheLLM(NotPickled, GenerationSettings, CustomLLM):
    """Chat and completion model that reuses the KV of chunks which it finds inside the prompt.

    Works in a ``RetrieverQueryEngine`` with its default prompts. Every response carries the report as
    ``raw`` and token counts as ``additional_kwargs`` (``cache_read_tokens``: prompt tokens whose KV was
    really reused). A query engine drops both; :class:`ChunkReuseEvent`, sent for every answer, has them.

    Tools are not called natively: ``ReActAgent`` prompts for them. Structured output
    (``as_structured_llm``, ``structured_predict``) goes through the prompt, and an answer that is not of
    the schema is a ValueError.

    For most fields see :class:`~ragcachekit.frameworks.GenerationSettings`. ``context_window`` (tokens of
    prompt and answer) and ``is_chat_model`` (whether query engines send messages) come from the model if
    None. A chat model gets the prompt of ``complete`` as a user's message, unless it is ``formatted``, or
    ``completion_to_prompt`` is given.

    Examples
    --------
    >>> llm = RagCacheLLM(rag=rag, max_tokens=64)  # doctest: +SKIP
    >>> engine = RetrieverQueryEngine.from_args(retriever, llm=llm)  # doctest: +SKIP
    """

    rag: SkipValidation[Any] = Field(exclude=True, repr=False)
    context_window: int | None = Field(default=None, gt=0)
    is_chat_model: bool | None = None

    @model_validator(mode="after")
    def _require_engine(self) -> Self:
        check_engine(type(self).__name__, self.rag)
        return self

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex's events show this model."""
        return "RagCacheLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """What query engines ask: context window, answer length, whether to send messages."""
        config = getattr(self.rag.model, "config", None)
        limit: int = getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT_WINDOW
        chat = self.is_chat_model
        if chat is None:
            chat = bool(getattr(self.rag.tokenizer, "chat_template", None))
        return LLMMetadata(
            context_window=self.context_window or limit,
            num_output=self.max_tokens,
            is_chat_model=chat,
            model_name=model_name(self.rag.model),
        )

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete one prompt."""
        return self._answer(self._completion(prompt, formatted), kwargs)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Complete one prompt piece by piece; the last response has the report."""
        return self._pieces(self._completion(prompt, formatted), kwargs, lambda response: response)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """:meth:`complete` without blocking the loop."""
        return await self._aanswer(self._completion(prompt, formatted), kwargs)

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """:meth:`stream_complete` without blocking the loop."""
        return self._apieces(self._completion(prompt, formatted), kwargs, lambda response: response)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        return as_chat(self._answer(self._chat(messages), kwargs))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a conversation piece by piece; the last response has the report."""
        return self._pieces(self._chat(messages), kwargs, as_chat)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """:meth:`chat` without blocking the loop."""
        return as_chat(await self._aanswer(self._chat(messages), kwargs))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """:meth:`stream_chat` without blocking the loop."""
        return self._apieces(self._chat(messages), kwargs, as_chat)

    def prompt_of(self, template: BasePromptTemplate, **values: Any) -> str | list[dict[str, Any]]:
        """What ``predict`` submits to the engine."""
        if self.metadata.is_chat_model:
            return self._chat(self._get_messages(template, **values))
        return self._completion(self._get_prompt(template, **values), True)

    def _completion(self, prompt: str, formatted: bool) -> str | list[dict[str, Any]]:
        convert = self.completion_to_prompt
        if not formatted and convert not in (None, default_completion_to_prompt):
            return convert(prompt)
        if formatted or not self.metadata.is_chat_model:
            return prompt
        return [{"role": "user", "content": prompt}]

    def _chat(self, messages: Sequence[ChatMessage]) -> str | list[dict[str, Any]]:
        if self.metadata.is_chat_model:
            return to_dicts(messages)
        assert self.messages_to_prompt is not None  # LLM's validator fills it in
        return self.messages_to_prompt(messages)

    def _answer(self, prompt: Any, overrides: dict[str, Any]) -> CompletionResponse:
        request = self._engine.submit(prompt, **{"wait": True, **self._options(overrides)})
        return self._response(request.result())

    async def _aanswer(self, prompt: Any, overrides: dict[str, Any]) -> CompletionResponse:
        return self._response(await agenerate(self._engine, prompt, **self._options(overrides)))

    def _pieces(
        self, prompt: Any, overrides: dict[str, Any], form: Callable[[CompletionResponse], Response]
    ) -> Generator[Response, None, None]:
        text, request = "", self._engine.submit(prompt, **{"wait": True, **self._options(overrides)})
        with closing(request.stream()) as stream:
            for piece in stream:
                text += piece
                yield form(CompletionResponse(text=text, delta=piece))
        yield form(self._response(request.result(0), delta=""))

    async def _apieces(
        self, prompt: Any, overrides: dict[str, Any], form: Callable[[CompletionResponse], Response]
    ) -> AsyncGenerator[Response, None]:
        text = ""
        async with astream(self._engine, prompt, **self._options(overrides)) as stream:
            async for piece in stream:
                text += piece
                yield form(CompletionResponse(text=text, delta=piece))
            yield form(self._response(stream.answer, delta=""))

    def _response(self, answer: Answer, delta: str | None = None) -> CompletionResponse:
        return as_completion(answer, self._report(answer), delta)

    def _options(self, overrides: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments of ``RagCache.generate``: this model's settings, overridden for one call."""
        if overrides.get("tools"):
            raise ValueError("RagCacheLLM does not call tools natively; let a ReActAgent prompt for them")
        return self.call_options(overrides)

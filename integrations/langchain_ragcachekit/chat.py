"""A LangChain chat model on :class:`ragcachekit.RagCache`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from langchain_ragcachekit.messages import to_dicts
from langchain_ragcachekit.settings import EngineSettings, together
from ragcachekit import Answer, CancelScope, agenerate


class ChatRagCache(EngineSettings, BaseChatModel):
    """Chat model that reuses the KV of chunks which it finds inside the prompt.

    Chunks that a :class:`RagCacheRetriever` returned, or that ``rag.encode`` was given, are recognised in the
    messages that the chain's template assembled. ``usage_metadata["input_token_details"]["cache_read"]`` is
    the number of prompt tokens whose KV was reused; ``response_metadata["ragcachekit"]`` is the report.

    Examples
    --------
    >>> llm = ChatRagCache(cache=rag, max_tokens=64)  # doctest: +SKIP
    >>> llm.invoke("Where does Ada live?").usage_metadata["input_token_details"]  # doctest: +SKIP
    {'cache_read': 412}
    """

    def batch(
        self, inputs: Any, config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[AIMessage]:
        """Answer several prompts together; Ctrl-C ends those that run and those that wait."""
        options = {"return_exceptions": return_exceptions, **kwargs}
        return CancelScope().run(super().batch, inputs, together(config, len(inputs)), **options)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        options = {"wait": True, **self._call_options(stop, kwargs)}
        return self._result(self.rag.submit(to_dicts(messages), **options).result())

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        options = self._call_options(stop, kwargs)
        return self._result(await agenerate(self.rag, to_dicts(messages), **options))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        return self._chunks(to_dicts(messages), stop, run_manager, kwargs)

    def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        return self._achunks(to_dicts(messages), stop, run_manager, kwargs)

    def _result(self, answer: Answer) -> ChatResult:
        message = AIMessage(content=answer.text, **self._metadata(answer))
        info = {"finish_reason": answer.report.finish_reason}
        return ChatResult(generations=[ChatGeneration(message=message, generation_info=info)])

    def _chunk(self, text: str, answer: Answer | None = None) -> ChatGenerationChunk:
        if answer is None:
            return ChatGenerationChunk(message=AIMessageChunk(content=text))
        message = AIMessageChunk(content="", chunk_position="last", **self._metadata(answer))
        return ChatGenerationChunk(message=message)

    def _metadata(self, answer: Answer) -> dict[str, Any]:
        link, output = answer.report.link, answer.report.output_tokens
        usage = UsageMetadata(
            input_tokens=link.prompt_tokens,
            output_tokens=output,
            total_tokens=link.prompt_tokens + output,
            input_token_details=InputTokenDetails(cache_read=link.reused_tokens),
        )
        response = {
            "model_name": self.model_name,
            "model_provider": "ragcachekit",
            "finish_reason": answer.report.finish_reason,
            "ragcachekit": answer.report.to_dict(),
        }
        return {"usage_metadata": usage, "response_metadata": response}

    @property
    def _llm_type(self) -> str:
        return "ragcachekit-chat"

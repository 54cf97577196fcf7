"""A LangChain language model for plain prompts on :class:`ragcachekit.RagCache`."""

from __future__ import annotations

import asyncio
from typing import Any

from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.runnables import Runnable

from langchain_ragcachekit.settings import EngineSettings
from ragcachekit import Answer, ToolCallReader, agenerate


class RagCacheLLM(EngineSettings, BaseLLM):
    """Text completion that reuses the KV of chunks which it finds inside the prompt.

    Several prompts of one call are answered together. ``generation_info`` of each answer has
    ``finish_reason``, ``cache_read`` (prompt tokens whose KV was really reused) and the report.

    Examples
    --------
    >>> llm = RagCacheLLM(cache=rag, max_tokens=64)  # doctest: +SKIP
    >>> llm.invoke("Context: ...\\nQuestion: ...\\nAnswer:")  # doctest: +SKIP
    """

    def with_structured_output(self, schema: Any, **kwargs: Any) -> Runnable[Any, Any]:
        """NotImplementedError: a text prompt has no template for a schema."""
        raise NotImplementedError(
            "RagCacheLLM completes text: put a parser after it (llm | PydanticOutputParser(...)), or use "
            "ChatRagCache"
        )

    def _generate(
        self, prompts: list[str], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> LLMResult:
        return self._result(self.rag.generate_batch(prompts, **self._call_options(stop, kwargs)))

    async def _agenerate(
        self, prompts: list[str], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> LLMResult:
        options = self._call_options(stop, kwargs)
        tasks = [asyncio.ensure_future(agenerate(self.rag, prompt, **options)) for prompt in prompts]
        try:
            return self._result(await asyncio.gather(*tasks))
        finally:  # one failed, or all were cancelled: the others end before their next layer
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _chunk(
        self, text: str, answer: Answer | None = None, reader: ToolCallReader | None = None
    ) -> GenerationChunk:
        return GenerationChunk(text=text, generation_info=_info(answer) if answer else None)

    def _result(self, answers: list[Answer]) -> LLMResult:
        generations = [[Generation(text=a.text, generation_info=_info(a))] for a in answers]
        prompt = sum(a.report.link.prompt_tokens for a in answers)
        completion = sum(a.report.output_tokens for a in answers)
        counts = {"prompt_tokens": prompt, "completion_tokens": completion}
        usage = {**counts, "total_tokens": prompt + completion}
        output = {"token_usage": usage, "model_name": self.model_name}
        return LLMResult(generations=generations, llm_output=output)

    @property
    def _llm_type(self) -> str:
        return "ragcachekit"


def _info(answer: Answer) -> dict[str, Any]:
    return {
        "finish_reason": answer.report.finish_reason,
        "cache_read": answer.report.link.reused_tokens,
        "ragcachekit": answer.report.to_dict(),
    }

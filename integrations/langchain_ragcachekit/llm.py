"""The engine and its settings in both of LangChain's models, and the model for plain prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from typing import Any, Self

from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.runnables.config import RunnableConfig, get_config_list
from pydantic import Field, SkipValidation, model_validator

from ragcachekit import Answer, ToolCallReader, agenerate, astream
from ragcachekit.frameworks import GenerationSettings, check_engine, model_name

IGNORED = frozenset({"api_key", "base_url", "max_retries", "timeout"})
"""LangChain's standard parameters for remote services; a model in this process has no use for them."""
NOT_OPTIONS = frozenset({"stream", "model", "tools", "tool_choice"})
"""Arguments of calls that are not passed on as they are."""
MAX_THREADS = 64
"""Prompts of a batch at a time by default: these threads only wait for the engine."""


def together(config: Any, count: int) -> list[RunnableConfig]:
    """Configs of ``count`` prompts that run at once, up to :data:`MAX_THREADS`."""
    configs = get_config_list(config, count)
    if configs and configs[0].get("max_concurrency") is None:
        configs[0]["max_concurrency"] = min(count, MAX_THREADS)
    return configs


class EngineSettings(GenerationSettings):
    """The engine, and the generation settings that every call starts from.

    ``rag`` is the :class:`ragcachekit.RagCache`; ``cache`` is LangChain's own cache of whole answers. For
    the others see :class:`~ragcachekit.frameworks.GenerationSettings`.
    """

    rag: SkipValidation[Any] = Field(default=None, exclude=True, repr=False)
    streaming: bool = False

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name not in IGNORED}

    @model_validator(mode="after")
    def _require_engine(self) -> Self:
        check_engine(type(self).__name__, self.rag)
        return self

    def get_num_tokens(self, text: str) -> int:
        """Tokens of ``text`` under the model's own tokenizer."""
        return int(self.rag.count_tokens(text))

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        model: Any = super()
        params: LangSmithParams = model._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = "ragcachekit"
        return params

    @property
    def model_name(self) -> str:
        """Hub id, folder or class of the engine's model."""
        return model_name(self.rag.model)

    @property
    def _identifying_params(self) -> dict[str, Any]:
        # LangChain keys its cache of whole answers by these: tenants and policies must not meet there.
        settings = self.model_dump(include={"max_tokens", "temperature", "top_p", "top_k", "generate_kwargs"})
        return {
            "model_name": self.model_name,
            "fingerprint": getattr(self.rag, "fingerprint", None),
            "namespace": self.namespace or self.rag.namespace,
            "policy": str(self.policy or self.rag.policy),
            "stop_strings": self.stop,  # LangChain overwrites "stop" with the call's own, None as well
            **settings,
        }

    def _prompt(self, prompt: Any) -> Any:
        return prompt

    def _chunk(self, text: str, answer: Answer | None = None, reader: ToolCallReader | None = None) -> Any:
        """A piece of an answer in LangChain's form; with the answer, the last one."""
        raise NotImplementedError

    def _schemas(self, tools: Any, choice: Any) -> list[dict[str, Any]]:
        if tools:
            raise ValueError(f"{type(self).__name__} does not call tools; ChatRagCache does")
        return []

    def _stream(
        self, prompt: Any, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[Any]:
        options = {"wait": True, **self._call_options(stop, kwargs)}
        reader = ToolCallReader(options.get("tools", ()))
        request = self._engine.submit(self._prompt(prompt), **options)
        with closing(request.stream()) as stream:
            for piece in filter(None, map(reader.push, stream)):
                chunk = self._chunk(piece)
                if run_manager:
                    run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
            yield self._chunk(reader.rest(), request.result(), reader)

    async def _astream(
        self, prompt: Any, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        options = self._call_options(stop, kwargs)
        reader = ToolCallReader(options.get("tools", ()))
        async with astream(self._engine, self._prompt(prompt), **options) as stream:
            async for raw in stream:
                if not (piece := reader.push(raw)):
                    continue
                chunk = self._chunk(piece)
                if run_manager:
                    await run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
            yield self._chunk(reader.rest(), stream.answer, reader)

    def _call_options(self, stop: list[str] | None, overrides: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments of ``RagCache.generate``: these settings, overridden for one call."""
        given = {name: value for name, value in overrides.items() if name not in NOT_OPTIONS}
        if (model := overrides.get("model")) not in (None, self.model_name):
            raise ValueError(f"this engine holds {self.model_name!r}; build another RagCache for {model!r}")
        if tools := self._schemas(overrides.get("tools"), overrides.get("tool_choice")):
            given["tools"] = tools
        return self.call_options(given if stop is None else given | {"stop": stop})


class RagCacheLLM(EngineSettings, BaseLLM):
    """Text completion that reuses the KV of chunks which it finds inside the prompt.

    Several prompts of one call are answered together. ``generation_info`` of each answer has
    ``finish_reason``, ``cache_read`` (prompt tokens whose KV was really reused) and the report.

    Examples
    --------
    >>> llm = RagCacheLLM(rag=rag, max_tokens=64)  # doctest: +SKIP
    >>> llm.invoke("Context: ...\\nQuestion: ...\\nAnswer:")  # doctest: +SKIP
    """

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

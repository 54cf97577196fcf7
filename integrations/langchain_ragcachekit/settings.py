"""The engine and how it generates: what the chat model and the plain language model share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from typing import Any, Self

from langchain_core.caches import BaseCache
from langchain_core.language_models.base import LangSmithParams
from langchain_core.runnables.config import RunnableConfig, get_config_list
from pydantic import BaseModel, Field, SkipValidation, model_validator

from ragcachekit import Answer, CancelScope, ToolCallReader, astream
from ragcachekit.frameworks import (
    DEFAULT_MAX_TOKENS,
    SETTINGS,
    check_arguments,
    check_engine,
    generation_options,
    model_name,
    with_max_tokens,
)

IGNORED = frozenset({"api_key", "base_url", "max_retries", "timeout"})
"""LangChain's standard parameters for remote services; a model in this process has no use for them."""
MAX_THREADS = 64
"""Prompts of a batch at a time by default: these threads only wait for the engine."""


def together(config: Any, count: int) -> list[RunnableConfig]:
    """Configs of ``count`` prompts that run at once, up to :data:`MAX_THREADS`."""
    configs = get_config_list(config, count)
    if configs and configs[0].get("max_concurrency") is None:
        configs[0]["max_concurrency"] = min(count, MAX_THREADS)
    return configs


class EngineSettings(BaseModel):
    """The engine, and the generation settings that every call starts from.

    ``cache=`` takes the :class:`ragcachekit.RagCache`. LangChain has a field of the same name for its
    own cache of whole answers: a ``BaseCache`` or a bool given there has that meaning, and the
    engine is then passed as ``rag=``.

    ``namespace`` and ``policy`` are the engine's own if None. ``max_new_tokens`` is accepted for
    ``max_tokens``. A ``temperature`` of None or 0 is greedy; ``top_p`` and ``top_k`` count only when
    sampling. Answers end before the texts in ``stop``. ``generate_kwargs`` is anything else for
    transformers' ``generate``.
    """

    cache: Any = Field(default=None, exclude=True, repr=False)
    rag: SkipValidation[Any] = Field(default=None, exclude=True, repr=False)
    namespace: str | None = None
    policy: str | None = None
    max_tokens: int = Field(default=DEFAULT_MAX_TOKENS, gt=0)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, gt=0)
    stop: list[str] | None = None
    streaming: bool = False
    generate_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _sort_arguments(cls, values: dict[str, Any]) -> dict[str, Any]:
        values = {name: value for name, value in values.items() if name not in IGNORED}
        values = check_arguments(values, cls.model_fields.keys())
        if values.get("max_tokens", 0) is None:
            del values["max_tokens"]
        if not isinstance(values.get("cache"), BaseCache | bool | None):
            if values.get("rag") is not None:
                raise ValueError("cache= and rag= were both given an engine; pass it once")
            values["rag"] = values.pop("cache")
        return values

    @model_validator(mode="after")
    def _require_engine(self) -> Self:
        check_engine(type(self).__name__, self.rag)
        return self

    def batch_as_completed(
        self, inputs: Any, config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> Iterator[tuple[int, Any]]:
        """Answer several prompts together; Ctrl-C, or ending early, ends those that run or wait."""
        options = {"return_exceptions": return_exceptions, **kwargs}
        batch: Any = super()
        configs = together(config, len(inputs))
        return CancelScope().iterate(batch.batch_as_completed(inputs, configs, **options))

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
        """Name or path of the engine's model; its class where it has none."""
        return model_name(self.rag)

    @property
    def _identifying_params(self) -> dict[str, Any]:
        # LangChain keys its cache of whole answers by these: tenants and policies must not meet there.
        settings = self.model_dump(
            include={"max_tokens", "temperature", "top_p", "top_k", "stop", "generate_kwargs"}
        )
        return {
            "model_name": self.model_name,
            "fingerprint": getattr(self.rag, "fingerprint", None),
            "namespace": self.namespace or self.rag.namespace,
            "policy": str(self.policy or self.rag.policy),
            **settings,
        }

    def _prompt(self, prompt: Any) -> Any:
        """A prompt of LangChain's as the engine takes it."""
        return prompt

    def _chunk(self, text: str, answer: Answer | None = None, reader: ToolCallReader | None = None) -> Any:
        """A piece of an answer in LangChain's form; with the answer, the last one."""
        raise NotImplementedError

    def _schemas(self, tools: Any, choice: Any) -> list[dict[str, Any]]:
        """Tools in the form that chat templates take."""
        if tools:
            raise ValueError(f"{type(self).__name__} does not call tools; ChatRagCache does")
        return []

    def _stream(
        self, prompt: Any, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[Any]:
        options = {"wait": True, **self._call_options(stop, kwargs)}
        reader = ToolCallReader(options.get("tools", ()))
        request = self.rag.submit(self._prompt(prompt), **options)
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
        async with astream(self.rag, self._prompt(prompt), **options) as stream:
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
        overrides = with_max_tokens(overrides)
        overrides.pop("stream", None)
        if (model := overrides.pop("model", None)) not in (None, self.model_name):
            raise ValueError(f"this engine holds {self.model_name!r}; build another RagCache for {model!r}")
        tools = self._schemas(overrides.pop("tools", None), overrides.pop("tool_choice", None))
        given = {name: overrides.pop(name) for name in SETTINGS if name in overrides}
        own = {name: getattr(self, name) for name in ("rag", *SETTINGS)}
        chosen = EngineSettings.model_validate({**own, **given, **({} if stop is None else {"stop": stop})})
        options = generation_options({name: getattr(chosen, name) or None for name in SETTINGS})
        return {**options, **self.generate_kwargs, **overrides, **({"tools": tools} if tools else {})}

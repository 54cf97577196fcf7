"""A LangChain chat model on :class:`ragcachekit.RagCache`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, merge_message_runs
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableLambda, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from pydantic import BaseModel

from langchain_ragcachekit.llm import EngineSettings, together
from langchain_ragcachekit.messages import as_schemas, to_dicts, tool_fields
from ragcachekit import Answer, CancelScope, ToolCallReader, agenerate

UNCONSTRAINED = frozenset({"strict", "parallel_tool_calls"})
"""Arguments of ``bind_tools`` for services that constrain decoding; here they change nothing."""

METHODS = ("json_schema", "function_calling", "json_mode")

INSTRUCTIONS = (
    "\n\nAnswer with one JSON object and nothing else: no explanation and no code fence. It has values for "
    "this JSON schema:\n"
)
"""Asks for structured output."""


class ChatRagCache(EngineSettings, BaseChatModel):  # type: ignore[misc]  # _stream names its prompt
    """Chat model that reuses the KV of chunks which it finds inside the prompt.

    Chunks that a :class:`RagCacheRetriever` returned, or that ``rag.encode`` was given, are recognised in the
    messages that the chain's template assembled. ``usage_metadata["input_token_details"]["cache_read"]`` is
    the number of prompt tokens whose KV was reused; ``response_metadata["ragcachekit"]`` is the report.

    Examples
    --------
    >>> llm = ChatRagCache(rag=rag, max_tokens=64)  # doctest: +SKIP
    >>> llm.invoke("Where does Ada live?").usage_metadata["input_token_details"]  # doctest: +SKIP
    {'cache_read': 412}
    """

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: Any = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools, which the chat template shows it; calls are in the answer's ``tool_calls``.

        What looks like a call and cannot be read is in ``invalid_tool_calls``. NotImplementedError where the
        chat template does not render tools, ValueError for a ``tool_choice`` beside "auto" and "none".
        """
        schemas = self._schemas(tools, tool_choice)
        kwargs = {name: value for name, value in kwargs.items() if name not in UNCONSTRAINED}
        return self.bind(**({"tools": schemas} if schemas else {}), **kwargs)

    def with_structured_output(
        self,
        schema: Any,
        *,
        include_raw: bool = False,
        method: str = "json_schema",
        **kwargs: Any,
    ) -> Runnable[Any, Any]:
        """The model and a parser: an object of a Pydantic class, else a dict.

        With ``strict=True``, JSON that does not fit cannot be written (not for function_calling; see
        ``json_schema`` of :meth:`ragcachekit.RagCache.submit`). Else an answer that does not fit raises
        OutputParserException, or is the ``parsing_error`` of a dict with ``include_raw``.

        Parameters
        ----------
        method : {"json_schema", "function_calling", "json_mode"}
            With the schema at the end of the prompt; as a tool (see :meth:`bind_tools`), and None if the
            model does not call it; or with a prompt that asks for JSON by itself.
        """
        if method not in METHODS:
            raise ValueError(f"method must be json_schema, function_calling or json_mode, got {method!r}")
        if unknown := sorted(kwargs.keys() - {"strict"}):
            raise ValueError(f"unknown arguments {', '.join(unknown)}")
        tracing = {"ls_structured_output_format": {"kwargs": {"method": method}, "schema": schema}}
        is_model = isinstance(schema, type) and issubclass(schema, BaseModel)
        parser: Any = PydanticOutputParser(pydantic_object=schema) if is_model else JsonOutputParser()
        wanted, strict = {"type": "object"}, kwargs.get("strict")
        if method == "json_schema":
            wanted = convert_to_json_schema(schema, strict=strict)
        llm: Runnable[Any, Any] = self.bind(**tracing, **({"json_schema": wanted} if strict else {}))
        if method == "function_calling":
            name = convert_to_openai_tool(schema)["function"]["name"]
            parser = JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
            if is_model:
                parser = PydanticToolsParser(tools=[schema], first_tool_only=True)
            llm = self.bind_tools([schema], **tracing)
        elif method == "json_schema":
            text = INSTRUCTIONS + json.dumps(wanted, ensure_ascii=False)
            llm = RunnableLambda(partial(self._with_instructions, text)) | llm
        if not include_raw:
            parsed: Runnable[Any, Any] = llm | parser
            return parsed
        read = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        unread = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=llm) | read.with_fallbacks([unread], exception_key="parsing_error")

    def _with_instructions(self, text: str, prompt: LanguageModelInput) -> list[BaseMessage]:
        """The messages with instructions at their end, after the chunks: what is cached stays cached."""
        *others, last = self._convert_input(prompt).to_messages()
        return [*others, *merge_message_runs([last, HumanMessage(text)], chunk_separator="")]

    def batch(
        self, inputs: Any, config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[AIMessage]:
        """Answer several prompts together; Ctrl-C ends those that run and those that wait."""
        options = {"return_exceptions": return_exceptions, **kwargs}
        return CancelScope().run(super().batch, inputs, together(config, len(inputs)), **options)

    def _generate(
        self, messages: Any, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        options = {"wait": True, **self._call_options(stop, kwargs)}
        return self._result(self._engine.submit(self._prompt(messages), **options).result(), options)

    async def _agenerate(
        self, messages: Any, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        options = self._call_options(stop, kwargs)
        return self._result(await agenerate(self._engine, self._prompt(messages), **options), options)

    def submission(
        self, prompt: LanguageModelInput, stop: list[str] | None = None, **kwargs: Any
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The prompt and the options that a call submits to the engine."""
        messages = self._convert_input(prompt).to_messages()
        return self._prompt(messages), self._call_options(stop, kwargs)

    def _prompt(self, prompt: Sequence[BaseMessage]) -> list[dict[str, Any]]:
        return to_dicts(prompt, lambda: bool(self.rag.renders_tools))

    def _schemas(self, tools: Any, choice: Any) -> list[dict[str, Any]]:
        schemas = as_schemas(tools or (), choice)
        if schemas and not self.rag.renders_tools:
            raise NotImplementedError(
                f"the chat template of {self.model_name!r} does not render tools: the model would not see "
                "them. Take a model whose template does (Qwen2.5, Llama 3.1, Hermes), or describe them in "
                "the prompt; with_structured_output(schema) works without tools"
            )
        return schemas

    def _result(self, answer: Answer, options: dict[str, Any]) -> ChatResult:
        reader = ToolCallReader(options.get("tools", ()))
        message = AIMessage(**self._fields(reader.rest(answer.text), answer, reader))
        info = {"finish_reason": answer.report.finish_reason}
        return ChatResult(generations=[ChatGeneration(message=message, generation_info=info)])

    def _chunk(
        self, text: str, answer: Answer | None = None, reader: ToolCallReader | None = None
    ) -> ChatGenerationChunk:
        if answer is None or reader is None:
            return ChatGenerationChunk(message=AIMessageChunk(content=text))
        last = AIMessageChunk(**self._fields(text, answer, reader), chunk_position="last")
        return ChatGenerationChunk(message=last)

    def _fields(self, text: str, answer: Answer, reader: ToolCallReader) -> dict[str, Any]:
        link, output = answer.report.link, answer.report.output_tokens
        usage = UsageMetadata(
            input_tokens=link.prompt_tokens,
            output_tokens=output,
            total_tokens=link.prompt_tokens + output,
            input_token_details=InputTokenDetails(
                cache_read=link.reused_tokens, cache_creation=link.written_tokens
            ),
        )
        named = {"model_name": self.model_name, "model_provider": "ragcachekit"}
        reason, tools = answer.report.finish_reason, tool_fields(reader)
        response = {**named, "finish_reason": reason, "ragcachekit": self._report(answer)}
        if reason != "cancelled":
            response["normalized_finish_reason"] = "tool_call" if tools["tool_calls"] else reason
        return {"content": text, **tools, "usage_metadata": usage, "response_metadata": response}

    def _resolve_model_profile(self) -> Any:
        config = getattr(self.rag.model.config, "text_config", self.rag.model.config)
        profile = {"tool_calling": bool(self.rag.renders_tools), "tool_choice": False}
        return {"max_input_tokens": config.max_position_embeddings, **profile}

    @property
    def _llm_type(self) -> str:
        return "ragcachekit-chat"

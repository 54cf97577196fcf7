"""Structured output by instructions in the prompt and a parser: nothing constrains what the model writes."""

from __future__ import annotations

import json
from operator import itemgetter
from typing import Any

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import BaseMessage, HumanMessage, convert_to_messages
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from pydantic import BaseModel

INSTRUCTIONS = (
    "Answer with one JSON object and nothing else: no explanation and no code fence. It has values for this "
    "JSON schema:\n"
)


def with_instructions(prompt: LanguageModelInput, schema: Any) -> list[BaseMessage]:
    """The prompt's messages with the schema at their end, behind the chunks: what is cached stays cached."""
    if isinstance(prompt, PromptValue):
        messages = list(prompt.to_messages())
    else:
        messages = convert_to_messages([("human", prompt)] if isinstance(prompt, str) else prompt)
    text = INSTRUCTIONS + json.dumps(convert_to_json_schema(schema), ensure_ascii=False)
    return (
        [*messages, HumanMessage(text)]
        if not messages or messages[-1].type != "human"
        else [*messages[:-1], _with_text(messages[-1], text)]
    )


def _with_text(message: BaseMessage, text: str) -> BaseMessage:
    content = message.content
    more = f"{content}\n\n{text}" if isinstance(content, str) else [*content, f"\n\n{text}"]
    return message.model_copy(update={"content": more})


def parser_of(schema: Any, by_tools: bool) -> BaseOutputParser[Any]:
    """What reads an answer, or its first tool call, as an object of the schema."""
    is_model = isinstance(schema, type) and issubclass(schema, BaseModel)
    if not by_tools:
        return PydanticOutputParser(pydantic_object=schema) if is_model else JsonOutputParser()
    if is_model:
        return PydanticToolsParser(tools=[schema], first_tool_only=True)
    name = convert_to_openai_tool(schema)["function"]["name"]
    return JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)


def parsed(llm: Runnable[Any, Any], parser: BaseOutputParser[Any], include_raw: bool) -> Runnable[Any, Any]:
    """The model with its parser; with ``include_raw`` a dict of ``raw``, ``parsed`` and ``parsing_error``."""
    if not include_raw:
        return llm | parser
    read = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    unread = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | read.with_fallbacks([unread], exception_key="parsing_error")

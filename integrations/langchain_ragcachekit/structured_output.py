"""Structured output by instructions in the prompt and a parser: nothing constrains what the model writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage, merge_message_runs
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from pydantic import BaseModel

INSTRUCTIONS = (
    "\n\nAnswer with one JSON object and nothing else: no explanation and no code fence. It has values for "
    "this JSON schema:\n"
)


def with_instructions(messages: Sequence[BaseMessage], schema: Any) -> list[BaseMessage]:
    """The messages with the schema at their end, after the chunks: what is cached stays cached."""
    instructions = HumanMessage(INSTRUCTIONS + json.dumps(convert_to_json_schema(schema), ensure_ascii=False))
    return [*messages[:-1], *merge_message_runs([*messages[-1:], instructions], chunk_separator="")]


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

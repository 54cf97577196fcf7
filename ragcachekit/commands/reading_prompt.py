"""Prompt of ``ask``: the text around the chunks, in a form that the model's chat template allows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import convert_to_openai_messages
from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, PromptTemplate

from ragcachekit.model.tokens import SegmentTokenizer

INSTRUCTION = "Answer the question from the context."
SEPARATOR = "\n\n"
"""Text between chunks."""

_CONTEXT = f"{INSTRUCTION}{SEPARATOR}{{context}}"
_PLACE = "\N{BLACK SQUARE} the chunks stand here \N{BLACK SQUARE}"

PLAIN_STOP = ("\nQuestion:",)
"""Stop strings for models without a chat template, which would go on with another question."""


@dataclass(frozen=True)
class ReadingPrompt:
    """A LangChain prompt with the variables ``context`` and ``input``, giving messages if ``chat``.

    ``before`` is the text before the first chunk, after the chat template.
    """

    template: BasePromptTemplate[Any]
    chat: bool
    before: str

    def filled(self, question: str, chunks: Iterable[str]) -> str | list[dict[str, Any]]:
        """The prompt of a question over chunks: messages, or a string."""
        value = self.template.format_prompt(context=SEPARATOR.join(chunks), input=question)
        messages: Any = convert_to_openai_messages(value.to_messages())
        return messages if self.chat else value.to_string()


def prompt_for(tokenizer: Any) -> ReadingPrompt:
    """System and user message, one message if the template takes no system, or else a plain string."""
    if not tokenizer.chat_template:
        plain = PromptTemplate.from_template(f"{_CONTEXT}\n\nQuestion: {{input}}\nAnswer:")
        return ReadingPrompt(plain, False, plain.format(context=_PLACE, input="").partition(_PLACE)[0])
    with_system = ChatPromptTemplate.from_messages([("system", _CONTEXT), ("human", "{input}")])
    alone = ChatPromptTemplate.from_messages([("human", f"{_CONTEXT}\n\n{{input}}")])
    for template in (with_system, alone):
        before = _before(template, SegmentTokenizer(tokenizer))
        if before is not None:
            return ReadingPrompt(template, True, before)
    raise ValueError("this model's chat template takes no user message; use a model with another one")


def _before(template: ChatPromptTemplate, tokens: SegmentTokenizer) -> str | None:
    messages = template.format_messages(context=_PLACE, input="Why?")
    try:
        before, found, _ = tokens.render(convert_to_openai_messages(messages)).partition(_PLACE)
    except Exception:  # templates refuse roles with errors of their own kinds
        return None
    return before if found else None

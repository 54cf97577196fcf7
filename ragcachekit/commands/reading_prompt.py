"""The prompt of ``ask``: what stands around the chunks, in the form that a model's chat template allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, PromptTemplate

from ragcachekit.model.tokens import SegmentTokenizer

INSTRUCTION = "Answer the question from the context."
SEPARATOR = "\n\n"
"""What stands between chunks."""

_CONTEXT = f"{INSTRUCTION}{SEPARATOR}{{context}}"
_PLACE = "\N{BLACK SQUARE} the chunks stand here \N{BLACK SQUARE}"
_ROLES = {"system": "system", "human": "user"}

PLAIN_STOP = ("\nQuestion:",)
"""Where the answer of a model without chat template ends: it would go on to ask itself."""


@dataclass(frozen=True)
class ReadingPrompt:
    """A LangChain prompt with the variables ``context`` and ``input``.

    ``chat``: it gives messages, not a string. ``before`` is the text before the first chunk, as the model
    sees it.
    """

    template: BasePromptTemplate[Any]
    chat: bool
    before: str


def prompt_for(tokenizer: Any) -> ReadingPrompt:
    """System and user message; one message where the template knows no system; else a plain string."""
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
        before, found, _ = tokens.render([_plain(message) for message in messages]).partition(_PLACE)
    except Exception:  # templates refuse roles with errors of their own kinds
        return None
    return before if found else None


def _plain(message: BaseMessage) -> dict[str, str]:
    return {"role": _ROLES[message.type], "content": str(message.content)}

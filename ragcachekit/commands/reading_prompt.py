"""Prompt of ``ask``: the text around the chunks, in a form that the model's chat template allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragcachekit.prompt.tokenizer import PromptTokenizer

INSTRUCTION = "Answer the question from the context."
SEPARATOR = "\n\n"
"""Text between chunks."""

_PLACE = "\N{BLACK SQUARE} the chunks stand here \N{BLACK SQUARE}"

PLAIN_STOP = ("\nQuestion:",)
"""Stop strings for models without a chat template, which would go on with another question."""

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class ReadingPrompt:
    """The prompt of a context and a question: ``filled`` gives messages if ``chat``, else a string.

    ``before`` is the text before the context, after the chat template.
    """

    filled: Callable[[str, str], str | Messages]
    chat: bool
    before: str


def prompt_for(tokenizer: Any) -> ReadingPrompt:
    """System and user message, one message if the template takes no system, or else a plain string."""
    if not tokenizer.chat_template:
        return ReadingPrompt(_plain, False, _plain(_PLACE, "").partition(_PLACE)[0])
    tokens = PromptTokenizer(tokenizer)
    for messages in (_with_system, _one_message):
        try:
            before, found, _ = tokens.render(messages(_PLACE, "Why?")).partition(_PLACE)
        except Exception:  # templates refuse roles with errors of their own kinds
            continue
        if found:
            return ReadingPrompt(messages, True, before)
    raise ValueError("this model's chat template takes no user message; use a model with another one")


def bare_ids(tokenizer: Any, prompt: str | Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """The ids that a user's own code sends: the tokenizer's own, without this library."""
    if isinstance(prompt, str):
        return tuple(tokenizer(prompt).input_ids)
    found = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True)
    return tuple(found["input_ids"])


def _plain(context: str, question: str) -> str:
    return f"{INSTRUCTION}{SEPARATOR}{context}\n\nQuestion: {question}\nAnswer:"


def _with_system(context: str, question: str) -> Messages:
    system = {"role": "system", "content": f"{INSTRUCTION}{SEPARATOR}{context}"}
    return [system, {"role": "user", "content": question}]


def _one_message(context: str, question: str) -> Messages:
    return [{"role": "user", "content": f"{INSTRUCTION}{SEPARATOR}{context}\n\n{question}"}]

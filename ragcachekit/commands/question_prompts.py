"""Questions as prompts, the same for every policy and for the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ragcachekit.commands.datasets import Question
from ragcachekit.commands.reading_prompt import (
    PLAIN_STOP,
    SEPARATOR,
    Messages,
    ReadingPrompt,
    bare_ids,
    prompt_for,
)
from ragcachekit.errors import RagCacheError
from ragcachekit.prompt.tokenizer import PromptTokenizer

ASK, FEW_SHOT = "ask", "few-shot"
STYLES = (ASK, FEW_SHOT)

_INSTRUCTION = "Answer the question from the passages. Give a short answer."
_SHOTS = (
    ("What colour is the sky on a clear day?", "blue"),
    ("How many legs does a spider have?", "eight"),
    ("Which metal is liquid at room temperature?", "mercury"),
)
_PLACE = "\N{BLACK SQUARE} the chunks stand here \N{BLACK SQUARE}"


@dataclass(frozen=True)
class QuestionPrompt:
    """A prompt as a user gives it, the ids that the tokenizer itself makes of it, and its first text."""

    prompt: str | Messages
    token_ids: tuple[int, ...]
    before: str


class PromptMaker:
    """Puts questions into prompts of one style.

    ``ask`` is the prompt of ``ragcachekit ask``, in the model's chat template if it has one. ``few-shot`` is
    plain text, with three made-up questions and answers that show the form: models of few parameters answer
    it better. ``stop`` are texts where an answer ends; ``pad`` is an id for padding. ValueError for another
    style.
    """

    def __init__(self, tokenizer: Any, style: str = ASK) -> None:
        if style not in STYLES:
            raise ValueError(f"unknown prompt {style!r}; known: {', '.join(STYLES)}")
        few_shot = style == FEW_SHOT
        self._reading = ReadingPrompt(_few_shot, False, "") if few_shot else prompt_for(tokenizer)
        self._tokenizer, self._tokens = tokenizer, PromptTokenizer(tokenizer)
        self.pad = self._tokens.pad
        self.stop: tuple[str, ...] = ("\n",) if few_shot else () if self._reading.chat else PLAIN_STOP

    def answer_ids(self, answer: str) -> tuple[int, ...]:
        """Token ids of ``answer`` where this prompt is to be continued."""
        return self._tokens.text(answer if self._reading.chat else f" {answer}", first=False)

    def prompt(self, question: Question) -> QuestionPrompt:
        """The prompt of one question; RagCacheError if the chat template changes the chunks."""
        before, found, after = self._rendered(_PLACE, question).partition(_PLACE)
        context = SEPARATOR.join(question.chunks)
        if not (before and found) or self._rendered(context, question) != before + context + after:
            raise RagCacheError("this model's chat template changes the chunks; there is no reuse to measure")
        prompt = self._reading.filled(context, question.question)
        return QuestionPrompt(prompt, bare_ids(self._tokenizer, prompt), before)

    def _rendered(self, context: str, question: Question) -> str:
        prompt = self._reading.filled(context, question.question)
        return prompt if isinstance(prompt, str) else self._tokens.render(prompt)


def _few_shot(context: str, question: str) -> str:
    shots = "".join(f"Question: {asked}\nAnswer: {answer}\n\n" for asked, answer in _SHOTS)
    return f"{_INSTRUCTION}{SEPARATOR}{context}\n\n{shots}Question: {question}\nAnswer:"

"""Questions as prompts, the same for every policy and the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

from ragcachekit.commands.bench.fidelity.questions import FidelityQuestion
from ragcachekit.commands.reading_prompt import (
    PLAIN_STOP,
    SEPARATOR,
    Messages,
    ReadingPrompt,
    bare_ids,
    prompt_for,
)
from ragcachekit.errors import RagCacheError
from ragcachekit.prompt.token_runs import find_runs
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
class FidelityPrompt:
    """A prompt as a user gives it, and the ids that the tokenizer itself makes of it.

    ``before`` is the text before the first chunk, ``spans`` are the positions of every chunk.
    """

    prompt: str | Messages
    token_ids: tuple[int, ...]
    before: str
    spans: tuple[range, ...]


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

    def prompt(self, question: FidelityQuestion) -> FidelityPrompt:
        """The prompt of one question; RagCacheError if the chat template changes the chunks."""
        before, found, after = self._rendered(_PLACE, question).partition(_PLACE)
        between = (*question.between, after)
        context = "".join(chain(*zip(question.chunks, between, strict=True)))
        if (
            not (before and found)
            or self._rendered(context.removesuffix(after), question) != before + context
        ):
            raise RagCacheError("this model's chat template changes the chunks; there is no reuse to measure")
        prompt = self._reading.filled(context.removesuffix(after), question.question)
        text = before + context
        tokens = self._tokens.prompt(text, special=isinstance(prompt, str))
        assert tokens is not None, "no text is apart"
        at, places = len(before), list[tuple[int, int]]()
        for chunk, joint in zip(question.chunks, between, strict=True):
            places.append((at, at + len(chunk)))
            at += len(chunk) + len(joint)
        own = [self._tokens.chunk(chunk) for chunk in question.chunks]
        runs = find_runs(tokens.ids, tokens.offsets, places, own)
        if None in runs:
            raise RagCacheError("this model's tokenizer changes the chunks; there is no reuse to measure")
        spans = tuple(range(run.start, run.stop) for run in runs if run is not None)
        return FidelityPrompt(prompt, bare_ids(self._tokenizer, prompt), before, spans)

    def _rendered(self, context: str, question: FidelityQuestion) -> str:
        prompt = self._reading.filled(context, question.question)
        return prompt if isinstance(prompt, str) else self._tokens.render(prompt)


def _few_shot(context: str, question: str) -> str:
    shots = "".join(f"Question: {asked}\nAnswer: {answer}\n\n" for asked, answer in _SHOTS)
    return f"{_INSTRUCTION}{SEPARATOR}{context}\n\n{shots}Question: {question}\nAnswer:"

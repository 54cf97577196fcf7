"""Questions as prompts of token ids, the same for every policy and the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

from ragcachekit.commands.bench.fidelity.questions import FidelityQuestion
from ragcachekit.commands.reading_prompt import PLAIN_STOP, prompt_for
from ragcachekit.errors import RagCacheError
from ragcachekit.model.tokens import SegmentTokenizer
from ragcachekit.types import Chunk, Prompt, Segment, Text

_PLACE = "\N{BLACK SQUARE} the chunks stand here \N{BLACK SQUARE}"


@dataclass(frozen=True)
class FidelityPrompt:
    """A prompt whose chunks are text (encoders may look for similar ones), all else token ids.

    ``before`` is the text before the first chunk, ``spans`` are the positions of every chunk.
    """

    prompt: Prompt
    token_ids: tuple[int, ...]
    before: str
    spans: tuple[range, ...]


class PromptMaker:
    """Puts questions into the prompt that ``ragcachekit ask`` uses with this tokenizer.

    ``stop`` are texts where an answer ends, for models without a chat template; ``pad`` is an id for padding.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._reading = prompt_for(tokenizer)
        self._tokens = SegmentTokenizer(tokenizer)
        self.pad = self._tokens.pad
        self.stop: tuple[str, ...] = () if self._reading.chat else PLAIN_STOP

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
        ids = () if self._reading.chat else self._tokens.leading
        # Ids from the first segment on: a chat template writes its own BOS.
        segments: list[Segment] = [Text(token_ids=ids), Text(token_ids=self._tokens.text(before, first=True))]
        ids += self._tokens.text(before, first=True)
        spans = []
        for chunk, joint in zip(question.chunks, between, strict=True):
            start = len(ids)
            ids += self._tokens.chunk(chunk)
            spans.append(range(start, len(ids)))
            text = self._tokens.text(joint, first=False)
            segments += [Chunk(chunk), Text(token_ids=text)]
            ids += text
        return FidelityPrompt(Prompt(segments), ids, before, tuple(spans))

    def _rendered(self, context: str, question: FidelityQuestion) -> str:
        prompt = self._reading.filled(context, question.question)
        return prompt if isinstance(prompt, str) else self._tokens.render(prompt)

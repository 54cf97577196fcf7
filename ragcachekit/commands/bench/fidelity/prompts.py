"""Questions as prompts of token ids, so that every policy and the model itself see the same ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ragcachekit.commands.bench.fidelity.questions import FidelityQuestion
from ragcachekit.commands.reading_prompt import PLAIN_STOP, prompt_for
from ragcachekit.errors import RagCacheError
from ragcachekit.model.tokens import SegmentTokenizer
from ragcachekit.prompt.messages import marked, segment_messages
from ragcachekit.prompt.registry import ChunkRegistry
from ragcachekit.types import Chunk, Prompt, Segment, Text

_PLACE = "\N{BLACK SQUARE} the chunks stand here \N{BLACK SQUARE}"
_ROLES = {"system": "system", "human": "user"}


@dataclass(frozen=True)
class FidelityPrompt:
    """A question as the model sees it.

    In ``prompt`` chunks are text (an encoder may look for similar ones), all else token ids; ``before`` is
    the text before the first chunk, ``spans`` are the positions of every chunk.
    """

    prompt: Prompt
    token_ids: tuple[int, ...]
    before: str
    spans: tuple[range, ...]


class PromptMaker:
    """Puts questions into the prompt that ``ragcachekit ask`` uses with this tokenizer.

    Attributes
    ----------
    stop : tuple of str
        Where an answer ends, for models without a chat template.
    pad : int
        An id for padding.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._reading = prompt_for(tokenizer)
        self._tokens = SegmentTokenizer(tokenizer)
        self.pad = self._tokens.pad
        self.stop: tuple[str, ...] = () if self._reading.chat else PLAIN_STOP

    def prompt(self, question: FidelityQuestion) -> FidelityPrompt:
        """The prompt of one question.

        Raises RagCacheError if the chat template changes the chunks, so that nothing of them could be
        reused.
        """
        texts = self._chat(question) if self._reading.chat else self._plain(question)
        ids = () if self._reading.chat else self._tokens.leading
        # Ids from the first segment on: a template has written its own BOS, and no second one is wanted.
        out: list[Segment] = [Text(token_ids=ids)]
        spans = []
        for number, segment in enumerate(texts):
            text = segment.text or ""
            if isinstance(segment, Chunk):
                new = self._tokens.chunk(text)
                spans.append(range(len(ids), len(ids) + len(new)))
                out.append(segment)
            else:
                new = self._tokens.text(text, first=number == 0)
                out.append(Text(token_ids=new))
            ids += new
        return FidelityPrompt(Prompt(out), ids, texts[0].text or "", tuple(spans))

    def _plain(self, question: FidelityQuestion) -> list[Segment]:
        whole = str(self._reading.template.format(context=_PLACE, input=question.question))
        before, _, after = whole.partition(_PLACE)
        return [Text(before), *_joined(question), Text(after)]

    def _chat(self, question: FidelityQuestion) -> list[Segment]:
        value = self._reading.template.invoke({"context": _PLACE, "input": question.question})
        messages = [
            {"role": _ROLES[m.type], "content": _blocks(str(m.content), question)}
            for m in value.to_messages()
        ]
        found = segment_messages(messages, self._tokens.render, ChunkRegistry(), "fidelity")
        segments = list(found.prompt.segments)
        if found.fallback or not segments or isinstance(segments[0], Chunk):
            raise RagCacheError(
                f"the chunks cannot be found in this model's chat template ({found.fallback}); "
                "there is no reuse to measure"
            )
        return segments


def _joined(question: FidelityQuestion) -> list[Segment]:
    out: list[Segment] = []
    for chunk, joint in zip(question.chunks, (*question.between, ""), strict=True):
        out += [Chunk(chunk), Text(joint)]
    return out[:-1]


def _blocks(content: str, question: FidelityQuestion) -> str | Sequence[dict[str, Any]]:
    before, found, after = content.partition(_PLACE)
    if not found:
        return content
    middle = [
        marked(segment.text or "") if isinstance(segment, Chunk) else {"type": "text", "text": segment.text}
        for segment in _joined(question)
    ]
    return [{"type": "text", "text": before}, *middle, {"type": "text", "text": after}]

"""Questions of the fidelity bench, and their prompts of token ids, the same for every policy."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ragcachekit.commands.reading_prompt import PLAIN_STOP, SEPARATOR, prompt_for
from ragcachekit.errors import RagCacheError
from ragcachekit.model.tokens import SegmentTokenizer
from ragcachekit.types import Chunk, Prompt, Segment, Text

_PLACE = "\N{BLACK SQUARE} the chunks stand here \N{BLACK SQUARE}"
_ROLES = {"system": "system", "human": "user"}


@dataclass(frozen=True)
class FidelityQuestion:
    """One question with its retrieved chunks, in the order of the prompt.

    ``question_type`` groups figures; ``joints`` stand between the chunks (empty: a blank line everywhere).
    """

    question: str
    chunks: tuple[str, ...]
    answer: str
    question_type: str = ""
    joints: tuple[str, ...] = ()

    @property
    def between(self) -> tuple[str, ...]:
        """The texts between the chunks."""
        return self.joints or (SEPARATOR,) * (len(self.chunks) - 1)


def digest(questions: Sequence[FidelityQuestion]) -> str:
    """SHA-256 over all that is asked, in order."""
    text = json.dumps([asdict(question) for question in questions], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_questions(path: str | os.PathLike[str]) -> list[FidelityQuestion]:
    """Questions of a JSONL file: ``{"question", "chunks", "answer"}`` per line, ``"type"`` if wanted.

    Raises ValueError for a bad line (with its number) or a file without questions; OSError.
    """
    out = []
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    out.append(_parsed(line))
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{path}, line {number}: {error}") from error
    if not out:
        raise ValueError(f'{path} has no questions; give {{"question", "chunks", "answer"}} per line')
    return out


def _parsed(line: str) -> FidelityQuestion:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(found, dict):
        raise TypeError(f'give an object {{"question", "chunks", "answer"}}, not a {type(found).__name__}')
    if missing := [name for name in ("question", "chunks", "answer") if name not in found]:
        raise ValueError(f"{', '.join(map(repr, missing))} missing")
    chunks, kind = found["chunks"], found.get("type", "")
    if not isinstance(chunks, list) or not chunks:
        raise TypeError("'chunks' must be a list of texts, at least one")
    texts = {"question": found["question"], "answer": found["answer"]}
    texts |= {f"chunk {number}": chunk for number, chunk in enumerate(chunks, 1)}
    for name, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            raise TypeError(f"{name} must be a text that is not empty")
    if not isinstance(kind, str) or kind == "all":
        raise TypeError("'type' must be a text other than 'all'")
    return FidelityQuestion(found["question"], tuple(chunks), found["answer"], kind)


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
        value = self._reading.template.invoke({"context": context, "input": question.question})
        if not self._reading.chat:
            return value.to_string()
        messages = [{"role": _ROLES[m.type], "content": str(m.content)} for m in value.to_messages()]
        return self._tokens.render(messages)

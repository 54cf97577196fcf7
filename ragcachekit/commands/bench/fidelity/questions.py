"""Questions of the fidelity bench, with their retrieved chunks and right answers."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ragcachekit.commands.reading_prompt import SEPARATOR


@dataclass(frozen=True)
class FidelityQuestion:
    """One question with its retrieved chunks, in the order of the prompt.

    ``question_type`` groups figures; ``joints`` stand between the chunks (empty: a blank line everywhere).
    ``accepted`` are further right answers. ``document`` holds the chunks of the document that ``chunks`` come
    from, in order, if it is known: its order gives the neighbours of ``similar:n``.
    """

    question: str
    chunks: tuple[str, ...]
    answer: str
    question_type: str = ""
    joints: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    document: tuple[str, ...] = ()

    @property
    def answers(self) -> tuple[str, ...]:
        """All right answers."""
        return (self.answer, *self.accepted)

    @property
    def between(self) -> tuple[str, ...]:
        """The texts between the chunks."""
        return self.joints or (SEPARATOR,) * (len(self.chunks) - 1)


def digest(questions: Sequence[FidelityQuestion]) -> str:
    """SHA-256 over all that is asked, in order."""
    text = json.dumps([asdict(question) for question in questions], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_questions(path: str | os.PathLike[str], *, answered: bool = True) -> list[FidelityQuestion]:
    """Questions of a JSONL file: ``{"question", "chunks", "answer"}`` per line.

    Not ``answered``: the answer may be missing. A line may have a ``"type"``, and as ``"document"`` the
    chunks of the document that its chunks come from.

    Raises ValueError for a bad line (with its number) or a file without questions; OSError.
    """
    out = []
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    out.append(_parsed(line, answered))
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{path}, line {number}: {error}") from error
    if not out:
        raise ValueError(f'{path} has no questions; give {{"question", "chunks", "answer"}} per line')
    return out


def _parsed(line: str, answered: bool) -> FidelityQuestion:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(found, dict):
        raise TypeError(f'give an object {{"question", "chunks", "answer"}}, not a {type(found).__name__}')
    needed = ("question", "chunks", *(["answer"] if answered else []))
    if missing := [name for name in needed if name not in found]:
        raise ValueError(f"{', '.join(map(repr, missing))} missing")
    chunks, kind, document = found["chunks"], found.get("type", ""), found.get("document", [])
    if not isinstance(chunks, list) or not chunks:
        raise TypeError("'chunks' must be a list of texts, at least one")
    if not isinstance(document, list) or not all(isinstance(text, str) for text in document):
        raise TypeError("'document' must be the list of its chunks, in order")
    texts = {name: found[name] for name in ("question", "answer") if name in found}
    texts |= {f"chunk {number}": chunk for number, chunk in enumerate(chunks, 1)}
    for name, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            raise TypeError(f"{name} must be a text that is not empty")
    if not isinstance(kind, str) or kind == "all":
        raise TypeError("'type' must be a text other than 'all'")
    answer = found.get("answer", "")
    return FidelityQuestion(found["question"], tuple(chunks), answer, kind, document=tuple(document))

"""Questions that a user's model is asked: from a file or made of a corpus; and their prompts."""

from __future__ import annotations

import json
import os
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ragcachekit.commands.corpus import documents, read_corpus
from ragcachekit.commands.workspace import load_tokenizer, needs_neighbours
from ragcachekit.errors import CorpusError, RagCacheError
from ragcachekit.plan.companions import Neighbours, PrecedingChunks
from ragcachekit.prompt.tokenizer import PromptTokenizer

INSTRUCTION = "Answer the question from the context."
SEPARATOR = "\n\n"
"""Text between chunks."""

CHUNKS = 4
"""Chunks per probe: one and its predecessor in the document, among random others."""

MAX_OTHERS = 8
"""Chunks of other questions that one is encoded after, at most."""

MIN_CHARS, MAX_CHARS = 24, 400
"""Length of the sentence that a probe cuts in half."""

_SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n+")
_PLACE = "\N{BLACK SQUARE} the chunks stand here \N{BLACK SQUARE}"

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Question:
    """One question with its retrieved chunks, in the order of the prompt.

    ``answers`` are equally right. ``question_type`` groups figures. ``document`` holds the chunks of the
    document that ``chunks`` come from, in order, if it is known.
    """

    question: str
    chunks: tuple[str, ...]
    answers: tuple[str, ...] = ()
    question_type: str = ""
    document: tuple[str, ...] = ()


def read_questions(
    path: str | os.PathLike[str], needs: Sequence[str] = ("question", "chunks", "answer")
) -> list[Question]:
    """Questions of a JSONL file: ``{"question", "chunks", "answer"}`` per line.

    A line may have a ``"type"``, and as ``"document"`` the chunks of the document that its chunks come from.
    Where it ``needs`` a ``question`` alone, it may be plain text, and has no chunks then.

    Raises ValueError for a bad line (with its number) or a file without questions; OSError.
    """
    out, number = list[Question](), 0
    try:
        for line in Path(path).read_text(encoding="utf-8-sig").split("\n"):
            number += 1
            if line.strip():
                plain = len(needs) == 1 and not line.lstrip().startswith("{")
                out.append(_question({"question": line.strip()} if plain else json.loads(line), needs))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}{f', line {number}' if number else ''}: {error}") from error
    if not out:
        raise ValueError(
            f"{path} has no questions; give an object {{{', '.join(map(repr, needs))}}} per line"
        )
    return out


def _question(found: Any, needs: Sequence[str]) -> Question:
    if not isinstance(found, dict):
        raise TypeError(f'give an object {{"question", "chunks", "answer"}}, not a {type(found).__name__}')
    if missing := [name for name in needs if name not in found]:
        raise ValueError(f"{', '.join(map(repr, missing))} missing")
    chunks, kind, document = found.get("chunks"), found.get("type", ""), found.get("document", [])
    if not isinstance(document, list) or ("chunks" in found and (not isinstance(chunks, list) or not chunks)):
        raise TypeError(
            "'chunks' must be a list of texts, at least one, and 'document' the list of its chunks"
        )
    texts = {"question": found["question"], "answer": found.get("answer", "none")}
    texts |= {f"chunk {number}": chunk for number, chunk in enumerate((*(chunks or ()), *document), 1)}
    for name, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            raise TypeError(f"{name} must be a text that is not empty")
    if not isinstance(kind, str) or kind == "all":
        raise TypeError("'type' must be a text other than 'all'")
    answers = (found["answer"],) if "answer" in found else ()
    return Question(found["question"], tuple(chunks or ()), answers, kind, tuple(document))


class OtherPrompts:
    """For each chunk, those of other questions: of its document first; none that a prompt has beside it."""

    def __init__(self, questions: Sequence[Question]) -> None:
        self._beside: defaultdict[str, set[str]] = defaultdict(set)
        self._document: dict[str, tuple[str, ...]] = {}
        for one in questions:
            for text in one.chunks:
                self._beside[text.strip()].update(other.strip() for other in one.chunks)
                self._document.setdefault(text.strip(), one.document)
        self._all = tuple(dict.fromkeys(text for one in questions for text in one.chunks))

    def of(self, text: str) -> Sequence[str]:
        """A few of them, in a random order that depends on ``text`` alone."""
        rng, beside = random.Random(text.strip()), self._beside[text.strip()]
        for pool in (self._document.get(text.strip(), ()), self._all):
            apart = [other for other in dict.fromkeys(pool) if other.strip() not in beside]
            if apart:
                return rng.sample(apart, min(MAX_OTHERS, len(apart)))
        return ()


@dataclass(frozen=True)
class Sample:
    """Questions of one ``kind`` (a user's, or probes made from a corpus)."""

    questions: tuple[Question, ...]
    kind: str = "questions"
    neighbours: Neighbours | None = None


def read_sample(
    model: str,
    questions: str | os.PathLike[str] | None,
    corpus: str | os.PathLike[str] | None,
    encoders: Iterable[str],
    *,
    probes: int,
    chunk_tokens: int,
    seed: int,
    answered: bool = True,
) -> Sample:
    """The questions of a file (``answered``: each with a right answer), or else probes made of a corpus.

    Raises CorpusError, and ValueError if one of the ``encoders`` needs preceding chunks that are not known.
    """
    known: list[Sequence[str]] = []
    if corpus is not None:
        found = read_corpus(corpus, chunk_tokens=chunk_tokens, tokenizer=load_tokenizer(model))
        known += documents(found.chunks)
    if questions is not None:
        needs = ("question", "chunks", "answer")[: 2 + answered]
        asked, kind = tuple(read_questions(questions, needs)), "questions"
        known = known or list(dict.fromkeys(one.document for one in asked if one.document))
    else:
        asked, kind = _from_corpus(known, probes, seed), "probes"
    if not known and any(map(needs_neighbours, encoders)):
        raise ValueError(
            'it is not known which chunks precede a chunk: give --corpus, or questions with their "document"'
        )
    return Sample(asked, kind, PrecedingChunks(known))


def _from_corpus(corpus: Sequence[Sequence[str]], number: int, seed: int) -> tuple[Question, ...]:
    try:
        found = make_probes(corpus, number, seed)
    except ValueError as error:
        raise CorpusError(f"the corpus is too small to ask about ({error}); give --questions") from error
    ask = 'How does the sentence continue that begins with "{}"?'
    return tuple(Question(ask.format(one.beginning), one.chunks, (one.rest,)) for one in found if one.rest)


class Probe(NamedTuple):
    """Chunk texts in prompt order, and a sentence of one of them, cut in half."""

    chunks: tuple[str, ...]
    beginning: str
    rest: str


def make_probes(documents: Sequence[Sequence[str]], number: int, seed: int = 0) -> list[Probe]:
    """At most ``number`` probes, each about another chunk; ValueError for fewer than two different chunks.

    ``documents`` are lists of chunks. The other chunks of a prompt are those of other probes where there are
    enough, so that few have to be encoded.
    """
    rng = random.Random(seed)
    places = [(texts, at) for texts in documents for at, text in enumerate(texts) if text.strip()]
    pool = list(dict.fromkeys(texts[at].strip() for texts, at in places))
    if len(pool) < 2:
        raise ValueError(f"at least two chunks are needed to make prompts of, got {len(pool)}")
    rng.shuffle(places)
    groups = [[text.strip() for text in texts[max(0, at - 1) : at + 1]] for texts, at in places[:number]]
    asked = list(dict.fromkeys(text for group in groups for text in group if text))
    pool = asked if len(asked) >= CHUNKS else pool
    return [_probe(list(dict.fromkeys(filter(None, group))), pool, rng) for group in groups]


def _probe(group: list[str], pool: Sequence[str], rng: random.Random) -> Probe:
    others = [text for text in pool if text not in group]
    others = rng.sample(others, min(CHUNKS - len(group), len(others)))
    place = rng.randint(0, len(others))
    text = group[-1]
    found = [part for part in _SENTENCE.split(text) if MIN_CHARS <= len(part) <= MAX_CHARS]
    sentence = rng.choice(found) if found else text[:MAX_CHARS]
    half = (len(sentence) + 1) // 2
    half = max(sentence.rfind(" ", 0, half), 0) or half
    return Probe((*others[:place], *group, *others[place:]), sentence[:half], sentence[half:].strip())


@dataclass(frozen=True)
class QuestionPrompt:
    """A prompt as a user gives it, the ids that the tokenizer itself makes of it, and its first text."""

    prompt: str | Messages
    token_ids: tuple[int, ...]
    before: str


class PromptMaker:
    """Puts chunks and a question into the prompt of ``ragcachekit ask``.

    It is in the model's chat template if it has one: system and user message, or one message if the template
    takes no system. ``plain`` makes a text of context and question instead. ``filled`` gives messages if
    ``chat``, else a string; ``before`` is the text before the chunks; ``stop`` ends answers; ``pad`` is an
    id for padding. ValueError for an unusable chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        plain: Callable[[str, str], str] | None = None,
        stop: Sequence[str] = ("\nQuestion:",),  # a model without a chat template goes on with another one
    ) -> None:
        self._tokenizer, self._tokens = tokenizer, PromptTokenizer(tokenizer)
        self.pad, self.chat = self._tokens.pad, bool(tokenizer.chat_template) and plain is None
        self.stop = () if self.chat else tuple(stop)
        for filled in (_with_system, _one_message) if self.chat else (plain or _plain,):
            try:
                before, found, _ = self._rendered(filled(_PLACE, "Why?")).partition(_PLACE)
            except Exception:  # templates refuse roles with errors of their own kinds
                continue
            if found:
                self.filled: Callable[[str, str], str | Messages] = filled
                self.before = before
                return
        raise ValueError("this model's chat template takes no user message; use a model with another one")

    def answer_ids(self, answer: str) -> tuple[int, ...]:
        """Token ids of ``answer`` where this prompt is to be continued."""
        return self._tokens.text(answer if self.chat else f" {answer}", first=False)

    def prompt(self, question: Question) -> QuestionPrompt:
        """The prompt of one question; RagCacheError if the chat template changes the chunks."""
        context = SEPARATOR.join(question.chunks)
        prompt = self.filled(context, question.question)
        if not self._rendered(prompt).startswith(self.before + context):
            raise RagCacheError("this model's chat template changes the chunks; there is no reuse to measure")
        return QuestionPrompt(prompt, bare_ids(self._tokenizer, prompt), self.before)

    def _rendered(self, prompt: str | Messages) -> str:
        return prompt if isinstance(prompt, str) else self._tokens.render(prompt)


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

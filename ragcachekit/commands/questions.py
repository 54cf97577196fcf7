"""Questions that a user's model is asked, from a file, a dataset or made of a corpus, and their prompts."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ragcachekit.commands.corpus import DEFAULT_CHUNK_TOKENS, documents, read_corpus
from ragcachekit.commands.datasets import Question, Sampling, draw_questions
from ragcachekit.commands.reading_prompt import (
    PLAIN_STOP,
    SEPARATOR,
    Messages,
    ReadingPrompt,
    bare_ids,
    prompt_for,
)
from ragcachekit.commands.workspace import CacheFolder, check_dtype, load_tokenizer
from ragcachekit.errors import CorpusError, RagCacheError
from ragcachekit.plan.companions import Neighbours, PrecedingChunks, SimilarChunks
from ragcachekit.prompt.tokenizer import PromptTokenizer
from ragcachekit.quality.check import probes

EMBEDDING, DOCUMENT = "embedding", "document"
"""Sources of neighbours: the nearest chunks by all-MiniLM-L6-v2, or the chunks before in the document."""

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
class Sample:
    """Questions of one ``kind`` (a user's, or probes made from a corpus).

    ``documents`` are the chunks of each document, in order, where that is known. ``texts`` are the chunks
    among which neighbours are looked for, beside those of the questions.
    """

    questions: tuple[Question, ...]
    kind: str = "questions"
    documents: tuple[tuple[str, ...], ...] = ()
    texts: tuple[str, ...] = ()

    def neighbours(self, source: str, progress: bool = False) -> Neighbours:
        """Neighbours for ``similar:n``, from :data:`EMBEDDING` or :data:`DOCUMENT`."""
        if source == DOCUMENT:
            return PrecedingChunks(self.documents)
        from ragcachekit.commands.embedding import MiniLM  # an extra, and needed here only

        asked = (chunk for question in self.questions for chunk in question.chunks)
        texts = list(dict.fromkeys([*self.texts, *asked]))
        return SimilarChunks(texts, MiniLM().embed(texts, progress=progress))


@dataclass(frozen=True)
class AskSettings:
    """Settings of commands that ask a user's model.

    Questions are from a ``dataset`` (``squad:FILE``, ...; as ``sampling`` draws them) or from the JSONL file
    ``questions``, or else ``probes`` of them are made from ``corpus``, cut into chunks of at most
    ``chunk_tokens``. ``policies`` are compared (empty: the default ones). ``neighbours`` of ``similar:n`` are
    by ``embedding`` or of the ``document``. The rest is as for :class:`~ragcachekit.RagCache`.
    """

    model: str
    questions: str | os.PathLike[str] | None = None
    corpus: str | os.PathLike[str] | None = None
    dataset: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    policies: tuple[str, ...] = ()
    neighbours: str = DOCUMENT
    probes: int = 30
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    seed: int = 0
    max_new_tokens: int = 64
    device: str | None = None
    dtype: str = "auto"
    cache_dir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        if self.neighbours not in (EMBEDDING, DOCUMENT):
            raise ValueError(f"unknown neighbours {self.neighbours!r}; known: {EMBEDDING}, {DOCUMENT}")

    @property
    def folder(self) -> Path:
        """The cache folder."""
        return CacheFolder.at(self.cache_dir).path

    def sample(self, *, answered: bool = True, needs_neighbours: bool = False) -> Sample:
        """Read the questions (``answered``: each with a right answer), or make probes.

        Raises ValueError or CorpusError without either, and ValueError if neighbours are needed and nothing
        has the documents that they are of.
        """
        sample = self._sample(answered)
        if needs_neighbours and self.neighbours == DOCUMENT and not sample.documents:
            raise ValueError(
                "it is not known which chunks precede a chunk: give --corpus, a --dataset with documents "
                '(squad), or questions with their "document"; or use --neighbours embedding'
            )
        return sample

    def _sample(self, answered: bool) -> Sample:
        if self.dataset is not None:
            return _with_documents(draw_questions(self.dataset, self.sampling))
        if self.questions is None and self.corpus is None:
            raise ValueError("give --questions (JSONL), or --corpus to make probes from")
        corpus: tuple[tuple[str, ...], ...] = ()
        if self.corpus is not None:
            tokenizer = load_tokenizer(self.model)
            chunks = read_corpus(self.corpus, chunk_tokens=self.chunk_tokens, tokenizer=tokenizer).chunks
            corpus = tuple(map(tuple, documents(chunks)))
        if self.questions is None:
            return Sample(_from_corpus(corpus, self.probes, self.seed), "probes", corpus)
        asked = tuple(read_questions(self.questions, answered=answered))
        if not corpus:
            return _with_documents(asked)
        return Sample(asked, documents=corpus, texts=tuple(text for texts in corpus for text in texts))


def read_questions(path: str | os.PathLike[str], *, answered: bool = True) -> list[Question]:
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
                    out.append(_question(json.loads(line), answered))
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{path}, line {number}: {error}") from error
    if not out:
        raise ValueError(f'{path} has no questions; give {{"question", "chunks", "answer"}} per line')
    return out


def _question(found: Any, answered: bool) -> Question:
    if not isinstance(found, dict):
        raise TypeError(f'give an object {{"question", "chunks", "answer"}}, not a {type(found).__name__}')
    if missing := [name for name in ("question", "chunks", "answer")[: 2 + answered] if name not in found]:
        raise ValueError(f"{', '.join(map(repr, missing))} missing")
    chunks, kind, document = found["chunks"], found.get("type", ""), found.get("document", [])
    if not isinstance(chunks, list) or not chunks or not isinstance(document, list):
        raise TypeError(
            "'chunks' must be a list of texts, at least one, and 'document' the list of its chunks"
        )
    texts = {"question": found["question"], "answer": found.get("answer", "none")}
    texts |= {f"chunk {number}": chunk for number, chunk in enumerate((*chunks, *document), 1)}
    for name, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            raise TypeError(f"{name} must be a text that is not empty")
    if not isinstance(kind, str) or kind == "all":
        raise TypeError("'type' must be a text other than 'all'")
    answers = (found["answer"],) if "answer" in found else ()
    return Question(found["question"], tuple(chunks), answers, kind, tuple(document))


def _with_documents(questions: Sequence[Question]) -> Sample:
    known = dict.fromkeys(one.document for one in questions if one.document)
    return Sample(tuple(questions), documents=tuple(known))


def _from_corpus(corpus: Sequence[Sequence[str]], number: int, seed: int) -> tuple[Question, ...]:
    try:
        found = probes(corpus, number, seed)
    except ValueError as error:
        raise CorpusError(f"the corpus is too small to ask about ({error}); give --questions") from error
    ask = 'How does the sentence continue that begins with "{}"?'
    return tuple(Question(ask.format(one.beginning), one.chunks, (one.rest,)) for one in found if one.rest)


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

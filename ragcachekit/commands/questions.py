"""Questions that a user's model is asked: from a file, a dataset or made of a corpus; and their prompts."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ragcachekit.commands.corpus import DEFAULT_CHUNK_TOKENS, documents, read_corpus
from ragcachekit.commands.workspace import CacheFolder, load_tokenizer
from ragcachekit.errors import CorpusError, RagCacheError
from ragcachekit.plan.companions import Neighbours, PrecedingChunks, SimilarChunks
from ragcachekit.prompt.tokenizer import PromptTokenizer

EMBEDDING, DOCUMENT = "embedding", "document"
"""Sources of neighbours: the nearest chunks by all-MiniLM-L6-v2, or the chunks before in the document."""

ASK, FEW_SHOT = "ask", "few-shot"
STYLES = (ASK, FEW_SHOT)
HALVES = ("all", "develop", "report")
INSTRUCTION = "Answer the question from the context."
SEPARATOR = "\n\n"
"""Text between chunks."""

CHUNKS = 4
"""Chunks per probe: one and its predecessor in the document, among random others."""

MIN_CHARS, MAX_CHARS = 24, 400
"""Length of the sentence that a probe cuts in half."""

_SENTENCE = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n+")
_PLACE = "\N{BLACK SQUARE} the chunks stand here \N{BLACK SQUARE}"
_SHOTS = (
    ("What colour is the sky on a clear day?", "blue"),
    ("How many legs does a spider have?", "eight"),
    ("Which metal is liquid at room temperature?", "mercury"),
)

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


@dataclass(frozen=True)
class Passages:
    """One question as its file has it: the ``relevant`` passages that the answer needs, and ``others``.

    ``document`` are the chunks of the document that they come from, in order, if the file has it.
    """

    question: str
    answers: tuple[str, ...]
    relevant: tuple[str, ...]
    others: tuple[str, ...] = ()
    document: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sampling:
    """Which questions of a dataset are asked, and with which passages, in random order.

    ``distractors`` passages are added to the relevant ones. A digest of the question, not the
    seed, decides which ``half`` it is in: ``develop`` or ``report``.
    """

    count: int = 50
    distractors: int = 3
    half: str = "all"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.half not in HALVES:
            raise ValueError(f"unknown half {self.half!r}; known: {', '.join(HALVES)}")

    def draw(self, questions: Sequence[Passages]) -> list[Passages]:
        """At most ``count`` questions of the half, in random order; ValueError if there is none."""
        kept = [one for one in questions if self.half in ("all", half_of(one.question))]
        random.Random(self.seed).shuffle(kept)
        if not kept:
            raise ValueError(f"the file has no questions in the half {self.half!r}")
        return kept[: self.count]

    def chunks(self, one: Passages) -> tuple[str, ...]:
        """The passages of one prompt, each once."""
        rng = random.Random(f"{self.seed} {one.question}")
        others = [text for text in dict.fromkeys(one.others) if text not in one.relevant]
        few = rng.sample(others, min(self.distractors, len(others)))
        chosen = {*one.relevant, *few}
        source = (one.document or (*one.relevant, *one.others)) if few else one.relevant
        out = [text for text in dict.fromkeys(source) if text in chosen]
        rng.shuffle(out)
        return tuple(out)


def half_of(question: str) -> str:
    """``develop`` or ``report``, by the first bit of SHA-256."""
    return HALVES[1 + (hashlib.sha256(question.encode()).digest()[0] >> 7)]


def digest(questions: Sequence[Question]) -> str:
    """SHA-256 over all that is asked, in order."""
    text = json.dumps([asdict(question) for question in questions], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def load_dataset(spec: str) -> list[Passages]:
    """The questions of ``format:FILE``, such as ``squad:dev-v2.0.json``.

    Raises ValueError for an unknown format, or a file of another one; OSError if it cannot be read.
    """
    kind, colon, file = spec.partition(":")
    if not (colon and file and kind in LOADERS):
        raise ValueError(f"unknown dataset {spec!r}; give {', '.join(f'{name}:FILE' for name in LOADERS)}")
    try:
        questions = LOADERS[kind](Path(file).expanduser().read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{file} is not in the format of {kind} ({what})") from error
    questions = [one for one in questions if one.answers]
    if not questions:
        raise ValueError(f"{file} has no question with an answer")
    return questions


def draw_questions(spec: str, sampling: Sampling) -> tuple[Question, ...]:
    """Questions of ``format:FILE`` with the passages of their prompts; errors as :func:`load_dataset`."""
    return tuple(
        Question(one.question, sampling.chunks(one), one.answers, document=one.document)
        for one in sampling.draw(load_dataset(spec))
    )


def _squad(text: str) -> list[Passages]:
    """SQuAD 1.1 and 2.0: a question, its paragraph, and the other paragraphs of the article."""
    out = []
    for article in json.loads(text)["data"]:
        document = tuple(paragraph["context"].strip() for paragraph in article["paragraphs"])
        for own, paragraph in zip(document, article["paragraphs"], strict=True):
            for item in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in item["answers"]))
                if not item.get("is_impossible", False):
                    out.append(Passages(item["question"].strip(), answers, (own,), document, document))
    return out


def _musique(text: str) -> list[Passages]:
    """MuSiQue as published, or the passages of about 400 words that CacheBlend evaluates.

    Without marks, passages that contain an answer count as relevant.
    """
    is_list, out = text.lstrip().startswith("["), []
    items = json.loads(text) if is_list else map(json.loads, filter(str.strip, text.splitlines()))
    for item in (item for item in items if item.get("answerable", True)):
        parts = item.get("ctxs") or item["paragraphs"]
        answers = tuple(item["answers"]) if "ctxs" in item else (item["answer"], *item["answer_aliases"])
        passages: dict[bool, list[str]] = {True: [], False: []}
        for part in parts:
            body = (part["text"] if "ctxs" in item else part["paragraph_text"]).strip()
            passage = f"{part['title']}\n{body}" if part["title"] else body
            by_answer = any(answer.lower() in passage.lower() for answer in answers)
            passages[bool(part.get("is_supporting", by_answer))].append(passage)
        out.append(Passages(item["question"].strip(), answers, tuple(passages[True]), tuple(passages[False])))
    return out


LOADERS: dict[str, Callable[[str], list[Passages]]] = {"musique": _musique, "squad": _squad}


def read_questions(path: str | os.PathLike[str], *, answered: bool = True) -> list[Question]:
    """Questions of a JSONL file: ``{"question", "chunks", "answer"}`` per line.

    Not ``answered``: the answer may be missing. A line may have a ``"type"``, and as ``"document"`` the
    chunks of the document that its chunks come from.

    Raises ValueError for a bad line (with its number) or a file without questions; OSError.
    """
    out = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), 1):
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
class MeasureSettings:
    """Settings of the commands that ask a user's model many questions.

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
        corpus: tuple[tuple[str, ...], ...] = ()
        if self.corpus is not None and self.dataset is None:
            tokenizer = load_tokenizer(self.model)
            chunks = read_corpus(self.corpus, chunk_tokens=self.chunk_tokens, tokenizer=tokenizer).chunks
            corpus = tuple(map(tuple, documents(chunks)))
        if self.dataset is not None:
            asked = draw_questions(self.dataset, self.sampling)
        elif self.questions is not None:
            asked = tuple(read_questions(self.questions, answered=answered))
        elif corpus:
            return Sample(_from_corpus(corpus, self.probes, self.seed), "probes", corpus)
        else:
            raise ValueError("give --questions (JSONL), or --corpus to make probes from")
        known = dict.fromkeys(one.document for one in asked if one.document)
        return Sample(asked, documents=corpus or tuple(known), texts=tuple(chain.from_iterable(corpus)))


def _from_corpus(corpus: Sequence[Sequence[str]], number: int, seed: int) -> tuple[Question, ...]:
    try:
        found = probes(corpus, number, seed)
    except ValueError as error:
        raise CorpusError(f"the corpus is too small to ask about ({error}); give --questions") from error
    ask = 'How does the sentence continue that begins with "{}"?'
    return tuple(Question(ask.format(one.beginning), one.chunks, (one.rest,)) for one in found if one.rest)


class Probe(NamedTuple):
    """Chunk texts in prompt order, and a sentence of one of them, cut in half."""

    chunks: tuple[str, ...]
    beginning: str
    rest: str


def probes(documents: Sequence[Sequence[str]], number: int, seed: int = 0) -> list[Probe]:
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
    """Puts chunks and a question into a prompt of one style.

    ``ask`` is the prompt of ``ragcachekit ask``, in the model's chat template if it has one: system and user
    message, or one message if the template takes no system. ``few-shot`` is plain text, with three made-up
    questions and answers that show the form: models of few parameters answer it better. ``filled`` gives
    messages if ``chat``, else a string; ``before`` is the text before the chunks; ``stop`` are texts where an
    answer ends; ``pad`` is an id for padding. ValueError for another style, or an unusable chat template.
    """

    def __init__(self, tokenizer: Any, style: str = ASK) -> None:
        if style not in STYLES:
            raise ValueError(f"unknown prompt {style!r}; known: {', '.join(STYLES)}")
        self._tokenizer, self._tokens = tokenizer, PromptTokenizer(tokenizer)
        self.pad, self.chat = self._tokens.pad, bool(tokenizer.chat_template) and style == ASK
        # A model without a chat template would go on with another question.
        self.stop = () if self.chat else ("\n",) if style == FEW_SHOT else ("\nQuestion:",)
        plain = _few_shot if style == FEW_SHOT else _plain
        for filled in (_with_system, _one_message) if self.chat else (plain,):
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


def _few_shot(context: str, question: str) -> str:
    shots = "".join(f"Question: {asked}\nAnswer: {answer}\n\n" for asked, answer in _SHOTS)
    instruction = "Answer the question from the passages. Give a short answer."
    return f"{instruction}{SEPARATOR}{context}\n\n{shots}Question: {question}\nAnswer:"


def _with_system(context: str, question: str) -> Messages:
    system = {"role": "system", "content": f"{INSTRUCTION}{SEPARATOR}{context}"}
    return [system, {"role": "user", "content": question}]


def _one_message(context: str, question: str) -> Messages:
    return [{"role": "user", "content": f"{INSTRUCTION}{SEPARATOR}{context}\n\n{question}"}]

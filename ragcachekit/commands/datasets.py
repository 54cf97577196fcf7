"""Questions with their passages: SQuAD, MuSiQue, LongBench, or a JSONL file of your own."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

ORDERS = ("shuffled", "given")
HALVES = ("all", "develop", "report")

LONGBENCH_WORDS = 200
"""Chunks of a context without marked passages have at most so many words, or one longer paragraph."""

_PASSAGE = re.compile(r"(?m)^Passage \d+:\n")


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
    """One question as its file has it.

    ``relevant`` are the passages that the answer needs, ``others`` further ones, both in the order of the
    file; ``document`` are the chunks of the document that they come from, in order, if the file has it.
    """

    question: str
    answers: tuple[str, ...]
    relevant: tuple[str, ...]
    others: tuple[str, ...] = ()
    document: tuple[str, ...] = ()
    kind: str = ""


@dataclass(frozen=True)
class Sampling:
    """Which questions of a dataset are asked, and with which passages.

    ``distractors`` passages are added to the relevant ones (None: all of them). The ``half`` to ``develop``
    on and that to ``report`` are told apart by a digest of the question, whatever the seed.
    """

    count: int = 50
    distractors: int | None = 3
    order: str = "shuffled"
    half: str = "all"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < 1 or (self.distractors is not None and self.distractors < 0):
            raise ValueError("give at least one question, and no fewer than 0 distractors")
        if self.order not in ORDERS:
            raise ValueError(f"unknown order {self.order!r}; known: {', '.join(ORDERS)}")
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
        """The passages of one prompt, in order, each once."""
        rng = random.Random(f"{self.seed} {one.question}")
        others = [text for text in dict.fromkeys(one.others) if text not in one.relevant]
        few = others if self.distractors is None else rng.sample(others, min(self.distractors, len(others)))
        chosen = {*one.relevant, *few}
        source = (one.document or (*one.relevant, *one.others)) if few else one.relevant
        out = [text for text in dict.fromkeys(source) if text in chosen]
        if self.order == "shuffled":
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
        Question(one.question, sampling.chunks(one), one.answers, one.kind, one.document)
        for one in sampling.draw(load_dataset(spec))
    )


def _items(text: str) -> list[Any]:
    """The items of a JSON list, or of one JSON value per line."""
    if text.lstrip().startswith("["):
        return list(json.loads(text))
    return [json.loads(line) for line in text.splitlines() if line.strip()]


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
    out = []
    for item in (item for item in _items(text) if item.get("answerable", True)):
        if "ctxs" in item:
            answers = tuple(item["answers"])
            texts = [_titled(part["title"], part["text"]) for part in item["ctxs"]]
            marks = [any(answer.lower() in one.lower() for answer in answers) for one in texts]
        else:
            answers = (item["answer"], *item["answer_aliases"])
            texts = [_titled(part["title"], part["paragraph_text"]) for part in item["paragraphs"]]
            marks = [bool(part["is_supporting"]) for part in item["paragraphs"]]
        relevant = tuple(one for one, mark in zip(texts, marks, strict=True) if mark)
        others = tuple(one for one, mark in zip(texts, marks, strict=True) if not mark)
        out.append(Passages(item["question"].strip(), answers, relevant, others))
    return out


def _titled(title: str, text: str) -> str:
    return f"{title}\n{text.strip()}" if title else text.strip()


def _longbench(text: str) -> list[Passages]:
    """LongBench: every question with all of its context, as one document; no passage is marked relevant."""
    out = []
    for item in _items(text):
        document = tuple(_cut(item["context"]))
        answers, kind = tuple(item["answers"]), item.get("dataset", "")
        out.append(Passages(item["input"].strip(), answers, document, (), document, kind))
    return out


def _cut(context: str) -> list[str]:
    starts = [match.start() for match in _PASSAGE.finditer(context)]
    if starts:
        parts = [context[a:b].strip() for a, b in pairwise([0, *starts, len(context)])]
        return [part for part in parts if part]
    chunks: list[list[str]] = [[]]
    for paragraph in filter(None, map(str.strip, context.split("\n"))):
        if chunks[-1] and sum(len(text.split()) for text in (*chunks[-1], paragraph)) > LONGBENCH_WORDS:
            chunks.append([])
        chunks[-1].append(paragraph)
    return ["\n".join(chunk) for chunk in chunks]


def _jsonl(text: str) -> list[Passages]:
    """``{"question", "chunks", "answer"}`` per line; all chunks count as relevant."""
    return [
        Passages(
            item["question"],
            (item["answer"],),
            tuple(item["chunks"]),
            (),
            tuple(item.get("document", ())),
            item.get("type", ""),
        )
        for item in _items(text)
    ]


LOADERS: dict[str, Callable[[str], list[Passages]]] = {
    "jsonl": _jsonl,
    "longbench": _longbench,
    "musique": _musique,
    "squad": _squad,
}

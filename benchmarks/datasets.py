"""SQuAD and MuSiQue: questions with the passages of their prompts."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ragcachekit.commands.questions import Question

HALVES = ("all", "develop", "report")


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

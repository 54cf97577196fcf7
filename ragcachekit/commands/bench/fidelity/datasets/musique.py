"""MuSiQue: the published JSONL, or the passages of about 400 words that CacheBlend evaluates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ragcachekit.commands.bench.fidelity.datasets.base import Passages, read_items


def load(path: Path) -> list[Passages]:
    """Every answerable question. Without marks, passages that contain an answer count as relevant."""
    found = [_parsed(item) for item in read_items(path) if item.get("answerable", True)]
    return [one for one in found if one.answers]


def _parsed(item: dict[str, Any]) -> Passages:
    if "ctxs" in item:
        answers = tuple(item["answers"])
        texts = [_titled(ctx["title"], ctx["text"]) for ctx in item["ctxs"]]
        marks = [any(answer.lower() in text.lower() for answer in answers) for text in texts]
    else:
        answers = (item["answer"], *item["answer_aliases"])
        texts = [_titled(part["title"], part["paragraph_text"]) for part in item["paragraphs"]]
        marks = [bool(part["is_supporting"]) for part in item["paragraphs"]]
    relevant = tuple(text for text, mark in zip(texts, marks, strict=True) if mark)
    others = tuple(text for text, mark in zip(texts, marks, strict=True) if not mark)
    return Passages(item["question"].strip(), answers, relevant, others)


def _titled(title: str, text: str) -> str:
    return f"{title}\n{text.strip()}" if title else text.strip()

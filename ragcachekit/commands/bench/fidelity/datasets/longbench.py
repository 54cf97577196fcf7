"""LongBench: one JSON object per line, with the whole context as one text."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from ragcachekit.commands.bench.fidelity.datasets.base import Passages, read_items

WORDS = 200
"""Chunks of a context without marked passages have at most so many words, or one longer paragraph."""

_PASSAGE = re.compile(r"(?m)^Passage \d+:\n")


def load(path: Path) -> list[Passages]:
    """Every question with all of its context, as one document: nothing says which passages are relevant."""
    out = []
    for item in filter(lambda item: item["answers"], read_items(path)):
        document = tuple(_cut(item["context"]))
        kind = item.get("dataset", "")
        out.append(Passages(item["input"].strip(), tuple(item["answers"]), document, (), document, kind))
    return out


def _cut(context: str) -> list[str]:
    starts = [match.start() for match in _PASSAGE.finditer(context)]
    if starts:
        parts = [context[a:b].strip() for a, b in pairwise([0, *starts, len(context)])]
        return [part for part in parts if part]
    chunks: list[list[str]] = [[]]
    for paragraph in filter(None, map(str.strip, context.split("\n"))):
        if chunks[-1] and sum(len(text.split()) for text in (*chunks[-1], paragraph)) > WORDS:
            chunks.append([])
        chunks[-1].append(paragraph)
    return ["\n".join(chunk) for chunk in chunks]

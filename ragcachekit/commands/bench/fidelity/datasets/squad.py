"""SQuAD 1.1 and 2.0: a question, its paragraph, and the other paragraphs of the article."""

from __future__ import annotations

import json
from pathlib import Path

from ragcachekit.commands.bench.fidelity.datasets.base import Passages


def load(path: Path) -> list[Passages]:
    """Every question that has an answer; the document is the article."""
    out = []
    for article in json.loads(path.read_text(encoding="utf-8"))["data"]:
        document = tuple(paragraph["context"].strip() for paragraph in article["paragraphs"])
        for text, paragraph in zip(document, article["paragraphs"], strict=True):
            for item in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in item["answers"]))
                if answers and not item.get("is_impossible", False):
                    out.append(Passages(item["question"].strip(), answers, (text,), document, document))
    return out

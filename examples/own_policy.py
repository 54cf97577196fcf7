"""A policy of your own beside the library's: `python examples/own_policy.py [--model PATH]`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from ragcachekit import RagCache
from ragcachekit.policies.base import PlacedChunk

DOCUMENTS = (
    "Ada keeps bees behind the mill. In May she sells honey at the market in Norda, in small jars.",
    "Her brother Carl builds boats of larch wood. He needs a winter for each, and sells them in spring.",
)
QUESTION = "What does Carl sell?"


@dataclass(frozen=True)
class Ends:
    """Recomputes the first and the last ``n`` tokens of every chunk that is not exact."""

    n: int
    encoder: str | None = None  # any
    reads_cache = True

    @property
    def name(self) -> str:
        """``ends:n``, for reports."""
        return f"ends:{self.n}"

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        """Positions in the prompt."""
        chosen: list[int] = []
        for chunk in (c for c in chunks if not c.is_exact):
            places = range(chunk.start, chunk.stop)
            chosen += sorted({*places[: self.n], *places[-self.n :]})
        return chosen


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer one question under several policies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sample", help="folder or hub id")
    model = parser.parse_args(arguments).model
    content = "\n\n".join(["Answer from the context.", *DOCUMENTS, QUESTION])
    messages = [{"role": "user", "content": content}]
    with RagCache.from_pretrained(model, policy=Ends(4)) as rag:
        rag.encode(DOCUMENTS, prompt=messages)
        for policy in (Ends(4), "lego:8", "reuse", "full"):
            answer = rag.generate(messages, policy=policy, max_new_tokens=16)
            link = answer.report.link
            print(f"{link.policy}: ratio {link.recompute_ratio:.2f}, {answer.text!r}")


if __name__ == "__main__":
    main()

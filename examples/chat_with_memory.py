"""A conversation whose turns are reused: `python examples/chat_with_memory.py [--model PATH] [--ask]`.

With `--ask` it reads questions from the keyboard, until an empty line.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence

from ragcachekit import RagCache, TreeConfig

DOCUMENTS = (
    "The lighthouse of Norda was built in 1874. Its keeper, Edna Lund, studied marine biology before that.",
    "The light can be seen from twenty miles away. In fog a horn sounds every thirty seconds instead.",
)
SYSTEM = "Answer from these notes, in one sentence.\n\n" + "\n\n".join(DOCUMENTS)
QUESTIONS = ("When was the lighthouse built?", "Who keeps it?", "What does one hear in fog?")


def typed() -> Iterator[str]:
    """Questions from the keyboard."""
    while question := input("> ").strip():
        yield question


def chat(rag: RagCache, questions: Iterable[str]) -> None:
    """Answer one question after the other; each prompt holds the whole conversation."""
    messages = [{"role": "system", "content": SYSTEM}]
    for question in questions:
        messages.append({"role": "user", "content": question})
        print(question, end=" ", flush=True)
        with rag.stream(messages, max_new_tokens=24) as pieces:
            for piece in pieces:
                print(piece, end="", flush=True)
            answer = pieces.answer
        messages.append({"role": "assistant", "content": answer.text})
        link = answer.report.link
        print(f"\n  {link.reused_tokens} of {link.prompt_tokens} prompt tokens reused")


def main(arguments: Sequence[str] | None = None) -> None:
    """Chat."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="sample", help="folder or hub id")
    parser.add_argument("--ask", action="store_true", help="read questions from the keyboard")
    given = parser.parse_args(arguments)
    tree = TreeConfig(host_bytes=1 << 30, turns_bytes=1 << 30)
    with RagCache.from_pretrained(given.model, tree=tree) as rag:
        rag.register(DOCUMENTS)
        chat(rag, typed() if given.ask else QUESTIONS)


if __name__ == "__main__":
    main()

"""Prompts in which nothing was reused: the report says why, and lists the text before the chunks apart."""

from __future__ import annotations

import pytest

from ragcachekit import Chunk, Prompt, RagCache, Text
from speaking import byte_level, speaker

ONE = "Berlin is the capital of Germany. The river Spree flows in Berlin."
TWO = "Paris is the capital of France; the river Seine flows in Paris."
PROMPT = f"Answer from the context.\n{ONE}\n\n{TWO}\nWhere does the river flow?"
MESSAGES = [{"role": "user", "content": PROMPT}]


@pytest.fixture
def rag(tmp_path):
    with RagCache(speaker(), byte_level(), cache_dir=tmp_path, cold="now", policy="lego:4") as rag:
        yield rag


@pytest.mark.parametrize("prompt", [PROMPT, MESSAGES])
def test_no_chunk_is_registered(rag, prompt) -> None:
    rag.register([ONE, TWO], namespace="other")
    (note,) = rag.link(prompt).report.notes
    assert note.startswith("no chunk is registered in namespace 'default'")
    assert "wrap the retriever" in note
    assert "other" not in note


@pytest.mark.parametrize("prompt", ["Where does the Tiber flow?", [{"role": "user", "content": "Where?"}]])
def test_no_registered_chunk_stands_in_the_prompt(rag, prompt) -> None:
    rag.encode([ONE])
    (note,) = rag.link(prompt).report.notes
    assert note.startswith("no chunk registered in namespace 'default' occurs verbatim in the prompt")


@pytest.mark.parametrize(
    ("prompt", "policy"),
    [
        (PROMPT, "full"),
        (Prompt([Text("Where?")]), "reuse"),
        (Prompt([Text("x"), Chunk(ONE), Text("?")]), "reuse"),
        ([{"role": "user", "content": [{"type": "text", "text": ONE, "chunk": True}, "?"]}], "reuse"),
    ],
)
def test_nothing_is_said_where_nothing_was_to_be_found(rag, prompt, policy) -> None:
    assert rag.link(prompt, policy=policy).report.notes == ()


class TestPrefix:
    def test_is_listed_apart_from_the_chunks(self, rag) -> None:
        rag.register([ONE, TWO])
        first, second = (rag.generate(PROMPT, max_new_tokens=1).report.link for _ in range(2))
        head = 1 + rag.count_tokens("Answer from the context.\n")
        for link, source in ((first, "computed"), (second, "host")):
            assert (link.prefix.tokens, link.prefix.source) == (head, source)
            assert [use.tokens for use in link.chunks] == [rag.count_tokens(ONE), rag.count_tokens(TWO)]
        assert second.prefix.exact
        assert (second.exact_tokens, second.prefix.recomputed) == (head, 0)

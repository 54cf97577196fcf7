"""Notes of reports: why nothing was reused, and that the store could not keep what was missing."""

import logging

import pytest

from engine_kit import PROMPT as TOKENS
from engine_kit import rag_for
from ragcachekit import Chunk, Prompt, StoreConfig, Text, TreeConfig
from speaking import ONE, TWO

ASKED = {"max_new_tokens": 2, "do_sample": False}
PROMPT = f"Answer from the context.\n{ONE}\n\n{TWO}\nWhere does the river flow?"
MESSAGES = [{"role": "user", "content": PROMPT}]


@pytest.fixture
def rag(opened):
    return opened(cold="now", policy="lego:4", encoder="standalone")


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


def test_the_text_before_the_chunks_is_listed_apart(rag) -> None:
    rag.register([ONE, TWO])
    first, second = (rag.generate(PROMPT, max_new_tokens=1).report.link for _ in range(2))
    head = 1 + rag.count_tokens("Answer from the context.\n")
    for link, source in ((first, "computed"), (second, "host")):
        assert (link.prefix.tokens, link.prefix.source) == (head, source)
        assert [use.tokens for use in link.chunks] == [rag.count_tokens(ONE), rag.count_tokens(TWO)]
    assert second.prefix.exact
    assert (second.exact_tokens, second.prefix.recomputed) == (head, 0)


def test_encoding_into_nothing_is_warned_of_once(opened, caplog):
    rag = opened(store=StoreConfig(host_bytes=0))
    for _ in range(2):
        assert len(rag.encode([ONE])) == 1
    (record,) = [r for r in caplog.records if "encode keeps nothing" in r.message]
    assert record.levelno == logging.WARNING
    assert "host_bytes" in record.message
    assert "disk_path" in record.message


@pytest.mark.parametrize(
    ("encoder", "options", "asked", "said"),
    [
        ("average:2", {}, False, 1),
        ("average:2", {"system": "Answer from the context.\n"}, False, 0),
        ("average:2", {}, True, 0),
        ("standalone", {}, False, 0),
    ],
)
def test_encoding_without_the_text_before_the_chunks_is_warned_of(
    opened, caplog, encoder, options, asked, said
):
    rag = opened(encoder=encoder)
    rag.register([ONE, TWO])
    if asked:
        rag.generate(PROMPT, max_new_tokens=1)
    rag.encode([ONE, TWO], **options)
    assert sum("give prompt=, or ask a question first" in r.message for r in caplog.records) == said


@pytest.mark.parametrize("encoder", ["system", "average:3"])
def test_an_encode_that_does_not_fit_says_what_is_kept(opened, caplog, encoder):
    texts = [f"{ONE} {number}" for number in range(8)]
    rag = opened(encoder=encoder)
    ids = rag.encode(texts, system="Answer.\n")
    assert (len(ids), ids.kept, caplog.records) == (8, ids, [])
    room = rag.stats()[0].nbytes // 2
    small = opened(encoder=encoder, store=StoreConfig(host_bytes=room))
    for number in range(2):  # each call says it
        ids = small.encode(texts, system="Answer.\n")
        assert 2 <= len(ids.kept) < 8
        stored = small.components.store.keys()
        assert set(ids.kept) <= {key.chunk_id for key in stored}
        (record,) = caplog.records[number:]
        assert f"of {len(ids.kept)} of 8 chunks" in record.message
        assert "raise host_bytes or disk_bytes" in record.message


@pytest.mark.parametrize("disk", [False, True])
def test_the_next_report_says_that_entries_were_not_kept(disk, tmp_path):
    store = StoreConfig(host_bytes=64)
    if disk:
        store = StoreConfig(host_bytes=0, disk_path=tmp_path / "kv", disk_bytes=64)
    rag = rag_for("llama", store=store)
    first, second = (rag.generate(TOKENS, **ASKED).report for _ in range(2))
    assert first.link.notes == (), "nobody knows yet"
    (note,) = second.link.notes
    assert note.startswith("3 missing entries could not be kept, as the store is too small")
    assert note in str(second)
    rag.close()


def test_no_note_where_entries_are_kept_or_nothing_is_wanted():
    for options in ({}, {"store": StoreConfig(host_bytes=0), "tree": TreeConfig()}):
        rag = rag_for("llama", **options)
        assert [rag.generate(TOKENS, **ASKED).report.link.notes for _ in range(2)] == [(), ()]
        rag.close()

"""What the store could not keep is said: by a warning when encoding ahead, by a note in later reports."""

from __future__ import annotations

import logging

import pytest

from engine_kit import PROMPT, rag_for
from ragcachekit import RagCache, StoreConfig, TreeConfig
from speaking import byte_level, speaker

ONE = "Berlin is the capital of Germany. The river Spree flows in Berlin."
ASKED = {"max_new_tokens": 2, "do_sample": False}


def test_encoding_into_nothing_is_warned_of_once(tmp_path, caplog):
    nothing = StoreConfig(host_bytes=0)
    with RagCache(speaker(), byte_level(), cache_dir=tmp_path, store=nothing) as rag:
        for _ in range(2):
            assert len(rag.encode([ONE])) == 1
    (record,) = [r for r in caplog.records if "encode keeps nothing" in r.message]
    assert record.levelno == logging.WARNING
    assert "host_bytes" in record.message
    assert "disk_path" in record.message


@pytest.mark.parametrize("disk", [False, True])
def test_the_next_report_says_that_entries_were_not_kept(disk, tmp_path):
    store = StoreConfig(host_bytes=64)
    if disk:
        store = StoreConfig(host_bytes=0, disk_path=tmp_path / "kv", disk_bytes=64)
    rag = rag_for("llama", store=store)
    first, second = (rag.generate(PROMPT, **ASKED).report for _ in range(2))
    assert first.link.notes == (), "nobody knows yet"
    (note,) = second.link.notes
    assert note.startswith("3 missing entries could not be kept, as the store is too small")
    assert note in str(second)
    rag.close()


def test_no_note_where_entries_are_kept_or_nothing_is_wanted():
    for options in ({}, {"store": StoreConfig(host_bytes=0), "tree": TreeConfig()}):
        rag = rag_for("llama", **options)
        assert [rag.generate(PROMPT, **ASKED).report.link.notes for _ in range(2)] == [(), ()]
        rag.close()

"""Reports in notebooks and as text: readable, escaped, complete."""

import pickle
from xml.etree import ElementTree

import pytest

from ragcachekit.reports import (
    Answer,
    ChunkUse,
    EncodingStats,
    GenerateReport,
    LinkReport,
    QueueStats,
    ShadowReport,
)
from ragcachekit.store.base import StoreStats

EVIL = "<script>alert('x')</script> & more"
USES = (ChunkUse("ab" * 32, 66, "host", 4), ChunkUse("cd" * 32, 60, EVIL))
LINK = LinkReport(
    "lego:4", "standalone", EVIL, prompt_tokens=160, exact_tokens=20, approximate_tokens=122, chunks=USES
)
REPORT = GenerateReport(LINK, 24, ttft_ms=85.2, total_ms=420.0, finish_reason="stop")
TIER = StoreStats("host", 3, 1 << 20, 1 << 32, hits=5, misses=1, evictions=0, damaged=0, failed_writes=0)
SHOWN = [
    *(USES[1], LINK, REPORT, ShadowReport(), EncodingStats(1, 2, 3), QueueStats(), TIER),
]


@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: type(shown).__name__)
def test_html_is_well_formed_and_escaped(shown) -> None:
    markup = shown._repr_html_()
    assert ElementTree.fromstring(f"<div>{markup}</div>") is not None
    assert "<script" not in markup


def test_a_report_shows_every_field() -> None:
    markup = LINK._repr_html_()
    for name in LinkReport.__dataclass_fields__:
        assert f">{name.replace('_', ' ')}</th>" in markup


def test_an_answer_is_short_in_a_list_and_whole_as_text() -> None:
    answer = Answer("word " * 400, tuple(range(400)), REPORT)
    assert len(repr([answer])) < 200
    assert "142 of 160 prompt tokens reused" in repr(answer)
    assert str(answer) == answer.text
    assert pickle.loads(pickle.dumps(answer)) == answer

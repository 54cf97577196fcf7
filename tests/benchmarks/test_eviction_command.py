"""bench eviction from the command line."""

from __future__ import annotations

import json

import pytest

TINY = ("eviction", "--documents", "60", "--requests", "120", "--seeds", "2", "--sizes", "0.05,0.1")


def test_it_prints_tables_and_writes_json_and_a_picture(proofs, tmp_path):
    result = proofs(*TINY, "--traces", "zipf", "--json", tmp_path / "e.json", "--plot", tmp_path / "e.svg")
    assert result.exit_code == 0
    for words in ("Documents found", "bound", "pgdsf", "1.02-1.32", "always-reload", "time saved by"):
        assert words in result.output
    frame = json.loads((tmp_path / "e.json").read_text())
    assert frame["bench"] == "eviction"
    assert {"trace", "policy", "capacity", "hit_rate", "belady_hit_rate"} <= set(frame["rows"][0])
    assert len(frame["rows"]) == 2 * 2 * 6 + 2 * 3
    assert "<svg" in (tmp_path / "e.svg").read_text()


def test_it_replays_a_trace_of_the_users(proofs, tmp_path):
    trace = tmp_path / "asked.jsonl"
    lines = [
        {"docs": [f"doc {n % 7}", {"id": f"doc {n % 3 + 7}", "tokens": 50 * (n % 3 + 1)}]} for n in range(40)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "e.json"
    result = proofs(
        *(
            "eviction",
            "--trace",
            trace,
            "--tokens",
            "200",
            "--sizes",
            "0.5",
            "--structure",
            "chunks",
        ),
        *("--policies", "lru,pgdsf:50", "--no-tiers", "--profile", "smollm2-135m", "--json", out),
    )
    assert result.exit_code == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["trace"], row["policy"], row["seeds"]) for row in rows] == [
        ("asked", "lru", 1),
        ("asked", "pgdsf:50", 1),
    ]
    assert rows[0]["capacity"] == (7 * 200 + 50 + 100 + 150) // 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--traces", "zipf", "--trace", "x.jsonl"), "not both"),
        (("--traces", "uniform"), "known: zipf"),
        (("--policies", "mru"), "known: lru"),
        (("--sizes", "small"), "as 0.01,0.04"),
        (("--structure", "list"), "known: tree, chunks"),
        (("--trace", "nowhere.jsonl"), "nowhere.jsonl"),
    ],
)
def test_what_cannot_be_is_one_line(proofs, arguments, says):
    result = proofs(*TINY[:-2], *arguments)
    assert result.exit_code == 2
    assert says in result.output


def test_a_bad_line_of_a_trace_is_named(proofs, tmp_path):
    trace = tmp_path / "asked.jsonl"
    trace.write_text('{"docs": ["a"]}\n{"docs": []}\n')
    result = proofs("eviction", "--trace", trace)
    assert result.exit_code == 2
    assert "line 2: expected" in result.output

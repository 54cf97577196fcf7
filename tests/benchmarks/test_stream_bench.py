"""``python -m benchmarks stream``: what a new user's questions cost, beside the bare model."""

import json
from itertools import pairwise

from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.stream import MAX_WORDS, PER_PROMPT, draws, pieces
from benchmarks.world.reader_folder import READER


def test_passages_are_cut_and_popular_ones_return():
    texts = [" ".join(f"{number}x{word}" for word in range(400)) for number in range(3)]
    assert [len(piece.split()) for piece in pieces([*texts, texts[0], "too short"])] == [
        MAX_WORDS,
        MAX_WORDS,
    ] * 3
    first, uniform = (list(draws(50, 200, zipf, 0)) for zipf in (1.0, 0.0))
    assert all(len(set(places)) == PER_PROMPT for places, _ in first)
    often = [sum(places.count(0) for places, _ in drawn) for drawn in (first, uniform)]
    assert often[0] > 3 * often[1] > 0


def test_rows_add_up(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    texts = [" ".join(f"Item {n} is at place {n * word}." for word in range(24)) for n in range(8)]
    paragraphs = [{"context": t, "qas": [{"question": "What?", "answers": [{"text": "1"}]}]} for t in texts]
    data = {"data": [{"title": "T", "paragraphs": paragraphs}]}
    (tmp_path / "a.json").write_text(json.dumps(data))
    sizes = ("--chunks", 8, "--questions", 6, "--max-new-tokens", 2, "--zipf", 1.0)
    files = ("--json", tmp_path / "s.json", "--plot", tmp_path / "s.png")
    given = ("stream", "--model", READER, "--dataset", f"squad:{tmp_path / 'a.json'}", *sizes, *files)
    result = CliRunner().invoke(app, list(map(str, given)))
    assert result.exit_code == 0, result.output
    assert "the estimate says" in " ".join(result.output.split())
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert [row["question"] for row in rows] == [*range(1, 7)]
    for name in ("cpu_s", "bare_cpu_s"):
        assert all(one[name] < other[name] for one, other in pairwise(rows))
    assert rows[0]["estimated_rows"] == 1 > rows[-1]["estimated_rows"]
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")

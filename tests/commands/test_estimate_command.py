"""ragcachekit estimate: what it says, the JSON, the picture, and when it says no."""

import json
import re
import shutil

import pytest

from benchmarks.world.reader_folder import READER
from ragcachekit.commands.corpus import read_corpus
from ragcachekit.commands.estimate.report import duration
from ragcachekit.commands.estimate.run import EstimateSettings
from ragcachekit.commands.workspace import load_tokenizer


@pytest.fixture
def estimate(command, corpus, one_minilm, prepared, tmp_path):
    """Run it over lines of a log, without measuring."""
    shutil.copytree(prepared, tmp_path / "cache")

    def run(lines, *arguments, measure="--no-measure"):
        log = tmp_path / "log.jsonl"
        log.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
        return command(
            *("estimate", "--log", log, "--corpus", corpus, "--model", READER, measure),
            *("--cache", tmp_path / "cache", "--chunk-tokens", "34", "--json", tmp_path / "out.json"),
            *arguments,
        )

    return run


@pytest.fixture
def rows(tmp_path):
    """The JSON's rows of a part."""

    def of(part):
        found = json.loads((tmp_path / "out.json").read_text())
        assert (found["schema"], found["bench"], found["model"]) == (1, "estimate", READER)
        return [row for row in found["rows"] if row["part"] == part]

    return of


@pytest.fixture
def chunks(corpus):
    return read_corpus(corpus, chunk_tokens=34, tokenizer=load_tokenizer(READER)).chunks


def test_a_log_that_repeats_itself_is_helped(estimate, rows, chunks, tmp_path):
    long = [" ".join(c.text for c in chunks[i : i + 8]) for i in (0, 8)]
    lines = [{"question": f"Question {n % 3}?", "chunks": long} for n in range(12)]
    result = estimate(lines, "--plot", tmp_path / "out.png", "--policy", "lego:4")
    assert result.exit_code == 0, result.output
    (advice,) = rows("advice")
    assert advice["helps"]
    assert advice["speedup"] > 1.1
    assert f"store={advice['store']}" in result.stdout
    assert re.fullmatch(r"StoreConfig\(host_bytes=[\d_]+\)", advice["store"])
    (log,) = rows("log")
    assert (log["questions"], log["repeated"], log["chunk_uses"], log["chunks_touched"]) == (12, 9, 24, 2)
    assert log["chunk_reuse"] == pytest.approx(22 / 24)
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_every_row_adds_up(estimate, rows):
    assert estimate(["Where was he born?", "Who is she?"] * 3, "--host", "0.5,1").exit_code == 0
    found = rows("tiers")
    assert {(r["eviction"], r["disk"], r["precomputed"]) for r in found} == {
        (eviction, *way)
        for eviction in ("lru", "pgdsf")
        for way in ((False, False), (True, False), (True, True))
    }
    for row in found:
        assert row["from_host"] + row["from_disk"] + row["computed"] == pytest.approx(1)
        assert row["disk"] or row["from_disk"] == 0
        assert not row["precomputed"] or row["computed"] == 0
        assert row["ttft_ms"] <= row["ttft_ms_p90"]


def once(chunks):
    """Every chunk in one prompt, eight in each."""
    names = [f"{c.source}#{c.number}" for c in chunks]
    return [{"question": f"Question {n}?", "chunks": names[n : n + 8]} for n in range(0, len(names) - 7, 8)]


def test_chunks_that_never_come_back_are_not_helped(estimate, rows, chunks):
    texts = [f"Note {n}. {chunk.text}" for n, chunk in enumerate(chunks[:16])]
    result = estimate([{"question": "Why?", "chunks": texts[:8]}, {"question": "Who?", "chunks": texts[8:]}])
    assert result.exit_code == 0
    (advice,) = rows("advice")
    assert (advice["helps"], advice["store"], advice["precompute"]) == (False, None, False)
    assert "it will not help you" in result.stdout
    assert "16 uses of 16 different ones (0% of the uses come back)" in result.stdout
    assert rows("log")[0]["chunks_not_in_corpus"] == 16
    assert "16 of those used not among them" in result.stdout


def test_all_of_a_corpus_once_is_helped_by_precompute_only(estimate, rows, chunks):
    result = estimate(once(chunks), "--policy", "reuse")
    (advice,) = rows("advice")
    assert (advice["helps"], advice["precompute"]) == (True, True)
    assert "but only if you run precompute first" in result.stdout
    assert all(row["from_host"] == 0 for row in rows("tiers") if not row["precomputed"])


def test_a_name_is_the_text_that_it_stands_for(estimate, rows, chunks):
    named = [{"question": "Why?", "chunks": [f"{c.source}#{c.number}" for c in chunks[:3]]}] * 2
    given = [{"question": "Why?", "chunks": [c.text for c in chunks[:3]]}] * 2
    estimate(named)
    first = rows("log"), rows("tiers")
    estimate(given)
    assert (rows("log"), rows("tiers")) == first


def test_near_questions_are_answered_by_the_query_cache(estimate, rows):
    asked = ["Where was he born?", "Where was he born, then?"]
    estimate(asked, "-k", "1", "--tolerance", "0.9")
    assert rows("log")[0]["chunks_touched"] == 1
    assert rows("log")[0]["repeated"] == 0


def test_no_embedding_where_the_log_names_all_documents(estimate, chunks, monkeypatch):
    monkeypatch.setattr("ragcachekit.commands.ask.MiniLM", None)
    result = estimate([{"question": "Why?", "chunks": [chunk.text for chunk in chunks[:3]]}] * 2)
    assert result.exit_code == 0, result.output


def test_prefills_are_measured_and_the_rest_is_said_to_be_assumed(estimate, rows, monkeypatch):
    monkeypatch.setattr("ragcachekit.commands.estimate.speed.MEASURE_SECONDS", 0.2)
    result = estimate(["Where was he born?"] * 2, "--host", "1", measure="--measure")
    assert result.exit_code == 0, result.output
    assert "prefills measured on cpu" in result.output
    assert "assumed: KV from the disk at 1.00 GB/s (--disk-gbps)" in result.output
    estimate(["Where was he born?"] * 2, "--host", "1", "--disk-gbps", "2.5")
    assert rows("log")[0]["disk_gb_per_s"] == 2.5


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["fine", '{"question": 3}'], 'line 2: "question" must be'),
        (
            [{"question": "Why?", "chunks": ["nowhere.txt#0"]}],
            "line 1 of the log: the corpus has no chunk nowhere",
        ),
        ([{"question": "Why?", "chunks": ["word " * 6000]}], "line 1 of the log: the prompt has"),
        ([], "holds no question"),
    ],
)
def test_bad_logs_are_one_line(estimate, lines, message):
    result = estimate(lines)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "full"), "reuses nothing"),
        (("--policy", "cacheblend:0.15"), "cannot say how many rows"),
        (("--encoder", "in-prompt"), "does not replay encoder"),
        (("--eviction", "newest"), "unknown eviction policy"),
        (("--eviction", ","), "at least one eviction policy"),
        (("--host", "half"), "--host takes numbers"),
        (("--host", "0"), "shares > 0"),
        (("--disk-gbps", "0"), "more than 0 GB/s"),
    ],
)
def test_bad_arguments_are_one_line(estimate, arguments, message):
    result = estimate(["Why?"], *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_settings_check_themselves():
    with pytest.raises(ValueError, match="k must be at least 1"):
        EstimateSettings("folder", READER, log="log", k=0)


@pytest.mark.parametrize(("seconds", "text"), [(0.0125, "12.5 ms"), (64.7, "64.7 s"), (1110.0, "1,110.0 s")])
def test_a_short_time_is_in_milliseconds(seconds, text):
    assert duration(seconds) == text

"""The query-cache bench measures what it says."""

import json

import numpy as np
import pytest

from benchmarks.query_cache.hits import PANELS, Sweep, draw, replays, run, searched
from benchmarks.query_cache.lookups import lookup_rows
from benchmarks.query_cache.workload import Workload, of_dataset
from ragcachekit.retrieval.proximity import Hit, ProximityCache


def workload():
    """Ten questions, each asked four times with a little noise, shuffled."""
    rng = np.random.default_rng(0)
    base = rng.standard_normal((10, 16))
    asked = np.repeat(base, 4, axis=0) + 1e-3 * rng.standard_normal((40, 16))
    order = rng.permutation(40)
    distinct = tuple(int(at) // 4 for at in order)
    texts = ("The guard has nothing to say.",) * 40
    return Workload(
        "noise", texts, asked[order].astype(np.float32), np.eye(16), distinct, (frozenset({7}),) * 40
    )


def search(question):
    return [int(np.sign(question[0])), 7, 9]


def rows_of(asked, sweep, find=search):
    return list(replays(asked, searched(asked, find), sweep))


def test_rows_of_a_sweep():
    rows = rows_of(workload(), Sweep((2, 40), (0.0, 0.05), reorder=False))
    by_case = {(row["capacity"], row["tolerance"]): row for row in rows}
    assert by_case[40, 0.0]["hit_rate"] == 0.0
    assert by_case[40, 0.05]["hit_rate"] == 30 / 40
    assert by_case[2, 0.05]["hit_rate"] < 30 / 40
    assert by_case[40, 0.0]["result_recall"] == 1.0
    assert all(row["lookup_us"] > 0 and row["latency_ms"] > 0 for row in rows)
    assert {row["evidence_uncached"] for row in rows} == {1.0}


def test_recall_counts_what_the_index_would_have_said():
    asked = np.array([[1.0, 0.0], [1.0, 0.01]], np.float32)
    answers = {0.0: [1, 2], 0.01: [2, 3]}
    two = Workload("two", ("a", "b"), asked, np.eye(2), (0, 1), (frozenset({1}), frozenset({3})))
    (row,) = rows_of(two, Sweep((1,), (0.5,), reorder=False), lambda q: answers[round(float(q[1]), 2)])
    assert (row["hit_rate"], row["result_recall"], row["wrong_hits"]) == (0.5, 0.75, 0.5)
    assert (row["evidence"], row["evidence_uncached"]) == (0.5, 1.0)


def test_candidates_are_put_in_order_for_the_question_that_hits_them():
    asked = np.array([[1.0, 0.0, 0.0], [0.9, 0.4, 0.0]], np.float32)
    turns = np.linspace(-0.5, 1.0, 16)
    chunks = np.stack([np.cos(turns), np.sin(turns), 0 * turns], 1).astype(np.float32)
    two = Workload("two", ("a", "a"), asked, chunks, (0, 0), (frozenset(),) * 2)
    nearest = [[int(at) for at in np.argsort(-(chunks @ question))] for question in asked]
    found = searched(two, lambda question: nearest[int(question[1] > 0)])
    assert set(found.ids[0]) != set(found.ids[1])
    for reorder, recall in ((True, 1.0), (False, 0.5 + len({*found.ids[0]} & {*found.ids[1]}) / 8)):
        (row,) = replays(two, found, Sweep((1,), (0.5,), reorder=reorder))
        assert (row["hit_rate"], row["result_recall"]) == (0.5, recall)


def test_a_saved_search_saves_its_own_time():
    asked, ms = workload(), iter(range(1, 41))
    found = searched(asked, search)
    object.__setattr__(found, "ms", tuple(1000.0 * next(ms) for _ in range(40)))
    (row,) = replays(asked, found, Sweep((40,), (0.05,), reorder=False))
    seen, spent = set(), 0.0
    for at, number in enumerate(asked.distinct):
        spent += 0.0 if number in seen else found.ms[at]
        seen.add(number)
    assert row["latency_saved"] == pytest.approx(1 - spent / sum(found.ms), abs=1e-3)


@pytest.fixture
def squad(tmp_path):
    texts = ["Berne is the capital of Switzerland.", "Oslo is the capital of Norway.", "Cork floats."]
    paragraphs = [{"context": text, "qas": []} for text in texts]
    for at, country in enumerate(("Switzerland", "Norway")):
        answer = {"text": texts[at].split()[0]}
        paragraphs[at]["qas"] = [{"question": f"What is the capital of {country}?", "answers": [answer]}]
    file = tmp_path / "squad.json"
    file.write_text(json.dumps({"data": [{"title": "t", "paragraphs": paragraphs}]}))
    return file


def test_a_dataset_of_questions_in_four_wordings(one_minilm, squad, tmp_path):
    found = of_dataset(f"squad:{squad}", 2, vectors=50)
    assert (len(found.texts), len(found.chunks), sorted(found.distinct)) == (8, 50, [0] * 4 + [1] * 4)
    report = run(found, Sweep((8,), (0.0, 0.3)), "faiss-flat")
    exact, wide = report.part("sweep").rows
    assert (exact["hit_rate"], exact["result_recall"]) == (0.0, 1.0)
    assert wide["hit_rate"] >= 0.75
    draw(report, tmp_path / "q.svg")
    assert (tmp_path / "q.svg").read_text().count("<!-- ") >= len(PANELS)


def test_the_command_over_a_dataset(proofs, one_minilm, squad, tmp_path):
    result = proofs("query-cache", "--dataset", f"squad:{squad}", "--json", tmp_path / "q.json")
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "q.json").read_text())["rows"]
    assert {row["capacity"] for row in rows} == {1, 2}
    result = proofs("query-cache", "--dataset", "squad:a", "--tolerances", "wide")
    assert (result.exit_code, "takes numbers with commas" in result.output) == (2, True)


@pytest.mark.parametrize("wrong", [None, Hit((1,), 0.0)])
def test_a_wrong_cache_reports_no_timings(wrong, monkeypatch):
    monkeypatch.setattr(ProximityCache, "lookup", lambda self, embedding, *, partition: wrong)
    with pytest.raises(RuntimeError, match="the nearest key lies at"):
        lookup_rows(8, 16, "cosine", lookups=20, seed=0)

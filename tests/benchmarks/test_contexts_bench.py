"""``python -m benchmarks contexts``: no context holds passages of the measured prompt, but the control."""

import json

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.context_draws import OWN, USES, draw_contexts
from benchmarks.contexts import Others
from benchmarks.world.reader_folder import READER
from ragcachekit.commands.questions import Question
from ragcachekit.plan.companions import SimilarChunks

pytestmark = pytest.mark.soak

PARAGRAPHS = [f"Paragraph {n} tells that item {n} is number {n}." for n in range(12)]
FAR = [f"Rivers of country {n} are long." for n in range(5)]


def squad(path, articles):
    def paragraphs(texts):
        return [
            {"context": t, "qas": [{"question": f"What is in {t}?", "answers": [{"text": "1"}]}]}
            for t in texts
        ]

    data = [{"title": "T", "paragraphs": paragraphs(texts)} for texts in articles]
    path.write_text(json.dumps({"data": data}))
    return f"squad:{path}"


@pytest.mark.parametrize("document", [PARAGRAPHS[:8], ()])
def test_contexts_are_of_other_passages_and_questions(document):
    questions = [
        Question(f"What is {n}?", (PARAGRAPHS[n], PARAGRAPHS[n + 1], FAR[0]), document=tuple(document))
        for n in range(3)
    ]
    near = SimilarChunks(PARAGRAPHS, [[1.0, n] for n in range(len(PARAGRAPHS))])
    for asked in questions:
        for chunk, kinds in draw_contexts(asked, questions, PARAGRAPHS, FAR, 0, near=near.of).items():
            assert {name: len(kinds[name]) for name in USES} == USES
            assert kinds["tenth use"][:3] == kinds["fourth use"]
            one, two = kinds["similar passages"] if chunk in PARAGRAPHS else (None, None)
            assert one is None or one.passages == two.passages[1:]
            for name, contexts in kinds.items():
                held = {text for context in contexts for text in context.passages}
                assert held == set(asked.chunks) - {chunk} if name == OWN else not held & set(asked.chunks)
                assert asked.question not in {context.question for context in contexts}


def test_no_similar_chunk_is_of_the_measured_prompt():
    near = Others(SimilarChunks(PARAGRAPHS, [[1.0, n] for n in range(len(PARAGRAPHS))]))
    assert near.of(PARAGRAPHS[11])[:2] == [PARAGRAPHS[10], PARAGRAPHS[9]]
    near.measured = frozenset((PARAGRAPHS[10], PARAGRAPHS[11]))
    assert near.of(PARAGRAPHS[11])[0] == PARAGRAPHS[9]


def test_the_rows_are_of_as_many_contexts_as_they_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    dataset = squad(tmp_path / "a.json", [PARAGRAPHS[:6], PARAGRAPHS[6:]])
    far = squad(tmp_path / "b.json", [FAR])
    options = ("--policies", "reuse,impact:0.1", "--count", 1, "--half", "all", "--distractors", 2)
    files = ("--other", far, "--json", tmp_path / "c.json", "--plot", tmp_path / "c.png")
    given = ("contexts", "--model", READER, "--dataset", dataset, *options, *files)
    result = CliRunner().invoke(app, list(map(str, given)))
    assert result.exit_code == 0, result.output
    rows = {(r["contexts"], r["policy"]): r for r in json.loads((tmp_path / "c.json").read_text())["rows"]}
    assert {name: rows[name, "reuse"]["of"] for name in USES} == USES
    assert rows["standalone", "reuse"]["recovered"] == 0
    assert rows["fourth use", "reuse"]["minus_impact"] == pytest.approx(
        rows["fourth use", "reuse"]["kl"] - rows["fourth use", "impact:0.1"]["kl"]
    )
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "c.json.work").exists()

    few = CliRunner().invoke(app, [*map(str, given), "--only", "third use"])
    kinds = {row["contexts"] for row in json.loads((tmp_path / "c.json").read_text())["rows"]}
    assert (few.exit_code, kinds) == (0, {"standalone", "third use"})
    wrong = CliRunner().invoke(app, [*map(str, given), "--only", "third use,none"])
    assert wrong.exit_code == 2
    assert "unknown contexts: none" in wrong.output


def test_the_frontier_has_every_policy_over_both_encodings(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    dataset = squad(tmp_path / "a.json", [PARAGRAPHS[:6], PARAGRAPHS[6:]])
    options = ("--policies", "reuse,lego:2,impact:0.1", "--count", 1, "--half", "all", "--distractors", 2)
    files = ("--json", tmp_path / "f.json", "--plot", tmp_path / "f.png")
    given = ("frontier", "--model", READER, "--dataset", dataset, *options, *files)
    result = CliRunner().invoke(app, list(map(str, given)))
    assert result.exit_code == 0, result.output
    full, *rows = json.loads((tmp_path / "f.json").read_text())["rows"]
    assert (full["policy"], full["kl"]) == ("full", 0)
    over = {(r["contexts"], r["policy"]): r for r in rows}
    for policy in ("reuse", "lego:2", "impact:0.1"):
        assert over["standalone", policy]["kl"] > over["same document", policy]["kl"] >= 0
    assert {"craft:1", "query:0.15"} <= {policy for _, policy in over}
    assert all(r["ms"] > 0 for r in (full, *rows))
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")

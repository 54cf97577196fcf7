"""The full demo on the sample model, with few documents."""

import json

import pytest

from benchmarks.demo import run as demo
from benchmarks.demo.answers import PART
from benchmarks.demo.first_token import STATES

pytestmark = pytest.mark.soak


def test_every_part_has_its_figures(small_demo, tmp_path):
    report = demo.run(small_demo, out := tmp_path, progress=False)
    answers = report.part(PART).rows
    assert len(answers) == 2
    for row in answers:
        assert row["full"]
        assert row["cached"]
        assert row["kl"] >= 0
        assert row["prompt_tokens"] > row["reused_tokens"] > 0.5 * row["prompt_tokens"]
    (quality,) = report.part("quality").rows
    assert quality["n"] == 2
    times = {row["state"]: row for row in report.part("first token").rows}
    assert tuple(times) == STATES
    assert times["full"]["reused_tokens"] == times["cold"]["reused_tokens"] == 0
    assert len({times[state]["reused_tokens"] for state in ("host", "disk", "restart")}) == 1
    (queries,) = report.part("query cache").rows
    assert queries["n"] == 8
    assert queries["right"] + queries["wrong"] == queries["hits"]
    assert json.loads(out.joinpath(demo.RESULTS).read_text())["rows"] == json.loads(json.dumps(report.rows))
    assert (out / demo.PICTURE).read_bytes()[:4] == b"\x89PNG"
    assert not (out / "kv").exists()

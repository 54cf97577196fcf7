"""The planner bench: its pipeline by hand, its figures, the command. And the profile it relies on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.planner import measured as planner_measured
from benchmarks.planner import run as bench
from benchmarks.planner.pipeline import Machine, Medium, prefill_seconds, read_layers
from ragcachekit import RagCache
from ragcachekit.errors import RagCacheError
from ragcachekit.model.prefill_timing import extended, measure_profile, store_profile, stored_profile


@pytest.fixture(scope="module")
def small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "CHUNKS", (1, 3))
        patch.setattr(bench, "LATENCIES", (1e-3,))
        return bench.run(draws=1, progress=False)


def test_one_reader_reads_layer_by_layer():
    ready, reads = read_layers([10.0, 30.0], 2, Medium(1.0, 10.0), 1)
    assert ready == [6.0, 12.0]  # 1 + 1 and 1 + 3 seconds, twice
    assert [read.seconds for read in reads] == [2.0, 4.0, 2.0, 4.0]
    assert [read.beside for read in reads] == [0, 0, 0, 0]


def test_two_readers_share_the_channel_and_wait_side_by_side():
    ready, reads = read_layers([10.0, 10.0], 1, Medium(1.0, 10.0), 2)
    assert ready == [3.0]  # both wait a second, then one after the other
    assert [read.seconds for read in reads] == [2.0, 3.0]
    assert [read.beside for read in reads] == [0, 10.0]


def test_one_entry_is_read_by_one_reader():
    assert read_layers([10.0], 3, Medium(1.0, 10.0), 4)[0] == [2.0, 4.0, 6.0]


def test_a_prefill_waits_for_each_layer():
    machine = Machine(layers=3, fixed=3.0, per_row=0.0, per_pair=0.0)
    assert prefill_seconds([], 0, 5, machine, Medium(0, 1), 1) == 3.0
    assert prefill_seconds([4.0], 1, 5, machine, Medium(0, 1), 1) == 13.0  # 4, 8, 12, and one layer more
    assert prefill_seconds([0.5], 1, 5, machine, Medium(0, 1), 1) == 3.5


def test_a_pass_that_chooses_rows_waits_in_place_of_the_forward():
    machine = Machine(layers=3, fixed=3.0, per_row=0.3, per_pair=0.0)
    # 3 + 5 x 0.3 s, layers there at 4, 8 and 12: 13.5; then 3 + 7 x 0.3 s.
    slow = prefill_seconds([4.0], 10, 5, machine, Medium(0, 1), 1, chosen=2)
    assert slow == pytest.approx(12 + 1.5 + 5.1)
    assert prefill_seconds([], 10, 5, machine, Medium(0, 1), 1, chosen=2) == pytest.approx(4.5 + 5.1)


def test_figures_of_the_report(small):
    assert len(small.rows) == 2 * len(bench.BANDWIDTHS) * 2 * len(bench.SPEEDS)
    (every,) = bench.summary(small)
    assert every["quicker"] >= 0.9  # of 96 cells; the whole grid is what is reported
    assert 0 <= every["regret"] < min(every["regret_always"], every["regret_never"])
    assert every["strict"] <= every["right"]
    slow, fast = (
        [r for r in small.rows if r["bandwidth_mb_s"] == b / 1e6 and r["rows_per_s"] == s]
        for b, s in ((bench.BANDWIDTHS[0], bench.SPEEDS[-1]), (bench.BANDWIDTHS[-1], bench.SPEEDS[0]))
    )
    assert all(row["loaded"] == 0 for row in slow)
    assert all(row["loaded"] == 1 for row in fast)


def test_the_same_seed_gives_the_same_rows(small, monkeypatch):
    monkeypatch.setattr(bench, "CHUNKS", (1, 3))
    monkeypatch.setattr(bench, "LATENCIES", (1e-3,))
    assert bench.run(draws=1, progress=False).rows == small.rows


def test_the_command_writes_what_it_shows(monkeypatch, tmp_path):
    for name, few in (
        ("BANDWIDTHS", (1e8, 1e10)),
        ("CHUNKS", (1,)),
        ("LATENCIES", (1e-3,)),
        ("SPEEDS", (500, 8000)),
    ):
        monkeypatch.setattr(bench, name, few)
    files = ["--json", str(tmp_path / "p.json"), "--plot", str(tmp_path / "p.png")]
    done = CliRunner().invoke(app, ["planner", "--draws", "1", *files])
    assert done.exit_code == 0, done.output
    frame = json.loads((tmp_path / "p.json").read_text())
    assert (frame["bench"], len(frame["rows"])) == ("planner", 8)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("options", [{"draws": 0}, {"noise": -1}])
def test_bad_arguments(options):
    with pytest.raises(ValueError, match="draws"):
        bench.run(**options)


def test_a_profile_is_extended_by_the_cost_of_attention():
    def seconds(cached, new):
        return 0.002 + 1e-4 * new + 2e-8 * new * (cached + new / 2)

    points = [(c, n, seconds(c, n)) for c in (0, 256) for n in (4, 16, 64, 256, 1024)]
    profile = extended(points)
    for cached, new in ((0, 64), (256, 1024), (8192, 2048), (1024, 8192), (0, 16384)):
        assert profile.seconds(cached, new) == pytest.approx(seconds(cached, new), rel=1e-3)


def test_costs_are_never_negative():
    shrinking = [(c, n, 1.0 / n) for c in (0, 256) for n in (4, 16, 64)]
    assert extended(shrinking).seconds(4096, 8192) > 0


def test_a_model_is_measured_and_remembered(tmp_path):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    profile = measure_profile(model, context=128, budget=0.0)
    assert 0 < profile.seconds(0, 4) <= profile.seconds(0, 64) <= profile.seconds(64, 2048)
    assert stored_profile(tmp_path, "model", model) is None
    store_profile(tmp_path, "model", model, profile)
    assert stored_profile(tmp_path, "model", model).to_json() == profile.to_json()
    assert stored_profile(tmp_path, "another", model) is None
    (file,) = (tmp_path / "prefill").iterdir()
    file.write_text("{")
    assert stored_profile(tmp_path, "model", model) is None


def test_auto_is_measured_beside_always(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    report = planner_measured.run(shapes=("tiny",), prompt_tokens=(128,), runs=3, progress=False)
    (row,) = report.rows
    assert (row["shape"], row["prompt_tokens"], row["runs"]) == ("tiny", 128, 3)
    assert 0 < row["low"] <= row["ratio"] <= row["high"]
    assert row["auto_ms"] > 0 < row["always_ms"]
    assert row["loaded"] in (0, 1 / 3, 2 / 3, 1)


def test_no_figure_beside_a_wrong_answer(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = RagCache.generate

    def wrong(self, prompt, **options):
        answer = asked(self, prompt, **options)
        return replace(answer, token_ids=(1, 2)) if self.components.loads.planner else answer

    monkeypatch.setattr(RagCache, "generate", wrong)
    with pytest.raises(RagCacheError, match="full prefill"):
        planner_measured.run(shapes=("tiny",), prompt_tokens=(128,), runs=1, progress=False)


def test_bad_runs():
    with pytest.raises(ValueError, match="runs"):
        planner_measured.run(runs=0)

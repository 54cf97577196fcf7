"""The serving bench on a tiny shape: its requests, its figures and what it refuses. Never how fast."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.serve import replay as replays
from benchmarks.serve import run as module
from benchmarks.serve.run import EXACT, ServeSettings
from benchmarks.serve.systems import Served
from benchmarks.serve.workload import random_documents, text_documents
from benchmarks.shapes import random_model
from benchmarks.world.reader_folder import READER
from ragcachekit import Chunk
from ragcachekit.errors import CorpusError, RagCacheError

pytestmark = pytest.mark.soak

SIZES = {"documents": 8, "chunks": 3, "chunk_tokens": 20, "max_new_tokens": 6, "warm_up": 2}
SYSTEMS = ("batching", "sharing", "full", "prefix", "reuse")
DOCUMENTS = random_documents(1000, 20, 7, seed=0)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def report():
    orders = ("cache-aware", "fifo")
    return module.run(
        ServeSettings(shape="tiny", systems=SYSTEMS, orders=orders, requests=6, rates=(50.0,), **SIZES)
    )


def test_prompts_have_different_documents_and_the_seed_decides():
    requests = DOCUMENTS.requests(50, 4, 1.2, (3,))
    for request in requests:
        chunks = [s.token_ids for s in request.prompt.segments if isinstance(s, Chunk)]
        assert len(set(chunks)) == 4
        assert len(request.token_ids) == 24 + 4 * 7 + 24
    assert requests == DOCUMENTS.requests(50, 4, 1.2, (3,))
    assert requests != DOCUMENTS.requests(50, 4, 1.2, (4,))
    with pytest.raises(ValueError, match="21 documents, and there are 20"):
        DOCUMENTS.requests(1, 21, 1.0, (0,))


def test_documents_of_a_folder_are_its_text(tmp_path):
    (tmp_path / "a.md").write_text("a town is in the town. " * 40)
    tokenizer = AutoTokenizer.from_pretrained(READER)
    documents = text_documents(tokenizer, 5, 10, corpus=tmp_path)
    text = tokenizer.decode([i for chunk in documents.chunks for i in chunk])
    assert text.strip() in "a town is in the town. " * 40
    assert {len(chunk) for chunk in documents.chunks} == {10}
    with pytest.raises(CorpusError, match="fewer documents"):
        text_documents(tokenizer, 5000, 10, corpus=tmp_path)
    with pytest.raises(ValueError, match="dataset"):
        text_documents(tokenizer, 5, 10)


def served(due, times, tokens=None, reused=None):
    request = DOCUMENTS.requests(1, 1, 1.0, (0,))[0]
    return Served(request, due, list(times), tuple(range(len(times) if tokens is None else tokens)), reused)


def test_figures_by_hand():
    answers = [served(10.0, [11.0, 11.5, 12.5], reused=11), served(11.0, [14.0, 14.25], reused=0)]
    refused = replace(served(12.0, []), refused=True)
    row = replays.figures([*answers, refused], deadline_s=2.0)
    assert row["requests"] == 3
    assert row["refused"] == 1
    assert row["ttft_ms"] == pytest.approx((1000 + 3000) / 2)
    assert row["ttft_ms_p50"] == pytest.approx(2000)
    assert row["ttft_ms_p99"] == pytest.approx(1000 + 0.99 * 2000)
    assert row["tbt_ms_p50"] == pytest.approx(500)  # of 250, 500, 1000
    assert row["throughput"] == pytest.approx(2 / 4.25)
    assert row["tokens_per_s"] == pytest.approx(5 / 4.25)
    assert row["goodput"] == pytest.approx(1 / 4.25)
    assert row["hit_rate"] == pytest.approx(11 / (2 * (24 + 7 + 24)))
    assert replays.figures(answers[:1], None)["goodput"] == pytest.approx(1 / 2.5)


def test_no_figures_of_answers_without_times():
    with pytest.raises(RagCacheError, match="3 tokens came with 2 times"):
        replays.figures([served(0.0, [1.0, 2.0], tokens=3)], None)
    with pytest.raises(RagCacheError, match="every request was refused"):
        replays.figures([replace(served(0.0, []), refused=True)], None)


class Recorder:
    def __init__(self):
        self.at = []

    def serve(self, served):
        self.at.append((served.due, time.perf_counter()))

    def drain(self):
        self.drained = len(self.at)


def test_requests_are_sent_when_they_are_due():
    system, requests = Recorder(), DOCUMENTS.requests(5, 1, 1.0, (0,))
    out = replays.replay(system, requests, rate=100.0)
    dues = np.array([due for due, _ in system.at])
    assert np.diff(dues) == pytest.approx(np.diff([r.arrival for r in requests]) / 100.0)
    assert all(sent >= due for due, sent in system.at)
    assert system.drained == len(out) == 5
    assert len({one.due for one in replays.replay(system, requests, rate=None)}) == 1


def test_answers_that_differ_give_no_figures():
    model = random_model("tiny")
    (request,) = DOCUMENTS.requests(1, 1, 1.0, (0,))
    ids = torch.tensor([request.token_ids])
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, pad_token_id=0
    )
    right = tuple(output[0, ids.shape[1] :].tolist())
    good = Served(request, 0.0, token_ids=right)
    replays.check_same(model, [right], [good], "x")
    wrong = replace(good, token_ids=(*right[:2], right[2] + 1, right[3]))
    with pytest.raises(RagCacheError, match="x: token 3 of an answer"):
        replays.check_same(model, [right], [wrong], "x")
    with pytest.raises(RagCacheError, match="3 tokens, not 4"):
        replays.check_same(model, [right], [replace(good, token_ids=right[:3])], "x")
    replays.check_same(model, [right], [replace(wrong, refused=True)], "x")
    assert replays.same_answers([right, right], [good, wrong]) == 0.5


def test_tokens_of_equal_logits_may_change_places():
    model = random_model("tiny")
    weights = model.get_output_embeddings().weight
    (request,) = DOCUMENTS.requests(1, 1, 1.0, (0,))
    with torch.no_grad():
        best = int(model(input_ids=torch.tensor([request.token_ids])).logits[0, -1].argmax())
        twin = (best + 1) % len(weights)
        weights[twin] = weights[best]
    one = Served(request, 0.0, token_ids=(twin, 5))
    replays.check_same(model, [(best, 7)], [one], "x")


def test_rows_are_every_system_at_every_rate(report):
    policies = [(s, order) for s in SYSTEMS[2:] for order in ("cache-aware", "fifo")]
    systems = [("sequential", ""), ("batching", ""), ("sharing", ""), *policies]
    found = [(row["system"], row["order"], row["rate"]) for row in report.rows]
    assert found == [(*system, rate) for system in systems for rate in (None, 50.0)]
    assert all(row["requests"] == 6 and not row["refused"] for row in report.rows)
    assert json.loads(json.dumps(report.to_dict()))["bench"] == "serve"


def test_exact_systems_answer_as_the_model_alone(report):
    assert {row["same"] for row in report.rows if row["system"] in EXACT} == {1.0}


def test_speedups_are_over_sequential(report):
    (alone, *_) = (row["throughput"] for row in report.rows)
    for row in report.rows:
        expected = None if row["rate"] else pytest.approx(row["throughput"] / alone)
        assert row["speedup"] == expected


def test_warm_documents_are_reused(report):
    hits = {row["system"]: row["hit_rate"] for row in report.rows}
    assert hits["full"] == 0
    assert hits["sequential"] is hits["sharing"] is None
    assert hits["reuse"] == pytest.approx((24 + 3 * 20) / (24 + 3 * 20 + 24))
    assert 0 < hits["prefix"] < hits["reuse"]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"shape": "tiny", "model": "x"}, "not both"),
        ({"dataset": "squad:x"}, "needs the tokenizer"),
        ({"systems": ("vllm",)}, "unknown policy 'vllm'"),
        ({"chunks": 5, "documents": 4}, "5 documents, and there are 4"),
        ({"orders": ()}, "unknown order .*known: cache-aware, fifo"),
        ({"dtype": "int8"}, "unknown dtype"),
    ],
)
def test_bad_settings_are_refused(options, what):
    with pytest.raises(ValueError, match=what):
        ServeSettings(**options)


def test_the_command_shows_and_writes_the_rows(tmp_path):
    sizes = ["--requests", "3", "--documents", "4", "--chunks", "2", "--chunk-tokens", "9", "--warm-up", "1"]
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    command = ["serve", "--shape", "tiny", "--systems", "full", "--rates", "100", *sizes, *files]
    result = CliRunner().invoke(app, [*command, "--max-new-tokens", "3"])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [row["system"] for row in rows] == ["sequential", "sequential", "full", "full"]
    assert (tmp_path / "a.png").exists()
    assert "throughput" in result.output

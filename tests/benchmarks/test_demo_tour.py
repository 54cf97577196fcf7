"""The short demo on the sample model, with few documents, and what it shows of one question."""

import json
from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.demo import tour, tour_report
from benchmarks.demo.answers import PART
from ragcachekit.model.loading import sample_model

TIMED = 2


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("tour")


@pytest.fixture(scope="module")
def report(small_demo, out):
    settings = replace(small_demo, questions=1, timed=TIMED, vectors=0, wordpieces=64)
    return tour.run(settings, out, progress=False)


def test_every_question_is_answered_both_ways(report, out):
    found = report.part(PART).rows
    assert len(found) == 1
    for row in found:
        assert row["bare"]
        assert row["cached"]
        assert len(row["cached_ms"]) == 1 + TIMED
        assert row["prompt_tokens"] > row["reused"] > 0.5 * row["prompt_tokens"]
        assert row["recomputed"] > 0
        assert 0 < row["agreed"] <= row["tokens"]
        assert row["agreed"] == row["tokens"] or row["bare"] != row["cached"]
    assert json.loads((out / tour_report.RESULTS).read_text())["rows"] == json.loads(json.dumps(report.rows))
    assert (out / tour_report.PICTURE).read_bytes()[:4] == b"\x89PNG"
    assert found[0]["cached"].split()[0] in (out / tour.RECORDING).read_text()


def test_the_bare_answer_is_that_of_generate():
    folder, seen = sample_model(), []
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = [{"role": "user", "content": "What does heapq.heappop return?"}]
    text, tokens, ms = tour.Bare(folder, 4).answer(tokenizer, prompt, seen.append)
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt")
    own = model.generate(**ids, max_new_tokens=4, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert text == tokenizer.decode(own, skip_special_tokens=True) == seen[-1]
    assert tokens == own.tolist()
    assert len(seen) == 4
    assert ms > 0


def compared(bare_ms, cached_ms):
    texts = {
        "question": "why?",
        "known": "so",
        "bare": "so",
        "cached": "so",
        "policy": "p",
        "tokens": 1,
        "agreed": 1,
    }
    return tour_report.Compared(
        **texts, bare_ms=bare_ms, cached_ms=cached_ms, prompt_tokens=10, reused=8, recomputed=1
    )


def test_one_outlier_decides_nothing():
    found = [compared(6000.0, (600.0, 9000.0, 600.0)), compared(5000.0, (500.0,)), compared(9000.0, (300.0,))]
    assert tour_report.speedups(found) == [10.0, 10.0, 30.0]
    assert tour_report.summary(found) == (6.0, 0.6, 10.0)

"""The TTFT bench on a tiny shape: what it asks, what it refuses to report. Never how fast."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import shapes
from benchmarks.shapes import ShapeSettings
from benchmarks.world.reader_folder import READER
from ragcachekit.commands import ttft
from ragcachekit.errors import CorpusError, RagCacheError
from ragcachekit.store.memory import HostStore
from ragcachekit.types import Chunk

COLUMNS = [
    *("dtype", "policy", "encoder", "tier", "prompt_tokens", "recompute_ratio"),
    *("ttft_ms", "ttft_ms_min", "ttft_ms_max", "speedup"),
]
SMALL = {"shape": "tiny", "prompt_tokens": [200], "chunk_tokens": 60, "question_tokens": 20}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def model():
    return shapes.random_model("tiny")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        policies = ("reuse", "lego:16", "lego0")
        return ttft.run(ShapeSettings(**SMALL, policies=policies, runs=3, tiers=("host", "disk")))


def test_rows_are_those_of_the_design(report):
    assert all(list(row)[: len(COLUMNS)] == COLUMNS for row in report.rows)
    assert {row["encoder"] for row in report.rows if row["tier"] == "none"} == {"none"}
    encoders = {row["policy"]: row["encoder"] for row in report.rows if row["tier"] != "none"}
    assert encoders == {"reuse": "average:2", "lego:16": "average:2", "lego0": "sinks:4"}
    assert [(row["policy"], row["tier"]) for row in report.rows] == [
        *(("generate", "none"), ("prefix-cache", "none"), ("full", "none"), ("cold", "none")),
        *((policy, tier) for tier in ("host", "disk") for policy in ("reuse", "lego:16", "lego0")),
    ]
    frame = json.loads(json.dumps(report.to_dict()))
    assert (frame["bench"], frame["rows"]) == ("ttft", list(report.rows))
    assert frame["model"] == "tiny shape, random weights, float32"


def test_figures_belong_together(report):
    full = next(row["ttft_ms"] for row in report.rows if row["policy"] == "full")
    for row in report.rows:
        assert 0 < row["ttft_ms_min"] <= row["ttft_ms"] <= row["ttft_ms_max"]
        assert row["speedup"] == pytest.approx(full / row["ttft_ms"])
        assert (row["prompt_tokens"], row["runs"]) == (200, 3)
    ratios = {(row["policy"], row["tier"]): row["recompute_ratio"] for row in report.rows}
    cached = 200 - 20  # system text and chunks
    assert ratios["full", "none"] == ratios["generate", "none"] == 1.0
    assert ratios["lego:16", "host"] == ratios["lego:16", "disk"]
    assert ratios["lego:16", "disk"] == pytest.approx(2 * 16 / cached), "the first chunk is exact"
    assert ratios["reuse", "host"] == ratios["lego0", "disk"] == ratios["cold", "none"] == 0


@pytest.mark.parametrize(
    ("tokens", "chunk", "question"), [(2048, 490, 64), (200, 60, 20), (101, 7, 1), (50, 400, 9)]
)
def test_prompts_have_exactly_the_tokens_asked_for(tokens, chunk, question):
    prompt = ttft.random_prompt(1000, tokens, chunk, question, seed=3)
    sizes = [len(segment.token_ids) for segment in prompt.segments]
    chunks = [len(s.token_ids) for s in prompt.segments if isinstance(s, Chunk)]
    assert sum(sizes) == tokens
    assert (sizes[0], sizes[-1]) == (ttft.SYSTEM_TOKENS, question)
    assert len(chunks) == len(sizes) - 2
    assert max(chunks) - min(chunks) <= 1
    assert prompt == ttft.random_prompt(1000, tokens, chunk, question, seed=3)
    assert prompt != ttft.random_prompt(1000, tokens, chunk, question, seed=4)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"shape": "giant"}, "unknown shape 'giant'; known: smollm2-135m"),
        ({"prompt_tokens": (40,)}, "no room"),
        ({"chunk_tokens": 0}, "no room"),
    ],
)
def test_bad_arguments_are_refused(options, what):
    with pytest.raises(ValueError, match=what):
        ttft.run(ShapeSettings(**{**SMALL, **options}))


@pytest.fixture
def prompt():
    return ttft.random_prompt(32000, 120, 40, 16, seed=0)


@pytest.fixture
def engines(model, prompt):
    with ttft.open_engines(
        model, ("host", "disk"), lambda rag: rag.generate(prompt, **ttft.ONE_TOKEN)
    ) as opened:
        yield opened


def test_an_answer_that_is_not_the_models_gives_no_figures(engines, prompt, monkeypatch):
    """Here because the stored KV is wrong: recomputing every chunk does not mend the text before them."""
    rag, get = engines.warm["host"], HostStore.get
    ttft.check_exact(rag, prompt)

    def wrong(store, key, weight=1.0):
        found = get(store, key, weight)
        if found is None or key.encoding != "prefix":
            return found
        values = tuple(value + 1 for value in found.kv.values)
        return type(found)(replace(found.kv, values=values), found.tier)

    monkeypatch.setattr(HostStore, "get", wrong)
    with pytest.raises(RagCacheError, match="logits differ"):
        ttft.check_exact(rag, prompt)


def test_the_check_wants_something_linked(engines, prompt):
    with pytest.raises(RagCacheError, match="linked path was not checked"):
        ttft.check_exact(engines.cold, prompt)


def test_a_request_served_from_elsewhere_is_no_sample(engines, prompt):
    assert ttft.ask_engine(engines.warm["disk"], prompt, "reuse", "disk").prompt_tokens == 120
    with pytest.raises(RagCacheError, match="expected KV from disk"):
        ttft.ask_engine(engines.warm["host"], prompt, "reuse", "disk")
    with pytest.raises(RagCacheError, match="expected KV from none"):
        ttft.ask_engine(engines.warm["host"], prompt, "reuse", "none")
    ttft.ask_engine(engines.cold, prompt, "reuse", "none")
    assert ttft.ask_engine(engines.cold, prompt, "reuse", "none").recompute_ratio == 0


def test_documents_in_two_sizes_and_two_dtypes(tmp_path):
    words = " ".join(f"person {number} lives in town {number * 7}" for number in range(200))
    (tmp_path / "facts.txt").write_text(words)
    asked = {"policies": ("reuse",), "encoder": "system", "runs": 1, "chunk_tokens": 60}
    sizes, dtypes = [150, 230], ("float32", "bfloat16")
    found = ttft.run(
        ttft.TtftSettings(model=READER, corpus=tmp_path, prompt_tokens=sizes, dtypes=dtypes, **asked)
    )
    assert found.model == f"{READER}, float32, bfloat16"
    linked = [row for row in found.rows if row["policy"] == "reuse"]
    assert [(row["dtype"], row["prompt_tokens"]) for row in linked] == [(d, n) for d in dtypes for n in sizes]
    assert {row["encoder"] for row in linked} == {"system"}
    for number, row in enumerate(linked):
        (full,) = (r for r in found.rows[5 * number : 5 * number + 5] if r["policy"] == "full")
        assert row["speedup"] == pytest.approx(full["ttft_ms"] / row["ttft_ms"])
    with pytest.raises(CorpusError, match="the prompt needs"):
        ttft.run(ttft.TtftSettings(model=READER, corpus=tmp_path, prompt_tokens=[100_000], **asked))


def test_random_models_are_ordinary_models(model):
    ordinary = LlamaForCausalLM(model.config).eval()
    assert ordinary.load_state_dict(model.state_dict()).missing_keys == []
    ids = torch.arange(40)[None]
    assert torch.equal(model(ids).logits, ordinary(ids).logits)
    assert isinstance(model.config, LlamaConfig)
    assert not model.training

"""The fidelity bench on the reader: what it measures, and what it refuses."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache
from typer.testing import CliRunner

from benchmarks.world.questions import world_questions, world_sample
from benchmarks.world.reader_folder import ANSWER_TOKENS, READER
from benchmarks.world.world import messages
from ragcachekit import RagCache
from ragcachekit.commands import fidelity
from ragcachekit.commands.app import app
from ragcachekit.commands.engines import Engines
from ragcachekit.commands.questions import Question, Sample
from ragcachekit.config import StoreConfig
from ragcachekit.errors import PromptTooLong, RagCacheError
from ragcachekit.model.loading import load_model

NAMED_BY_THE_DESIGN = {
    *("policy", "encoder", "question_type", "ratio_asked", "ratio_spent", "exact_match", "f1"),
    *("agreement", "kl", "low", "high", "n"),
}
PER_TYPE = 1
POLICIES = ("lego:4", "reuse", "lego0")
Rows = dict[tuple[str, str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's cache folder: the reader is admitted once."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


def run(results: dict[Any, Any], per_type: int = PER_TYPE, policies: Sequence[str] = ("lego:4",)) -> Rows:
    """The rows by policy, encoder and question type; ``results`` are added to."""
    model, tokenizer = load_model(READER, "cpu")
    ways = fidelity.pairs(model, tokenizer, policies, ("standalone",))
    sample = world_sample(0, per_type)
    fidelity.measure(model, tokenizer, sample, ways, results, max_new_tokens=ANSWER_TOKENS)
    rows = fidelity.quality_rows(sample.questions, ways, results, 0)
    return {(row["policy"], row["encoder"], row["question_type"]): row for row in rows}


@pytest.fixture(scope="module")
def results(home: Path) -> dict[Any, Any]:
    return {}


@pytest.fixture(scope="module")
def rows(results: dict[Any, Any]) -> Rows:
    return run(results, policies=POLICIES)


def test_the_baselines_are_always_there_and_each_way_once(rows: Rows) -> None:
    assert [(policy, encoder) for policy, encoder, kind in rows if kind == "all"] == [
        ("full", "none"),
        ("reuse", "system"),
        ("lego:4", "standalone"),
        ("reuse", "standalone"),
        ("lego0", "sinks:4"),
    ]
    for found in rows.values():
        assert found.keys() >= NAMED_BY_THE_DESIGN
        assert found["n"] == (3 * PER_TYPE if found["question_type"] == "all" else PER_TYPE)


def test_answers_and_ratios_are_those_of_the_library_used_by_hand(rows: Rows, home: Path) -> None:
    asked = world_questions(0, PER_TYPE)
    with RagCache.from_pretrained(READER, policy="lego:4", encoder="standalone", cold="now") as rag:
        rag.encode([chunk for question in asked for chunk in question.chunks])
        rag.generate(messages(asked[0].chunks, asked[0].question), max_new_tokens=1)  # the system text
        found = [rag.generate(messages(q.chunks, q.question), max_new_tokens=16) for q in asked]
    lego = rows["lego:4", "standalone", "all"]
    assert lego["exact_match"] == sum(
        a.text == q.answers[0] for a, q in zip(found, asked, strict=True)
    ) / len(asked)
    ratios = [4 * 8 / sum(use.tokens for use in a.report.link.uses) for a in found]
    assert lego["ratio_spent"] == pytest.approx(sum(ratios) / len(ratios))
    assert lego["recomputed_tokens"] == 32.0
    assert lego["answer_tokens"] == sum(len(a.token_ids) for a in found) / len(found)


@torch.no_grad()
def test_kl_of_reuse_is_that_of_chunks_run_alone(rows: Rows) -> None:
    """No library: each chunk alone at its positions, put into the prompt's cache by hand."""
    model = AutoModelForCausalLM.from_pretrained(READER).eval()
    tokenizer, kl = AutoTokenizer.from_pretrained(READER), []
    for question in world_questions(0, PER_TYPE):
        asked = messages(question.chunks, question.question)
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
        spans, start = [], 0
        for chunk in question.chunks:
            own = tokenizer(chunk, add_special_tokens=False).input_ids
            start = next(at for at in range(start, len(ids)) if ids[at : at + len(own)] == own)
            spans.append(range(start, start + len(own)))
        prompt, full, linked = torch.tensor([ids]), DynamicCache(), DynamicCache()
        right = model(prompt, past_key_values=full).logits[0, -1].double().log_softmax(-1)
        start = 0
        for span in (*spans, range(len(ids), len(ids))):
            if span.start > start:  # text between chunks attends to all before it
                out = model(prompt[:, start : span.start], past_key_values=linked)
            if len(span):
                alone, at = DynamicCache(), torch.arange(span.start, span.stop)[None]
                model(prompt[:, span.start : span.stop], position_ids=at, past_key_values=alone)
                for number, layer in enumerate(alone.layers):
                    linked.update(layer.keys, layer.values, number)
            start = span.stop
        other = out.logits[0, -1].double().log_softmax(-1)
        kl.append(float((right.exp() * (right - other)).sum()))
    assert rows["reuse", "standalone", "all"]["kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-3)


def test_what_is_there_is_not_asked_again(
    rows: Rows, results: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = {way: found for number, (way, found) in enumerate(results.items()) if number < 6}
    assert run(part, policies=POLICIES) == rows
    assert len(part) == len(results) == 5 * 3 * PER_TYPE
    monkeypatch.setattr(Engines, "full", None)
    assert run(dict(results), policies=POLICIES) == rows


def test_a_full_that_is_not_the_models_own_gives_no_figure(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fidelity, "generated", lambda *_: (1, 2, 3))
    with pytest.raises(RagCacheError, match="do not trust any figure"):
        run({}, per_type=1, policies=("reuse",))


def test_chunks_that_the_store_cannot_keep_give_no_figure(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be computed in place and look like a perfect policy."""
    small = StoreConfig(host_bytes=60_000)  # holds one chunk, not eight
    monkeypatch.setattr("ragcachekit.commands.engines.StoreConfig", lambda **_: small)
    with pytest.raises(RagCacheError, match="is not kept"):
        run({}, per_type=1, policies=("reuse",))


def test_a_prompt_that_does_not_fit_is_found_before_any_work(home: Path) -> None:
    sample = Sample((Question("Why?", ("soap " * 2100,), ("soap",)),))
    with pytest.raises(PromptTooLong, match="'Why\\?'"):
        fidelity.measure(*load_model(READER, "cpu"), sample, fidelity.BASELINES, {})


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "q.jsonl"
    lines = [
        {"question": q.question, "chunks": q.chunks, "answer": q.answers[0]} for q in world_questions(0, 1)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(*arguments: object) -> Result:
    given = ["bench", "fidelity", "--model", READER, *map(str, arguments)]
    return CliRunner().invoke(app, given)


def test_the_command_writes_json(home: Path, questions: Path, tmp_path: Path) -> None:
    result = command(
        *("--questions", questions, "--policies", "lego:4", "--encoders", "standalone,sinks:2"),
        *("--json", tmp_path / "f.json", "--max-new-tokens", 16),
    )
    assert result.exit_code == 0, result.output
    frame = json.loads((tmp_path / "f.json").read_text())
    assert (frame["bench"], frame["seed"], frame["model"]) == ("fidelity", 0, READER)
    quality = [r for r in frame["rows"] if r["part"] == "quality"]
    assert {(r["policy"], r["encoder"]) for r in quality} >= {("lego:4", "standalone"), ("lego:4", "sinks:2")}
    assert {r["question_type"] for r in quality} == {"all"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policies", "lego:4,fastest"), "unknown policy 'fastest'"),
        (("--questions", "/nowhere.jsonl"), "there is no file /nowhere.jsonl; give --questions"),
        ((), "give --questions (JSONL), or --corpus"),
        (("--encoders", ",", "--corpus", str(Path(__file__).parent)), "at least one encoder"),
    ],
)
def test_bad_arguments_are_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr("ragcachekit.commands.measure.load_checked", None)
    result = command(*arguments)
    assert result.exit_code == 2
    assert message in result.output

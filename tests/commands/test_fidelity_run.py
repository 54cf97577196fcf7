"""The fidelity bench on the reader: what it measures, and that it goes on where it was stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from benchmarks.world.fidelity import WorldFidelitySettings, run, tables
from benchmarks.world.questions import world_questions
from benchmarks.world.reader_folder import READER
from benchmarks.world.world import messages
from ragcachekit import RagCache
from ragcachekit.commands.bench.fidelity import run as fidelity
from ragcachekit.commands.bench.fidelity.engines import Engines
from ragcachekit.commands.bench.fidelity.plot import plot
from ragcachekit.commands.bench.fidelity.prompts import PromptMaker
from ragcachekit.commands.bench.fidelity.run import FidelitySettings
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.config import StoreConfig
from ragcachekit.errors import PromptTooLong, RagCacheError

NAMED_BY_THE_DESIGN = {
    *("policy", "encoder", "question_type", "ratio_asked", "ratio_spent", "exact_match", "f1"),
    *("normalized_f1", "agreement", "kl", "low", "high", "n"),
}
PER_TYPE = 2


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's cache folder: the reader is admitted once."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


def settings(**options: object) -> WorldFidelitySettings:
    chosen = {"per_type": PER_TYPE, "policies": ("lego:4", "reuse", "lego0"), **options}
    return WorldFidelitySettings(**chosen)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def work(home: Path) -> Path:
    return home / "run.work"


@pytest.fixture(scope="module")
def report(work: Path) -> BenchReport:
    """An uninterrupted run."""
    threads = torch.get_num_threads()
    found = run(settings(), work=work)
    assert torch.get_num_threads() == threads
    return found


def row(report: BenchReport, policy: str, encoder: str, kind: str = "all") -> dict[str, object]:
    (found,) = [
        r
        for r in report.rows
        if r["part"] == "quality"
        and (r["policy"], r["encoder"], r["question_type"]) == (policy, encoder, kind)
    ]
    return found


# -- what is measured ---------------------------------------------------------------------------------


def test_the_baselines_are_always_there_and_each_way_once(report: BenchReport) -> None:
    ways = [
        (r["policy"], r["encoder"])
        for r in report.rows
        if r["part"] == "quality" and r["question_type"] == "all"
    ]
    assert ways == [
        ("full", "none"),
        ("reuse", "system"),
        ("lego:4", "standalone"),
        ("reuse", "standalone"),
        ("lego0", "sinks:4"),
    ]
    for found in (r for r in report.rows if r["part"] == "quality"):
        assert found.keys() >= NAMED_BY_THE_DESIGN
        assert found["n"] == (3 * PER_TYPE if found["question_type"] == "all" else PER_TYPE)


def test_full_is_full(report: BenchReport) -> None:
    full = row(report, "full", "none")
    assert (full["agreement"], full["kl"], full["ratio_spent"]) == (1.0, 0.0, 1.0)
    assert full["key_deviation"] == full["value_deviation"] == 0.0
    assert full["exact_match"] == 1.0  # the reader can read
    assert next(r for r in report.rows if r["part"] == "check")["n"] == 3 * PER_TYPE


def test_answers_and_ratios_are_those_of_the_library_used_by_hand(report: BenchReport, home: Path) -> None:
    asked = world_questions(0, PER_TYPE)
    with RagCache.from_pretrained(READER, policy="lego:4", cold="now") as rag:
        rag.encode([chunk for question in asked for chunk in question.chunks])
        rag.generate(messages(asked[0].chunks, asked[0].question), max_new_tokens=1)  # the system text
        found = [rag.generate(messages(q.chunks, q.question), max_new_tokens=16) for q in asked]
    lego = row(report, "lego:4", "standalone")
    assert lego["exact_match"] == sum(a.text == q.answer for a, q in zip(found, asked, strict=True)) / len(
        asked
    )
    ratios = [4 * 8 / sum(use.tokens for use in a.report.link.uses) for a in found]
    assert lego["ratio_spent"] == pytest.approx(sum(ratios) / len(ratios))
    assert lego["recomputed_tokens"] == 32.0
    assert lego["answer_tokens"] == sum(len(a.token_ids) for a in found) / len(found)


@torch.no_grad()
def test_kl_and_deviation_of_reuse_are_those_of_chunks_run_alone(report: BenchReport) -> None:
    """No library: each chunk alone at its positions, put into the prompt's cache by hand."""
    model = AutoModelForCausalLM.from_pretrained(READER).eval()
    asked, maker = world_questions(0, PER_TYPE), PromptMaker(load_tokenizer())
    kl, keys = [], []
    for question in asked:
        prompt = maker.prompt(question)
        ids, inside = torch.tensor([prompt.token_ids]), {p for span in prompt.spans for p in span}
        full, linked = DynamicCache(), DynamicCache()
        right = model(ids, past_key_values=full).logits[0, -1].double().log_softmax(-1)
        start = 0
        for span in (*prompt.spans, range(ids.shape[1], ids.shape[1])):
            if span.start > start:  # text between chunks sees all that stands before it
                out = model(ids[:, start : span.start], past_key_values=linked)
            if len(span):
                alone, at = DynamicCache(), torch.arange(span.start, span.stop)[None]
                model(ids[:, span.start : span.stop], position_ids=at, past_key_values=alone)
                for number, layer in enumerate(alone.layers):
                    linked.update(layer.keys, layer.values, number)
            start = span.stop
        other = out.logits[0, -1].double().log_softmax(-1)
        kl.append(float((right.exp() * (right - other)).sum()))
        rows = sorted(inside)
        keys.append(
            [
                float((b.keys[:, :, rows] - a.keys[:, :, rows]).norm() / a.keys[:, :, rows].norm())
                for a, b in zip(full.layers, linked.layers, strict=True)
            ]
        )
    found = row(report, "reuse", "standalone")
    assert found["kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-3)
    layers = [r for r in report.rows if r["part"] == "layer" and r["encoder"] == "standalone"]
    measured = [r["key_deviation"] for r in layers if r["policy"] == "reuse"]
    expected = [sum(column) / len(column) for column in zip(*keys, strict=True)]
    assert measured == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert max(measured) > 0.1


def load_tokenizer() -> object:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(READER)


def test_chunks_behind_similar_ones(home: Path) -> None:
    class Before:
        def of(self, text: str) -> list[str]:
            return [chunk for chunk in corpus if chunk != text][:2]

    corpus = [chunk for question in world_questions(0, 1) for chunk in question.chunks]
    found = run(settings(per_type=1, policies=("reuse",), encoders=("similar:2",)), neighbours=Before())
    similar, system = row(found, "reuse", "similar:2"), row(found, "reuse", "system")
    assert similar["ratio_spent"] == 0.0
    assert similar["kl"] != system["kl"]


def test_chunks_rounded_at_rest(report: BenchReport, home: Path) -> None:
    """Layer 0 of a chunk read back is off by the rounding alone; without it, by nothing."""
    rounded = run(settings(policies=("reuse",), encoders=("standalone+int8",)))

    def first_layer(found: BenchReport, encoder: str) -> dict[str, float]:
        (layer,) = [
            r
            for r in found.rows
            if (r["part"], r.get("layer"), r.get("policy"), r.get("encoder"))
            == ("layer", 0, "reuse", encoder)
        ]
        return layer

    plain, off = first_layer(report, "standalone"), first_layer(rounded, "standalone+int8")
    for part in ("key_deviation", "value_deviation"):
        assert plain[part] < 1e-6 < 1e-4 < off[part] < 0.02
    assert row(rounded, "full", "none")["kl"] == 0
    with pytest.raises(ValueError, match="unknown rounding 'int5'; known: int8, fp8"):
        run(settings(encoders=("standalone+int5",)))


def test_tables_and_plots(report: BenchReport, tmp_path: Path) -> None:
    titles = [str(table.title) for table in tables(report)]
    assert len(titles) == 4
    plot(report, tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no rows to draw"):
        plot(BenchReport("fidelity", "m", 0, ()), tmp_path / "n.png")


# -- going on -----------------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on(
    report: BenchReport, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = work.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 5 * 3 * PER_TYPE
    part = tmp_path / "part.work"
    part.write_bytes(b"".join(lines[:13]) + lines[13][:40])  # cut off within a line
    measured, measure = [], fidelity.measure
    monkeypatch.setattr(fidelity, "measure", lambda *given: measured.append(given[3]) or measure(*given))
    again = run(settings(), work=part)
    assert len(measured) == 5 * 3 * PER_TYPE - 12
    assert again.rows == report.rows
    assert part.read_bytes() == work.read_bytes()


def test_a_finished_run_asks_nothing_again(
    report: BenchReport, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fidelity, "measure", None)
    assert run(settings(), work=work).rows == report.rows
    monkeypatch.undo()
    more = run(settings(policies=("reuse", "lego:4", "full")), work=work)
    assert row(more, "lego:4", "standalone") == row(report, "lego:4", "standalone")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "another seed"),
        ({"per_type": 1}, "another questions"),
        ({"max_new_tokens": 3}, "another max_new_tokens"),
    ],
)
def test_results_of_other_runs_are_refused(
    report: BenchReport, work: Path, change: dict[str, int], message: str
) -> None:
    with pytest.raises(RagCacheError, match=message):
        run(settings(**change), work=work)


def test_another_models_results_are_refused(report: BenchReport, work: Path, tmp_path: Path) -> None:
    lines = work.read_text().splitlines()
    header = json.loads(lines[0]) | {"model": "0" * 64}
    other = tmp_path / "other.work"
    other.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    with pytest.raises(RagCacheError, match="another model"):
        run(settings(), work=other)


@pytest.mark.parametrize("text", ["hello\n", "hello", '{"a": 1}\n', "[]\n"])
def test_files_that_are_none_of_ours_are_left_alone(home: Path, tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(RagCacheError, match="no work file"):
        run(settings(), work=path)
    assert path.read_text() == text


def test_a_damaged_file_is_refused(report: BenchReport, work: Path, tmp_path: Path) -> None:
    lines = work.read_text().splitlines()
    lines[4] = lines[4].replace('"kl"', '"lk"')
    bad = tmp_path / "bad.work"
    bad.write_text("\n".join(lines) + "\n")
    with pytest.raises(RagCacheError, match="is damaged"):
        run(settings(), work=bad)


# -- checks -------------------------------------------------------------------------------------------


def test_a_full_that_is_not_the_models_own_gives_no_figure(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engines, "token_ids", lambda self, prompt: (1, 2, 3))
    with pytest.raises(RagCacheError, match="do not trust any figure"):
        run(settings(per_type=1, policies=("reuse",)))


def test_chunks_that_the_store_cannot_keep_give_no_figure(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be computed in place and look like a perfect policy."""
    small = StoreConfig(host_bytes=60_000)  # holds one chunk, not eight
    monkeypatch.setattr("ragcachekit.commands.bench.fidelity.engines.StoreConfig", lambda **_: small)
    with pytest.raises(RagCacheError, match="is not kept"):
        run(settings(per_type=1, policies=("reuse",)))


def test_a_prompt_that_does_not_fit_is_found_before_any_work(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"question": "Why?", "chunks": ["soap " * 2100], "answer": "soap"}))
    with pytest.raises(PromptTooLong, match="'Why\\?'"):
        fidelity.run(FidelitySettings(READER, questions=path))

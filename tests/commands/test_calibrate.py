"""Calibrating a quality budget: the curve, its bound, probes from a corpus, and the commands."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.world.questions import held_out_world, world_questions
from benchmarks.world.reader_folder import READER
from ragcachekit import PrecedingChunks, Prompt, RagCache
from ragcachekit.cli import app
from ragcachekit.commands.bench.fidelity.prompts import PromptMaker
from ragcachekit.commands.calibrate import run as calibrate
from ragcachekit.commands.calibrate.measure import candidates, check_full, needed, upper_bound
from ragcachekit.commands.calibrate.probes import probes
from ragcachekit.commands.calibrate.run import CalibrateSettings, calibrated, summary
from ragcachekit.commands.corpus import CorpusChunk, documents
from ragcachekit.commands.own_questions import Sample
from ragcachekit.errors import CorpusError, RagCacheError
from ragcachekit.model.pretrained import load_model
from ragcachekit.policies.budgets.calibration import Calibration, read_record

PER_TYPE = 2
ASKED = {"max_new_tokens": 16, "do_sample": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder: the reader is admitted once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def questions_file(folder: Path) -> Path:
    path = folder / "questions.jsonl"
    rows = [
        {"question": q.question, "chunks": list(q.chunks), "answer": q.answer}
        for q in world_questions(0, PER_TYPE)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def corpus(folder: Path) -> Path:
    """Articles as files of two paragraphs."""
    where = folder / "corpus"
    where.mkdir()
    for number, article in enumerate(held_out_world(3).articles[:12]):
        (where / f"{number:02}.txt").write_text("\n\n".join(article.chunks))
    return where


def command(*arguments: object, folder: Path) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments), "--cache", str(folder)])
    assert result.exit_code == 0, result.output
    return result.output


# -- the bound ----------------------------------------------------------------------------------------


def test_a_sample_without_loss_proves_no_more_than_its_size_allows() -> None:
    assert upper_bound(np.zeros(199), 0) <= 0.01 < upper_bound(np.zeros(150), 0)
    assert (needed(0.01), needed(0.02), needed(0.1)) == (199, 99, 19)
    assert all(upper_bound(np.zeros(needed(b)), seed) <= b for b in (0.01, 0.05) for seed in range(5))


def test_the_bound_covers_the_true_loss_nine_times_in_ten() -> None:
    rng = np.random.default_rng(0)
    lost = rng.random((200, 300)) < 0.03
    covered = np.mean([upper_bound(row.astype(float), 0) >= 0.03 for row in lost])
    assert covered > 0.88


def test_losses_raise_the_bound_and_gains_lower_it() -> None:
    losses = np.zeros(300)
    losses[:6] = 1.0
    gains = losses.copy()
    gains[-6:] = -1.0
    assert upper_bound(np.zeros(300), 0) < upper_bound(gains, 0) < upper_bound(losses, 0)
    assert upper_bound(losses, 0) > losses.mean()


# -- candidates ---------------------------------------------------------------------------------------


def test_default_candidates_fit_the_encoder_and_leave_full_out() -> None:
    names = candidates((), "standalone")
    assert {"reuse", "lego:16", "query:0.1"} <= set(names)
    assert "full" not in names
    assert candidates(("lego0", "full", "lego0"), "sinks:4") == ["lego0"]
    with pytest.raises(ValueError, match="give --encoder sinks:4"):
        candidates(("lego0",), "standalone")
    with pytest.raises(ValueError, match="unknown policy"):
        candidates(("magic",), "standalone")


# -- whether there is anything to lose ----------------------------------------------------------------


@pytest.mark.parametrize(("n", "right", "budget"), [(12, 0, 0.2), (200, 10, 0.01), (200, 30, 0.2)])
def test_where_full_answers_hardly_anything_there_is_no_budget(n: int, right: int, budget: float) -> None:
    f1 = (np.arange(n) < right).astype(float)
    with pytest.raises(RagCacheError, match="no budget is stored: a full prefill"):
        check_full(f1, budget, 0)


@pytest.mark.parametrize(("n", "right", "budget"), [(12, 6, 0.2), (200, 30, 0.01), (200, 200, 0.5)])
def test_a_model_that_answers_something_can_be_calibrated(n: int, right: int, budget: float) -> None:
    check_full((np.arange(n) < right).astype(float), budget, 0)


def test_the_command_stores_nothing_where_full_answers_nothing(tmp_path: Path, questions_file: Path) -> None:
    rows = [json.loads(line) for line in questions_file.read_text().splitlines()]
    path = tmp_path / "wrong.jsonl"
    path.write_text("".join(json.dumps({**row, "answer": "xyzzy"}) + "\n" for row in rows))
    arguments = ("calibrate", "--model", READER, "--questions", path, "--budget", "0.2")
    result = CliRunner().invoke(app, [*map(str, arguments), "--cache", str(tmp_path / "cache")])
    assert result.exit_code == 2
    assert "answers (nearly) nothing right" in result.output
    assert "F1 0.000 on 6 questions" in result.output
    assert not (tmp_path / "cache" / "calibrations").exists()


# -- the curve ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def record(folder: Path, questions_file: Path) -> Calibration:
    threads = torch.get_num_threads()
    found = calibrate.run(
        CalibrateSettings(
            READER,
            max_new_tokens=16,
            questions=questions_file,
            policies=("lego:8", "reuse"),
            budget=0.9,
            namespace="acme",
            cache_dir=folder,
        )
    )
    assert torch.get_num_threads() == threads
    return found


@torch.no_grad()
def first_probabilities(rag: RagCache, prompt: Prompt, policy: str) -> torch.Tensor:
    """``[vocab]``, by generate over the linked prompt."""
    found = rag.model.generate(
        **rag.link(prompt, policy=policy).inputs,
        max_new_tokens=1,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return found.logits[0][0].double().softmax(-1)


def test_the_curve_is_what_the_engine_gives(record: Calibration, folder: Path) -> None:
    """Asked again, one by one, through the public interface, scored by hand."""
    model, tokenizer = load_model(READER, "cpu")
    maker, asked = PromptMaker(tokenizer), world_questions(0, PER_TYPE)
    right = {"full": 0.0, "reuse": 0.0, "lego:8": 0.0}
    doubts = dict.fromkeys(right, 0.0)
    ratios = {name: [] for name in right}
    with RagCache(model, tokenizer, policy="reuse", cold="now", cache_dir=folder) as rag:
        for question in asked:
            prompt = maker.prompt(question).prompt
            rag.encode(question.chunks)
            rag.generate(prompt, policy="reuse", **ASKED)
            for name in right:
                answer = rag.generate(prompt, policy=name, **ASKED)
                right[name] += answer.text.strip().lower() == question.answer.lower()
                ratios[name].append(answer.report.link.recompute_ratio)
            first = {name: first_probabilities(rag, prompt, name) for name in right}
            begin = first["full"].argmax()
            for name in right:
                doubts[name] += float(first["full"][begin] - first[name][begin]) / len(asked)
    points = {point.policy: point for point in record.curve}
    for name, point in points.items():
        assert point.ratio == pytest.approx(np.mean(ratios[name]))
        assert point.loss == pytest.approx(points["full"].f1 - point.f1)
        assert point.doubt == pytest.approx(doubts[name], abs=1e-6)
        assert point.upper >= max(point.loss, point.doubt)
        # One-word answers mostly: F1 is at least the share that is right.
        assert right[name] / len(asked) - 1e-9 <= point.f1 <= 1.0
    assert points["full"].f1 == 1.0
    assert points["full"].loss == points["full"].upper == 0.0
    assert [point.policy for point in record.curve] == ["reuse", "lego:8", "full"]
    assert record.n == 3 * PER_TYPE


def test_the_record_is_found_by_engines_of_either_making(record: Calibration, folder: Path) -> None:
    assert record.policy == "reuse"
    model, tokenizer = load_model(READER, "cpu")
    made = RagCache(model, tokenizer, policy="budget:0.9", namespace="acme", cache_dir=folder)
    loaded = RagCache.from_pretrained(
        READER, device="cpu", policy="budget:0.9", namespace="acme", cache_dir=folder
    )
    with made, loaded:
        assert made.fingerprint != loaded.fingerprint
        assert made.policy == loaded.policy == "budget:0.9 -> reuse"
        other = made.link(PromptMaker(tokenizer).prompt(world_questions(0, 1)[0]).prompt, namespace="x")
        assert other.report.policy == "budget:0.9 -> full"
    assert read_record(folder, loaded.fingerprint, "acme") == record


def test_too_few_questions_are_not_taken_for_proof(record: Calibration) -> None:
    assert record.cheapest(0.01).policy == "full"
    strict = Calibration(**{**vars(record), "budget": 0.01, "policy": "full"})
    assert "give at least 199" in summary(strict)
    assert "budget:0.9 -> reuse" in summary(record)


def test_neighbours_are_part_of_the_encoder(folder: Path) -> None:
    model, tokenizer = load_model(READER, "cpu")
    near = PrecedingChunks(article.chunks for article in held_out_world(0).articles)
    settings = CalibrateSettings(
        READER, encoder="similar:1", policies=("reuse",), max_new_tokens=16, cache_dir=folder
    )
    sample = Sample(tuple(world_questions(0, PER_TYPE)))
    found = calibrated(settings, model, tokenizer, sample, lambda: near)
    assert found.encoder == "similar:1"
    assert found.curve[0].f1 == 1.0  # what standalone chunks lose, see docs/encoders.md


# -- probes -------------------------------------------------------------------------------------------

HOUSES = {"One": 1700, "Two": 1750, "Three": 1800, "Four": 1850, "Five": 1900}
TEXT = "{} was built in the year {} by the river. House {} has rooms for all its many guests."
CHUNKS = [CorpusChunk(TEXT.format(h, HOUSES[h], h), "a", n) for n, h in enumerate(HOUSES)]


def test_probes_ask_about_a_sentence_of_their_chunks() -> None:
    found = probes(CHUNKS, 5, seed=1)
    assert found == probes(CHUNKS, 5, seed=1)
    assert [probe.question_type for probe in found] == ["continuation", "cloze"] * 2 + ["continuation"]
    for probe in found:
        quoted = probe.question.split('"')[1]
        whole = (
            quoted.replace("____", probe.answer)
            if probe.question_type == "cloze"
            else f"{quoted} {probe.answer}"
        )
        assert sum(whole in chunk for chunk in probe.chunks) == 1
        assert len(probe.chunks) == len(set(probe.chunks)) == 4
        assert set(probe.chunks) <= {chunk.text for chunk in CHUNKS}


def test_the_chunk_before_stands_before() -> None:
    texts = [chunk.text for chunk in CHUNKS]
    for probe in probes(CHUNKS, 5, seed=4):
        quoted = probe.question.split('"')[1].split(" ____")[0]
        at = next(i for i, chunk in enumerate(texts) if quoted in chunk)
        if at:
            place = probe.chunks.index(texts[at])
            assert probe.chunks[place - 1] == texts[at - 1]


def test_documents_are_files() -> None:
    chunks = [CorpusChunk("x", "a", 0), CorpusChunk("y", "b", 0), CorpusChunk("z", "a", 1)]
    assert documents(chunks) == [["x", "z"], ["y"]]


def test_a_corpus_without_sentences_cannot_be_asked_about() -> None:
    with pytest.raises(CorpusError, match="your own --questions"):
        probes([CorpusChunk("too short", "a", 0)], 5, 0)


# -- the commands -------------------------------------------------------------------------------------


def test_calibrate_on_generated_probes(folder: Path, corpus: Path, tmp_path: Path) -> None:
    output = command(
        *("calibrate", "--model", READER, "--corpus", corpus, "--chunk-tokens", 60, "--probes", 4),
        *("--policies", "reuse,lego:2000", "--namespace", "probed", "--budget", "0.6"),
        *("--json", tmp_path / "c.json"),
        folder=folder,
    )
    assert "4 questions (agreement)" in output
    found = json.loads((tmp_path / "c.json").read_text())
    rows = {row["policy"]: row for row in found["rows"]}
    assert found["bench"] == "calibrate"
    assert rows["full"]["f1"] == 1.0  # agrees with itself, whatever it answers
    assert rows["lego:2000"]["f1"] == 1.0  # computes everything too
    assert 0.9 < rows["lego:2000"]["ratio_spent"] < 1.0  # all but the exact prefix
    assert sum(row["chosen"] for row in found["rows"]) == 1


def test_similar_chunks_may_be_those_before(folder: Path, corpus: Path) -> None:
    output = command(
        *("calibrate", "--model", READER, "--corpus", corpus, "--chunk-tokens", 60, "--probes", 2),
        *("--policies", "reuse", "--encoder", "similar:1", "--neighbours", "preceding", "--budget", "0.9"),
        folder=folder,
    )
    assert "on similar:1" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", READER), "give --questions"),
        (("--model", READER, "--budget", "1.5"), "loss of F1"),
        (("--model", READER, "--neighbours", "preceding"), "give --corpus"),
        (("--model", READER, "--neighbours", "random"), "'similar' or 'preceding'"),
        (("--model", READER, "--namespace", ""), "namespace is empty"),
        (("--model", READER, "--corpus", "/nowhere"), "does not exist"),
        ((), "which model"),
    ],
)
def test_bad_arguments(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["calibrate", *arguments, "--cache", str(folder)])
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--policies", "magic"), "unknown policy"), (("--encoder", "backwards"), "unknown encoder")],
)
def test_bad_names(folder: Path, questions_file: Path, arguments: tuple[str, ...], message: str) -> None:
    given = ("--model", READER, "--questions", str(questions_file), "--cache", str(folder))
    result = CliRunner().invoke(app, ["calibrate", *given, *arguments])
    assert result.exit_code == 2
    assert message in result.output

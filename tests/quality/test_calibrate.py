"""Calibrating a quality budget: the curve, its bound, probes from a corpus, and the commands."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.world.questions import held_out_world, world_questions
from benchmarks.world.reader_folder import READER
from engine_kit import checked
from ragcachekit import RagCache
from ragcachekit.commands import calibrate
from ragcachekit.commands.app import app
from ragcachekit.commands.calibrate import Candidate, Loss, candidates, is_settled, upper_bound
from ragcachekit.commands.questions import OtherPrompts, PromptMaker, Sample, make_probes, read_questions
from ragcachekit.model.loading import load_model
from ragcachekit.quality.records import Calibration, read_calibration

PER_TYPE = 3
ASKED = {"max_new_tokens": 3, "do_sample": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder: the reader is admitted once."""
    return checked(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def questions_file(folder: Path) -> Path:
    path = folder / "questions.jsonl"
    rows = [
        {"question": q.question, "chunks": list(q.chunks), "answer": q.answers[0]}
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


def quantile_of_all_means(sample: list[float], share: float) -> float:
    """By brute force: the mean of every sequence of draws with replacement."""
    means = sorted(np.mean(draw) for draw in itertools.product(sample, repeat=len(sample)))
    return float(np.quantile(means, share))


@pytest.mark.parametrize("losses", [[0.0, 0.1, 0.3, 0.02], [0.0, 0.0, 0.0, 0.0], [0.5, -0.2, 0.1, 0.4]])
def test_the_bound_is_a_quantile_of_all_resamples(losses: list[float]) -> None:
    """2,000 draws of all 3,125: their quantile lies between close ones of the whole."""
    low, high = (quantile_of_all_means([*losses, 0.7], share) for share in (0.875, 0.925))
    assert low - 1e-12 <= upper_bound(losses, 0.7) <= high + 1e-12


@pytest.mark.parametrize("n", [8, 16, 30])
@pytest.mark.parametrize("spikes", [0.0, 0.05])
def test_the_upper_bound_covers_the_true_mean_nine_times_in_ten(n: int, spikes: float) -> None:
    """Skewed losses, some of them with rare large ones; the worst candidate shows how large losses get."""
    rng = np.random.default_rng(n)
    small = rng.exponential(0.05, (400, n))
    losses = np.where(rng.random((400, n)) < spikes, 1.0, small)
    mean = 0.05 * (1 - spikes) + spikes
    worst = 1.0 if spikes else float(small.max())
    assert np.mean([upper_bound(row, worst) >= mean for row in losses]) > 0.87


# -- the end of the questions --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "settled", "decisions"),
    [
        ([(0.0, 0.3, 0.4), (0.1, 0.01, 0.02), (0.4, 0.005, 0.3)], True, ["not sure", "within", "not sure"]),
        ([(0.0, 0.5, 0.6), (0.1, 0.095, 0.11), (0.5, 0.001, 0.01)], False, ["not sure"] * 2 + ["within"]),
        ([(0.0, 0.5, 0.6), (0.1, 0.2, 0.3)], False, ["not sure"] * 2),
    ],
)
def test_asking_ends_when_the_cheapest_that_seems_within_is_sure(
    losses: list[tuple[float, float, float]], settled: bool, decisions: list[str]
) -> None:
    """Of each candidate its ratio, the mean of its losses and their upper bound."""
    found = [Candidate("lego:4", [Loss(mean, ratio)] * 8, upper) for ratio, mean, upper in losses]
    assert is_settled(found, 0.1) is settled
    assert [one.decision(0.1) for one in found] == decisions


# -- candidates ---------------------------------------------------------------------------------------


def test_default_candidates_fit_the_encoder_and_leave_full_out() -> None:
    names = candidates((), "standalone")
    assert {"reuse", "lego:16", "impact:0.05", "impact:0.1", "impact:0.2", "impact:0.3"} <= set(names)
    assert "full" not in names
    assert candidates(("lego0", "full", "lego0"), "sinks:4") == ["reuse", "lego0"]
    with pytest.raises(ValueError, match="give --encoder sinks:4"):
        candidates(("lego0",), "standalone")
    with pytest.raises(ValueError, match="unknown policy"):
        candidates(("magic",), "standalone")


# -- the curve ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calibrated_rows(folder: Path, questions_file: Path) -> tuple[Calibration, dict[str, dict[str, Any]]]:
    threads = torch.get_num_threads()
    record, report = calibrate.run(
        READER,
        Sample(tuple(read_questions(questions_file))),
        max_new_tokens=3,
        policies=("lego:8", "reuse"),
        budget=0.99,
        namespace="acme",
        cache_dir=folder,
    )
    assert torch.get_num_threads() == threads
    return record, {row["policy"]: row for row in report.rows}


@torch.no_grad()
def distributions(rag: RagCache, prompt: Any, policy: str, answer: Sequence[int]) -> torch.Tensor:
    """Probabilities ``[len(answer) + 1, vocab]`` after the linked prompt, token by token."""
    linked = rag.link(prompt, policy=policy)
    ids, out = linked.input_ids, []
    cache = linked.cache if policy != "full" else rag.model(ids[:, :-1], use_cache=True).past_key_values
    for place, token in enumerate((int(ids[0, -1]), *answer), ids.shape[1] - 1):
        where = torch.tensor([[place]])
        logits = rag.model(torch.tensor([[token]]), position_ids=where, past_key_values=cache).logits
        out.append(logits[0, -1].double().softmax(-1))
    return torch.stack(out)


@pytest.mark.soak
def test_the_losses_are_what_the_engine_gives(
    calibrated_rows: tuple[Calibration, dict[str, dict[str, Any]]], folder: Path
) -> None:
    """Asked again through the public interface, one token after the other, with sums by hand."""
    record, rows = calibrated_rows
    model, tokenizer = load_model(READER, "cpu")
    maker, asked = PromptMaker(tokenizer), world_questions(0, PER_TYPE)
    kls: list[float] = []
    options: dict[str, Any] = {"neighbours": OtherPrompts(asked), "cold": "never", "cache_dir": folder}
    with RagCache(model, tokenizer, policy="reuse", **options) as rag:
        for question in asked:
            prompt, before = maker.prompt(question).prompt, maker.prompt(question).before
            for text in question.chunks:
                rag.encode([text], system=before)
            stop = list(maker.stop) or None
            answer = rag.generate(prompt, policy="full", stop=stop, **ASKED).token_ids
            full, reuse = (distributions(rag, prompt, name, answer) for name in ("full", "reuse"))
            kls.append(float((full * (full / reuse).log()).nan_to_num(0).sum(-1).mean()))
    order = np.random.default_rng(0).permutation(len(asked))[: record.curve[0].n]
    assert rows["reuse"]["loss"] == pytest.approx(np.take(kls, order).mean(), rel=1e-3, abs=1e-6)
    point = next(point for point in record.curve if point.policy == "reuse")
    assert point.ratio == 0.0
    assert [point.policy for point in record.curve][-1] == "full"
    assert record.curve[-1].upper == 0.0


def test_the_record_is_found_by_engines_of_either_making(
    calibrated_rows: tuple[Calibration, dict[str, dict[str, Any]]], folder: Path
) -> None:
    record, _ = calibrated_rows
    policy = record.cheapest(0.99).policy
    model, tokenizer = load_model(READER, "cpu")
    made = RagCache(model, tokenizer, policy="budget:0.99", namespace="acme", cache_dir=folder)
    loaded = RagCache.from_pretrained(
        READER, device="cpu", policy="budget:0.99", namespace="acme", cache_dir=folder
    )
    with made, loaded:
        assert made.fingerprint == loaded.fingerprint
        assert made.policy == loaded.policy == f"budget:0.99 -> {policy}"
        other = made.link(PromptMaker(tokenizer).prompt(world_questions(0, 1)[0]).prompt, namespace="x")
        assert other.report.policy == "budget:0.99 -> full"
    assert read_calibration(folder, loaded.fingerprint, "acme") == record


# -- probes -------------------------------------------------------------------------------------------

HOUSES = {"One": 1700, "Two": 1750, "Three": 1800, "Four": 1850, "Five": 1900}
TEXT = "{} was built in the year {} by the river. House {} has rooms for all its many guests."
TEXTS = [TEXT.format(house, year, house) for house, year in HOUSES.items()]


def test_probes_are_halves_of_a_sentence_of_their_chunks() -> None:
    found = make_probes([TEXTS], 5, seed=1)
    assert found == make_probes([TEXTS], 5, seed=1)
    assert len({probe.beginning for probe in found}) == 5
    for probe in found:
        (own,) = (chunk for chunk in probe.chunks if f"{probe.beginning} {probe.rest}" in chunk)
        assert len(probe.chunks) == len(set(probe.chunks)) == 4
        assert set(probe.chunks) <= set(TEXTS)
        if own != TEXTS[0]:  # the chunk before it in its document precedes it
            assert probe.chunks[probe.chunks.index(own) - 1] == TEXTS[TEXTS.index(own) - 1]


def test_probes_of_texts_without_blanks_or_sentences() -> None:
    found = make_probes([["一二三四五六七八九十" * 60, "no end", ""], ["other"]], 9)
    assert len(found) == 3
    assert all(probe.beginning for probe in found)
    with pytest.raises(ValueError, match="at least two chunks"):
        make_probes([["one", " one "]], 5)


# -- the commands -------------------------------------------------------------------------------------


def test_calibrate_on_generated_probes(folder: Path, corpus: Path, tmp_path: Path) -> None:
    output = command(
        *("calibrate", "--model", READER, "--corpus", corpus, "--chunk-tokens", 60, "--probes", 8),
        *("--policies", "lego:2000", "--namespace", "probed", "--budget", "0.001"),
        *("--encoder", "standalone"),
        *("--json", tmp_path / "c.json"),
        folder=folder,
    )
    assert "up to 8 probes" in output
    found = json.loads((tmp_path / "c.json").read_text())
    rows = {row["policy"]: row for row in found["rows"]}
    assert found["bench"] == "calibrate"
    assert rows["lego:2000"]["loss"] == pytest.approx(0.0, abs=1e-6)  # computes everything too
    assert 0.9 < rows["lego:2000"]["ratio_spent"] < 1.0  # all but the exact prefix
    assert rows["reuse"]["decision"] == "not sure"
    assert sum(row["chosen"] for row in found["rows"]) <= 1


FILE = "the questions"
ASKING = ("--model", READER, "--questions", FILE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", READER), "give --questions"),
        (("--model", READER, "--budget", "1.5"), "nats per answer token"),
        ((), "which model"),
        ((*ASKING, "--policies", "magic"), "unknown policy"),
        ((*ASKING, "--encoder", "similar:1"), 'questions with their "document"'),
    ],
)
def test_bad_arguments(folder: Path, questions_file: Path, arguments: tuple[str, ...], message: str) -> None:
    arguments = tuple(str(questions_file) if one is FILE else one for one in arguments)
    result = CliRunner().invoke(app, ["calibrate", *arguments, "--cache", str(folder)])
    assert result.exit_code == 2
    assert message in result.output

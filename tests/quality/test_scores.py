"""The figures of the fidelity bench against slow re-derivations."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.fidelity import ALONE, add_recovery, normalized_f1
from ragcachekit.commands.engines import FULL
from ragcachekit.commands.fidelity import REUSE, Measurement, quality_rows
from ragcachekit.commands.questions import Question
from ragcachekit.policies.base import PolicyAndEncoder
from ragcachekit.quality.compare import bag_f1, divergence, exact_match, loss_per_token, word_f1


@pytest.mark.parametrize(
    ("answer", "right", "same"),
    [
        ("The Soap!", "soap", 1.0),
        ("soap glass", "glass soap", 0.0),
        ("", "soap", 0.0),
        ("Łódź.", "łódź", 1.0),
    ],
)
def test_exact_match_ignores_case_articles_and_punctuation(answer: str, right: str, same: float) -> None:
    assert exact_match(answer, right) == same
    assert word_f1(answer, right) == (1.0 if answer == "soap glass" else same)


def measurement(f1: float) -> Measurement:
    return Measurement(
        text="soap",
        exact_match=float(f1 == 1),
        f1=f1,
        agreement=0.0,
        answer_tokens=2,
        kl=0.25,
        answer_kl=1.0 - f1,
        answer_loss=2.0,
        gold_loss=3.0 - 2.0 * f1,
        ratio_spent=0.1,
        prompt_tokens=100,
        recomputed_tokens=10,
        reused_tokens=80,
    )


QUESTIONS = [Question("Q?", ("c",), ("soap",), kind) for kind in "aabb"]
WAY = PolicyAndEncoder("query:0.1", "standalone")
SCORES = {FULL: (1, 1, 1, 0.5), REUSE: (0, 1, 0.5, 0.5), ALONE: (0, 0, 0, 0.5), WAY: (1, 1, 0, 0.5)}


def all_rows(scores: dict[PolicyAndEncoder, Sequence[float]]) -> list[dict[str, Any]]:
    results = {(i, way): measurement(f1) for way, all_f1 in scores.items() for i, f1 in enumerate(all_f1)}
    found = quality_rows(QUESTIONS, list(scores), results, seed=3)
    add_recovery(found, QUESTIONS, results, seed=3)
    return found


def rows() -> dict[tuple[str, str], dict[str, Any]]:
    found = all_rows(SCORES)
    alone = {"policy": ALONE.policy, "encoder": ALONE.encoder}
    return {(row["policy"], row["question_type"]): row for row in found if not alone.items() <= row.items()}


def test_rows_are_means_by_type_and_normalized_f1_stands_between_reuse_and_full() -> None:
    found = rows()
    row = found["query:0.1", "all"]
    assert (row["f1"], row["n"], row["ratio_asked"], row["encoder"]) == (0.625, 4, 0.1, "standalone")
    assert row["low"] <= row["f1"] <= row["high"]
    assert row["kl"] == row["kl_low"] == 0.25
    assert row["normalized_f1"] == pytest.approx((0.625 - 0.5) / (0.875 - 0.5))
    assert found["query:0.1", "a"]["normalized_f1"] == 1.0
    assert found["query:0.1", "b"]["normalized_f1"] == pytest.approx((0.25 - 0.5) / (0.75 - 0.5))
    assert found["full", "all"]["normalized_f1"] == 1.0
    assert found["reuse", "all"]["normalized_f1"] == 0.0


def test_recovery_is_the_part_of_what_reuse_of_lone_chunks_loses() -> None:
    row = rows()["query:0.1", "all"]
    # Mean losses: 1 - F1 for KL, 3 - 2 F1 for the right answer; F1 is 0.625, 0.125 alone, 0.875 in full.
    assert row["answer_kl_recovery"] == pytest.approx((0.875 - 0.375) / (0.875 - 0.125))
    assert row["gold_loss_recovery"] == pytest.approx((2.75 - 1.75) / (2.75 - 1.25))
    assert row["f1_recovery"] == pytest.approx((0.625 - 0.125) / (0.875 - 0.125))
    assert row["kl_recovery"] is None  # the same everywhere
    assert row["answer_kl_recovery_low"] <= row["answer_kl_recovery"] <= row["answer_kl_recovery_high"]


def test_f1_of_bags():
    for one, other, precision, recall in (((1, 1, 2), (1, 3), 1 / 3, 1 / 2), ((1, 2, 2), (2, 2), 2 / 3, 1)):
        assert bag_f1(one, other) == pytest.approx(2 * precision * recall / (precision + recall))
    assert (bag_f1((), ()), bag_f1((1,), ())) == (1.0, 0.0)


def test_losses_of_whole_answers() -> None:
    rng = np.random.default_rng(3)
    logits = [rng.standard_normal((4, 11)) for _ in range(2)]
    full, other = (np.log(np.exp(x) / np.exp(x).sum(-1, keepdims=True)) for x in logits)
    expected = np.mean([(np.exp(f) * (f - o)).sum() for f, o in zip(full, other, strict=True)])
    assert divergence(*map(torch.from_numpy, (full, other))) == pytest.approx(expected)
    tokens = (3, 0, 10)
    expected = -np.mean([full[row, token] for row, token in enumerate(tokens)])
    assert loss_per_token(torch.from_numpy(full), tokens) == pytest.approx(expected)
    assert loss_per_token(torch.from_numpy(full), ()) == 0.0


def test_normalized_f1_has_no_value_where_full_is_no_better() -> None:
    assert np.isnan(normalized_f1(np.array([[0.5, 0.7, 0.7], [0.5, 0.7, 0.6]]))).all()
    row = all_rows(dict.fromkeys(SCORES, (1, 1, 1, 1)))[0]
    assert row["normalized_f1"] is row["normalized_f1_low"] is row["normalized_f1_high"] is None

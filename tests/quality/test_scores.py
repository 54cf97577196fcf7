"""The figures of the fidelity bench against slow re-derivations."""

from __future__ import annotations

import math
import random
import string

import numpy as np
import pytest
import torch

from ragcachekit.commands.engines import FULL
from ragcachekit.commands.fidelity import (
    ALONE,
    REUSE,
    Measurement,
    normalized_f1,
    quality_rows,
    ratio_asked,
)
from ragcachekit.commands.questions import Question
from ragcachekit.commands.report import RESAMPLES, Bootstrap
from ragcachekit.policies.measured import PolicyAndEncoder
from ragcachekit.quality.compare import bag_f1, divergence, exact_match, loss_per_token, word_f1

WORDS = ["soap", "glass", "Acmetron", "makes", "the", "a", "Łódź", "東京", "1999"]


def pairs(number: int = 60) -> list[tuple[str, str]]:
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(0, 6))) for _ in range(2 * number)]
    return list(zip(texts[:number], texts[number:], strict=True))


def counted(text: str) -> list[str]:
    """SQuAD's normalisation, word by word."""
    cleared = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return [word for word in cleared.split() if word not in ("a", "an", "the")]


@pytest.mark.parametrize(
    ("answer", "right", "same"),
    [
        ("The Soap!", "soap", 1.0),
        ("soap glass", "glass soap", 0.0),
        ("", "soap", 0.0),
        ("a theatre", "theatre", 1.0),
        ("Łódź.", "łódź", 1.0),
    ],
)
def test_exact_match_ignores_case_articles_and_punctuation(answer: str, right: str, same: float) -> None:
    assert exact_match(answer, right) == same


def test_token_f1_is_that_of_bags() -> None:
    for answer, right in pairs():
        one, left = counted(answer), counted(right)
        shared = 0
        for word in one:
            if word in left:
                left.remove(word)
                shared += 1
        wanted = counted(right)
        if not one or not wanted:
            expected = float(one == wanted)
        elif not shared:
            expected = 0.0
        else:
            precision, recall = shared / len(one), shared / len(wanted)
            expected = 2 * precision * recall / (precision + recall)
        assert word_f1(answer, right) == pytest.approx(expected)


def test_divergence_is_the_sum_of_the_textbook() -> None:
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(50)), rng.dirichlet(np.ones(50))
    expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    one, two = torch.tensor(p).log(), torch.tensor(q).log()
    assert divergence(one, two) == pytest.approx(expected)
    assert divergence(one, one) == 0.0
    assert divergence(two, one) != pytest.approx(expected)


def test_a_token_that_full_cannot_say_adds_nothing() -> None:
    one = torch.tensor([0.0, -math.inf], dtype=torch.float64)
    two = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    assert divergence(one, two) == pytest.approx(math.log(2))


# -- intervals and rows -------------------------------------------------------------------------------


def test_the_bootstrap_draws_questions_again() -> None:
    values = np.random.default_rng(1).random(23)
    picks = np.random.default_rng(5).integers(0, 23, (RESAMPLES, 23))
    expected = np.quantile([values[pick].mean() for pick in picks], [0.025, 0.975])
    assert Bootstrap(23, seed=5).of_mean(values) == pytest.approx(tuple(expected))
    with pytest.raises(ValueError, match="NaN"):
        Bootstrap(2).of_mean([1.0, math.nan])


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


def rows() -> dict[tuple[str, str], dict[str, object]]:
    results = {way: [measurement(f1) for f1 in scores] for way, scores in SCORES.items()}
    found = quality_rows(QUESTIONS, results, seed=3)
    alone = {"policy": ALONE.policy, "encoder": ALONE.encoder}
    return {(row["policy"], row["question_type"]): row for row in found if not alone.items() <= row.items()}


def test_normalized_f1_stands_between_reuse_and_full() -> None:
    found = rows()
    assert found["query:0.1", "all"]["normalized_f1"] == pytest.approx((0.625 - 0.5) / (0.875 - 0.5))
    assert found["query:0.1", "a"]["normalized_f1"] == 1.0
    assert found["query:0.1", "b"]["normalized_f1"] == pytest.approx((0.25 - 0.5) / (0.75 - 0.5))
    assert found["full", "all"]["normalized_f1"] == 1.0
    assert found["reuse", "all"]["normalized_f1"] == 0.0


def test_its_interval_draws_all_three_together() -> None:
    row = rows()["query:0.1", "all"]
    picks = np.random.default_rng(3).integers(0, 4, (RESAMPLES, 4))
    way, reuse, full = (np.array(SCORES[one], float) for one in (WAY, REUSE, FULL))
    drawn = [
        (way[p].mean() - reuse[p].mean()) / (full[p].mean() - reuse[p].mean())
        for p in picks
        if full[p].mean() > reuse[p].mean()
    ]
    expected = np.quantile(drawn, [0.025, 0.975])
    assert (row["normalized_f1_low"], row["normalized_f1_high"]) == pytest.approx(tuple(expected))


def test_recovery_is_the_part_of_what_reuse_of_lone_chunks_loses() -> None:
    row = rows()["query:0.1", "all"]
    # Mean losses: 1 - F1 for KL, 3 - 2 F1 for the right answer; F1 is 0.625, 0.125 alone, 0.875 in full.
    assert row["answer_kl_recovery"] == pytest.approx((0.875 - 0.375) / (0.875 - 0.125))
    assert row["gold_loss_recovery"] == pytest.approx((2.75 - 1.75) / (2.75 - 1.25))
    assert row["f1_recovery"] == pytest.approx((0.625 - 0.125) / (0.875 - 0.125))
    assert row["kl_recovery"] is None  # the same everywhere
    assert row["answer_kl_recovery_low"] <= row["answer_kl_recovery"] <= row["answer_kl_recovery_high"]


def test_f1_of_tokens():
    assert bag_f1((1, 1, 2), (1, 3)) == pytest.approx(2 * 1 / 5)
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
    same = {way: [measurement(1.0)] * 4 for way in SCORES}
    row = quality_rows(QUESTIONS, same, seed=0)[0]
    assert row["normalized_f1"] is row["normalized_f1_low"] is row["normalized_f1_high"] is None


def test_rows_are_means_with_intervals_by_type() -> None:
    found = rows()
    row = found["query:0.1", "all"]
    assert (row["f1"], row["n"], row["ratio_asked"], row["encoder"]) == (0.625, 4, 0.1, "standalone")
    assert row["low"] <= row["f1"] <= row["high"]
    assert row["kl"] == row["kl_low"] == 0.25
    assert {kind for _, kind in found} == {"a", "b", "all"}
    assert found["query:0.1", "a"]["f1"] == 1.0
    assert found["query:0.1", "b"]["n"] == 2


@pytest.mark.parametrize(
    ("policy", "asked"),
    [
        ("query:0.15", 0.15),
        ("lego:16", None),
        ("full", None),
        ("lego:4+query:0.1", 0.1),
        ("x:0.1+y:0.2", None),
    ],
)
def test_the_ratio_asked_is_read_from_the_name(policy: str, asked: float | None) -> None:
    assert ratio_asked(policy) == asked

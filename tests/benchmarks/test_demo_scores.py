"""The demo's figures, on results made up for the purpose."""

import math

import pytest

from benchmarks.demo import query_hits
from benchmarks.demo.answers import Answered, contains, quality, wilson
from benchmarks.demo.query_hits import Lookup

ONE = {
    **{"question": "Why?", "known": "linear time", "full": "in linear time", "cached": "in linear time"},
    **{"full_right": True, "cached_right": True, "same": True, "f1": 1.0, "kl": 0.1, "full_loss": 0.5},
    **{"cached_loss": 0.75, "chunks": [1, 2], "cached_chunks": [1, 2], "prompt_tokens": 100},
    **{"reused_tokens": 80, "recompute_ratio": 0.1, "policy": "lego:4", "encoder": "system"},
}


def answered(**changes):
    return Answered(**{**ONE, **changes})


@pytest.mark.parametrize(
    ("answer", "known", "found"),
    [
        ("It takes Linear\n  time.", "linear time", True),
        ("The period is 2**19937-1, which", "2**19937-1", True),
        ("It is 170.", "70", False),
        ("It is 70.", "70", True),
        ("JavaScript's model", "Java", False),
        ("Java's model", "Java", True),
        ("", "Java", False),
    ],
)
def test_a_known_answer_is_found_as_whole_words(answer, known, found):
    assert contains(answer, known) is found


def test_wilson_is_that_of_the_textbook():
    assert wilson(8, 10) == pytest.approx((0.4901, 0.9433), abs=1e-3)
    assert wilson(10, 10)[1] == pytest.approx(1.0)


def test_quality_is_the_mean_of_the_questions():
    other = answered(
        full_right=False,
        cached_right=False,
        same=False,
        f1=0.5,
        kl=0.3,
        cached_chunks=[1, 3],
        reused_tokens=20,
    )
    row = quality([answered(), other, answered(cached_right=False)], seed=0)
    assert row["f1"] == pytest.approx(2.5 / 3)
    assert row["f1_low"] <= row["f1"] <= row["f1_high"]
    assert (row["full_right"], row["cached_right"], row["same"], row["n"]) == (2, 1, 2, 3)
    assert (row["other_chunks"], row["tokens_reused"]) == (1, pytest.approx(0.6))
    assert row["loss_added"] == pytest.approx(0.25)
    assert row["full_right_low"] < 2 / 3 < row["full_right_high"]


def lookup(question, maker, chunks, plain, ms=1.0, plain_ms=5.0):
    return Lookup(question, maker, chunks, plain, ms, plain_ms)


EVIDENCE = (frozenset({1}), frozenset({9}))


def test_hits_are_right_wrong_and_harmful():
    lookups = [
        lookup(0, None, (1, 2), (1, 2), 6.0),
        lookup(0, 0, (1, 2), (1, 3)),  # its own question's entry
        lookup(1, 0, (1, 2), (9, 2)),  # another's, without what it needs
        lookup(1, 0, (1, 9), (9, 2)),  # another's, which has it
        lookup(1, 0, (1, 2), (3, 4)),  # no search finds it either
        lookup(0, 0, (4, 5), (1, 2)),  # its own, without what it needs
    ]
    found = query_hits.row(lookups, EVIDENCE)
    assert {name: found[name] for name in ("n", "hits", "right", "wrong", "harmful")} == {
        **{"n": 6, "hits": 5, "right": 2, "wrong": 3, "harmful": 2}
    }
    assert (found["hit_ms"], found["miss_ms"], found["search_ms"]) == (1.0, 6.0, 5.0)
    assert found["saved_ms"] == 5 * 4.0


def test_the_sweep_replays_the_wordings_at_each_tolerance():
    class Angles:
        def embed_query(self, text):
            angle = float(text)
            return [math.cos(angle), math.sin(angle)]

    angles = (0.0, 0.3, 1.0)  # cosine distances: 0.045, 0.235 and 0.46
    lookups = [lookup(0, None, (1,), (1,)), lookup(0, None, (1,), (1,)), lookup(1, None, (9,), (9,))]
    wordings = [(one.question, str(angle)) for one, angle in zip(lookups, angles, strict=True)]
    rows = {row["tolerance"]: row for row in query_hits.sweep(lookups, wordings, Angles(), EVIDENCE)}
    assert rows[0.02]["hits"] == 0
    assert (rows[0.1]["right"], rows[0.1]["wrong"]) == (1, 0)
    assert (rows[0.4]["right"], rows[0.4]["wrong"], rows[0.4]["harmful"]) == (1, 0, 0)

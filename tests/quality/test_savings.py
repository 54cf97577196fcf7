"""When the time that reuse saved pays for a check, by hand-made seconds."""

import pytest

from ragcachekit.quality.auto import CHECK_PREFILLS, MIN_SAVED, Savings


def after(*prompts):
    savings = Savings()
    for prompt in prompts:
        savings.add(*prompt)
    return savings


COLD, WARM = (1000, 1000, 4.0), (1000, 60, 0.5)


def test_a_prompt_saves_what_the_quickest_prefill_would_have_taken_more():
    assert after((1000, 1000, 5.0), COLD, WARM, WARM).seconds == pytest.approx(2 * 3.5)
    assert after(COLD, (1000, 1000, 5.0), (500, 300, 9.0)).seconds == 0, "a slow prefill takes nothing back"
    assert after(COLD, (2000, 60, 0.5)).seconds == pytest.approx(7.5)


def test_short_forwards_say_nothing_about_a_prefill():
    assert after((1000, 60, 30.0), COLD, WARM).seconds == pytest.approx(3.5)


@pytest.mark.parametrize(("warm", "pays"), [(0, False), (12, False), (45, False), (46, True)])
def test_a_check_takes_a_quarter_of_what_was_saved(warm, pays):
    tokens = 1000
    assert MIN_SAVED * CHECK_PREFILLS * 4.0 == 160.0, "46 savings of 3.5 s"
    assert after(COLD, *[WARM] * warm).pay_for_check(tokens) is pays


def test_a_check_takes_a_minute_at_most():
    assert not after(COLD, *[WARM] * 68).pay_for_check(16_000)
    assert after(COLD, *[WARM] * 69).pay_for_check(16_000)


def test_chunks_that_were_encoded_ahead_are_checked_at_once():
    assert after(WARM, WARM).pay_for_check(16_000)


def test_a_prefix_hit_before_any_prefill_counts_for_nothing():
    assert after((1000, 10, 0.1), (1000, 10, 0.1)).seconds == 0

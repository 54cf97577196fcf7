"""Limits per tenant: meters with a clock of the test's own, and requests at once."""

from types import SimpleNamespace

import pytest

from ragcachekit.server.errors import ApiError
from ragcachekit.server.keys import Limits, Tenant, Usage


@pytest.fixture
def clock():
    return SimpleNamespace(now=1000.0)


@pytest.fixture
def usage(clock):
    return Usage(lambda: clock.now)


def tenant(name="ada", **limits):
    return Tenant(name, name, Limits(**limits))


def ask(usage, who, tokens=0, used=None):
    with usage.admit(who) as grant:
        grant.expect(tokens)
        if used is not None:
            grant.charge(used)


def refusal(usage, who, tokens=0):
    with pytest.raises(ApiError) as error:
        ask(usage, who, tokens)
    assert (error.value.status, error.value.code) == (429, "rate_limit_exceeded")
    return error.value


def test_requests_of_a_minute(usage, clock):
    who = tenant(requests_per_minute=6)
    for _ in range(6):
        ask(usage, who)
    clock.now += 9.5
    error = refusal(usage, who)
    assert error.retry_after == pytest.approx(0.5)
    assert error.kind == "requests"
    assert error.headers == {"Retry-After": "1"}
    clock.now += 0.5
    ask(usage, who)
    refusal(usage, who)
    clock.now += 10_000
    for _ in range(6):
        ask(usage, who)
    refusal(usage, who)


def test_tokens_are_charged_as_they_were_used(usage, clock):
    who = tenant(tokens_per_minute=600)
    ask(usage, who, 500, used=100)
    ask(usage, who, 500, used=900)
    error = refusal(usage, who, 1)
    assert error.kind == "tokens"
    assert error.retry_after == pytest.approx(40.1), "400 tokens beyond the limit, and one"
    clock.now += 40.1
    ask(usage, who, 1)
    refusal(usage, who, 1)


def test_a_refused_request_costs_no_tokens(usage):
    who = tenant(tokens_per_minute=100)
    for _ in range(5):
        error = refusal(usage, who, 101)
        assert error.retry_after is None, "waiting would not help"
        assert "Retry-After" not in error.headers
    ask(usage, who, 100)


def test_a_request_that_fails_costs_what_was_expected_and_frees_its_place(usage):
    who = tenant(tokens_per_minute=100, parallel=1)

    def fail():
        with usage.admit(who) as grant:
            grant.expect(60)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    ask(usage, who, 40)
    assert refusal(usage, who, 1).kind == "tokens"


def test_requests_at_once(usage):
    who, other = tenant(parallel=2), tenant("bob", parallel=2)
    with usage.admit(who):
        with usage.admit(who):
            assert refusal(usage, who).retry_after == 1.0
            ask(usage, other)
        ask(usage, who)


def test_changed_limits_hold_at_once(usage):
    ask(usage, tenant(requests_per_minute=100))
    refusal(usage, tenant(requests_per_minute=1))
    ask(usage, tenant())

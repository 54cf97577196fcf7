"""Limits per tenant: token buckets with a clock of the test's own, and requests at once."""

from __future__ import annotations

import asyncio

import pytest

from ragcachekit.server.errors import ApiError
from ragcachekit.server.keys import Limits, Tenant
from ragcachekit.server.limits import Usage, duration


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def usage(clock):
    return Usage(clock)


def tenant(name="ada", **limits):
    return Tenant(name, name, Limits(**limits))


async def ask(usage, who, tokens=0, used=None):
    async with usage.admit(who) as grant:
        grant.expect(tokens)
        if used is not None:
            headers = grant.headers
            grant.used(used)
            return headers
        return grant.headers


async def refusal(usage, who, tokens=0):
    with pytest.raises(ApiError) as error:
        await ask(usage, who, tokens)
    assert (error.value.status, error.value.code) == (429, "rate_limit_exceeded")
    return error.value


async def test_without_limits_nothing_is_refused(usage):
    for _ in range(1000):
        assert await ask(usage, tenant(), 10**9) == {}


async def test_requests_of_a_minute(usage, clock):
    who = tenant(requests_per_minute=6)
    left = [(await ask(usage, who))["x-ratelimit-remaining-requests"] for _ in range(6)]
    assert left == ["5", "4", "3", "2", "1", "0"]
    clock.now += 9.5
    error = await refusal(usage, who)
    assert error.retry_after == pytest.approx(0.5)
    assert error.kind == "requests"
    assert error.headers == {
        "x-ratelimit-limit-requests": "6",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "50.5s",
        "Retry-After": "1",
    }
    clock.now += 0.5
    await ask(usage, who)
    await refusal(usage, who)
    clock.now += 10_000
    for _ in range(6):
        await ask(usage, who)
    await refusal(usage, who)


async def test_no_schedule_gets_more_than_a_bucket_and_what_flows_in(usage, clock):
    who, admitted = tenant(requests_per_minute=30), 0
    for _ in range(1200):  # ten minutes
        clock.now += 0.5
        try:
            await ask(usage, who)
            admitted += 1
        except ApiError:
            pass
    assert 300 <= admitted <= 330


async def test_tokens_are_charged_as_they_were_used(usage, clock):
    who = tenant(tokens_per_minute=600)
    headers = await ask(usage, who, 500, used=100)
    assert headers["x-ratelimit-remaining-tokens"] == "100", "as known when the response begins"
    assert (await ask(usage, who, 500, used=900))["x-ratelimit-remaining-tokens"] == "0"
    error = await refusal(usage, who, 1)
    assert error.kind == "tokens"
    assert error.retry_after == pytest.approx(40.1), "400 tokens of debt, and one"
    clock.now += 40.1
    await ask(usage, who, 1)
    await refusal(usage, who, 1)


async def test_a_refused_request_costs_no_tokens(usage):
    who = tenant(tokens_per_minute=100)
    for _ in range(5):
        error = await refusal(usage, who, 101)
        assert error.retry_after is None, "waiting would not help"
        assert "Retry-After" not in error.headers
        assert error.headers["x-ratelimit-remaining-tokens"] == "100"
    await ask(usage, who, 100)


async def test_a_request_that_fails_costs_what_was_announced_and_frees_its_place(usage):
    who = tenant(tokens_per_minute=100, parallel=1)

    async def fail():
        async with usage.admit(who) as grant:
            grant.expect(60)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await fail()
    await ask(usage, who, 40)
    assert (await refusal(usage, who, 1)).kind == "tokens"


async def test_requests_at_once(usage):
    who, other = tenant(parallel=2), tenant("bob", parallel=2)
    go_on = asyncio.Event()

    async def hold(who):
        async with usage.admit(who):
            await go_on.wait()

    tasks = [asyncio.create_task(hold(who)) for _ in range(2)]
    await asyncio.sleep(0)
    assert (await refusal(usage, who)).retry_after == 1.0
    await ask(usage, other)
    tasks[0].cancel()
    await asyncio.wait(tasks[:1])
    await ask(usage, who)
    go_on.set()
    await tasks[1]


async def test_changed_limits_hold_at_once(usage, clock):
    await ask(usage, tenant(requests_per_minute=100))
    await refusal(usage, tenant(requests_per_minute=1))
    await ask(usage, tenant())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.02, "20ms"), (1, "1s"), (1.54, "1.5s"), (59.99, "1m0s"), (360, "6m0s"), (61.5, "1m1.5s")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text

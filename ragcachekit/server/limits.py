"""Limits of requests, tokens and parallel requests per tenant."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ragcachekit.server.errors import ApiError
from ragcachekit.server.tenants import Tenant

MINUTE = 60.0
_ROUNDING = 1e-6  # after the seconds that a refusal named, the request is admitted


@dataclass
class _Bucket:
    """A token bucket that refills within a minute; its level may fall below zero."""

    level: float
    at: float

    def refill(self, capacity: int, now: float) -> None:
        self.level = min(float(capacity), self.level + (now - self.at) * capacity / MINUTE)
        self.at = now


@dataclass
class _Used:
    running: int = 0
    buckets: dict[str, _Bucket] = field(default_factory=dict)


class Grant:
    """A request that was admitted; ``headers`` are OpenAI's ``x-ratelimit-*`` for its response."""

    def __init__(self, usage: Usage, tenant: Tenant, tokens: int) -> None:
        self._usage, self._tenant, self._tokens, self.places = usage, tenant, tokens, 1
        self.headers = usage.take(tenant, tokens, self.places, requests=1)

    def expect(self, tokens: int, places: int) -> None:
        """Announce these tokens in place of the first ones, and as how many parallel requests it counts.

        ApiError 429 as for :meth:`Usage.admit`; the request then counts as one, without tokens.
        """
        self.used(0)
        self.headers = self._usage.take(self._tenant, tokens, places, self.places)
        self._tokens, self.places = tokens, places

    def used(self, tokens: int) -> None:
        """Charge these tokens of prompt and answer in place of the ones announced; may be repeated.

        Without a call, the announced ones are charged, also where the request fails or is cancelled.
        """
        self._usage.charge(self._tenant, tokens - self._tokens)
        self._tokens = tokens


class Usage:
    """What tenants use now and used in the last minute. For one event loop.

    Requests and tokens are token buckets: a tenant may use a minute's share at once, then what flows in.
    Answers whose length is known only at their end may bring a bucket below zero; later requests are
    refused until it has refilled.

    Parameters
    ----------
    clock : callable
        Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._used: dict[str, _Used] = {}

    @asynccontextmanager
    async def admit(self, tenant: Tenant, tokens: int = 0) -> AsyncIterator[Grant]:
        """Count one request with so many prompt tokens, and let it run until the block ends.

        A refused request counts nothing.

        Raises
        ------
        ApiError
            429 with ``Retry-After`` beyond a limit; without it for a prompt beyond a minute's tokens, which
            no waiting mends.
        """
        grant = Grant(self, tenant, tokens)
        try:
            yield grant
        finally:
            self._used[tenant.name].running -= grant.places

    def take(
        self, tenant: Tenant, tokens: int, places: int, held: int = 0, requests: int = 0
    ) -> dict[str, str]:
        """Charge tokens and requests, and turn ``held`` places into ``places``; the headers, or ApiError."""
        limits, used = tenant.limits, self._used.setdefault(tenant.name, _Used())
        rates = {
            "requests": (limits.requests_per_minute, requests),
            "tokens": (limits.tokens_per_minute, tokens),
        }
        for kind, (limit, amount) in rates.items():
            self._check(tenant, used, kind, limit, amount)
        running = used.running - held + places
        if limits.parallel is not None and running > limits.parallel:
            message = (
                f"{tenant.name!r} may have {limits.parallel} answers at once; this would make it {running}."
            )
            wait = 1.0 if places <= limits.parallel else None
            raise _refusal(message, "requests", wait, self._headers(tenant, used))
        used.running = running
        self._charge(used, "requests", requests)
        self._charge(used, "tokens", tokens)
        return self._headers(tenant, used)

    def charge(self, tenant: Tenant, tokens: float) -> None:
        """Charge tokens without a check."""
        self._charge(self._used[tenant.name], "tokens", tokens)

    def _check(self, tenant: Tenant, used: _Used, kind: str, limit: int | None, amount: int) -> None:
        if limit is None:
            used.buckets.pop(kind, None)
            return
        now = self._clock()
        bucket = used.buckets.setdefault(kind, _Bucket(limit, now))
        bucket.refill(limit, now)
        if amount > limit:
            message = f"Request too large for {tenant.name!r}: limit {limit} {kind} per minute, not {amount}."
            raise _refusal(message, kind, None, self._headers(tenant, used))
        if bucket.level < amount - _ROUNDING:
            wait = (amount - bucket.level) * MINUTE / limit
            message = (
                f"Rate limit reached for {tenant.name!r} on {kind} per minute: limit {limit}, "
                f"requested {amount}. Please try again in {duration(wait)}."
            )
            raise _refusal(message, kind, wait, self._headers(tenant, used))

    @staticmethod
    def _charge(used: _Used, kind: str, amount: float) -> None:
        if kind in used.buckets:
            used.buckets[kind].level -= amount

    @staticmethod
    def _headers(tenant: Tenant, used: _Used) -> dict[str, str]:
        limits, headers = tenant.limits, {}
        for kind, limit in (("requests", limits.requests_per_minute), ("tokens", limits.tokens_per_minute)):
            if limit is not None and kind in used.buckets:
                level = used.buckets[kind].level
                headers[f"x-ratelimit-limit-{kind}"] = str(limit)
                headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, int(level)))
                headers[f"x-ratelimit-reset-{kind}"] = duration((limit - level) * MINUTE / limit)
        return headers


def _refusal(message: str, kind: str, wait: float | None, headers: dict[str, str]) -> ApiError:
    code = "rate_limit_exceeded"
    return ApiError(429, message, kind=kind, code=code, retry_after=wait, headers=headers)


def duration(seconds: float) -> str:
    """Seconds as OpenAI's headers have them: ``20ms``, ``1.5s``, ``6m0s``."""
    if seconds < 1:
        return f"{max(0, round(seconds * 1000))}ms"
    minutes, rest = divmod(round(seconds, 1), 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"

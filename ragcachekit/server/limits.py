"""Limits of requests, tokens and parallel requests per tenant."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ragcachekit.server.errors import ApiError
from ragcachekit.server.keys import Tenant

MINUTE = 60.0
_ROUNDING = 1e-6  # after the seconds that a refusal named, the request is admitted


@dataclass
class _Account:
    """What one tenant uses; tokens and requests drain within a minute."""

    running: int = 0
    requests: float = 0.0
    tokens: float = 0.0
    drained_at: float = 0.0


class Usage:
    """What tenants use now, and used in the last minute. For one event loop.

    A tenant may use a minute's limit at once, and then as much as drains. An answer whose length is known
    only at its end may exceed the limit; later requests wait until that has drained.

    Parameters
    ----------
    clock : callable
        Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts = defaultdict[str, _Account](_Account)

    @asynccontextmanager
    async def admit(self, tenant: Tenant) -> AsyncIterator[Grant]:
        """Count one request, and let it run until the block ends.

        Raises
        ------
        ApiError
            429 with ``Retry-After`` beyond a limit; the request then counts nothing.
        """
        account, most = self._accounts[tenant.name], tenant.limits.parallel
        grant = Grant(tenant, account, self._clock)
        if most is not None and account.running >= most:
            message = f"{tenant.name!r} may have {most} requests at once."
            raise grant.refusal(message, "requests", 1.0)
        grant.check(requests=1)
        account.requests += 1
        account.running += 1
        try:
            yield grant
        finally:
            account.running -= 1


class Grant:
    """A request that was admitted."""

    def __init__(self, tenant: Tenant, account: _Account, clock: Callable[[], float]) -> None:
        self._tenant, self._account, self._clock, self._charged = tenant, account, clock, 0
        limits = tenant.limits
        rates = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
        self._rates = {kind: limit for kind, limit in rates.items() if limit is not None}

    def expect(self, tokens: int) -> None:
        """Charge the tokens that are known before the answer.

        Raises
        ------
        ApiError
            429 as for :meth:`Usage.admit`; without ``Retry-After`` for more than a minute's tokens.
        """
        self.check(tokens=tokens)
        self.used(tokens)

    def used(self, tokens: int) -> None:
        """Charge these tokens instead of those before, without a check; may be repeated."""
        self._account.tokens += tokens - self._charged
        self._charged = tokens

    def check(self, **amounts: int) -> None:
        """ApiError where so many more requests or tokens are beyond the limit; drains first."""
        now, account, name = self._clock(), self._account, self._tenant.name
        minutes, account.drained_at = (now - account.drained_at) / MINUTE, now
        for kind in ("requests", "tokens"):
            drained = getattr(account, kind) - minutes * self._rates.get(kind, 0)
            setattr(account, kind, max(0.0, drained) if kind in self._rates else 0.0)
        for kind, amount in amounts.items():
            if (limit := self._rates.get(kind)) is None:
                continue
            used = getattr(account, kind)
            if amount > limit:
                message = f"Request too large for {name!r}: limit {limit} {kind} per minute, not {amount}."
                raise self.refusal(message, kind, None)
            if used + amount > limit + _ROUNDING:
                wait = (used + amount - limit) * MINUTE / limit
                message = (
                    f"Rate limit reached for {name!r} on {kind} per minute: limit {limit}, requested "
                    f"{amount}. Please try again in {duration(wait)}."
                )
                raise self.refusal(message, kind, wait)

    def refusal(self, message: str, kind: str, wait: float | None) -> ApiError:
        """The response of a request beyond a limit; ``wait`` in seconds."""
        code = "rate_limit_exceeded"
        return ApiError(429, message, kind=kind, code=code, retry_after=wait, headers=self.headers)

    @property
    def headers(self) -> dict[str, str]:
        """OpenAI's ``x-ratelimit-*`` headers, as of now."""
        headers = {}
        for kind, limit in self._rates.items():
            used = getattr(self._account, kind)
            headers[f"x-ratelimit-limit-{kind}"] = str(limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, int(limit - used)))
            headers[f"x-ratelimit-reset-{kind}"] = duration(used * MINUTE / limit)
        return headers


def duration(seconds: float) -> str:
    """Seconds as OpenAI's headers have them: ``20ms``, ``1.5s``, ``6m0s``."""
    if seconds < 1:
        return f"{max(0, round(seconds * 1000))}ms"
    minutes, rest = divmod(round(seconds, 1), 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"

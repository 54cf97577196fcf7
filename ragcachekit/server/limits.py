"""Limits of requests, tokens and parallel requests per tenant."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ragcachekit.server.errors import ApiError
from ragcachekit.server.keys import Tenant

MINUTE = 60.0
_ROUNDING = 1e-6  # after the seconds that a refusal named, the request is admitted


@dataclass
class _Account:
    """What one tenant uses. Requests and tokens drain within a minute."""

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

    @contextmanager
    def admit(self, tenant: Tenant) -> Iterator[Grant]:
        """Count one request, and let it run until the block ends.

        Raises
        ------
        ApiError
            429 with ``Retry-After`` beyond a limit; the request then counts nothing.
        """
        account, most = self._accounts[tenant.name], tenant.limits.parallel
        if most is not None and account.running >= most:
            raise _refusal(f"{tenant.name!r} may have {most} requests at once.", "requests", 1.0)
        grant = Grant(tenant, account, self._clock)
        grant.check("requests", 1, tenant.limits.requests_per_minute)
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

    def expect(self, tokens: int) -> None:
        """Charge the tokens that are known before the answer.

        Raises
        ------
        ApiError
            429 as for :meth:`Usage.admit`; without ``Retry-After`` for more than a minute's tokens.
        """
        self.check("tokens", tokens, self._tenant.limits.tokens_per_minute)
        self.used(tokens)

    def used(self, tokens: int) -> None:
        """Charge these tokens instead of those before, without a check; may be repeated."""
        self._account.tokens += tokens - self._charged
        self._charged = tokens

    def check(self, kind: str, amount: int, limit: int | None) -> None:
        """ApiError if ``amount`` more requests or tokens are beyond the limit."""
        self._drain()
        if limit is None:
            return
        name, wait = self._tenant.name, (getattr(self._account, kind) + amount - limit) * MINUTE / limit
        if amount > limit:
            message = f"Request too large for {name!r}: limit {limit} {kind} per minute, not {amount}."
            raise _refusal(message, kind, None)
        if wait > _ROUNDING:
            message = f"Rate limit reached for {name!r}: {limit} {kind} per minute, requested {amount}."
            raise _refusal(f"{message} Please try again in {wait:.3g} s.", kind, wait)

    def _drain(self) -> None:
        now, account, limits = self._clock(), self._account, self._tenant.limits
        minutes, account.drained_at = (now - account.drained_at) / MINUTE, now
        rates = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
        for kind, limit in rates.items():
            left = 0.0 if limit is None else max(0.0, getattr(account, kind) - minutes * limit)
            setattr(account, kind, left)


def _refusal(message: str, kind: str, wait: float | None) -> ApiError:
    return ApiError(429, message, kind=kind, code="rate_limit_exceeded", retry_after=wait)

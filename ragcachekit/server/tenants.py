"""Who asks, and what they may use."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Limits:
    """Most of what one API key may use; None: no limit.

    - ``requests_per_minute``, ``tokens_per_minute``: Requests, and prompt and answer tokens.
    - ``parallel``: Requests that wait or run at once.
    - ``contexts``, ``context_tokens``: Stored contexts, and tokens of all of them.
    - ``body_bytes``: Bytes of a request's body, where the server's own limit is not lower.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    parallel: int | None = None
    contexts: int | None = 1000
    context_tokens: int | None = 10_000_000
    body_bytes: int | None = None


@dataclass(frozen=True)
class Tenant:
    """The owner of an API key; ``namespace`` partitions every cache."""

    name: str
    namespace: str
    limits: Limits = field(default_factory=Limits)

    def partition(self, *salts: str | None) -> str:
        """The namespace of a request with a ``cache_salt`` and ``prompt_cache_key``; None adds nothing."""
        given = json.dumps({number: salt for number, salt in enumerate(salts) if salt})
        if given == "{}":
            return self.namespace
        return f"{self.namespace}/{hashlib.sha256(given.encode()).hexdigest()[:32]}"

"""One question in several wordings: short prefixes, as in the workload of Proximity (section 4.2)."""

from __future__ import annotations

import zlib

PREFIXES = (
    "Please tell me:",
    "Quick question:",
    "I would like to know:",
    "One more question:",
    "I wonder:",
    "Can you say:",
    "For my notes:",
    "Hello,",
    "Just curious:",
    "Help me with this:",
)


def variants(question: str, n: int = 4) -> tuple[str, ...]:
    """A question with ``n`` different short prefixes; which ones depends on the question."""
    if not 1 <= n <= len(PREFIXES):
        raise ValueError(f"n must be between 1 and {len(PREFIXES)}, not {n}")
    start = zlib.crc32(question.encode())
    return tuple(f"{PREFIXES[(start + i) % len(PREFIXES)]} {question}" for i in range(n))

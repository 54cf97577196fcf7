"""Settings of the server."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

from ragcachekit.types import WHOLE, check_number


@dataclass(frozen=True)
class ServerConfig:
    """What :func:`create_app` serves, and its limits for every request.

    - ``model_name``: Name that clients ask for; None: the last part of the model's path or hub id.
    - ``keys``: File of API keys (``ragcachekit keys add``); None: all requests are one tenant's.
    - ``contexts``: Folder of stored contexts, which then survive a restart.
    - ``timeout``: Seconds from a request to the end of its answer; then 504.
    - ``heartbeat``: Seconds of silence after which a stream gets an empty comment. A client that takes
      nothing for four times as long is gone.
    - ``max_body_bytes``: Largest body of a request; larger ones are refused with 413.
    - ``max_choices``: Most answers of one request (``n`` times its prompts); each takes a place in the queue.
    - ``default_tokens``: Most tokens of an answer by default; the model's context ends any.
    """

    model_name: str | None = None
    keys: Path | None = None
    contexts: Path | None = None
    timeout: float = 600.0
    heartbeat: float = 15.0
    max_body_bytes: int = 32 << 20
    max_choices: int = 32
    default_tokens: int = 1024

    def __post_init__(self) -> None:
        for name in ("timeout", "heartbeat"):
            check_number(name, getattr(self, name), positive=True)
        for name in ("max_body_bytes", "max_choices", "default_tokens"):
            check_number(name, getattr(self, name), WHOLE, kinds=Integral, positive=True)

"""The application in a process of its own, which a signal stops without losing answers."""

from __future__ import annotations

import signal
import socket
import time
from types import FrameType

import uvicorn
from fastapi import FastAPI

from ragcachekit.server.health import Activity

LINGER_SECONDS = 10
"""How long a stop waits for clients to take the rest of answers that have ended."""

AGAIN_SECONDS = 1.0
"""A signal this soon after the first is the same one: wrappers signal the group and forward it, too."""


class GracefulServer(uvicorn.Server):
    """Refuses new requests with 503 after SIGTERM or SIGINT, and exits with 0 when none runs any more.

    A second signal, a second later or more, ends it at once.
    """

    def __init__(self, config: uvicorn.Config, activity: Activity) -> None:
        super().__init__(config)
        self._activity, self._begun = activity, 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop."""
        now = time.monotonic()
        if not self._activity.stopping:
            self._activity.stopping, self._begun = True, now
        elif now - self._begun >= AGAIN_SECONDS:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)

    async def on_tick(self, counter: int) -> bool:
        """Whether to exit; asked every tenth of a second."""
        idle = self._activity.stopping and not self._activity.running
        return idle or await super().on_tick(counter)


def serve(app: FastAPI, bound: socket.socket) -> None:
    """Serve an application of :func:`.create_app` at a bound socket until a signal comes; blocks."""
    config = uvicorn.Config(
        app, log_level="warning", server_header=False, timeout_graceful_shutdown=LINGER_SECONDS
    )
    GracefulServer(config, app.state.activity).run([bound])

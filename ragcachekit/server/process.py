"""The application in a process of its own, which a signal stops without losing answers."""

from __future__ import annotations

import signal
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from ragcachekit.server.health import Activity

LINGER_SECONDS = 10
"""How long a stop waits for clients to take the rest of answers that have ended."""


class GracefulServer(uvicorn.Server):
    """Refuses new requests with 503 after SIGTERM or SIGINT, and exits with 0 when none runs any more.

    A second signal ends it at once.
    """

    def __init__(self, config: uvicorn.Config, activity: Activity) -> None:
        super().__init__(config)
        self._activity = activity

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop."""
        if self._activity.stopping:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self._activity.stopping = True

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

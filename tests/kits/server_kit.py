"""A server on a free port in a thread, around an engine that speaks."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import uvicorn
from pydantic import BaseModel, ConfigDict

from engine_kit import FOLDER
from queue_kit import LONG, until
from ragcachekit import RagCache
from speaking import byte_level, speaker

MODEL = "tiny"
DOCUMENTS = (
    "Berlin is the capital of Germany. The river Spree flows in Berlin.",
    "Paris is the capital of France; the river Seine flows in Paris.",
    "Rome is the town of the Tiber, and the answer is from the river.",
)
QUESTION = "Where does the river flow?"


class Town(BaseModel):
    """A town."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["Bern", "Rome"]
    capital: bool


def engine(tokenizer: Any = None, vocab_size: int = 340, **options: Any) -> RagCache:
    """A tiny engine whose chunks are warm at their second use."""
    own = {"policy": "reuse", "encoder": "standalone", "cold": "now", "cache_dir": FOLDER.name}
    return RagCache(speaker(vocab_size=vocab_size), tokenizer or byte_level(), **{**own, **options})


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Serve an application in a thread; yields its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=10))
    thread = threading.Thread(target=server.run, name="served")
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive())
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(LONG)
        assert not thread.is_alive()

"""A Redis server of the tests' own: started, killed, stopped and continued at will."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from ragcachekit.errors import StoreError
from ragcachekit.store.backends import RedisStore
from ragcachekit.store.remote import RemoteStore
from ragcachekit.types import KVKey

KEY_BYTES = b"a key for tests, nothing more"
REDIS_BUDGET = 1 << 20
FETCHED = Path(__file__).resolve().parents[2] / ".venv" / "redis" / "redis-server"


def server_program() -> str:
    """The server's program, or skip the test."""
    found = shutil.which("redis-server") or (str(FETCHED) if os.access(FETCHED, os.X_OK) else None)
    if found is None:
        pytest.skip(
            "no redis-server on PATH or in .venv/redis: install it, or run sh tests/kits/get_redis.sh"
        )
    return found


class RedisServer:
    """One server process, without persistence: a restart comes up empty, on the same address."""

    def __init__(self, folder: Path, *, tcp: bool = False) -> None:
        self._program, self._folder = server_program(), folder
        if tcp:
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            self.url = f"redis://127.0.0.1:{port}/0"
            self._address = ["--bind", "127.0.0.1", "--port", str(port)]
        else:
            path = folder / "redis.sock"
            self.url = f"unix://{path}"
            self._address = ["--port", "0", "--unixsocket", str(path)]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [self._program, *self._address, "--save", "", "--appendonly", "no", "--dir", str(self._folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.client = redis.Redis.from_url(self.url, protocol=2)
        while True:  # ends with the test's own time limit at the latest
            try:
                self.client.ping()
                return
            except redis.ConnectionError:
                assert self._process.poll() is None, "the server ended"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.client.close()

    def hang(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def empty(self) -> None:
        self.client.flushall()

    def entries(self) -> dict[str, bytes]:
        """Digest → sealed entry, as they lie there."""
        names = [name.decode() for name in self.client.keys("*:e:*")]
        return {name.rpartition(":")[2]: self.client.get(name) for name in names}

    def name_of(self, key: KVKey) -> bytes | str:
        """What an entry's key is called on the server, if it is there."""
        return next((name for name in self.client.keys(f"*:{key.digest()}")), "")


@contextmanager
def running_server(*, tcp: bool = False) -> Iterator[RedisServer]:
    folder = Path(tempfile.mkdtemp(prefix="rck-redis-"))  # short: a socket's path has at most 107 bytes
    server = None
    try:
        server = RedisServer(folder, tcp=tcp)
        yield server
    finally:
        if server is not None:
            server.kill()
        shutil.rmtree(folder)


def redis_store(server: RedisServer, **changes: Any) -> RedisStore:
    settings: dict[str, Any] = {"key": KEY_BYTES, "entry_bytes": REDIS_BUDGET, "deadline": 20.0}
    return RedisStore(server.url, **(settings | changes))


def forget_at_last(store: RemoteStore, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
    """Forget again until the service confirms it."""
    while True:  # ends with the test's own time limit at the latest
        with suppress(StoreError):
            return store.forget(namespace, chunk_ids)

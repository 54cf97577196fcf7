"""The server of ``ragcachekit serve``: its address, its engine and its metrics."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ragcachekit import QueueConfig, RagCache, StoreConfig, TreeConfig
from ragcachekit.commands.sample_model import resolve_model
from ragcachekit.commands.workspace import CacheFolder, explained
from ragcachekit.errors import RagCacheError
from ragcachekit.server import ServerConfig, create_app
from ragcachekit.server.app import serve
from ragcachekit.server.keys import ApiKeys, check_exposure


@dataclass(frozen=True)
class ServeSettings:
    """What ``ragcachekit serve`` takes."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str | None = None
    keys: Path | None = None
    no_keys: bool = False
    policy: str = "auto"
    encoder: str | None = None
    namespace: str = "default"
    cache: str | None = None
    host_gb: float = 4.0
    disk_gb: float | None = None
    tree_gb: float = 1.0
    max_batch: int = 16
    max_waiting: int = 256
    timeout: float = 600.0
    max_body_mb: int = 32
    public_metrics: bool = False
    device: str | None = None
    dtype: str = "auto"

    def __post_init__(self) -> None:
        check_exposure(self.host, self.keys, self.no_keys)
        if self.keys is not None:
            ApiKeys(self.keys)
        if self.disk_gb is not None and self.cache is None:
            raise RagCacheError("--disk-gb needs --cache, the folder that keeps KV on disk")

    @property
    def config(self) -> ServerConfig:
        """Settings of the application."""
        folder = None if self.cache is None else CacheFolder.at(self.cache).path / "contexts"
        name = self.model_name or Path(self.model).name
        body = self.max_body_mb << 20
        return ServerConfig(
            name,
            self.keys,
            folder,
            timeout=self.timeout,
            max_body_bytes=body,
            public_metrics=self.public_metrics,
        )

    def open_engine(self) -> RagCache:
        """Load the model; RagCacheError if there is none of that name."""
        folder = None if self.cache is None else CacheFolder.at(self.cache)
        store = StoreConfig(
            host_bytes=int(self.host_gb * 1e9),
            disk_path=folder.kv if folder else None,
            disk_bytes=None if self.disk_gb is None else int(self.disk_gb * 1e9),
        )
        tree = TreeConfig(host_bytes=int(self.tree_gb * 1e9)) if self.tree_gb else None
        with explained(self.model):
            return RagCache.from_pretrained(
                resolve_model(self.model),
                device=self.device,
                policy=self.policy,
                encoder=self.encoder,
                store=store,
                tree=tree,
                namespace=self.namespace,
                encode_after=1,  # what a request marks as a chunk is meant to come again
                queue=QueueConfig(max_batch=self.max_batch, max_waiting=self.max_waiting),
                cache_dir=folder.path if folder else None,
                dtype=self.dtype,
            )


def run(settings: ServeSettings, say: Callable[[str], object] = lambda _: None) -> None:
    """Serve until a signal comes; OSError, before the model is loaded, if the address cannot be had."""
    config = settings.config
    with _bound(settings.host, settings.port) as bound, settings.open_engine() as rag:
        app = create_app(rag, config, metrics=_metrics(rag))
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        say(f"{config.model_name} at http://{host}:{bound.getsockname()[1]}/v1; Ctrl-C stops it")
        serve(app, bound)


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as bound:  # connections are refused until the model is loaded
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, port))
        except OSError as error:
            why = f"cannot listen on {host}:{port}: {error.strerror}; choose another --port"
            raise OSError(why) from error
        yield bound


def _metrics(rag: RagCache) -> Callable[[], tuple[bytes, str]] | None:
    """The text of ``/metrics``, where prometheus_client is installed."""
    try:
        from ragcachekit.telemetry import PrometheusObserver
    except ImportError:
        return None
    return PrometheusObserver(rag).render

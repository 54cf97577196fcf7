"""``ragcachekit serve`` and ``keys``: the model and its caches over OpenAI's HTTP interface."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragcachekit.commands import options as opt
from ragcachekit.commands.console import note, quiet_loading
from ragcachekit.commands.workspace import CacheFolder, open_engine
from ragcachekit.config import QueueConfig, StoreConfig, TreeConfig
from ragcachekit.errors import RagCacheError

if TYPE_CHECKING:
    from ragcachekit.engine.rag_cache import RagCache

KeysFile = Annotated[Path, typer.Option("--file", help="JSON; holds hashes of the keys, never the keys.")]
KeyName = Annotated[str, typer.Argument(help="Of the key; appears in logs and errors.")]


def serve(
    model: opt.Model = "",
    host: Annotated[str, typer.Option(help="Address to listen on; beyond this machine with --keys.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8000,
    model_name: Annotated[
        str | None, typer.Option(help="That clients ask for; default: the last part of --model.")
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="File of API keys (ragcachekit keys add); each names a tenant.")
    ] = None,
    no_keys: Annotated[bool, typer.Option("--no-keys", help="Let everybody use it, on any --host.")] = False,
    policy: opt.Policy = "auto",
    encoder: opt.Encoder = None,
    namespace: opt.Namespace = "default",
    cache: Annotated[
        str | None,
        typer.Option(
            callback=opt.check_cache, help="Folder that keeps KV and contexts on disk; default: in memory."
        ),
    ] = None,
    host_gb: Annotated[float, typer.Option(min=0, max=1e9, help="Budget of the KV in host memory.")] = 4.0,
    disk_gb: opt.DiskGb = None,
    tree_gb: Annotated[
        float, typer.Option(min=0, max=1e9, help="Budget of exact KV of past prompts' beginnings; 0: off.")
    ] = 1.0,
    max_batch: Annotated[int, typer.Option(min=1, help="Requests that decode together.")] = 16,
    max_waiting: Annotated[int, typer.Option(min=1, help="Further requests get 503.")] = 256,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for an answer; then 504.")] = 600.0,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Size of a request; else 413.")] = 32,
    device: opt.Device = None,
    dtype: opt.Dtype = "auto",
) -> None:
    """Serve a model over HTTP as OpenAI does: chat and text completions, and stored contexts.

    SIGTERM and Ctrl-C let running answers end. A second one, a second later or more, ends them.
    """
    from ragcachekit.server.keys import ApiKeys, Tenant, check_exposure

    check_exposure(host, keys, no_keys)
    if keys is not None:
        ApiKeys(keys, Tenant("", namespace))
    if disk_gb is not None and cache is None:
        raise RagCacheError("--disk-gb needs --cache, the folder that keeps KV on disk")
    with _bound(host, port) as bound:
        quiet_loading()
        from ragcachekit.server import ServerConfig, create_app
        from ragcachekit.server.app import serve as serve_app

        folder = None if cache is None else CacheFolder.at(cache)
        config = ServerConfig(
            model_name or Path(model).name,
            keys,
            folder.path / "contexts" if folder else None,
            timeout=timeout,
            max_body_bytes=max_body_mb << 20,
        )
        store = StoreConfig(
            host_bytes=int(host_gb * 1e9),
            disk_path=folder.kv if folder else None,
            disk_bytes=None if disk_gb is None else int(disk_gb * 1e9),
        )
        rag = open_engine(
            model,
            device=device,
            policy=policy,
            encoder=encoder,
            store=store,
            tree=TreeConfig(host_bytes=int(tree_gb * 1e9)) if tree_gb else None,
            namespace=namespace,
            queue=QueueConfig(max_batch=max_batch, max_waiting=max_waiting),
            cache_dir=folder.path if folder else None,
            dtype=dtype,
        )
        with rag:
            app = create_app(rag, config, metrics=_metrics(rag))
            where = f"[{host}]" if ":" in host else host
            note(f"{config.model_name} at http://{where}:{bound.getsockname()[1]}/v1; Ctrl-C stops it")
            serve_app(app, bound, timeout)


def add(
    name: KeyName,
    file: KeysFile,
    namespace: Annotated[
        str | None, typer.Option(help="Partition of all caches; keys with one share it. Default: the name.")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Of prompts and answers.")] = None,
    parallel: Annotated[int | None, typer.Option(min=1, help="Requests at once.")] = None,
    contexts: Annotated[int, typer.Option(min=1, help="Stored contexts.")] = 1000,
    context_tokens: Annotated[int, typer.Option(min=1, help="Of all stored contexts.")] = 10_000_000,
) -> None:
    """Make an API key and print it. A running server accepts it at once."""
    from ragcachekit.server.keys import Limits, add_key

    key = add_key(file, name, namespace, opt.settings_of(Limits, locals()))
    typer.echo(key)
    note(f"the key of {name} is shown this once: {file} has only its hash")


def remove(name: KeyName, file: KeysFile) -> None:
    """Remove an API key. A running server refuses it from then on."""
    from ragcachekit.server.keys import remove_key

    remove_key(file, name)
    note(f"removed the key of {name}; what its namespace has cached stays")


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """The socket, before the model is loaded; connections are refused until it listens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as bound:
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

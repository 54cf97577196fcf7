"""The demo's engines: one with the library's defaults, and those that time the states of a cache."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ragcachekit.config import StoreConfig
from ragcachekit.engine.rag_cache import RagCache

LIBRARY: dict[str, Any] = {}
"""Options of every engine of the demo beside its storage: none, to show the defaults."""

COLD, HOST, DISK, RESTART = "cold", "host", "disk", "restart"


@contextmanager
def main_engine(folder: Path, kv: Path) -> Iterator[RagCache]:
    """The engine that answers; what it encodes is kept in memory and in the folder ``kv``.

    That folder is deleted if the block ends without an exception; else a continued demo reads it.
    """
    with RagCache.from_pretrained(folder, **LIBRARY, store=StoreConfig(disk_path=kv), cold="now") as rag:
        yield rag
    shutil.rmtree(kv, ignore_errors=True)


@contextmanager
def timed_engines(folder: Path, kv: Path, main: RagCache) -> Iterator[dict[str, RagCache]]:
    """Engines by the state that they time, which encode nothing; ``kv`` holds what ``main`` encoded.

    ``cold`` has nothing cached, ``disk`` reads the folder and has no memory. ``restart`` is an engine as
    after a restart: entries that it has read from the folder stay in memory.
    """
    # load="always": what is timed is loading, not the decision whether to load.
    options: dict[str, Any] = {**LIBRARY, "cold": "never", "load": "always"}
    with (
        RagCache(main.model, main.tokenizer, **options) as cold,
        RagCache.from_pretrained(folder, store=StoreConfig(host_bytes=0, disk_path=kv), **options) as disk,
        RagCache.from_pretrained(folder, store=StoreConfig(disk_path=kv), **options) as restart,
    ):
        yield {COLD: cold, HOST: main, DISK: disk, RESTART: restart}

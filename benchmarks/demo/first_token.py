"""Times to the first token of the same prompts: in full, with nothing cached, from memory, from disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from tqdm.auto import tqdm

from benchmarks.demo.answers import Answered
from benchmarks.demo.chain import messages
from ragcachekit.commands.ttft import ONE_TOKEN
from ragcachekit.config import StoreConfig
from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.errors import RagCacheError

PART = "first token"
COLD, HOST, DISK, RESTART = "cold", "host", "disk", "restart"
FULL = "full"
STATES = (FULL, COLD, HOST, DISK, RESTART)
_SOURCES: dict[str, set[str]] = {
    FULL: set(),
    COLD: {"computed"},
    HOST: {"host"},
    DISK: {"disk"},
    RESTART: {"disk", "host"},
}


def time_all(
    rag: RagCache, answered: Sequence[Answered], texts: Sequence[str], folder: Path, kv: Path, progress: bool
) -> list[dict[str, Any]]:
    """Per question its figures by state, of :data:`STATES`.

    ``rag`` has answered the questions; its model lies in ``folder``, its chunk KV in ``kv``. RagCacheError if
    a prompt's chunks came from anywhere else than the state requires.
    """
    timed = []
    rag.flush()
    with timed_engines(folder, kv, rag) as engines:
        for one in tqdm(answered, "first tokens", unit="question", disable=not progress):
            chunks = [texts[place] for place in one.cached_chunks]
            for engine in engines.values():
                engine.register(chunks)
            timed.append(_timed(engines, messages(chunks, one.question)))
    return timed


@contextmanager
def timed_engines(folder: Path, kv: Path, main: RagCache) -> Iterator[dict[str, RagCache]]:
    """Engines by the state that they time, which encode nothing; ``kv`` holds what ``main`` encoded.

    ``cold`` has nothing cached, ``disk`` reads the folder and has no memory. ``restart`` is an engine as
    after a restart: entries that it has read from the folder stay in memory.
    """
    # load="always": what is timed is loading, not the decision whether to load.
    options: dict[str, Any] = {"cold": "never", "load": "always"}
    with (
        RagCache(main.model, main.tokenizer, **options) as cold,
        RagCache.from_pretrained(folder, store=StoreConfig(host_bytes=0, disk_path=kv), **options) as disk,
        RagCache.from_pretrained(folder, store=StoreConfig(disk_path=kv), **options) as restart,
    ):
        yield {COLD: cold, HOST: main, DISK: disk, RESTART: restart}


def rows(timed: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per state: medians, least and greatest milliseconds, and the speed-up over ``full``."""
    out = []
    full_ms = median(one[FULL]["ttft_ms"] for one in timed)
    for state in STATES:
        times = [one[state]["ttft_ms"] for one in timed]
        named = ("prompt_tokens", "reused_tokens", "recompute_ratio")
        out.append(
            {
                "part": PART,
                "state": state,
                "ttft_ms": median(times),
                "ttft_ms_min": min(times),
                "ttft_ms_max": max(times),
                "speedup": full_ms / median(times),
                **{name: median(one[state][name] for one in timed) for name in named},
                "n": len(times),
            }
        )
    return out


def _timed(engines: Mapping[str, RagCache], prompt: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {}
    for state in STATES:
        engine, policy = (engines[HOST], "full") if state == FULL else (engines[state], None)
        report = engine.generate(prompt, policy=policy, **ONE_TOKEN).report
        sources = {use.source for use in report.link.uses}
        if not sources <= _SOURCES[state] or (state != FULL and not sources):
            raise RagCacheError(f"{state}: chunks came from {sorted(sources)} ({report.link})")
        found[state] = {
            "ttft_ms": report.ttft_ms,
            "prompt_tokens": report.link.prompt_tokens,
            "reused_tokens": report.link.reused_tokens,
            "recompute_ratio": report.link.recompute_ratio,
        }
    return found

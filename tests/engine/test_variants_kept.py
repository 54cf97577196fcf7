"""How many variants of chunks an engine finds again: as many as its store holds, also after a restart."""

from __future__ import annotations

import pytest

from engine_kit import chunk, text
from families import wrapped
from ragcachekit import Prompt, RagCache, StoreConfig

PROMPTS, EACH = 20, 30
QUESTION = text(5, 9_999)


def engine(tmp_path, store: StoreConfig) -> RagCache:
    options = {"encoder": "in-prompt", "policy": "reuse", "cold": "now", "load": "always"}
    return RagCache(wrapped("llama"), store=store, cache_dir=tmp_path / "cache", **options)


def asked(numbers, *, first: int = 0, tokens: int = 6) -> Prompt:
    return Prompt([text(4 + first, 7_777), *(chunk(tokens, 1 + number) for number in numbers), QUESTION])


def found(rag: RagCache, prompt: Prompt) -> int:
    report = rag.generate(prompt, max_new_tokens=1).report.link
    return sum(use.source != "computed" for use in report.chunks)


def test_all_of_600_chunks_are_found_behind_others(tmp_path):
    with engine(tmp_path, StoreConfig(host_bytes=1 << 28)) as rag:
        groups = [range(EACH * n, EACH * (n + 1)) for n in range(PROMPTS)]
        for group in groups:
            rag.generate(asked(group), max_new_tokens=1)
        assert sum(found(rag, asked(reversed(group), first=1)) for group in groups) == PROMPTS * EACH


@pytest.mark.parametrize("host_bytes", [0, 1 << 26])
@pytest.mark.parametrize("quantise", [{}, {"disk": "int8"}])
def test_a_new_process_finds_them_on_disk_in_other_contexts(host_bytes, quantise, tmp_path):
    store = StoreConfig(
        host_bytes=host_bytes, disk_path=tmp_path / "kv", disk_bytes=1 << 27, quantise=quantise
    )
    with engine(tmp_path, store) as rag:
        rag.generate(asked(range(8)), max_new_tokens=1)
    with engine(tmp_path, store) as rag:
        assert found(rag, asked(reversed(range(8)), first=1)) == 8


def test_what_is_worth_least_leaves_the_disk(tmp_path):
    """The first chunk is used in its very context time and again, then not while many others come."""
    store = StoreConfig(host_bytes=0, disk_path=tmp_path / "kv", disk_bytes=2_500_000)
    with engine(tmp_path, store) as rag:
        for _ in range(4):
            rag.generate(asked([0], tokens=90), max_new_tokens=1)
        for number in range(1, 60):
            rag.generate(asked([number], first=1, tokens=90), max_new_tokens=1)
        (disk,) = rag.stats()
        assert disk.evictions > 0
        assert disk.nbytes <= 0.95 * disk.budget, "the pool makes room before the tier has to"
        assert found(rag, asked([0], tokens=90)) == 1
        assert found(rag, asked([1], first=1, tokens=90)) == 0

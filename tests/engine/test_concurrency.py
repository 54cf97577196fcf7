"""Many threads on one model: everyone gets what they get alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine_kit import EXACT, PROMPT, chunk, ids, rag_for, text, warmed
from families import greedy, plain
from ragcachekit import Prompt

PROMPTS = [
    PROMPT,
    EXACT,
    Prompt([text(9, 1), chunk(25, 3), chunk(33, 2), text(4, 30)]),
    Prompt([text(12, 31), chunk(33, 2), text(5, 32)]),
    Prompt([chunk(25, 3), text(7, 33)]),
]
ASKED = {"max_new_tokens": 6, "do_sample": False}


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_linked_and_plain_calls_at_once(name):
    rag = warmed(name, *PROMPTS, policy="lego:4")
    linked = [rag.generate(p, **ASKED) for p in PROMPTS]
    ordinary = [greedy(plain(name), ids(p), 6) for p in PROMPTS]
    barrier = threading.Barrier(8)

    def work(number):
        prompt = PROMPTS[number % len(PROMPTS)]
        if number < 8:
            barrier.wait(60)
        kind = number % 4
        if kind == 0:
            return greedy(rag.model, ids(prompt), 6)
        if kind == 1:
            return rag.generate_batch([prompt, PROMPTS[0]], **ASKED)[0].token_ids
        return rag.generate(prompt, **ASKED, policy="full" if kind == 2 else None).token_ids

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(40)))
    for number, result in enumerate(results):
        expected = linked[number % len(PROMPTS)].token_ids
        if number % 4 in (0, 2):
            expected = ordinary[number % len(PROMPTS)]
        assert result == expected, number


def test_cold_calls_at_once_with_background_encoding():
    want = [greedy(plain("qwen3"), ids(p), 6) for p in PROMPTS]
    with rag_for("qwen3", policy="lego:1000", cold="background", encode_after=1) as rag:
        with ThreadPoolExecutor(6) as pool:
            results = list(pool.map(lambda i: rag.generate(PROMPTS[i % 5], **ASKED), range(30)))
        assert [r.token_ids for r in results] == [want[i % 5] for i in range(30)]
        assert rag.flush(60)
        (stats,) = rag.stats()
        # Text 9, text 12, chunks 33, 25 and 40, and chunk 25 again at position 0 under the same key.
        assert stats.entries == 5
        again = rag.generate(PROMPT, **ASKED)
        assert again.report.link.computed_tokens == 6

"""Many threads on one model: everyone gets what they get alone."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine_kit import EXACT, PROMPT, chunk, ids, text, warmed
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
        results = list(pool.map(work, range(20)))  # every prompt in every way
    for number, result in enumerate(results):
        expected = linked[number % len(PROMPTS)].token_ids
        if number % 4 in (0, 2):
            expected = ordinary[number % len(PROMPTS)]
        assert result == expected, number

"""Frequencies that depend on the length are one prompt's at a time, whoever else computes meanwhile."""

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

from engine_kit import FOLDER
from families import LONGROPE_THRESHOLD, build, off, plain, prefill, tokens
from loading_kit import WAIT
from ragcachekit import RagCache

LONG, SHORT = tokens(LONGROPE_THRESHOLD + 20, 1), tokens(20, 2)
MOMENT = 0.3
"""Seconds that the first thread stays inside when, as it should be, no second one comes in."""


def test_a_second_thread_does_not_come_between_writing_and_reading():
    """As transformers has it (``dynamic_rope_update``): first the buffer is rewritten, then it is read."""
    model = build("phi3-longrope")
    RagCache(model, cache_dir=FOLDER.name).close()
    rotary, inside, second = model.model.rotary_emb, threading.Event(), threading.Event()
    whole = type(rotary).forward
    reading = inspect.unwrap(whole)

    def forward(x, position_ids):
        whole(rotary, x, position_ids)
        (second if inside.is_set() else inside).set()
        second.wait(MOMENT)
        return reading(rotary, x, position_ids)

    rotary.forward = forward
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(prefill, model, LONG)
        assert inside.wait(WAIT)
        short = pool.submit(prefill, model, SHORT).result(WAIT)
        long = first.result(WAIT)
    assert off(long.logits, prefill(plain("phi3-longrope"), LONG).logits) < 1e-5
    assert off(short.logits, prefill(plain("phi3-longrope"), SHORT).logits) < 1e-5

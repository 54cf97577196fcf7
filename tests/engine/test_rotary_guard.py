"""Frequencies that depend on the length are one prompt's at a time, whoever else computes meanwhile."""

from __future__ import annotations

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine_kit import FOLDER
from families import LONGROPE_THRESHOLD, build, off, plain, prefill, tokens
from loading_kit import WAIT
from ragcachekit import RagCache
from ragcachekit.model import rope as rotary_guard
from ragcachekit.model.rope import guard_rotary

LONG, SHORT = tokens(LONGROPE_THRESHOLD + 20, 1), tokens(20, 2)
MOMENT = 0.3
"""Seconds that the first thread stays inside when, as it should be, no second one comes in."""


class Rotary(torch.nn.Module):
    """Writes into a buffer and reads it again; in between it calls ``between``."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", torch.ones(2), persistent=False)
        self.between = lambda: None

    def forward(self, x, position_ids):
        self.inv_freq.copy_(position_ids.max() * torch.ones(2))
        self.between()
        return self.inv_freq.clone()


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


class Interrupt(BaseException):
    """Goes past hooks, as Ctrl-C does."""


@pytest.mark.parametrize("error", [ValueError, Interrupt])
def test_what_is_raised_inside_blocks_nobody(error, monkeypatch, caplog):
    monkeypatch.setattr(rotary_guard, "MAX_LOCK_WAIT", 0.01)
    model = Rotary()
    guard_rotary(model)

    def fail():
        raise error

    model.between = fail
    with pytest.raises(error):
        model(None, torch.tensor([3]))
    del model.between
    model.between = lambda: None
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            assert pool.submit(model, None, torch.tensor([4])).result(WAIT).tolist() == [4, 4]
    assert ("interrupted" in caplog.text) == (error is Interrupt)
    assert model(None, torch.tensor([5])).tolist() == [5, 5]

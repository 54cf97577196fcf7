"""Seconds that are no finite number >= 0 are refused where they are given: NaN would never have passed."""

import math

import numpy as np
import pytest

from engine_kit import PROMPT, warmed
from queue_kit import LONG
from ragcachekit import SpeculativePipeline

VALUES = [math.nan, math.inf, -math.inf, -0.5, np.float32("nan")]
TYPES = ["5", [1.0], 1j]
ASKED = {"max_new_tokens": 4, "do_sample": False}


@pytest.fixture(scope="module")
def rag():
    with warmed("llama", PROMPT) as rag:
        yield rag


def both(call, name, *, true=False):
    """``call`` refuses bad numbers by ValueError, other types by TypeError, and names what they are for."""
    for value in VALUES:
        with pytest.raises(ValueError, match=name):
            call(value)
    for value in TYPES if true else [*TYPES, True]:
        with pytest.raises(TypeError, match=name):
            call(value)


def test_of_the_queue(rag):
    both(lambda v: rag.submit(PROMPT, deadline=v, **ASKED), "deadline")
    both(lambda v: rag.submit(PROMPT, wait=v, **ASKED), "wait", true=True)
    both(lambda v: rag.generate_batch([PROMPT], deadline=v, **ASKED), "deadline")
    both(lambda v: rag.generate_batch([PROMPT], wait=v, **ASKED), "wait", true=True)
    both(lambda v: rag.submit(PROMPT, max_time=v), "max_time")
    both(lambda v: rag.generate(PROMPT, max_time=v), "max_time")
    both(lambda v: SpeculativePipeline(rag).begin(deadline=v), "deadline")
    assert rag.queue.stats().submitted == 1, "the one that warmed it"


def test_of_waits(rag):
    request = rag.submit(PROMPT, **ASKED)
    assert request.result(LONG)
    both(request.result, "timeout")
    both(rag.flush, "timeout")
    both(rag.queue.drain, "timeout")

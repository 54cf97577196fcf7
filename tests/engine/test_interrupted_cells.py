"""A cell that is interrupted and run again: the second run answers as if there had been no first."""

import signal
import threading

import pytest

from speaking import ONE

PROMPT = f"Answer from the context.\n{ONE}\nWhere does the river flow?"
ASKED = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": -1}


class Interrupting:
    """A streamer that interrupts the main thread at its third call."""

    def __init__(self) -> None:
        self.calls = 0

    def put(self, value) -> None:
        self.calls += 1
        if self.calls == 3:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def end(self) -> None:
        pass


@pytest.fixture
def rag(opened):
    rag = opened(cold="now", policy="lego:4")
    rag.encode([ONE])
    rag.generate(PROMPT, **ASKED)
    return rag


RUNS = {
    "generate": lambda rag, **options: rag.generate(PROMPT, **options),
    "submit": lambda rag, **options: rag.submit(PROMPT, **options).result(60),
    "batch": lambda rag, **options: rag.generate_batch([PROMPT], **options)[0],
}


@pytest.mark.parametrize("name", RUNS)
def test_the_second_run_answers(rag, name) -> None:
    expected = rag.generate(PROMPT, **ASKED)
    with pytest.raises(KeyboardInterrupt):
        RUNS[name](rag, streamer=Interrupting(), **{**ASKED, "max_new_tokens": 200})
    assert rag.queue.drain(60)
    assert rag.queue.stats().cancelled == 1
    again = RUNS[name](rag, **ASKED)
    assert again.text == expected.text
    assert again.report.link.reused_tokens == expected.report.link.reused_tokens

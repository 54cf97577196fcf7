"""Leaving the interpreter, or dropping a stream, while an answer is being generated."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import torch

from ragcachekit.generate.answer_stream import AnswerStream
from ragcachekit.generate.streams import Detokenizer

LONG = 60.0

LEAVING = """
import sys, time
import torch
from ragcachekit.generate.answer_stream import AnswerStream
from ragcachekit.generate.streams import Detokenizer

def produce(tokens, cancel):
    tokens.put(torch.tensor([[0]]))
    tokens.put(torch.tensor([65]))
    tokens.put(torch.tensor([66]))
    cancel.wait(60)
    time.sleep(0.3)  # the token in work
    print("ended", flush=True)

stream = AnswerStream(produce, Detokenizer(lambda ids: "".join(map(chr, ids))))
print(next(stream), flush=True)
if "dropped" in sys.argv:
    del stream
"""


def left(*arguments: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", LEAVING, *arguments], capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout.split()


def test_the_interpreter_leaves_when_the_token_in_work_is_done() -> None:
    assert left() == (0, ["A", "ended"])


def test_also_after_the_stream_was_dropped() -> None:
    assert left("dropped") == (0, ["A", "ended"])


def test_dropping_a_stream_cancels_and_does_not_wait() -> None:
    cancelled, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def produce(tokens, cancel):
        tokens.put(torch.tensor([[0]]))
        tokens.put(torch.tensor([65]))
        if cancel.wait(LONG):
            cancelled.set()
        go_on.wait(LONG)
        ended.set()

    stream = AnswerStream(produce, Detokenizer(lambda ids: "".join(map(chr, ids))))
    assert next(stream) == "A"
    del stream
    gc.collect()
    assert cancelled.wait(LONG)
    assert not ended.is_set()
    go_on.set()
    assert ended.wait(LONG)

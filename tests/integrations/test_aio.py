"""agenerate and astream: pieces in order, and no generation outlives the task that asked for it."""

import asyncio
import threading

import pytest
from fake_engine import WORDS, FakeEngine

from ragcachekit import agenerate, astream


async def test_pieces_and_the_answer():
    engine = FakeEngine()
    async with astream(engine, "hi", max_new_tokens=5) as stream:
        pieces = [piece async for piece in stream]
        assert stream.answer.text == "".join(pieces) == " ".join(WORDS)
    assert (await agenerate(engine, "hi", namespace="a")).text == " ".join(WORDS)
    assert [(c["namespace"], c.get("max_new_tokens")) for c in engine.calls] == [(None, 5), ("a", None)]


class Broken(FakeEngine):
    def submit(self, prompt, *, wait, streamer=None):
        raise AssertionError("not called: it takes no such argument")


async def test_an_error_of_the_engine_reaches_the_caller():
    with pytest.raises(TypeError, match="unexpected"):
        await agenerate(Broken(), "hi", unexpected=1)


async def test_a_stream_that_is_closed_or_dropped_is_cancelled():
    engine = FakeEngine(gate=threading.Event())
    closed = astream(engine, "hi")
    async for piece in closed:
        assert piece == "it"
        break
    await closed.aclose()
    assert engine.streams[0].cancelled.is_set()
    assert [piece async for piece in closed] == []
    async for _ in astream(engine, "hi"):
        break
    await asyncio.sleep(0.01)
    assert engine.streams[1].cancelled.is_set()
    engine.gate.set()


async def test_two_readers_at_once_submit_one_request():
    engine = FakeEngine()
    stream = astream(engine, "hi")
    async with stream:
        pieces = await asyncio.gather(*(anext(stream) for _ in range(3)))
    assert sorted(pieces) == sorted(["it", " is", " in"])
    other = astream(engine, "hi")
    assert len(await asyncio.gather(anext(other), anext(other))) == 2
    assert len(engine.streams) == 2
    async with other:  # a context may come later, too
        assert await anext(other) == " in"
    assert len(engine.streams) == 2


async def test_its_own_streamer_is_refused_where_it_would_be_dropped():
    with pytest.raises(ValueError, match="streamer"):
        astream(FakeEngine(), "hi", streamer=object())

"""What the planner hears of a prefill is the forward's time, whatever streamers and readers take."""

from __future__ import annotations

import time

import pytest
from transformers.generation.streamers import BaseStreamer

from engine_kit import PROMPT, rag_for, warmed
from loading_kit import SlowStore
from ragcachekit import RagCache
from ragcachekit.model.prefill_profile import PrefillProfile
from speaking import byte_level, speaker

ASKED = {"max_new_tokens": 3, "do_sample": False}
TEXT = "Berlin is the capital of Germany. The river Spree flows in Berlin."
LONG = 1e6
"""Seconds on the test's clock; nothing that it runs takes that long."""


class Clock:
    """The real clock, put forward by whoever wants to seem slow."""

    def __init__(self, monkeypatch):
        self._real, self._skew = time.perf_counter, 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self._real() + self._skew)

    def advance(self):
        self._skew += LONG


class Listening(BaseStreamer):
    """Lists what it is given."""

    def __init__(self):
        self.given = []

    def put(self, value):
        self.given.append(value.flatten().tolist())

    def end(self):
        pass


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def learning(policy="lego:4", warm=True):
    store = SlowStore()
    if warm:
        warmed("llama", PROMPT, policy=policy, store=store)
    return rag_for("llama", policy=policy, store=store, load="auto", cold="never"), store


def listening(rag):
    """Give the planner a profile, and list what it hears of prefills: cached and new rows, seconds."""
    planner, heard = rag._components.loads.planner, []
    planner.profile = PrefillProfile([0, 512], [1, 512], [[1.0, 512.0]] * 2)
    inner = planner.observe_prefill

    def observe(cached, new, seconds):
        heard.append((cached, new, seconds))
        inner(cached, new, seconds)

    planner.observe_prefill = observe
    return heard


def test_a_load_that_fails_with_a_streamer():
    rag, store = learning()
    failed, streamer = [], Listening()

    def fail(key, layer):
        if layer == 1 and not failed:
            failed.append(key)
            raise OSError("injected")

    store.before_read = fail
    answer = rag.generate(PROMPT, streamer=streamer, **ASKED)
    assert failed
    assert len(streamer.given) == 1 + len(answer.token_ids), "told the prompt once"
    rag.close()


def test_a_reader_that_is_slow_between_pieces_is_no_slow_model(clock, tmp_path):
    options = {"store": SlowStore(), "load": "auto", "policy": "lego:4", "cold": "never"}
    rag = RagCache(speaker(), byte_level(), cache_dir=tmp_path, **options)
    rag.encode([TEXT])
    heard, pieces = listening(rag), []
    stream = rag.stream(f"{TEXT}\nWhere?", max_new_tokens=24, do_sample=False)
    for piece in stream:
        pieces.append(piece)
        clock.advance()
    assert "".join(pieces) == stream.answer.text != ""
    assert [(cached > 0, 0 < seconds < 60) for cached, _, seconds in heard] == [(True, True)]
    rag.close()

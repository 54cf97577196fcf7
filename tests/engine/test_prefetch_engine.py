"""rag.prefetch and what runs beside a request: loads before the prompt, loads while others compute."""

from __future__ import annotations

import pytest
from transformers.generation.streamers import BaseStreamer

from engine_kit import PROMPT, chunk, ids, rag_for, text, warmed
from families import greedy, plain
from loading_kit import WAIT, SlowStore
from ragcachekit import Prompt
from ragcachekit.model.prefill_profile import PrefillProfile
from ragcachekit.store.memory import HostStore
from ragcachekit.store.tiered import TieredStore
from ragcachekit.types import chunk_id

ASKED = {"max_new_tokens": 4, "do_sample": False}
SECOND = Prompt([text(9, 1), chunk(21, 7), chunk(30, 8), text(5, 9)])


def ids_of_chunks(prompt):
    return [chunk_id(s.token_ids, "default") for s in prompt.segments if type(s).__name__ == "Chunk"]


def prefetch(rag, prompt):
    """As the queue does for prompts that wait."""
    request = rag.prepare(prompt)
    rag.components.loads.prefetch(rag.components.planner.estimator(request).to_load)


def slow(name="llama", policy="lego:4", load="always", **options):
    store = SlowStore()
    warmed(name, PROMPT, SECOND, policy=policy, store=store, **options)
    store.log.clear()
    store.sources.clear()
    return rag_for(name, policy=policy, store=store, load=load, cold="never", **options), store


@pytest.mark.parametrize("encoder", ["standalone", "system"])
def test_a_prompt_takes_over_what_was_prefetched(encoder):
    store, policy = SlowStore(), "lego:4"
    warmed("llama", PROMPT, SECOND, policy=policy, store=store, encoder=encoder)
    tiers = TieredStore([HostStore(1 << 30), store])
    rag = rag_for("llama", policy=policy, store=tiers, load="always", cold="never", encoder=encoder)
    rag.generate(SECOND, **ASKED)  # tells the system text
    assert rag.flush(WAIT)
    del store.log[:], store.sources[:]
    prefetch(rag, PROMPT)
    assert rag.flush(WAIT)
    prefetched = [source.tokens for source in store.sources]
    assert 33 in prefetched
    link = rag.generate(PROMPT, **ASKED).report.link
    assert {use.source for use in link.uses} == {"host"}
    assert len(store.sources) == len(prefetched)  # nothing was opened again
    rag.close()


def test_forgetting_reaches_what_was_prefetched():
    rag, _ = slow()
    first = ids_of_chunks(PROMPT)[0]
    prefetch(rag, PROMPT)
    assert rag.flush(WAIT)
    assert rag.forget([first]) == 1
    uses = rag.generate(PROMPT, **ASKED).report.link.uses
    assert [use.source for use in uses] == ["disk", "computed", "disk"]
    rag.close()


class Forgetful(BaseStreamer):
    """Forgets in the middle of an answer."""

    def __init__(self, forget):
        self.forget, self.calls = forget, 0

    def put(self, value):
        self.calls += 1
        if self.calls == 2:
            self.forget()

    def end(self):
        assert self.calls > 2


@pytest.mark.parametrize("cold", ["now", "background"])
def test_a_request_in_work_does_not_bring_back_what_is_forgotten(cold):
    rag = rag_for("llama", policy="lego:4", cold=cold, encode_after=1)
    rag.generate(PROMPT, **ASKED, streamer=Forgetful(rag.forget))
    assert rag.flush(WAIT)
    assert rag.stats()[0].entries == 0
    rag.generate(PROMPT, **ASKED)
    assert rag.flush(WAIT)
    assert rag.stats()[0].entries == 3
    rag.close()


def slow_profile(seconds_per_token):
    return PrefillProfile(0.0, seconds_per_token)


@pytest.mark.parametrize(("per_token", "source"), [(1e-9, "computed"), (10.0, "disk")])
def test_what_is_quicker_to_compute_is_not_loaded(per_token, source):
    rag, store = slow(load="auto")
    first = rag.generate(PROMPT, **ASKED)
    assert {use.source for use in first.report.link.uses} == {"disk"}  # nothing known: load
    assert rag.flush(WAIT)
    for _ in range(10):
        rag.components.loads.planner.observe_read("disk", 1000, 0.01)
    rag.components.loads.planner.profile = slow_profile(per_token)
    del store.log[:], store.sources[:]
    answer = rag.generate(PROMPT, **ASKED)
    assert {use.source for use in answer.report.link.uses} == {source}
    if source == "computed":
        assert answer.token_ids == greedy(plain("llama"), ids(PROMPT), 4)
        assert answer.report.link.loaded_bytes == 0
        assert rag.flush(WAIT)
        # Loaded after the answer: a faster tier would have it now, and the tier's speed stays current.
        assert len(store.finished) >= 3
        assert {source.tokens for source in store.sources} == {9, 33, 25}
    rag.close()

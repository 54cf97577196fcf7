"""rag.prefetch and what runs beside a request: loads before the prompt, loads while others compute."""

import pytest

from engine_kit import PROMPT, chunk, ids, rag_for, text, warmed
from families import greedy, plain
from loading_kit import WAIT, SlowStore
from ragcachekit import Prompt
from ragcachekit.model.prefill_profile import PrefillProfile
from ragcachekit.store.memory import HostStore
from ragcachekit.store.tiered import TieredStore

ASKED = {"max_new_tokens": 4, "do_sample": False}
SECOND = Prompt([text(9, 1), chunk(21, 7), chunk(30, 8), text(5, 9)])


def prefetch(rag, prompt):
    """As the queue does for prompts that wait."""
    request = rag.prepare(prompt)
    rag.components.loads.prefetch(rag.components.planner.estimator(request).to_load)


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


@pytest.mark.parametrize(("per_token", "source"), [(1e-9, "computed"), (10.0, "disk")])
def test_what_is_quicker_to_compute_is_not_loaded(per_token, source):
    store = SlowStore()
    warmed("llama", PROMPT, SECOND, policy="lego:4", store=store)
    rag = rag_for("llama", policy="lego:4", store=store, load="auto", cold="never")
    first = rag.generate(PROMPT, **ASKED)
    assert {use.source for use in first.report.link.uses} == {"disk"}  # nothing known: load
    assert rag.flush(WAIT)
    for _ in range(10):
        rag.components.loads.planner.observe_read("disk", 1000, 0.01)
    rag.components.cost.profile = PrefillProfile(0.0, per_token)
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

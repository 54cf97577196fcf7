"""A prompt right after another one waits until that one's rows are stored, and no longer than it should."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from engine_kit import chunk, rag_for, text
from ragcachekit import Prompt
from ragcachekit.config import TreeConfig
from ragcachekit.engine import runner
from ragcachekit.store.memory import HostStore

FIRST = Prompt([chunk(40, 2), text(6, 4)])
SAME = Prompt([chunk(40, 2), text(7, 5)])
OTHER = Prompt([chunk(40, 8), text(6, 4)])
SHORT = {"max_new_tokens": 1, "do_sample": False}
WAYS = {
    "generate": lambda rag: rag.generate(SAME, **SHORT).report.link,
    "link": lambda rag: rag.link(SAME).report,
}


class HeldStore(HostStore):
    """Stores once ``go`` is set; ``storing`` is set as soon as it was asked to."""

    def __init__(self) -> None:
        super().__init__(1 << 28)
        self.storing, self.go = threading.Event(), threading.Event()

    def put(self, key, kv):
        self.storing.set()
        assert self.go.wait(60)
        return super().put(key, kv)


@pytest.fixture
def clock(monkeypatch):
    """The clock of the waits; it stands still, so that no wait ends by time."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(runner, "monotonic", lambda: now.seconds)
    return now


@pytest.fixture
def waits(monkeypatch):
    """Set once a request waits."""
    begun = threading.Event()

    class Watched(runner.Condition):
        def wait_for(self, predicate, timeout=None):
            begun.set()
            return super().wait_for(predicate, timeout)

    monkeypatch.setattr(runner, "Condition", Watched)
    return begun


@pytest.fixture
def held(clock, waits):
    """An engine whose first prompt is answered, and whose store has begun to keep its chunk."""
    store = HeldStore()
    with rag_for("llama", policy="reuse", cold="background", store=store) as rag:
        rag.generate(FIRST, **SHORT)
        assert store.storing.wait(60)
        yield SimpleNamespace(rag=rag, store=store)
        store.go.set()


@pytest.fixture
def aside():
    with ThreadPoolExecutor(2) as pool:
        yield pool.submit


@pytest.mark.parametrize("way", WAYS)
def test_the_next_prompt_reuses_what_the_last_one_computed(held, waits, aside, way):
    result = aside(WAYS[way], held.rag)
    assert waits.wait(60)
    held.store.go.set()
    report = result.result(60)
    assert (report.reused_tokens, report.computed_tokens) == (40, 7)


@pytest.mark.parametrize("way", WAYS)
def test_a_hung_store_delays_by_the_first_prefill_at_most(held, clock, waits, aside, way):
    result = aside(WAYS[way], held.rag)
    assert waits.wait(60)
    clock.seconds += runner.MIN_WAIT + 60
    report = result.result(60)
    assert report.computed_tokens == 47
    assert any("until rows of an earlier prompt were stored" in note for note in report.notes)
    assert not held.store.go.is_set()


def test_others_do_not_wait(held, waits):
    assert held.rag.generate(OTHER, **SHORT).report.link.computed_tokens == 46
    assert not waits.is_set()


def test_a_waiting_request_can_be_cancelled(held, waits):
    request = held.rag.submit(SAME, **SHORT)
    assert waits.wait(60)
    request.cancel()
    assert request.result(60).report.finish_reason == "cancelled"
    assert not held.store.go.is_set()


def test_running_requests_go_on(held, waits):
    """A request that would wait is not begun beside others."""
    running = held.rag.submit(OTHER, max_new_tokens=40, min_new_tokens=40, do_sample=False)
    second = held.rag.submit(SAME, **SHORT)
    assert len(running.result(60).token_ids) == 40
    assert waits.wait(60)  # the other one alone
    held.store.go.set()
    assert second.result(60).report.link.reused_tokens == 40


def test_a_closing_engine_waits_no_more(clock, waits, aside):
    store = HeldStore()
    rag = rag_for("llama", policy="reuse", cold="background", store=store)
    rag.generate(FIRST, **SHORT)
    assert store.storing.wait(60)
    result = aside(rag.generate, SAME, **SHORT)
    assert waits.wait(60)
    closing = aside(rag.close)
    assert result.result(60).report.link.computed_tokens == 47
    store.go.set()
    assert closing.result(60) is None


def test_what_could_not_be_stored_is_not_waited_for(clock, waits):
    class BrokenStore(HostStore):
        def put(self, key, kv):
            raise OSError("no space left")

    with rag_for("llama", policy="reuse", cold="background", store=BrokenStore(1 << 28)) as rag:
        rag.generate(FIRST, **SHORT)
        assert rag.flush(60)
        assert rag.generate(SAME, **SHORT).report.link.computed_tokens == 47
    assert not waits.is_set()


def test_a_conversation_s_next_turn_waits_for_the_last_one(clock, waits, aside, monkeypatch):
    """Nothing of the tree is new in the second turn; its rows after the chunk are."""
    tree = TreeConfig(host_bytes=1 << 26, turns_bytes=1 << 26)
    with rag_for("llama", policy="prefix", cold="background", tree=tree) as rag:
        turns, go, keeping = rag.components.tree.turns, threading.Event(), threading.Event()
        rag.generate(FIRST, **SHORT)
        assert rag.flush(60)
        keep = turns.keep

        def held(*args):
            keeping.set()
            assert go.wait(60)
            return keep(*args)

        monkeypatch.setattr(turns, "keep", held)
        rag.generate(Prompt([chunk(40, 2), text(20, 4)]), **SHORT)
        assert keeping.wait(60)
        result = aside(rag.generate, Prompt([chunk(40, 2), text(20, 4), text(9, 7)]), **SHORT)
        assert waits.wait(60)
        go.set()
        assert result.result(60).report.link.exact_tokens == 60


def test_a_prompt_of_text_alone_waits_for_the_beginning_that_it_shares(clock, waits, aside, monkeypatch):
    with rag_for("llama", policy="prefix", cold="background", tree=TreeConfig(host_bytes=1 << 26)) as rag:
        tree, go, keeping = rag.components.tree, threading.Event(), threading.Event()
        insert = tree.insert

        def held(*args, **options):
            keeping.set()
            assert go.wait(60)
            return insert(*args, **options)

        monkeypatch.setattr(tree, "insert", held)
        rag.generate(Prompt([text(70, 1), text(6, 2)]), **SHORT)
        assert keeping.wait(60)
        assert not rag.generate(Prompt([text(70, 3)]), **SHORT).report.link.exact_tokens
        assert not waits.is_set(), "another beginning"
        result = aside(rag.generate, Prompt([text(70, 1), text(6, 5)]), **SHORT)
        assert waits.wait(60)
        go.set()
        assert result.result(60).report.link.exact_tokens == 64

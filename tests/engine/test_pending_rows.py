"""A prompt right behind another one waits until that one's rows are stored, and no longer than it should."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from engine_kit import chunk, rag_for, text
from ragcachekit import Prompt
from ragcachekit.config import TreeConfig
from ragcachekit.engine import after_answer as pending_rows
from ragcachekit.store.memory import HostStore

FIRST = Prompt([chunk(40, 2), text(6, 4)])
SAME = Prompt([chunk(40, 2), text(7, 5)])
OTHER = Prompt([chunk(40, 8), text(6, 4)])
SHORT = {"max_new_tokens": 1, "do_sample": False}


class HeldStore(HostStore):
    """Stores once ``go`` is set; ``storing`` says that it was asked to."""

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
    monkeypatch.setattr(pending_rows, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


@pytest.fixture
def waits(monkeypatch):
    """Set once a request waits."""
    begun, real = threading.Event(), pending_rows.Condition.wait_for

    class Watched(pending_rows.Condition):
        def wait_for(self, predicate, timeout=None):
            begun.set()
            return real(self, predicate, timeout)

    monkeypatch.setattr(pending_rows, "Condition", Watched)
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


def in_thread(work):
    results = []

    def run():
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result():
        thread.join(60)
        assert not thread.is_alive()
        return results[0]

    return result


def ways(rag):
    return {
        "generate": lambda prompt: rag.generate(prompt, **SHORT).report.link,
        "submit": lambda prompt: rag.submit(prompt, **SHORT).result(60).report.link,
        "link": lambda prompt: rag.link(prompt).report,
    }


@pytest.mark.parametrize("way", ["generate", "submit", "link"])
def test_the_next_prompt_reuses_what_the_last_one_computed(held, waits, way):
    result = in_thread(lambda: ways(held.rag)[way](SAME))
    assert waits.wait(60)
    held.store.go.set()
    report = result()
    assert (report.reused_tokens, report.computed_tokens) == (40, 7)


def test_the_report_tells_of_a_long_wait(held, clock, waits):
    result = in_thread(lambda: held.rag.generate(SAME, **SHORT))
    assert waits.wait(60)
    earliest = held.rag.after_answer.rows.pending._pending[0].until
    clock.seconds += min(0.5, (earliest - clock.seconds) / 2)
    waited = clock.seconds - 1000
    held.store.go.set()
    note = f"waited {waited:.2f} s until rows of an earlier prompt were stored"
    assert (note in result().report.link.notes) == (waited >= 0.01)


@pytest.mark.parametrize("way", ["generate", "submit", "link"])
def test_a_hung_store_delays_by_the_first_prefill_at_most(held, clock, waits, way):
    result = in_thread(lambda: ways(held.rag)[way](SAME))
    assert waits.wait(60)
    (pending,) = held.rag.after_answer.rows.pending._pending
    assert 0 < pending.until - clock.seconds < 60
    clock.seconds = pending.until
    assert result().computed_tokens == 47
    assert not held.store.go.is_set()


@pytest.mark.parametrize("way", ["generate", "submit", "link"])
def test_others_do_not_wait(held, waits, way):
    assert in_thread(lambda: ways(held.rag)[way](OTHER))().computed_tokens == 46
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


def test_a_closing_engine_waits_no_more(clock, waits):
    store = HeldStore()
    rag = rag_for("llama", policy="reuse", cold="background", store=store)
    rag.generate(FIRST, **SHORT)
    assert store.storing.wait(60)
    result = in_thread(lambda: rag.generate(SAME, **SHORT))
    assert waits.wait(60)
    closing = in_thread(rag.close)
    assert result().report.link.computed_tokens == 47
    store.go.set()
    assert closing() is None


class BrokenStore(HostStore):
    def put(self, key, kv):
        raise OSError("no space left")


def test_what_could_not_be_stored_is_not_waited_for(clock, waits):
    with rag_for("llama", policy="reuse", cold="background", store=BrokenStore(1 << 28)) as rag:
        rag.generate(FIRST, **SHORT)
        assert rag.flush(60)
        assert rag.after_answer.rows.pending._pending == ()
        assert rag.generate(SAME, **SHORT).report.link.computed_tokens == 47
    assert not waits.is_set()


@pytest.mark.parametrize("raised", [None, KeyboardInterrupt])
def test_what_is_dropped_is_not_waited_for(clock, waits, monkeypatch, raised):
    with rag_for("llama", policy="reuse", cold="background") as rag:
        capture = rag.after_answer.rows

        def submit(job):
            if raised is not None:
                raise raised
            return False

        monkeypatch.setattr(capture._jobs, "submit", submit)
        if raised is None:
            rag.generate(FIRST, **SHORT)
        else:
            with pytest.raises(raised):
                rag.generate(FIRST, **SHORT)
        assert capture.pending._pending == ()


class TestTree:
    """The knowledge tree holds prompts' beginnings: only a prompt with the same one waits."""

    @pytest.fixture
    def rag(self, clock, waits, monkeypatch):
        go, storing = threading.Event(), threading.Event()
        with rag_for("llama", policy="prefix", cold="background", tree=TreeConfig(host_bytes=1 << 26)) as rag:
            tree = rag.components.tree
            insert = tree.insert

            def held(*args, **kwargs):
                storing.set()
                assert go.wait(60)
                return insert(*args, **kwargs)

            monkeypatch.setattr(tree, "insert", held)
            rag.generate(Prompt([chunk(40, 2), chunk(30, 3), text(6, 4)]), **SHORT)
            assert storing.wait(60)
            rag.go = go
            yield rag
            go.set()

    def test_the_same_beginning_waits(self, rag, waits):
        result = in_thread(lambda: rag.generate(Prompt([chunk(40, 2), chunk(30, 9), text(6, 4)]), **SHORT))
        assert waits.wait(60)
        rag.go.set()
        assert result().report.link.tree_tokens == 40


def test_the_next_turn_waits_for_the_last_one(clock, waits, monkeypatch):
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
        other = rag.generate(Prompt([chunk(40, 2), text(20, 6)]), **SHORT)
        assert other.report.link.tree_tokens == 40
        assert not waits.is_set()
        result = in_thread(lambda: rag.generate(Prompt([chunk(40, 2), text(20, 4), text(9, 7)]), **SHORT))
        assert waits.wait(60)
        go.set()
        assert result().report.link.exact_tokens == 60

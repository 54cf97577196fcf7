"""Encoding behind answers: what is forgotten stays forgotten, also where no thread can be had."""

import threading
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from families import tokens
from link_kit import BOS, described, planned, request_of, segments
from loading_kit import WAIT
from ragcachekit.encode.background import BackgroundEncoder, MissCounts
from ragcachekit.model.encoding import Encoding, InPromptEncoding
from ragcachekit.plan.encodings import Encodings, Fetch
from ragcachekit.plan.link_plan import Missing, make_plan
from ragcachekit.plan.variants import VariantPool
from ragcachekit.policies.registry import open_policy
from ragcachekit.store.forgets import ForgetEpochs
from ragcachekit.store.memory import HostStore
from store_kit import key_of, kv_of

SPACE = key_of(0).namespace


class Encoder:
    """Gives a chunk's number as its KV; ``before`` runs first."""

    def __init__(self):
        self.before = lambda: None

    def encode(self, chunks, encoding):
        self.before()
        return [(index, kv_of(ids[0])) for index, ids in enumerate(chunks)]


@pytest.fixture
def made():
    with ExitStack() as opened:

        def make(**options):
            store, encoder = HostStore(1 << 20), Encoder()
            none = SimpleNamespace(encode=lambda items: ())
            parts = (none, none, lambda *_: None, ForgetEpochs())
            work = BackgroundEncoder(encoder, store, lambda: True, *parts, **options)
            opened.callback(work.worker.close)
            return work, store, encoder

        yield make


def missing(number, epoch=0):
    return Missing(key_of(number), (number,), Encoding("standalone"), epoch)


def stored(store):
    return [number for number in range(4) if key_of(number) in store]


@contextmanager
def forgetting(work, store, chunk_ids=None):
    """As the engine forgets; what is done inside happens in the middle of it."""
    forgets = work.forgets
    with forgets.storing, forgets.storing_in_tree:
        store.forget(SPACE, chunk_ids)
        yield
        forgets.add(SPACE, chunk_ids)


def test_what_was_missed_before_a_forgetting_is_not_stored_after_it(made):
    work, store, _ = made()
    old = work.forgets.epoch
    with forgetting(work, store):
        during = work.forgets.epoch
    new = work.forgets.epoch
    items = [missing(0, old), missing(1, during), missing(2, new)]
    work.now(items)
    assert stored(store) == [2]
    work.later(items[:2])
    assert work.worker.flush(WAIT)
    assert stored(store) == [2]


def test_a_miss_before_a_forgetting_does_not_count_after_it(made):
    work, store, _ = made(after=2)
    old = work.forgets.epoch
    with forgetting(work, store):
        pass
    new = work.forgets.epoch
    for epoch, expected in ((old, []), (new, []), (new, [0])):
        work.later([missing(0, epoch)])
        assert work.worker.flush(WAIT)
        assert stored(store) == expected


def test_other_chunks_and_namespaces_are_not_concerned(made):
    work, store, _ = made()
    item = missing(0, work.forgets.epoch)
    with forgetting(work, store, frozenset(["chunk-1"])):
        pass
    work.forgets.add("another")
    work.now([item])
    assert stored(store) == [0]


def test_what_waits_and_was_not_forgotten_is_stored(made):
    work, store, encoder = made()
    reached, gate = threading.Event(), threading.Event()
    encoder.before = lambda: (reached.set(), gate.wait(WAIT))
    epoch = work.forgets.epoch
    work.later([missing(0, epoch), missing(1, epoch)])
    assert reached.wait(WAIT)
    with forgetting(work, store, frozenset(["chunk-0"])):
        pass
    gate.set()
    assert work.worker.flush(WAIT)
    assert stored(store) == [1]


def test_what_is_missed_again_while_the_forgotten_is_encoded_is_stored(made):
    work, store, encoder = made()
    reached, gate = threading.Event(), threading.Event()
    encoder.before = lambda: (reached.set(), gate.wait(WAIT))
    work.later([missing(0)])
    assert reached.wait(WAIT)
    with forgetting(work, store):
        pass
    work.later([missing(0, work.forgets.epoch)])
    gate.set()
    assert work.worker.flush(WAIT)
    assert stored(store) == [0]


def test_nothing_is_stored_while_something_is_forgotten(made):
    work, store, encoder = made()
    encoded = threading.Event()
    encoder.before = encoded.set
    thread = threading.Thread(target=work.now, args=([missing(0), missing(1)],))
    with forgetting(work, store, frozenset(["chunk-0"])):
        thread.start()
        assert encoded.wait(WAIT)
        assert stored(store) == []
    thread.join(WAIT)
    assert stored(store) == [1]


def test_a_plan_carries_its_epoch_also_where_it_is_made_again():
    parts = segments(("text", tokens(5, 1)), ("chunk", tokens(9, 2)), ("chunk", tokens(7, 3)), ("text", (4,)))
    store = HostStore(1 << 26)
    planned("llama", parts, "reuse", store=store)  # stores what the prompt needs
    encodings = Encodings("standalone", described("llama"), BOS)
    for full, fetch in ((True, Fetch(store)), (False, Fetch(HostStore(1 << 26)))):
        request = request_of(parts, open_policy("reuse"), encodings, fetch, "fingerprint", "space")
        request = replace(request, epoch=5)
        keys = [want.key for want in request.wanted]
        first = make_plan(request, VariantPool())
        assert [item.key for item in first.missing] == ([] if full else keys)
        for lost in (keys[1:2], keys[1:]):
            again = make_plan(request, VariantPool(), lost)
            assert set(lost) <= {item.key for item in again.missing}
            assert {item.epoch for item in again.missing} == {5}
            assert again.request is request


def test_where_no_thread_can_be_started_the_work_is_dropped(made, monkeypatch, caplog):
    work, store, _ = made()

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        work.later([missing(0)])
    assert "can't start new thread" in caplog.text
    assert work.worker.flush(0)
    work.later([missing(0), missing(1)])
    assert work.worker.flush(WAIT)
    assert stored(store) == [0, 1]


def test_what_finds_no_place_in_the_queue_is_said(made, caplog, monkeypatch):
    monkeypatch.setattr("ragcachekit.encode.background.MAX_WAITING", 1)
    work, store, encoder = made()
    begun, go = threading.Event(), threading.Event()

    def hold():
        begun.set()
        assert go.wait(WAIT)

    encoder.before = hold
    work.later([missing(0)])
    assert begun.wait(WAIT)
    work.later([missing(1)])
    work.later([missing(2), missing(3)])
    go.set()
    assert work.worker.flush(WAIT)
    assert stored(store) == [0, 1]
    assert [record.message for record in caplog.records] == [
        "2 missing chunks are not encoded: 1 requests wait"
    ]


def missed(number, encoding=None, **changes):
    return Missing(key_of(number, **changes), (number,), encoding or Encoding("standalone"))


@pytest.mark.parametrize("after", [1, 2, 4])
def test_every_nth_miss_is_due(after):
    counts = MissCounts()
    due = [counts.is_due(missed(0), after) for _ in range(3 * after)]
    assert due == [number % after == after - 1 for number in range(3 * after)]


def test_other_contexts_are_other_entries_but_of_in_prompt_chunks():
    for encoding, due in ((Encoding("system", (1,)), False), (InPromptEncoding("in-prompt", (1,)), True)):
        counts = MissCounts()
        assert not counts.is_due(missed(0, encoding, context=("a",)), 2)
        assert counts.is_due(missed(0, encoding, context=("b",)), 2) is due


def test_what_was_missed_longest_ago_is_forgotten_first(monkeypatch):
    monkeypatch.setattr("ragcachekit.encode.background.MAX_COUNTED", 2)
    counts = MissCounts()
    for number in range(3):
        counts.is_due(missed(number), 2)
    assert [counts.is_due(missed(number), 2) for number in (2, 1, 0)] == [True, True, False]


def test_forget_drops_the_misses_of_a_chunk_and_of_what_comes_after_it():
    counts = MissCounts()
    items = [missed(0), missed(1, context=("chunk-0",)), missed(2), missed(0, namespace="other")]
    for one in items:
        counts.is_due(one, 2)
    counts.forget(SPACE, frozenset(["chunk-0"]))
    assert [counts.is_due(one, 2) for one in items] == [False, False, True, True]

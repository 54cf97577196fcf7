"""Forgets that a service has not confirmed: bounded, and dropped only once confirmed."""

from __future__ import annotations

import pytest

from ragcachekit.store.remote import pending_deletes as pending_module
from ragcachekit.store.remote.pending_deletes import PendingDeletes
from store_kit import key_of

SPACE = key_of(0).namespace


def test_concerns_chunks_and_what_was_encoded_behind_them() -> None:
    pending = PendingDeletes()
    pending.add(SPACE, frozenset({"chunk-1"}))
    assert pending.concern(key_of(1))
    assert pending.concern(key_of(2, context=("chunk-0", "chunk-1")))
    assert not pending.concern(key_of(2))
    assert not pending.concern(key_of(1, namespace="globex"))
    assert [namespace for namespace, _ in pending.items()] == [SPACE]


def test_a_confirmation_counts_for_the_last_forget_alone() -> None:
    pending = PendingDeletes()
    pending.add(SPACE, frozenset({"chunk-1", "chunk-2"}))
    (_, (ids, number)), *_ = pending.items()
    assert ids == {"chunk-1", "chunk-2"}
    pending.add(SPACE, frozenset({"chunk-2", "chunk-3"}))
    pending.confirm(SPACE, number)
    assert [pending.concern(key_of(n)) for n in (1, 2, 3, 4)] == [True, True, True, False]
    pending.add(SPACE, None)
    pending.confirm(SPACE, number)
    assert pending.items() == [(SPACE, (None, 3))]
    pending.confirm(SPACE, 3)
    assert (len(pending), pending.concern(key_of(3))) == (0, False)


def test_too_many_ids_stand_for_the_whole_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_module, "MOST_IDS", 3)
    pending = PendingDeletes()
    pending.add("globex", frozenset({"chunk-1"}))
    for number in range(3):
        pending.add(SPACE, frozenset({f"chunk-{number}"}))
    assert not pending.concern(key_of(9))
    pending.add(SPACE, frozenset({"chunk-3"}))
    assert dict(pending.items())[SPACE].chunk_ids is None
    assert pending.concern(key_of(9))
    assert dict(pending.items())["globex"].chunk_ids == {"chunk-1"}

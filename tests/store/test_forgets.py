"""What counts as forgotten since a moment."""

import pytest

from ragcachekit.store import forgets as module
from ragcachekit.store.forgets import ForgetEpochs
from store_kit import key_of

SPACE = key_of(0).namespace
TEXT = "Berlin is the capital of Germany."


def test_a_chunk_and_what_was_encoded_behind_it():
    forgets = ForgetEpochs()
    since = forgets.epoch
    forgets.add(SPACE, {"chunk-1"})
    assert forgets.forgot(key_of(1), since)
    assert forgets.forgot(key_of(2, context=("chunk-0", "chunk-1")), since)
    assert not forgets.forgot(key_of(2), since)
    assert not forgets.forgot(key_of(1, namespace="another"), since)
    assert not forgets.forgot(key_of(1), forgets.epoch)


@pytest.mark.parametrize("most", [1, 100])
def test_the_whole_namespace(most, monkeypatch):
    monkeypatch.setattr(module, "MAX_NAMES", most)
    forgets = ForgetEpochs()
    forgets.add(SPACE, {"chunk-1"})
    since = forgets.epoch
    forgets.add(SPACE)
    forgets.add(SPACE, {"chunk-3"})
    assert forgets.forgot(key_of(2), since)
    assert forgets.forgot_text(SPACE, TEXT, since)
    assert not forgets.forgot_text("another", TEXT, since)
    assert not forgets.forgot(key_of(2), since + 1)


@pytest.mark.parametrize("given", [TEXT, f"  {TEXT}\n"])
def test_texts_whatever_whitespace_stands_around_them(given):
    forgets = ForgetEpochs()
    forgets.add(SPACE, {"chunk-1"}, [given])
    assert forgets.forgot_text(SPACE, TEXT, 0)
    assert not forgets.forgot_text(SPACE, "Paris", 0)
    assert not forgets.forgot_text(SPACE, TEXT, forgets.epoch)
    forgets.add(SPACE, {"chunk-1"}, ["\ud800"])  # half a character, as broken JSON has it
    assert forgets.forgot_text(SPACE, "\ud800", 1)


def test_beyond_its_bound_more_counts_as_forgotten_and_never_less(monkeypatch):
    monkeypatch.setattr(module, "MAX_NAMES", 3)
    forgets = ForgetEpochs()
    for number in range(6):
        forgets.add(SPACE, {f"chunk-{number}"})
    for number in range(6):
        assert forgets.forgot(key_of(number), number)  # just before its own forget
        assert not forgets.forgot(key_of(number), 6)
    assert forgets.forgot(key_of(9), 3), "the fourth forget counts as one of everything"
    assert not forgets.forgot(key_of(9), 4)

"""Sealed entries: every flipped bit, every cut, other names, other keys; and where the key comes from."""

import hashlib
import hmac
import random
from contextlib import suppress

import pytest

from ragcachekit.store.entry import EntryDamaged, decode_entry, encode_entry
from ragcachekit.store.remote import OVERHEAD, Seal
from store_kit import KEY, key_of, kv_of

SECRET = b"sixteen bytes...and more"
DIGEST = KEY.digest()


def sealed(seed=1):
    return bytes(Seal(SECRET).sealed(DIGEST, encode_entry(KEY, kv_of(seed))))


def test_the_seal_is_an_hmac_over_name_and_entry():
    blob, image = sealed(), b"".join(encode_entry(KEY, kv_of(1)))
    assert blob[OVERHEAD:] == image
    assert (
        blob[OVERHEAD - 32 : OVERHEAD]
        == hmac.new(SECRET, blob[:8] + DIGEST.encode() + image, hashlib.sha256).digest()
    )
    assert SECRET not in blob


def test_every_flipped_bit_is_noticed():
    blob, rng = sealed(), random.Random(0)
    places = [*range(OVERHEAD), *rng.sample(range(OVERHEAD, len(blob)), 600)]
    for place in places:
        damaged = bytearray(blob)
        damaged[place] ^= 1 << rng.randrange(8)
        with suppress(EntryDamaged):
            assert Seal(SECRET).opened(DIGEST, damaged) is None


def test_a_valid_entry_under_another_name_is_damage():
    with pytest.raises(EntryDamaged):
        Seal(SECRET).opened(key_of(2).digest(), sealed())
    with pytest.raises(EntryDamaged, match="another key"):
        decode_entry(Seal(SECRET).opened(DIGEST, sealed()), key_of(2))


def test_another_key_is_told_from_damage():
    assert Seal(SECRET + b"!").opened(DIGEST, sealed()) is None


def test_the_key_comes_as_bytes_or_from_the_environment(monkeypatch):
    monkeypatch.setenv("RAG_KEY", "0123456789abcdef")
    assert Seal("RAG_KEY").opened(DIGEST, Seal(b"0123456789abcdef").sealed(DIGEST, [b"entry"])) == b"entry"
    for bad in (None, "RAG_KEY_THAT_IS_NOT_SET", b"short", ""):
        with pytest.raises(ValueError, match="openssl rand -hex 32"):
            Seal(bad)
    monkeypatch.setenv("RAG_KEY", "short")
    with pytest.raises(ValueError, match="fewer than 16"):
        Seal("RAG_KEY")


def test_no_message_repeats_the_key():
    mistaken = "deadbeefdeadbeefdeadbeefdeadbeef"  # the key itself where a name is wanted
    with pytest.raises(ValueError, match="not set") as caught:
        Seal(mistaken)
    assert mistaken not in str(caught.value)
    assert SECRET.decode() not in repr(Seal(SECRET))

"""The chunk encoder against plain forwards, one chunk at a time."""

import pytest
import torch

from families import EACH, off, plain, prefill, tokens, wrapped
from link_kit import described
from ragcachekit.encode import encoders as encoder_room
from ragcachekit.encode.encoders import ChunkEncoder
from ragcachekit.model.encoding import Encoding

CHUNKS = [tokens(n, n) for n in (5, 31, 1, 17, 31, 58)]


def encoded(name, chunks, encoding):
    return dict(ChunkEncoder(wrapped(name), described(name)).encode(chunks, encoding))


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("behind", [(), (1, 1, 1, 1), tokens(6, 99)])
def test_batched_unequal_lengths_are_one_by_one(name, behind):
    """Values need no rotation, so they compare with a plain forward as they are."""
    chunks = CHUNKS if name != "phi3-longrope" else CHUNKS[:5]
    together = encoded(name, chunks, Encoding("x", behind))
    assert sorted(together) == list(range(len(chunks)))
    for index, chunk in enumerate(chunks):
        run = prefill(plain(name), behind + chunk)
        kv = together[index]
        assert kv.tokens == len(chunk)
        assert kv.start is None
        for layer in range(3):
            assert off(kv.values[layer], run.values[layer][:, len(behind) :]) <= 1e-5
        assert all(t.is_contiguous() for t in (*kv.keys, *kv.values)), "no view of the padded batch"


def test_small_batches_give_the_same(monkeypatch):
    whole = encoded("llama", CHUNKS, Encoding("standalone"))
    monkeypatch.setattr(encoder_room, "BATCH_TOKENS", 40)
    small = encoded("llama", CHUNKS, Encoding("standalone"))
    for index, kv in whole.items():
        assert all(off(a, b) <= 1e-5 for a, b in zip(kv.keys, small[index].keys, strict=True))


def test_a_prefix_keeps_the_keys_as_the_model_rotated_them():
    kv = encoded("gemma3", [CHUNKS[3]], Encoding("prefix"))[0]
    run = prefill(plain("gemma3"), CHUNKS[3])
    assert kv.start == 0
    assert all(torch.equal(a, b) for a, b in zip(kv.keys, run.keys, strict=True))


def test_an_empty_chunk_is_an_error_before_any_work():
    with pytest.raises(ValueError, match="empty chunk"):
        encoded("llama", [CHUNKS[0], ()], Encoding("standalone"))

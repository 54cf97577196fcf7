"""How much KV encoding holds between computing and storing, beside the store's budget."""

import weakref

import pytest
from forget_kit import BEFORE

from ragcachekit.encode import encoders as encoder
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.memory import HostStore

TEXTS = [f"Paragraph {number}: " + "the river Spree flows in Berlin. " * 4 for number in range(64)]


class Counting(HostStore):
    """Keeps nothing, and counts at each put how much KV is alive in the process."""

    def __init__(self, monkeypatch):
        super().__init__(1 << 30)
        self.alive = weakref.WeakSet()
        self.most = self.largest = self.puts = 0
        made = ChunkKV.__post_init__

        def count(kv):
            made(kv)
            self.alive.add(kv)

        monkeypatch.setattr(ChunkKV, "__post_init__", count)

    def put(self, key, kv):
        self.puts += 1
        self.largest = max(self.largest, kv.nbytes)
        self.most = max(self.most, sum(one.nbytes for one in list(self.alive)))
        return True


@pytest.mark.parametrize("bound", [1, 200_000])
@pytest.mark.parametrize("name", ["standalone", "system"])
def test_encoding_holds_one_batch_at_most(opened, monkeypatch, bound, name):
    store = Counting(monkeypatch)
    monkeypatch.setattr(encoder, "BATCH_BYTES", bound)
    opened(encoder=name, store=store).encode(TEXTS, system=BEFORE)
    assert store.puts >= len(TEXTS)
    assert store.largest < 200_000
    assert store.most <= max(bound, store.largest)

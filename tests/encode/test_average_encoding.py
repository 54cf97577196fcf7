"""``average:n``: means of encodings, against ordinary prefills."""

from itertools import combinations

import pytest
import torch
from test_similar_encoding import background_encoder

from families import off, plain, prefill, tokens
from link_kit import described, key_of
from ragcachekit.encode import in_prompt
from ragcachekit.model.encoding import AverageEncoding
from ragcachekit.plan.encodings import Encodings
from ragcachekit.plan.link_plan import Missing
from ragcachekit.plan.variants import VariantPool
from ragcachekit.prompt.segments import TokenSegment
from ragcachekit.store.memory import HostStore
from ragcachekit.types import KVKey, chunk_id

SYSTEM, CHUNK, JOINT = tokens(9, 1), tokens(14, 2), tokens(2, 8)
A, B, C = tokens(13, 3), tokens(11, 4), tokens(12, 5)


def encodings(name="llama", near=(A, B, C), count=3, joint=JOINT):
    return Encodings(f"average:{count}", described(name), 1, lambda ids: near if ids == CHUNK else (), joint)


def missing(ours, ids, system=SYSTEM):
    encoding, context = ours.encoding(ids, system)
    return Missing(key_of(ids, encoding, context), ids, encoding)


def stored(name, near, count, system=SYSTEM):
    """The mean KV of CHUNK, keys rotated to follow ``system``, by way of the store; and the store."""
    item, store = missing(encodings(name, near, count), CHUNK, system), HostStore(1 << 26)
    background_encoder(name, store).now([item])
    return item, store, store.get(item.key).kv


def in_order(name, group, system=SYSTEM):
    """Keys without RoPE and values of CHUNK behind a text and a group, from an ordinary prefill."""
    whole = (*system, *(i for ids in group for i in (*ids, *JOINT)), *CHUNK)
    run, start = prefill(plain(name), whole), len(whole) - len(CHUNK)
    angles = described(name).angles(torch.arange(start, len(whole)), len(whole))
    keys = [described(name).strip(i, k[:, start:], k[:, start:], angles)[0] for i, k in enumerate(run.keys)]
    return keys, [values[:, start:] for values in run.values]


@pytest.mark.parametrize("name", ["llama", "gemma3", "glm4", "gpt-oss"])
@pytest.mark.parametrize("system", [SYSTEM, ()], ids=["system", "nothing"])
def test_it_is_the_mean_of_ordinary_prefills(name, system):
    _, _, kv = stored(name, (A, B, C), 3, system)
    runs = [in_order(name, group, system) for group in ((C,), (B, C), (A, B, C))]
    for layer in range(kv.layers):
        keys, values = [run[0][layer] for run in runs], [run[1][layer] for run in runs]
        assert off(kv.keys[layer], sum(keys) / 3) <= 1e-5
        assert off(kv.values[layer], sum(values) / 3) <= 1e-5
        pairs = list(combinations(range(3), 2))
        moved = sum((values[i] - values[j]).square().sum((0, 2)) for i, j in pairs) / len(pairs)
        # Behind a window that hides the neighbours, only rounding moves.
        rounding = 1e-5 * max(float(one.abs().max()) for one in values)
        difference = (kv.sums["sensitivity"][layer] - moved.sqrt()).abs().max()
        assert difference <= 1e-4 * moved.sqrt().max() + rounding
    assert off(runs[0][1][-1], runs[1][1][-1]) > 1e-3, "the check sees other neighbours"


def test_of_one_neighbour_nothing_before_the_chunk_counts_too():
    _, _, kv = stored("llama", (A,), 3)
    runs = [in_order("llama", group) for group in ((), (A,))]
    for layer in range(kv.layers):
        one, other = runs[0][1][layer], runs[1][1][layer]
        assert off(kv.values[layer], (one + other) / 2) <= 1e-5
        assert off(kv.sums["sensitivity"][layer], (one - other).square().sum((0, 2)).sqrt()) <= 1e-4


@pytest.mark.parametrize("count", [2, 3])
def test_four_chunks_that_stand_behind_each_other_take_four_forwards(monkeypatch, count):
    chunks = (A, B, C, CHUNK)
    around = {ids: (*chunks[at + 1 :], *chunks[:at])[-count:] for at, ids in enumerate(chunks)}
    ours = Encodings(f"average:{count}", described("llama"), 1, around.__getitem__, JOINT)
    items = [missing(ours, ids) for ids in chunks]
    alone = HostStore(1 << 26)
    for item in items:
        background_encoder("llama", alone).now([item])
    lengths = []
    forward = in_prompt.prefill
    monkeypatch.setattr(
        in_prompt,
        "prefill",
        lambda m, prompts, *a: lengths.append(len(prompts[0])) or forward(m, prompts, *a),
    )
    together = HostStore(1 << 26)
    background_encoder("llama", together).now(items)
    assert len(lengths) == 4
    others = [len(SYSTEM) + len(JOINT) * count + sum(map(len, (ids, *around[ids]))) for ids in chunks]
    assert sorted(lengths) == sorted(others)
    for item in items:
        one, other = together.get(item.key).kv, alone.get(item.key).kv
        assert max(map(off, one.keys, other.keys)) <= 1e-5
        assert max(map(off, one.values, other.values)) <= 1e-5


@pytest.mark.parametrize("near", [{CHUNK: (A, B)}, {CHUNK: (A,), A: (CHUNK,)}], ids=["two", "each other"])
def test_the_entry_after_the_system_text_alone_is_stored_as_well_and_is_no_mean(near):
    """Where two chunks are each other's only neighbour, its forward counts for the mean, too."""
    ours, store = Encodings("average:3", described("llama"), 1, near.__getitem__, JOINT), HostStore(1 << 26)
    background_encoder("llama", store).now([missing(ours, ids) for ids in near])
    kv = store.get(missing(Encodings("system", described("llama"), 1), CHUNK).key).kv
    keys, values = in_order("llama", ())
    for layer in range(kv.layers):
        assert off(kv.keys[layer], keys[layer]) <= 1e-5
        assert off(kv.values[layer], values[layer]) <= 1e-5


def test_a_chunk_behind_two_texts_at_once():
    """Two prompts of one batch, as with a date in the system text."""
    items = [missing(encodings(near=(A,)), CHUNK, system) for system in (SYSTEM, B)]
    store = HostStore(1 << 26)
    background_encoder("llama", store).now(items)
    for item, system in zip(items, (SYSTEM, B), strict=True):
        one, other = (in_order("llama", group, system)[1][-1] for group in ((), (A,)))
        assert off(store.get(item.key).kv.values[-1], (one + other) / 2) <= 1e-5


class TestNames:
    def wanted(self, *chunks, system=SYSTEM, **options):
        segments = [TokenSegment(system, False)] if system else []
        segments += [TokenSegment(ids, True) for ids in chunks]
        return list(encodings(**options).wanted(segments, "model", "space"))

    def test_the_first_chunk_is_exact_behind_the_system_text(self):
        _, first, second = self.wanted(CHUNK, CHUNK)
        assert first.exact
        assert first.encoding.name == "system"
        assert not second.exact
        assert second.encoding.name == "average:3"
        assert first.average.encoding == "average:3"
        assert first.average.context == (chunk_id(SYSTEM, "space"),)
        assert second.plain == first.key
        assert second.in_place.context == (chunk_id(SYSTEM, "space"), chunk_id(CHUNK, "space"))
        assert second.key.context == tuple(chunk_id(ids, "space") for ids in (SYSTEM, A, B, C))

    def test_without_a_system_text_the_first_is_alone(self):
        first, second = self.wanted(CHUNK, CHUNK, system=())
        assert first.exact
        assert first.encoding.name == "standalone"
        assert first.average is None
        assert second.key.context[0] == chunk_id((), "space")
        assert second.plain == first.key
        assert second.in_place.context == (chunk_id((), "space"), chunk_id(CHUNK, "space"))

    def test_without_neighbours_it_is_the_plain_entry(self):
        _, _, second = self.wanted(A, B)
        assert second.encoding.name == "system"
        assert not second.exact
        assert second.plain is None

    def test_neighbours_that_do_not_fit_are_left_out(self):
        long = tuple(range(described("llama").context))
        _, _, second = self.wanted(A, CHUNK, near=(B, long))
        assert isinstance(second.encoding, AverageEncoding)
        assert second.encoding.neighbours == (B,)


def test_stored_means_are_found_whatever_is_behind_them():
    def key(*context, encoding="average:3", chunk="x", namespace="space"):
        return KVKey("model", namespace, chunk, encoding, context)

    averages = VariantPool()
    for one in (key("s", "z"), key("s", "a", "b"), key("s", encoding="system", chunk="y")):
        averages.add_average(one)
    assert averages.average(key("s")) == key("s", "a", "b")
    assert averages.average(key("t")) is None
    assert averages.latest(key("t")) == key("s", "a", "b")
    assert averages.latest(key("t", chunk="y")) is None
    averages.add_average(key("t"))
    assert averages.latest(key("s")) == key("t")
    averages.discard(key("t"))
    assert averages.latest(key("s")) is None
    assert averages.average(key("s", chunk="y")) is None
    averages.forget("other")
    averages.forget("space", frozenset(["c"]))
    assert averages.average(key("s", "c")) == key("s", "a", "b")
    averages.forget("space", frozenset(["b"]))
    assert averages.average(key("s")) is None


def test_stored_means_are_bounded(monkeypatch):
    monkeypatch.setattr("ragcachekit.plan.variants.MAX_AVERAGES", 2)
    keys = [KVKey("model", "space", chunk, "average:3", ("s",)) for chunk in "abc"]
    averages = VariantPool()
    averages.add_average(keys[0])
    averages.add_average(keys[1])
    averages.average(keys[0])
    averages.add_average(keys[2])
    assert [averages.average(key) for key in keys] == [keys[0], None, keys[2]]

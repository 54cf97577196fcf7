"""``similar:n`` against derivations that know neither our masks nor our rotations."""

import pytest
import torch

from families import columns, off, plain, prefill, stepwise, tokens, wrapped
from link_kit import described, key_of
from ragcachekit.encode.background import BackgroundEncoder
from ragcachekit.encode.encoders import ChunkEncoder, NeighbourEncoder, ingredients
from ragcachekit.encode.in_prompt import InPromptEncoder
from ragcachekit.forward.attention import install
from ragcachekit.plan.encodings import Encodings
from ragcachekit.plan.link_plan import Missing
from ragcachekit.store.forgets import ForgetEpochs
from ragcachekit.store.memory import HostStore

SYSTEM, CHUNK = tokens(9, 1), tokens(14, 2)
NEAR = (tokens(13, 3), tokens(11, 4), tokens(12, 5))  # most similar first
TOLERANCE = 1e-5
FAMILIES = ("llama", "gemma3", "glm4", "gpt-oss")


def wanted(name, system=SYSTEM, near=NEAR, chunk=CHUNK):
    """What to encode: ``chunk`` under similar:3."""
    encodings = Encodings("similar:3", described(name), 1, lambda _: near)
    encoding, context = encodings.encoding(chunk, system)
    return Missing(key_of(chunk, encoding, context), chunk, encoding)


def background_encoder(name, store):
    model, rope = wrapped(name), described(name)
    install(model)
    chunks = ChunkEncoder(model, rope)
    parts = (NeighbourEncoder(model, rope, chunks, store), InPromptEncoder(model, rope))
    return BackgroundEncoder(chunks, store, lambda: True, *parts, lambda *_: None, ForgetEpochs())


def encoded(name, item, store=None):
    """K at the positions behind the context, and V, by way of the store."""
    store = store or HostStore(1 << 26)
    background_encoder(name, store).now([item])
    kv = store.get(item.key).kv
    assert kv.start is None
    start = len(item.encoding.before) + sum(map(len, item.encoding.neighbours))
    angles = described(name).angles(torch.arange(start, start + kv.tokens), start + kv.tokens)
    keys = [described(name).place(i, k, k, angles)[0] for i, k in enumerate(kv.keys)]
    return keys, kv.values


def in_place(name, system, near):
    """Columns of the system text and of neighbours moved into place, all from ordinary forwards.

    A neighbour is run behind the system text with every position moved by as much as it stands
    further back: what it sees is at the same distances, so its hidden states are those of its own
    encoding, and its keys come out where they belong.
    """
    kept, at = {}, len(system)
    if system:
        kept |= columns(prefill(plain(name), system), range(len(system)), 0)
    for ids in near:
        moved = at - len(system)
        run = prefill(plain(name), (*system, *ids), range(moved, moved + len(system) + len(ids)))
        kept |= columns(run, range(len(system), len(system) + len(ids)), at)
        at += len(ids)
    return kept


def worst(theirs, keys, values):
    rows = slice(theirs.keys[0].shape[1] - keys[0].shape[1], None)
    pairs = [
        *zip(keys, (k[:, rows] for k in theirs.keys), strict=True),
        *zip(values, (v[:, rows] for v in theirs.values), strict=True),
    ]
    return max(off(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("system", [SYSTEM, ()], ids=["system", "nothing"])
def test_the_chunk_sees_text_and_neighbours_that_are_blind_to_each_other(name, system):
    keys, values = encoded(name, wanted(name, system))
    order = NEAR[::-1]  # the most similar one stands next to the chunk
    whole = (*system, *(i for ids in order for i in ids), *CHUNK)
    theirs = stepwise(plain(name), whole, in_place(name, system, order))
    assert worst(theirs, keys, values) <= TOLERANCE
    if name not in ("gemma3", "mistral-sliding"):  # windows of 8 hide the order of what is further off
        swapped = stepwise(plain(name), whole, in_place(name, system, order) | in_place(name, system, NEAR))
        assert worst(swapped, keys, values) > 1e-3, "the check sees a wrong neighbour"


@pytest.mark.parametrize("name", ["llama", "gemma3", "glm4"])
def test_behind_the_system_text_and_nothing_else_it_is_a_system_encoding(name):
    item = wanted(name, near=())
    assert item.encoding.name == item.key.encoding == "system"
    store = HostStore(1 << 26)
    background_encoder(name, store).now([item])
    kv, theirs = store.get(item.key).kv, prefill(plain(name), (*SYSTEM, *CHUNK))
    angles = described(name).angles(torch.arange(9, 23), 23)
    keys = [described(name).place(i, k, k, angles)[0] for i, k in enumerate(kv.keys)]
    assert worst(theirs, keys, kv.values) <= TOLERANCE


class TestIngredients:
    def test_are_stored_as_what_a_prompt_would_look_for(self):
        store = HostStore(1 << 26)
        item = wanted("llama")
        background_encoder("llama", store).now([item])
        assert store.stats()[0].entries == 5
        system = Encodings("system", described("llama"), 1)
        for near in NEAR:
            encoding, context = system.encoding(near, SYSTEM)
            assert key_of(near, encoding, context) in store
        assert [at for at, _ in ingredients(item)] == [0, 9, 21, 32]

    def test_come_from_the_store_where_it_has_them(self):
        store, item = HostStore(1 << 26), wanted("llama")
        parts = [part for _, part in ingredients(item)]
        work = background_encoder("llama", store)
        assert work.complete([item, item]) == [*parts, item]
        work.now(parts[1:3])
        assert work.complete([item]) == [parts[0], parts[3], item]

    def test_a_store_that_keeps_nothing_costs_time_only(self):
        heard = {}

        class Sieve(HostStore):
            def put(self, key, kv):
                heard[key] = kv
                return key == item.key and super().put(key, kv)

        item = wanted("llama")
        keys, values = encoded("llama", item, Sieve(1 << 26))
        assert len(heard) == 5
        theirs, others = encoded("llama", item)
        assert max(off(a, b) for a, b in zip((*keys, *values), (*theirs, *others), strict=True)) <= TOLERANCE

    def test_come_before_what_needs_them(self):
        order = []

        class Listening(HostStore):
            def put(self, key, kv):
                order.append(key)
                return super().put(key, kv)

        items = [wanted("llama", near=(tokens(3, 100 + i),), chunk=tokens(4, 200 + i)) for i in range(9)]
        background_encoder("llama", Listening(1 << 26)).now(
            [*items, wanted("llama", near=(), chunk=tokens(5, 99))]
        )
        assert len(order) == len(set(order)) == 2 * len(items) + 2
        place = {key: at for at, key in enumerate(order)}
        assert all(place[part.key] < place[item.key] for item in items for _, part in ingredients(item))


@pytest.mark.parametrize("system", [SYSTEM, ()], ids=["system", "no system"])
@pytest.mark.parametrize("name", FAMILIES)
def test_sensitivity_is_how_far_values_move_from_those_behind_the_system_text_alone(name, system):
    store, item = HostStore(1 << 26), wanted(name, system)
    _, values = encoded(name, item, store)
    alone = prefill(plain(name), (*system, *CHUNK))
    expected = [
        (behind.double() - other[:, len(system) :].double()).norm(dim=-1).square().sum(0).sqrt()
        for behind, other in zip(values, alone.values, strict=True)
    ]
    found = store.get(item.key).kv.sums["sensitivity"]
    assert found.shape == (len(values), len(CHUNK))
    assert torch.allclose(found.double(), torch.stack(expected), atol=TOLERANCE)
    assert float(found.max()) > 100 * TOLERANCE

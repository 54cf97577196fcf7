"""``RagCache(encoder="similar:n", neighbours=...)`` from text to text."""

import pytest
import torch

from families import off
from ragcachekit import Chunk, PrecedingChunks, Prompt, Text
from ragcachekit.store.memory import HostStore
from ragcachekit.types import chunk_id
from speaking import ONE, THREE, TWO, speaker

BEFORE = "Answer from the context.\n\nContext:\n"
ASKED = {"max_new_tokens": 4, "do_sample": False}
PROMPT = f"{BEFORE}{THREE}\n{TWO}\nWhere does the river flow?"


class Listed:
    """Neighbours from a dictionary."""

    def __init__(self, near):
        self.near = near

    def of(self, text):
        return self.near.get(text, ())


class Keys(HostStore):
    """Remembers what was put."""

    def __init__(self):
        super().__init__(1 << 26)
        self.put_keys = []

    def put(self, key, kv):
        self.put_keys.append(key)
        return super().put(key, kv)

    def under(self, name, encoding):
        return [k for k in self.put_keys if k.chunk_id == name and k.encoding == encoding]


@pytest.fixture
def keys():
    return Keys()


@pytest.fixture
def make(opened, keys):
    def make(neighbours, **options):
        own = {"policy": "reuse", "encoder": "similar:1", "cold": "never", "store": keys}
        return opened(neighbours=neighbours, **{**own, **options})

    return make


def used(answer):
    return [(c.tokens, c.source, c.exact) for c in answer.report.link.uses]


@torch.no_grad()
def prefilled(ids):
    return speaker()(input_ids=ids, use_cache=True).past_key_values


DOCUMENT = PrecedingChunks([[ONE, TWO, THREE]])


class TestEncodeAndAsk:
    def test_what_is_linked_is_what_the_neighbour_encoding_says(self, make):
        """Behind exactly text, a neighbour and a blank line a chunk is what a prefill computes."""
        rag = make(DOCUMENT)
        rag.encode([ONE, TWO], system=BEFORE)
        linked = rag.link(Prompt([Text(BEFORE), Chunk(ONE), Text("\n\n"), Chunk(TWO), Text("\nWhere?")]))
        assert linked.report.approximate_tokens > 0
        ids, cache = linked.input_ids, linked.cache
        theirs = prefilled(ids[:, :-1])
        for ours, layer in zip(cache.layers, theirs.layers, strict=True):
            assert off(ours.keys, layer.keys) < 1e-5
            assert off(ours.values, layer.values) < 1e-5

    @pytest.mark.parametrize("cold", ["now", "background"])
    def test_cold_chunks_are_encoded_behind_their_neighbours(self, make, keys, cold):
        rag = make(DOCUMENT, cold=cold, encode_after=1)
        rag.register([THREE, TWO])  # not the neighbour ONE: nobody ever retrieved it
        first = rag.generate(PROMPT, **ASKED)
        assert rag.flush(30)
        assert {s for _, s, _ in used(first)} == {"computed"}
        assert {s for _, s, _ in used(rag.generate(PROMPT, **ASKED))} == {"host"}
        tokens = rag.components.parser.tokens
        one, two, three = (chunk_id(tokens.chunk(t), "default") for t in (ONE, TWO, THREE))
        assert [k.context[1:] for k in keys.under(three, "similar:1")] == [(two,)]
        assert [k.context[1:] for k in keys.under(two, "similar:1")] == [(one,)]


class TestWithoutNeighbours:
    def test_unknown_chunks_are_encoded_behind_the_text(self, make):
        rag = make(Listed({}), cold="now")
        rag.register([TWO])
        prompt = f"{BEFORE}{TWO}\nWhere?"
        rag.generate(prompt, **ASKED)
        assert used(rag.generate(prompt, **ASKED))[1][2], "exact, as a system encoding is there"

    def test_an_index_that_fails_costs_the_encoding_not_the_answer(self, make, caplog):
        class Broken:
            def of(self, text):
                raise OSError("the index is gone")

        rag = make(Broken())
        rag.register([THREE, TWO])
        answer = rag.generate(PROMPT, **ASKED)
        assert len(answer.token_ids) > 0
        assert "the index is gone" in " ".join(answer.report.link.notes)
        assert "neighbours" in caplog.text
        with pytest.raises(OSError, match="the index is gone"):
            rag.encode([TWO], system=BEFORE)


class TestOtherNeighbours:
    def test_are_a_miss(self, make):
        source = Listed({TWO: [ONE]})
        rag = make(source)
        rag.encode([TWO], system=BEFORE)
        prompt = f"{BEFORE}{TWO}\nWhere?"
        assert used(rag.generate(prompt, **ASKED))[1][1] == "host"
        source.near = {TWO: [THREE, ONE]}
        assert used(rag.generate(prompt, **ASKED))[1][1] == "computed"
        source.near = {TWO: [TWO, ONE, THREE]}
        assert used(rag.generate(prompt, **ASKED))[1][1] == "host", "the chunk itself is not its neighbour"


class TestForget:
    def test_a_forgotten_neighbour_takes_what_was_encoded_behind_it_along(self, make, keys):
        rag = make(DOCUMENT)
        one, two, three = rag.encode([ONE, TWO, THREE], system=BEFORE)
        assert rag.forget([one]) == 2  # itself, and two behind it
        prompt = f"{BEFORE}{TWO}\nWhere?"
        answer = rag.generate(prompt, **ASKED)
        assert used(answer)[1][1] == "host", "two's own system encoding is left, and exact here"
        assert used(answer)[1][2]
        put = len(keys.put_keys)
        rag.encode([TWO], system=BEFORE)
        assert not any(one in (k.chunk_id, *k.context) for k in keys.put_keys[put:])
        assert [k.context[1] for k in keys.under(three, "similar:1")] == [two]

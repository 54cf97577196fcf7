"""Names, keys, order and budget of ``similar:n``."""

import pytest

from families import tokens
from link_kit import described, key_of, segments
from ragcachekit.plan.encodings import Encodings, NeighbourEncoding
from ragcachekit.store.base import concerns
from ragcachekit.types import chunk_id

SYSTEM, CHUNK = tokens(9, 1), tokens(14, 2)
NEAR = tuple(tokens(100, seed) for seed in (3, 4, 5, 6, 7))


def similar(name="similar:3", near=NEAR, family="llama"):
    return Encodings(name, described(family), 1, lambda ids: near if ids == CHUNK else ())


class TestNames:
    @pytest.mark.parametrize(
        ("name", "n", "written"),
        [("similar", 10, "similar:10"), ("similar:1", 1, "similar:1"), ("similar:007", 7, "similar:7")],
    )
    def test_are_read(self, name, n, written):
        encodings = similar(name)
        assert (encodings.neighbours, encodings.name) == (n, written)

    @pytest.mark.parametrize(
        "name",
        ["similar:", "similar:0", "similar:-1", "similar:x", "similar:²", "system:3", "sinks", "near:3"],
    )
    def test_bad_ones_say_what_to_write(self, name):
        with pytest.raises(ValueError, match="encoder"):
            similar(name)

    def test_unknown_ones_list_the_known(self):
        with pytest.raises(ValueError, match="standalone, sinks:4, system, similar:10"):
            similar("like:3")

    def test_rotation_that_depends_on_length_is_refused(self):
        with pytest.raises(ValueError, match="longrope"):
            similar(family="phi3-longrope")


class TestContext:
    def test_most_similar_stands_nearest(self):
        encoding, context = similar().encoding(CHUNK, SYSTEM)
        assert encoding == NeighbourEncoding("similar:3", SYSTEM, neighbours=(NEAR[2], NEAR[1], NEAR[0]))
        assert context == (SYSTEM, NEAR[2], NEAR[1], NEAR[0])

    def test_the_chunk_itself_repeats_and_empty_ones_are_left_out(self):
        near = (CHUNK, NEAR[0], (), NEAR[0], NEAR[1])
        assert similar("similar:2", near).encoding(CHUNK, SYSTEM)[1] == (SYSTEM, NEAR[1], NEAR[0])

    def test_the_least_similar_go_where_the_context_is_full(self):
        # 512 tokens: system 9, chunk 14, and four neighbours of 100.
        encoding, _ = similar("similar:5").encoding(CHUNK, SYSTEM)
        assert encoding.neighbours == NEAR[3::-1]
        room = 512 - 9 - 14
        exactly = similar(near=(tokens(room, 8), NEAR[0])).encoding(CHUNK, SYSTEM)[0]
        assert exactly.neighbours == (tokens(room, 8),)
        over = similar(near=(tokens(room + 1, 8), NEAR[0])).encoding(CHUNK, SYSTEM)[0]
        assert over.name == "system", (
            "one that does not fit ends the row: nothing less similar stands in for it"
        )

    def test_without_neighbours_it_is_the_system_encoding(self):
        system = Encodings("system", described("llama"), 1)
        for behind in (SYSTEM, ()):
            assert similar(near=()).encoding(CHUNK, behind) == system.encoding(CHUNK, behind)

    def test_without_text_neighbours_begin_the_context(self):
        encoding, context = similar("similar:1").encoding(CHUNK)
        assert encoding == NeighbourEncoding("similar:1", (), neighbours=NEAR[:1])
        assert context == ((), NEAR[0])

    def test_a_first_neighbour_is_never_taken_for_the_system_text(self):
        def key(near, system):
            return key_of(CHUNK, *similar("similar:2", near).encoding(CHUNK, system))

        assert key((NEAR[0], NEAR[1]), ()) != key((NEAR[0],), NEAR[1])


class TestKeys:
    def keys(self, near=NEAR, name="similar:3"):
        parts = segments(("text", SYSTEM), ("chunk", CHUNK), ("text", tokens(5, 9)), ("chunk", NEAR[0]))
        return list(similar(name, near).wanted(parts, "model", "space"))

    def test_of_a_prompt(self):
        text, chunk, other = self.keys()
        assert (text.key.encoding, text.exact) == ("prefix", True)
        assert (chunk.key.encoding, chunk.exact) == ("similar:3", False)
        assert chunk.key.context == tuple(chunk_id(c, "space") for c in (SYSTEM, NEAR[2], NEAR[1], NEAR[0]))
        assert (other.key.encoding, other.exact) == ("system", False), "it has no neighbours"

    def test_a_chunk_without_neighbours_behind_exactly_the_text_is_exact(self):
        _, chunk, _ = self.keys(near=())
        assert (chunk.key.encoding, chunk.exact) == ("system", True)

    @pytest.mark.parametrize("near", [NEAR[::-1], NEAR[1:], NEAR[:2], (NEAR[1], NEAR[0], NEAR[2])])
    def test_other_neighbours_or_another_order_are_another_entry(self, near):
        assert self.keys(near)[1].key != self.keys()[1].key

    def test_forgetting_a_neighbour_is_about_the_chunk(self):
        key = self.keys()[1].key
        assert concerns(key, "space", frozenset([chunk_id(NEAR[2], "space")]))
        assert not concerns(key, "space", frozenset([chunk_id(NEAR[3], "space")]))

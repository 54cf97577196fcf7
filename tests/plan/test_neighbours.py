"""The chunks that a chunk is encoded after: an index, a document, those registered with it."""

import numpy as np
import pytest

from ragcachekit import Neighbours, PrecedingChunks, SimilarChunks
from ragcachekit.plan.companions import Companions
from ragcachekit.types import chunk_id

TEXTS = ["north", "east", "north east", "south"]
ROWS = np.array([[0, 2.0], [3.0, 0], [1.0, 1.2], [0, -1.0]])


@pytest.mark.parametrize("source", [SimilarChunks(TEXTS, ROWS), PrecedingChunks([TEXTS])])
def test_all_keep_the_contract(source):
    assert isinstance(source, Neighbours)
    assert source.of("nowhere") == ()
    for text in TEXTS:
        found = list(source.of(text))
        assert found == list(source.of(f"\n{text} ")), "outer whitespace does not count"
        assert text not in found
        assert set(found) < set(TEXTS)


class TestSimilarChunks:
    def test_agrees_with_a_slow_search(self):
        rows = np.random.default_rng(0).normal(size=(40, 7))
        names = [f"chunk {i}" for i in range(40)]
        source = SimilarChunks(names, rows.astype(np.float32))
        for i in (0, 13, 39):
            cosine = [float(a @ rows[i]) / float(np.linalg.norm(a) * np.linalg.norm(rows[i])) for a in rows]
            expected = sorted((j for j in range(40) if j != i), key=lambda j: -cosine[j])
            assert source.of(names[i]) == tuple(names[j] for j in expected)

    def test_equals_stay_in_order_of_the_corpus(self):
        rows = np.tile(np.random.default_rng(1).normal(size=(1, 384)), (70, 1)) * np.arange(1, 71)[:, None]
        names = [f"chunk {i}" for i in range(70)]
        assert SimilarChunks(names, rows, most=100).of("chunk 3") == tuple(n for n in names if n != "chunk 3")

    def test_takes_what_embeds(self):
        asked = []

        def embed(texts):
            asked.append(texts)
            return ROWS.tolist()

        assert SimilarChunks(iter(TEXTS), embed, most=1).of("north") == ("north east",)
        assert asked == [TEXTS]

    def test_a_text_that_occurs_twice_is_one_chunk(self):
        source = SimilarChunks([*TEXTS, "east "], [*ROWS, [0, 1.0]])
        assert source.of("north") == ("north east", "east", "south")

    @pytest.mark.parametrize(
        ("rows", "match"),
        [(ROWS[:3], "one row per text"), (ROWS[0], "one row per text"), (ROWS * np.nan, "finite")],
    )
    def test_bad_rows_are_refused(self, rows, match):
        with pytest.raises(ValueError, match=match):
            SimilarChunks(TEXTS, rows)

    def test_a_row_of_zeros_is_similar_to_nothing(self):
        source = SimilarChunks(TEXTS, [*ROWS[:3], [0, 0]])
        assert source.of("south") == ()
        assert source.of("north") == ("north east", "east")


class TestPrecedingChunks:
    def test_nearest_first_within_the_document(self):
        source = PrecedingChunks([["a", "b", "c"], ["x", "y"]])
        assert [list(source.of(t)) for t in "abcxy"] == [[], ["a"], ["b", "a"], [], ["x"]]

    def test_the_first_place_of_a_text_counts(self):
        source = PrecedingChunks(iter([["a", "b"], ["x", "b"], ["b", "z"]]))
        assert list(source.of("b")) == ["a"]
        assert list(source.of("z")) == ["b"]


def letters(text):
    return tuple(ord(letter) for letter in text)


def name(text):
    return chunk_id(letters(text), "here")


class TestTokens:
    def source(self):
        return Companions({"here": PrecedingChunks([["a", "b", "c", "d"]])}, letters)

    def test_are_given_in_their_own_namespace_only(self):
        assert self.source().of("c", "here") == ((98,), (97,))
        assert self.source().of("c", "there") == ()
        assert not Companions({}, letters)

    def test_each_text_is_tokenised_once(self):
        asked = []
        source = Companions(
            {"here": PrecedingChunks([["a", "b", "c"]])}, lambda text: asked.append(text) or letters(text)
        )
        assert source.of("c", "here") == source.of("c", "here")
        assert asked == ["b", "a"]

    def test_forgotten_ones_are_left_out_until_they_come_again(self):
        source = self.source()
        source.forget("here", frozenset([name("b")]))
        assert source.of("d", "here") == ((99,), (97,))
        source.register("here", ["a"])
        assert source.of("d", "here") == ((99,), (97,))
        source.register("here", ["b"])
        assert source.of("d", "here") == ((99,), (98,), (97,))

    def test_after_all_is_forgotten_only_what_came_again_counts(self):
        source = self.source()
        source.forget("here", frozenset([name("b")]))
        source.forget("here")
        assert source.of("d", "here") == ()
        source.register("here", ["b", "c"])
        assert source.of("d", "here") == ((99,), (98,))
        source.forget("here", frozenset([name("c")]))
        assert source.of("d", "here") == ((98,),)

    def test_a_source_without_the_method_is_refused(self):
        with pytest.raises(TypeError, match="of\\(text\\)"):
            Companions({"here": {"a": ["b"]}}, letters)

    def test_one_string_is_no_answer(self):
        class Wrong:
            def of(self, text):
                return "abc"

        with pytest.raises(TypeError, match="list of strings"):
            Companions({"here": Wrong()}, letters).of("a", "here")


class TestRegisteredTogether:
    """Chunks of a namespace without a source."""

    @pytest.fixture
    def near(self):
        found = Companions({}, letters)
        return found, lambda text, namespace="here": "".join(chr(i) for (i,) in found.of(text, namespace))

    def test_those_of_one_block_stand_after_each_other(self, near):
        near[0].observe("here", "abcd")
        assert (near[1]("c"), near[1]("a\n"), near[1]("e"), near[1]("c", "there")) == ("abd", "cdb", "", "")

    def test_blocks_are_of_nearly_equal_size(self, near):
        near[0].observe("here", "abcdefghi")
        assert (near[1]("a"), near[1]("e"), near[1]("i")) == ("bc", "fd", "gh")

    def test_companions_stay_those_of_the_first_list(self, near):
        near[0].observe("here", "a")
        assert near[1]("a") == ""
        near[0].observe("here", "ab")
        near[0].observe("here", "cba")
        assert near[1]("a") == "b"
        assert near[1]("c") == "ba", "the only new one takes what is known"

    def test_of_a_list_longer_than_what_is_remembered_all_have_companions(self, near, monkeypatch):
        monkeypatch.setattr("ragcachekit.plan.companions.MAX_COMPANIONS", 4)
        near[0].observe("here", "abcdefgh")
        assert all(map(near[1], "abcdefgh"))
        near[0].observe("here", "xy")
        assert [bool(near[1](text)) for text in "afghxy"] == [False, False, True, True, True, True]

    def test_what_is_forgotten_is_no_companion(self, near):
        near[0].observe("here", "abc")
        near[0].forget("here", frozenset([name("b")]))
        assert (near[1]("a"), near[1]("b")) == ("c", "")
        near[0].observe("here", "ab")
        assert near[1]("b") == "a", "a prompt may still hold it, but no chunk is encoded after it"
        assert near[1]("a") == "c"
        near[0].forget("here")
        assert near[1]("a") == ""

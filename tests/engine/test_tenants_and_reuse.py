"""Namespaces are walls; encoding is idempotent; forgetting forgets; cold chunks are encoded as asked."""

import pytest

from engine_kit import PROMPT, RecordingStore, chunk, ids, rag_for, text, warmed
from families import greedy, plain
from ragcachekit import Chunk, Prompt, Text
from ragcachekit.policies.registry import known_policies, open_policy
from ragcachekit.types import chunk_id
from soak_kit import soaked
from speaking import ONE, TWO, byte_level

ASKED = {"max_new_tokens": 4, "do_sample": False}


@pytest.fixture
def reader(opened):
    return opened(cold="never", policy="lego:4", encoder="standalone")


class TestNamespaces:
    def test_one_tenant_never_sees_anothers_kv(self):
        rag = warmed("llama", PROMPT, policy="reuse", namespace="a")
        mine = rag.generate(PROMPT, **ASKED)
        theirs = rag.generate(PROMPT, namespace="b", **ASKED)
        assert mine.report.link.namespace == "a"
        assert mine.report.link.reused_tokens == 67
        assert theirs.report.link.namespace == "b"
        assert theirs.report.link.reused_tokens == 0
        assert theirs.token_ids == greedy(plain("llama"), ids(PROMPT), 4)
        assert not {c.chunk_id for c in mine.report.link.uses} & {c.chunk_id for c in theirs.report.link.uses}

    def test_texts_registered_by_one_are_not_looked_for_in_anothers_prompts(self, reader):
        reader.encode([ONE], namespace="a")
        prompt = f"Answer from:\n{ONE}\nWhere?"
        assert len(reader.generate(prompt, namespace="a", **ASKED).report.link.uses) == 2
        other = reader.generate(prompt, namespace="b", **ASKED).report.link
        assert (other.reused_tokens, other.uses) == (0, ())

    def test_forgetting_one_leaves_the_other(self, reader):
        reader.encode([ONE, TWO], namespace="a")
        reader.encode([ONE], namespace="b")
        assert reader.forget(namespace="a") == 2
        assert reader.stats()[0].entries == 1
        assert reader.forget(namespace="b") == 1

    @pytest.mark.parametrize("bad", ["", None, 3])
    def test_a_namespace_is_a_word(self, bad):
        with pytest.raises(ValueError, match="namespace"):
            rag_for("llama", namespace=bad)
        if bad is not None:
            with pytest.raises(ValueError, match="namespace"):
                rag_for("llama").generate(PROMPT, namespace=bad)


class TestEncode:
    def test_is_idempotent_and_returns_ids_in_order(self, reader):
        first = reader.encode([ONE, TWO, ONE])
        assert first[0] == first[2] != first[1]
        before = reader.stats()[0]
        assert before.entries == 2
        assert reader.encode([TWO, ONE]) == [first[1], first[0]]
        assert reader.stats()[0].entries == 2
        ids_of_one = byte_level()(ONE, add_special_tokens=False).input_ids
        assert first[0] == chunk_id(ids_of_one, "default")

    def test_empty_and_enormous_chunks(self, reader):
        with pytest.raises(ValueError, match="chunk 1 is empty"):
            reader.encode([ONE, ""])
        with pytest.raises(
            ValueError, match=r"chunk 0 has \d+ tokens, more than the model's context \(512\)"
        ):
            reader.encode(["Berlin " * 600])
        assert reader.stats()[0].entries == 0, "nothing of a refused call is kept"


class TestForget:
    def test_by_id(self, reader):
        one, _ = reader.encode([ONE, TWO])
        assert reader.forget([one]) == 1
        assert reader.forget([one]) == 0
        link = reader.generate(f"x\n{ONE}\n{TWO}\n?", **ASKED).report.link
        assert [use.source for use in link.uses] == ["computed", "computed", "host"]

    def test_follows_the_context_of_contextual_entries(self):
        rag = warmed("llama", PROMPT, encoder="system", policy="reuse")
        system = chunk_id(PROMPT.segments[0].token_ids, "default")
        assert rag.forget([system]) == 3, "the prefix and both chunks encoded behind it"
        assert rag.stats()[0].entries == 0


def test_neighbouring_texts_are_one_text():
    """The prefix, and what a chunk stands behind, go up to the first chunk however they are cut."""
    cut = Prompt([text(5, 1), text(4, 2), chunk(30, 3), text(2, 4), text(3, 5)])
    rag = warmed("llama", cut, encoder="system", policy="reuse")
    link = rag.generate(cut, **ASKED).report.link
    assert (link.exact_tokens, link.computed_tokens) == (39, 5)
    whole = Prompt([Text(token_ids=ids(cut)[:9]), Chunk(token_ids=ids(cut)[9:39]), text(2, 4)])
    assert rag.generate(whole, **ASKED).report.link.exact_tokens == 39


POLICIES = [
    *(name for name in known_policies() if name != "full" and not name.startswith("budget")),
    "lego:1000",
]


@pytest.mark.parametrize("encoder", soaked(("standalone", "system", "sinks:2"), "standalone"))
def test_stored_tensors_are_byte_identical_after_many_uses(encoder):
    store = RecordingStore()
    rag = warmed("gemma3", PROMPT, store=store, policy="lego:4", encoder=encoder)
    last = Prompt([text(9, 1), chunk(33, 2)])
    for number, policy in enumerate(POLICIES):
        own = open_policy(policy).encoder
        if own not in (None, encoder) or (own is None and encoder != "standalone" and number % 3):
            continue  # what a policy does with stored tensors does not depend on who encoded them
        rag.generate(PROMPT, policy=policy, **ASKED)
        rag.generate(PROMPT, policy=policy, max_new_tokens=2, num_beams=2)
        rag.generate_batch([PROMPT, last, PROMPT], policy=policy, **ASKED)
        rag.generate(last, policy=policy, **ASKED)
        rag.model.generate(**rag.link(PROMPT, policy=policy).inputs, max_new_tokens=2)
        rag.model.generate(**rag.link(last, policy=policy).inputs, max_new_tokens=2)
    assert len(store.originals) == 3
    assert store.unchanged()
    kv, _ = next(iter(store.originals.values()))
    kv.values[0][0, 0, 0] += 1
    assert not store.unchanged(), "the check can fail"

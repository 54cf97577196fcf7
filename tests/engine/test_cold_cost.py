"""What a miss costs: rows that are an encoding are kept as they were computed, others are encoded later."""

import pytest

from engine_kit import EXACT, PROMPT, RecordingStore, chunk, ids, rag_for, text
from families import greedy, off, plain, prefill
from ragcachekit import Prompt
from ragcachekit.encode.encoders import ChunkEncoder
from ragcachekit.types import chunk_id

ASKED = {"max_new_tokens": 6, "do_sample": False}
SYSTEM = "Answer from the context.\n\nContext:\n"
FACT, OTHER = "Berlin is the capital of Germany.", "The river Seine flows in Paris."
KINDS = {
    "prefix and system": (EXACT, "system"),
    "standalone": (Prompt([chunk(40, 2), text(6, 4)]), "standalone"),
}


def sides(kv):
    return (*kv.keys, *kv.values)


@pytest.fixture
def forwards(monkeypatch):
    """Tokens of the chunks that were encoded by forwards of their own."""
    runs, forward = [], ChunkEncoder.forward

    def counted(self, chunks, encoding):
        runs.extend(map(len, chunks))
        return forward(self, chunks, encoding)

    monkeypatch.setattr(ChunkEncoder, "forward", counted)
    return runs


@pytest.mark.parametrize("cold", ["now", "background"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_kept_are_what_the_encoder_computes(name, kind, cold, forwards):
    """A batch keeps nothing, so that the second engine encodes: the same KV."""
    prompt, encoder = KINDS[kind]
    kept, encoded = RecordingStore(), RecordingStore()
    with rag_for(name, encoder=encoder, policy="reuse", store=kept, cold=cold) as rag:
        rag.generate(prompt, max_new_tokens=3)
        assert rag.flush(60)
        assert 40 not in forwards
    with rag_for(name, encoder=encoder, policy="reuse", store=encoded) as rag:
        rag.link(prompt)
        assert 40 in forwards
    assert sorted(key.encoding for key in kept.originals) == sorted(kind.split(" and "))
    for key, (kv, _) in kept.originals.items():
        other, _ = encoded.originals[key]
        assert kv.start == other.start
        assert set(kv.sums) == {"token_ids", "key"} == set(other.sums)
        for ours, theirs in zip(sides(kv), sides(other), strict=True):
            assert off(ours, theirs) <= 1e-5


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_next_request_takes_the_kept_rows_as_exact(name, forwards):
    store = RecordingStore()
    with rag_for(name, encoder="system", policy="reuse", store=store, cold="background") as rag:
        forwards.clear()  # of the model's check
        rag.generate(EXACT, **ASKED)
        assert rag.flush(60)
        later = Prompt([text(9, 1), chunk(40, 2), chunk(25, 3), text(6, 5)])
        answer = rag.generate(EXACT, **ASKED)
        report = rag.generate(later, **ASKED).report.link
    assert answer.token_ids == greedy(plain(name), ids(EXACT), 6)
    assert answer.report.link.exact_tokens == 49
    assert [(use.tokens, use.exact) for use in report.uses] == [(9, True), (40, True), (25, False)]
    assert forwards == []
    values = prefill(plain(name), ids(EXACT)).values
    (stored,) = (kv for key, (kv, _) in store.originals.items() if key.encoding == "system")
    assert all(off(ours, theirs[:, 9:49]) <= 1e-5 for ours, theirs in zip(stored.values, values, strict=True))


class TestEncodeAfter:
    def encoded(self, rag, store, prompt):
        rag.generate(prompt, max_new_tokens=1)
        assert rag.flush(60)
        return sorted(kv.tokens for kv, _ in store.originals.values())

    @pytest.mark.parametrize(
        ("options", "misses"), [({}, 2), ({"encode_after": 1}, 1), ({"encode_after": 3}, 3)]
    )
    def test_a_chunk_is_encoded_after_its_last_miss(self, options, misses):
        store = RecordingStore()
        with rag_for("llama", encoder="system", store=store, cold="background", **options) as rag:
            for _ in range(misses - 1):
                assert self.encoded(rag, store, PROMPT) == [9, 33]
            assert self.encoded(rag, store, PROMPT) == [9, 25, 33]
            assert [use.source for use in rag.link(PROMPT).report.uses] == ["host"] * 3

    @pytest.mark.parametrize("everything", [True, False])
    def test_forget_begins_the_count_anew(self, everything):
        store = RecordingStore()
        with rag_for("llama", encoder="system", store=store, cold="background") as rag:
            self.encoded(rag, store, PROMPT)
            rag.forget(None if everything else [chunk_id(PROMPT.segments[2].token_ids, "default")])
            assert self.encoded(rag, store, PROMPT) == [9, 33]
            assert self.encoded(rag, store, PROMPT) == [9, 25, 33]

"""What a report says is kept of a prompt is what store and tree hold afterwards; keep="marked"."""

import random

import pytest

from engine_kit import FOLDER, PROMPT, chunk, rag_for, stored_in, text
from ragcachekit import Prompt, RagCache, TreeConfig
from ragcachekit.prompt.segments import marked
from server_kit import DOCUMENTS, QUESTION
from snapshots_kit import rag_of
from speaking import byte_level, speaker
from tree_kit import nodes

LENGTH = 9 + 33 + 25 + 6
REVERSED = Prompt([PROMPT.segments[0], *PROMPT.segments[2:0:-1], text(7, 8)])


def asked(rag, prompt, **options):
    report = rag.generate(prompt, max_new_tokens=1, **options).report.link
    assert rag.flush()
    assert report.written_tokens + report.reused_tokens + report.recomputed_tokens <= report.prompt_tokens
    return report


def held(rag):
    """Tokens in the chunk store."""
    store = rag.components.store
    return sum(store.get(key, 0.0).kv.tokens for key in stored_in(rag))


def tree_tokens(rag):
    return sum(node.step.tokens for node in nodes(rag.components.tree))


@pytest.mark.parametrize("cold", ["now", "background"])
@pytest.mark.parametrize(
    ("encoder", "written"), [("standalone", 9), ("system", 9 + 33), ("in-prompt", 67), ("average:2", 67)]
)
def test_rows_that_a_prompt_computed_for_the_chunk_store(encoder, written, cold):
    with rag_for("llama", policy="reuse", encoder=encoder, cold=cold) as rag:
        report = asked(rag, PROMPT)
        stats = rag.encoding_stats()
        assert report.written_tokens == stats.captured_tokens == written
        assert held(rag) == stats.captured_tokens + stats.encoded_tokens
        assert asked(rag, PROMPT).written_tokens == 0, "all of it is there"


def test_nothing_where_nothing_may_be_kept():
    with rag_for("llama", policy="reuse", encoder="in-prompt", cold="never") as rag:
        assert asked(rag, PROMPT).written_tokens == held(rag) == 0


def test_recomputed_rows_are_not_written_again():
    with rag_for("llama", policy="lego:8", encoder="average:2") as rag:
        asked(rag, PROMPT)
        before = held(rag)
        report = asked(rag, Prompt([*PROMPT.segments[:3], chunk(20, 9), PROMPT.segments[3]]))
        assert report.recomputed_tokens > 0
        assert report.written_tokens == held(rag) - before == 20


def test_a_turn_holds_the_whole_prompt():
    tree = TreeConfig(turns_bytes=1 << 24)
    with rag_for("llama", policy="reuse", tree=tree) as rag:
        assert asked(rag, PROMPT).written_tokens == LENGTH
        report = asked(rag, REVERSED)
        assert report.written_tokens == report.computed_tokens > 0


def test_the_tree_grows_by_what_is_written():
    draw = random.Random(3)
    chunks = [chunk(draw.randint(18, 60), seed) for seed in range(20, 25)]
    with rag_for("llama", policy="prefix", cold="background", tree=TreeConfig()) as rag:
        known = 0
        for seed in range(12):
            picked = draw.sample(chunks, draw.randint(0, 3))
            report = asked(rag, Prompt([text(draw.choice((9, 70)), 1), *picked, text(7, seed)]))
            assert report.written_tokens == tree_tokens(rag) - known
            known = tree_tokens(rag)
        assert known > 200


def test_a_model_whose_chunks_cannot_be_linked():
    with rag_of("mamba2", policy="reuse", tree=TreeConfig()) as rag:
        assert asked(rag, PROMPT).written_tokens == tree_tokens(rag) == 67
        assert asked(rag, PROMPT).written_tokens == 0


def user(*blocks):
    texts = [block if isinstance(block, dict) else {"type": "text", "text": block} for block in blocks]
    return [
        {"role": "system", "content": "Answer from the documents. " * 3},
        {"role": "user", "content": texts},
    ]


@pytest.fixture(params=[0, 1 << 24])
def rag(request):
    options = {"policy": "reuse", "encoder": "average:2", "cold": "now", "cache_dir": FOLDER.name}
    tree = TreeConfig(turns_bytes=request.param)
    with RagCache(speaker(), byte_level(), tree=tree, **options) as rag:
        rag.register([DOCUMENTS[1]])
        yield rag


def test_without_a_mark_nothing_is_kept(rag):
    messages = user(f"{DOCUMENTS[1]}\n\n{QUESTION}")
    assert asked(rag, messages, keep="marked").written_tokens == 0
    assert (stored_in(rag), tree_tokens(rag)) == ([], 0)
    assert all(record.entries == 0 for record in rag.stats())
    assert asked(rag, messages).written_tokens > 0
    assert asked(rag, messages, keep="marked").reused_tokens > 0, "it may be read"


def test_what_is_before_the_last_mark_is_kept(rag):
    messages = user(marked(DOCUMENTS[0]), "\n\n", f"{DOCUMENTS[1]}\n\n{QUESTION}")
    report = asked(rag, messages, keep="marked")
    first, second = report.chunks
    kept = report.prefix.tokens + first.tokens
    assert report.written_tokens == tree_tokens(rag) == kept
    stored = {key.chunk_id for key in stored_in(rag)}
    assert stored & {first.chunk_id, second.chunk_id} == {first.chunk_id}
    again = asked(rag, messages, keep="marked")
    assert (again.reused_tokens, again.written_tokens) == (kept, 0)
    with pytest.raises(ValueError, match="all, marked"):
        rag.submit(QUESTION, keep="none")

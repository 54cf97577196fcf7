"""Chunks in prompts by the ids that encode returned, instead of their texts (EPIC section 3)."""

import asyncio

import pytest

from langchain_ragcachekit import ChatRagCache
from ragcachekit import Chunk, Prompt, StoreConfig, Text, agenerate
from ragcachekit.errors import UnknownChunk
from speaking import ONE, TWO

ASKED = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": -1}
START, QUESTION = "Answer from the context.\n", "\nWhere does the river flow?"


def segments(how, *chunks):
    parts = [piece for one in chunks for piece in (Chunk(**{how: one}), Text("\n\n"))]
    return Prompt([Text(START), *parts, Text(QUESTION)])


def messages(how, *chunks):
    parts = [piece for one in chunks for piece in ({"type": "text", how: one, "chunk": True}, "\n\n")]
    return [{"role": "user", "content": [START, *parts, QUESTION]}]


@pytest.fixture
def rag(opened):
    return opened(policy="lego:4", encoder="standalone", cold="never")


@pytest.mark.parametrize("form", [segments, messages])
def test_tokens_answer_and_report_are_those_of_the_text(rag, form):
    texts = [ONE, TWO + " \n", "Oslo."]
    by_id, by_text = form("id", *rag.encode(texts)), form("text", *texts)
    answer, same = rag.generate(by_text, **ASKED), rag.generate(by_id, **ASKED)
    assert same.token_ids == answer.token_ids
    assert [use.source for use in same.report.link.chunks] == ["host"] * 3
    assert same.report.link.uses == answer.report.link.uses
    assert rag.link(by_id).input_ids.tolist() == rag.link(by_text).input_ids.tolist()
    assert rag.inspect(by_id).pieces == rag.inspect(by_text).pieces
    assert rag.diagnose(by_id, [ONE]).chunks[0].found
    asynchronous = asyncio.run(agenerate(rag, by_id, **ASKED))
    for other in (rag.generate_batch([by_id], **ASKED)[0], asynchronous):
        assert other.token_ids == answer.token_ids
    assert "".join(rag.stream(by_id, **ASKED)) == answer.text
    if form is messages:
        chat = ChatRagCache(rag=rag, max_tokens=8, generate_kwargs={"eos_token_id": -1})
        assert chat.invoke(by_id).content == answer.text
    with pytest.raises(UnknownChunk):
        rag.stream(form("id", "0" * 64))


@pytest.mark.parametrize("form", [segments, messages])
@pytest.mark.parametrize(
    "forget", [{"ids": ()}, {"texts": [ONE]}, {"texts": ["The river Spree"]}, {}], ids=str
)
def test_what_is_forgotten_has_no_text_any_more(rag, form, forget):
    one, two = rag.encode([ONE, TWO])
    rag.forget(**({"ids": [one]} if "ids" in forget else forget))
    with pytest.raises(UnknownChunk, match="encode it again"):
        rag.generate(form("id", one), **ASKED)
    if forget:
        assert rag.generate(form("id", two), **ASKED).report.link.chunks[0].source == "host"


def test_another_namespaces_id_is_like_one_that_never_was(rag):
    (theirs,), said = rag.encode([ONE], namespace="bob"), set()
    for name in (theirs, "0" * 64):
        with pytest.raises(UnknownChunk) as error:
            rag.generate(segments("id", name), namespace="ada")
        said.add(str(error.value).replace(name, "ID"))
    assert len(said) == 1


def test_after_a_restart_texts_are_encoded_again_at_no_cost(opened, tmp_path):
    options = {"store": StoreConfig(disk_path=tmp_path), "policy": "lego:4", "encoder": "standalone"}
    with opened(**options) as first:
        ids = first.encode([ONE, TWO])
    with opened(**options) as second:
        with pytest.raises(UnknownChunk, match="stored is not computed again"):
            second.generate(segments("id", *ids), **ASKED)
        assert second.encode([ONE, TWO]) == ids
        assert second.encoding_stats().encoded_tokens == 0
        answer = second.generate(segments("id", *ids), **ASKED)
        assert {use.source for use in answer.report.link.chunks} == {"disk"}


@pytest.mark.parametrize(("given", "error"), [({"text": "a", "id": "b"}, ValueError), ({"id": 7}, TypeError)])
def test_a_chunk_is_one_of_text_token_ids_and_id(given, error):
    with pytest.raises(error, match=r"exactly one of|must be str"):
        Chunk(**given)

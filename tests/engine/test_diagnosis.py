"""Why a document of a prompt is not found as a chunk, and what to change."""

import copy
import html
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document
from llama_index.core.schema import NodeWithScore, TextNode

from ragcachekit import RagCache
from ragcachekit.engine.inspection import ADVICE, diagnose, difference
from ragcachekit.prompt.parser import PromptParser
from speaking import byte_level, speaker

ONE = "Berlin is the capital of Germany. The river Spree flows & ends in Berlin."
TWO = "Paris is the capital of France; the river Seine flows in Paris."
PARTS = f"{ONE}\n\n{TWO}"
QUESTION = "Answer from the context.\n\n{}\n\nWhere does the river flow?"


def messages(context: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": QUESTION.replace("{}", context)}]


@pytest.fixture(scope="module")
def prompts():
    return PromptParser(byte_level())


@pytest.fixture(scope="module")
def rag(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with RagCache(speaker(), byte_level(), cache_dir=folder, cold="never", policy="reuse") as rag:
        rag.register([ONE, TWO])
        rag.register([f"{ONE} {TWO}"], namespace="joined")
        yield rag


def reasons(found) -> list[str]:
    return [chunk.why for chunk in found.chunks]


@pytest.mark.parametrize("prompt", [QUESTION.replace("{}", PARTS), messages(PARTS)])
@pytest.mark.parametrize(
    "documents",
    [
        [ONE, TWO],
        [Document(ONE), Document(TWO)],
        [NodeWithScore(node=TextNode(text=ONE, metadata={"file": "a"})), TextNode(text=TWO)],
    ],
)
def test_all_are_found(rag, prompt, documents) -> None:
    found = rag.diagnose(prompt, documents)
    assert reasons(found) == ["found", "found"]
    assert not found.missing
    assert all(f"{rag.inspect(prompt).report.chunks[at].tokens}" for at in (0, 1))


@pytest.mark.parametrize(
    ("context", "documents", "why"),
    [
        (html.escape(PARTS), [ONE, TWO], ["HTML-escaped", "found"]),
        (f"{ONE}\n\nSpree", [ONE, "Spree"], ["found", "too short"]),
        (f"x{ONE}\n\n{TWO}", [ONE, TWO], ["word runs on", "found"]),
        (f"{ONE} {TWO}", [f"{ONE} {TWO[:24]}", f"{ONE[34:]} {TWO}"], ["found", "overlapped"]),
    ],
)
def test_reasons(prompts, context, documents, why) -> None:
    prompts.register(context, documents)
    found = diagnose(prompts, messages(context), documents, context)
    assert reasons(found) == why
    for chunk in found.chunks:
        assert chunk.advice == ADVICE.get(chunk.why, "")
        assert chunk.found == (chunk.why == "found")
    assert len(found.missing) == sum(reason != "found" for reason in why)


def test_what_is_not_registered_is_told_from_what_is_altered(rag) -> None:
    third = "Rome is the capital of Italy, and the river Tiber flows in Rome."
    found = rag.diagnose(messages(f"{PARTS}\n\n{third}"), [ONE, TWO, third])
    assert reasons(found) == ["found", "found", "not registered"]
    assert reasons(rag.diagnose(messages(PARTS), [ONE, TWO], namespace="other")) == ["not registered"] * 2


def test_a_template_that_alters_contents_is_named() -> None:
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] | replace('Where', 'Whence') | truncate(2000) }}"
        "{% if 'Berlin' in m['content'] %}!{% endif %}{% endfor %}"
    )
    parser = PromptParser(tokenizer)
    parser.register("acme", [ONE])
    found = diagnose(parser, messages(PARTS), [ONE], "acme")
    assert reasons(found) == ["template"]
    assert "computed in full" in found.notes[0]
    assert "leaves contents as they are" in str(found)


def test_other_documents_are_refused(rag) -> None:
    with pytest.raises(TypeError, match="document 2 is a int"):
        rag.diagnose(PARTS, [ONE, 2])


TEXT = (
    'The "Old Mill" stands by the river; it was built in 1874.\nIts wheel was made of oak & iron.\n\n'
    "Nobody has ground flour there since the flood, and the town keeps it as a museum."
)


def why(document: str, made: str) -> str:
    return difference(document, QUESTION.replace("{}", made)).why


@pytest.mark.parametrize(
    ("kind", "made"),
    [
        ("HTML-escaped", html.escape(TEXT)),
        ("JSON-escaped", json.dumps(TEXT)),
        ("printed as Python", f"[Document(page_content={TEXT!r})]"),
        ("whitespace", TEXT.replace("\n", " ")),
        ("truncated", TEXT[:90] + "..."),
        ("altered", TEXT[:80] + "\nsource: mill.txt\n" + TEXT[80:]),
        ("absent", "Paris is the capital of France; the river Seine flows in Paris."),
    ],
)
def test_kinds(kind, made) -> None:
    assert why(TEXT, made) == kind


def test_the_first_difference_is_shown() -> None:
    found = difference(TEXT, QUESTION.replace("{}", TEXT.replace("oak", "wood")))
    assert (found.document[:15], found.prompt[:16]) == (" was made of oak"[1:], " was made of wood"[1:])


@given(st.text(max_size=300), st.text(max_size=300))
def test_nothing_makes_it_fail(document, prompt) -> None:
    assert difference(document, prompt).why

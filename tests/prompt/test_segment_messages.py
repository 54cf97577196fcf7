"""Chat messages through templates of several temperaments: found chunks, or a named fallback."""

import html
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcachekit.prompt.segments import MARK, ChunkRegistry, Segmentation, marked, segment_messages
from ragcachekit.prompt.tokenizer import SpecialTokenTexts
from ragcachekit.types import Chunk

BERLIN = "Berlin is the capital of Germany."
PARIS = "Paris is the capital of France."


def chatml(messages) -> str:
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


def llama(messages) -> str:
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    turns = [head.format(m["role"]) + m["content"].strip() + "<|eot_id|>" for m in messages]
    return "<|begin_of_text|>" + "".join(turns) + head.format("assistant")


def no_system(messages) -> str:
    if messages[0]["role"] == "system":
        raise ValueError("System role not supported")
    return chatml(messages)


def printing_lists(messages) -> str:
    return "".join(f"[{m['role']}] {m['content']!s}\n" for m in messages)


def escaping(messages) -> str:
    return chatml([{**m, "content": html.escape(m["content"])} for m in messages])


def doubling(messages) -> str:
    return chatml(messages) + f"(last said: {messages[-1]['content']})"


def dropping_first(messages) -> str:
    return chatml(messages[1:])


def reversing(messages) -> str:
    return chatml(messages[::-1])


def upper(messages) -> str:
    return chatml(messages).upper()


def needs_the_word_capital(messages) -> str:
    if "capital" not in messages[-1]["content"]:
        raise RuntimeError("where is the capital?")
    return chatml(messages)


def drops_thoughts(messages) -> str:
    return chatml([{**m, "content": m["content"].split("</think>")[-1]} for m in messages])


FAITHFUL = [chatml, llama, printing_lists]


def registry_of(*texts: str, namespace: str = "acme") -> ChunkRegistry:
    registry = ChunkRegistry()
    registry.add(namespace, texts)
    return registry


def segment(messages, render, *chunks: str, namespace: str = "acme") -> Segmentation:
    return segment_messages(messages, render, registry_of(*chunks), namespace, SpecialTokenTexts())


def texts(result: Segmentation) -> str:
    return "".join(s.text or "" for s in result.segments)


def chunk_texts(result: Segmentation) -> list[str]:
    return [s.text or "" for s in result.segments if isinstance(s, Chunk)]


def conversation(context: str) -> list[dict[str, object]]:
    return [
        {"role": "system", "content": "Answer from the context."},
        {"role": "user", "content": f"{context}\n\nQuestion: where?"},
    ]


@pytest.mark.parametrize("render", FAITHFUL)
def test_registered_chunks_are_found_behind_the_template(render) -> None:
    messages = conversation(f"Context:\n{BERLIN}\n\n{PARIS}\n\n{BERLIN}")
    result = segment(messages, render, BERLIN, PARIS)
    assert chunk_texts(result) == [BERLIN, PARIS, BERLIN]
    assert texts(result) == render(messages)
    assert result.fallback is None
    assert result.notes == ()


@pytest.mark.parametrize("render", FAITHFUL)
def test_marked_blocks_are_chunks_without_being_registered(render) -> None:
    blocks = ["Context: ", marked("short"), {"type": "text", "text": " and "}, marked(PARIS), " Where?"]
    result = segment([{"role": "user", "content": blocks}], render)
    assert chunk_texts(result) == ["short", PARIS]
    assert texts(result) == render([{"role": "user", "content": f"Context: short and {PARIS} Where?"}])


def test_marks_win_over_searching() -> None:
    blocks = [f"Known: {BERLIN} ", marked(f"{BERLIN} {PARIS}"), {"type": "text", "text": PARIS, MARK: False}]
    result = segment([{"role": "user", "content": blocks}], chatml, BERLIN, PARIS)
    assert chunk_texts(result) == [BERLIN, f"{BERLIN} {PARIS}", PARIS]


def test_a_trimming_template_takes_the_margin_off_the_last_chunk() -> None:
    chunk = f"{BERLIN}\n"
    messages = [{"role": "system", "content": f"\n{chunk}{chunk}"}, {"role": "user", "content": "Where?"}]
    result = segment(messages, llama, chunk)
    assert chunk_texts(result) == [chunk, BERLIN]
    assert texts(result) == llama(messages)
    assert result.fallback is None
    kept = segment(messages, chatml, chunk)
    assert chunk_texts(kept) == [chunk, chunk]


@pytest.mark.parametrize(
    ("render", "reason"),
    [
        (escaping, "changes chunk texts"),
        (doubling, "drops, repeats, reorders"),
        (reversing, "drops, repeats, reorders"),
        (upper, "drops, repeats, reorders"),
        (needs_the_word_capital, "where is the capital?"),
    ],
)
def test_templates_that_touch_contents_fall_back_to_the_plain_prompt(render, reason) -> None:
    chunk = "Berlin & Bonn: the <capital> moved in 1999."
    messages = [{"role": "system", "content": f"Use {chunk}"}, {"role": "user", "content": f"{chunk} Where?"}]
    result = segment(messages, render, chunk)
    assert [s.text for s in result.segments] == [render(messages)]
    assert chunk_texts(result) == []
    assert result.fallback is not None
    assert reason in result.fallback


def test_a_dropped_message_with_a_chunk_falls_back_and_one_without_does_not() -> None:
    with_chunk = [{"role": "system", "content": BERLIN}, {"role": "user", "content": "Where?"}]
    assert segment(with_chunk, dropping_first, BERLIN).fallback is not None
    assert texts(segment(with_chunk, dropping_first, BERLIN)) == dropping_first(with_chunk)
    without = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": BERLIN}]
    assert chunk_texts(segment(without, dropping_first, BERLIN)) == [BERLIN]


def test_a_clock_in_the_template_matters_only_when_it_ticks() -> None:
    ticks = itertools.count()

    def ticking(messages) -> str:
        return f"Time: {next(ticks)}\n" + chatml(messages)

    def today(messages) -> str:
        return "Today: 21 Nov\n" + chatml(messages)

    moved = segment(conversation(BERLIN), ticking, BERLIN)
    assert moved.fallback is not None
    assert "differently each time" in moved.fallback
    assert texts(moved) == "Time: 0\n" + chatml(conversation(BERLIN))
    assert chunk_texts(segment(conversation(BERLIN), today, BERLIN)) == [BERLIN]


def test_a_template_that_refuses_the_messages_says_so_itself() -> None:
    with pytest.raises(ValueError, match="System role not supported"):
        segment(conversation(BERLIN), no_system, BERLIN)
    assert chunk_texts(segment([{"role": "user", "content": BERLIN}], no_system, BERLIN)) == [BERLIN]


def test_documents_that_contain_sentinels_stay_themselves() -> None:
    sly = "Zq7xChunk0N000000E and Zq7xChunk1N000001E were here, Zq7xChunk"
    messages = conversation(f"{sly}\n{BERLIN}\n{sly}")
    result = segment(messages, chatml, BERLIN, sly)
    assert chunk_texts(result) == [sly, BERLIN, sly]
    assert texts(result) == chatml(messages)


def test_a_search_that_ended_early_is_noted_with_the_message_it_is_in() -> None:
    messages = conversation(f"{BERLIN} " + "a " * 40_000)
    result = segment(messages, chatml, BERLIN, *("a " * 20_000 + f"{n} X" for n in range(40)))
    assert chunk_texts(result) == [BERLIN]
    (note,) = result.notes
    assert note.startswith("message 2: chunks were searched for in the first ")


def test_other_keys_and_missing_contents_reach_the_template() -> None:
    seen: list[list[dict[str, object]]] = []

    def render(messages) -> str:
        seen.append([dict(m) for m in messages])
        return "".join(f"{m['role']}:{m['content'] or m['tool_calls']}\n" for m in messages)

    call = {"role": "assistant", "content": None, "tool_calls": ["lookup()"]}
    reply = {"role": "tool", "content": BERLIN, "name": "lookup"}
    result = segment([call, reply], render, BERLIN)
    assert chunk_texts(result) == [BERLIN]
    assert all(first == call and second["name"] == "lookup" for first, second in seen)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "user"}, ValueError),
        ({"content": "hello"}, ValueError),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, ValueError),
        ({"role": "user", "content": [3]}, ValueError),
        ({"role": "user", "content": [{"type": "text"}]}, TypeError),
        ({"role": "user", "content": 3}, TypeError),
        ("Where?", TypeError),
    ],
)
def test_messages_of_another_form_are_refused(message, error) -> None:
    with pytest.raises(error):
        segment([message], chatml)


contents = st.lists(
    st.one_of(
        st.text(alphabet="ab Zq7xChunk0N\n<|", max_size=30),
        st.sampled_from([BERLIN, f" {PARIS}\n"]),
        st.text(max_size=20).map(marked),
    ),
    max_size=5,
)
roles = st.sampled_from(["system", "user", "assistant"])
all_templates = [*FAITHFUL, escaping, doubling, dropping_first, reversing, upper, drops_thoughts]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(roles, contents), min_size=1, max_size=4), st.sampled_from(all_templates))
def test_the_segments_are_always_what_the_template_renders(turns, render) -> None:
    messages = [{"role": role, "content": blocks} for role, blocks in turns]
    result = segment(messages, render, BERLIN, f" {PARIS}\n")
    flat = [
        {"role": role, "content": "".join(b if isinstance(b, str) else b["text"] for b in blocks)}
        for role, blocks in turns
    ]
    assert texts(result) == render(flat)
    assert all(s.text for s in result.segments)
    if result.fallback:
        assert chunk_texts(result) == []
    if render is chatml:
        assert result.fallback is None

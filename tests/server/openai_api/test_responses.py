"""/v1/responses through the unchanged client: whole and streamed, the same answers as a chat's."""

import openai
import pytest
from openai.types.responses import Response

from server_kit import DOCUMENTS, MODEL, QUESTION, Town

ASKED = {"model": MODEL, "temperature": 0, "max_output_tokens": 8}
MESSAGES = [
    {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": "The Spree."}]},
    {"type": "message", "role": "user", "content": "And in Paris?"},
]


@pytest.mark.parametrize("given", [QUESTION, MESSAGES])
def test_an_answer_is_that_of_the_chat(client, given):
    texts = [QUESTION, "The Spree.", "And in Paris?"][: 1 if given is QUESTION else 3]
    roles = ("user", "assistant", "user")
    chat = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    chat.insert(0, {"role": "system", "content": "Be short."})
    want = client.chat.completions.create(model=MODEL, messages=chat, temperature=0, max_tokens=8)
    response = client.responses.create(**ASKED, input=given, instructions="Be short.")
    assert response.output_text == want.choices[0].message.content
    assert (response.usage.input_tokens, response.usage.output_tokens) == (want.usage.prompt_tokens, 8)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    Response.model_validate({**response.model_dump(), "usage": None}, strict=True)
    extra = {"documents": list(DOCUMENTS), "cache_salt": f"responses {len(given)}"}
    first, again = (client.responses.create(**ASKED, input=given, extra_body=extra).usage for _ in range(2))
    assert first.input_tokens_details.cached_tokens == 0 < again.input_tokens_details.cached_tokens


def test_a_stream_has_the_same_text_and_response(client):
    whole = client.responses.create(**ASKED, input=QUESTION)
    with client.responses.stream(**ASKED, input=QUESTION) as stream:
        events = list(stream)
    names = [event.type for event in events if event.type != "response.output_text.delta"]
    assert names == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    *first, last = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join([*first, last]) == whole.output_text == events[-1].response.output_text != last
    assert events[-1].response.usage.output_tokens == 8
    stop = {"stop": whole.output_text[3:5]}
    *_, last = client.responses.create(**ASKED, input=QUESTION, stream=True, extra_body=stop)
    assert (last.type, last.response.status) == ("response.completed", "completed")


def test_a_stream_that_fails_ends_with_its_error(client, rag, monkeypatch):
    submit = rag.submit
    monkeypatch.setattr(rag, "submit", lambda *a, **o: submit(*a, **{**o, "deadline": 1e-4}))
    *_, last = client.responses.create(**ASKED, input=QUESTION, stream=True)
    assert (last.type, last.code) == ("error", "timeout")


def test_the_text_has_a_schema(client):
    asked = {**ASKED, "max_output_tokens": 60}
    assert isinstance(client.responses.parse(**asked, input=QUESTION, text_format=Town).output_parsed, Town)


BAD_SCHEMA = {"format": {"type": "json_schema", "name": "t", "schema": {"type": "x"}}}
REFUSED = [
    ({"input": []}, "input"),
    ({"input": "Berlin " * 9000}, "'param': 'input'"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"text": BAD_SCHEMA}, "Invalid type: x"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED)
def test_refusals(client, changes, said):
    with pytest.raises(openai.BadRequestError, match=said):
        client.responses.create(**{**ASKED, "input": QUESTION, **changes})

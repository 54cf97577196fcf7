"""Anthropic's Messages over plain HTTP, and by the unchanged ``anthropic`` client where it is installed."""

import json

import httpx
import pytest

from queue_kit import held
from ragcachekit import TreeConfig
from ragcachekit.server import ServerConfig, create_app
from ragcachekit.server.keys import add_key
from server_kit import DOCUMENTS, LONG, MODEL, QUESTION, engine, served

ASKED = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": QUESTION}]}
GREEDY = {**ASKED, "temperature": 0}
BY_CLIENT = {**ASKED, "extra_body": {"temperature": 0}}  # the client has no such parameter any more
EPHEMERAL = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
LONG_SYSTEM = "Answer from the documents, in one sentence, and name the river. " * 3


@pytest.fixture(scope="module")
def own():
    with engine(tree=TreeConfig(), encoder="average:2") as rag:
        yield rag


@pytest.fixture(scope="module")
def address(own, tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    key = add_key(file, "ada")
    config = ServerConfig(model_name=MODEL, keys=file, heartbeat=0.05)
    with served(create_app(own, config)) as url:
        yield url, key


@pytest.fixture
def http(address):
    url, key = address
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
    with httpx.Client(base_url=f"{url}/v1", headers=headers, timeout=LONG) as http:
        yield http


def expected(rag):
    return rag.generate(ASKED["messages"], policy="full", do_sample=False, max_new_tokens=8)


def ask(http, **changes):
    return http.post("/messages", json={**GREEDY, **changes})


def usage(http, **changes):
    used = ask(http, **changes).json()["usage"]
    return [used[f"{name}input_tokens"] for name in ("", "cache_creation_", "cache_read_")]


def text(text, **more):
    return {"type": "text", "text": text, **more}


def events(response):
    blocks = [block.split("\n") for block in response.text.strip().split("\n\n")]
    named = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]
    assert all(name == event["type"] for name, event in named)
    return [event for _, event in named]


def test_a_message_whole_and_streamed(http, own):
    want, response = expected(own), ask(http)
    message, length = response.json(), want.report.link.prompt_tokens
    assert message["content"] == [text(want.text)]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", MODEL)
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    assert sum(usage(http)) == length
    assert message["usage"]["output_tokens"] == len(want.token_ids)
    assert response.headers["request-id"].startswith("req_")
    streamed = [event for event in events(ask(http, stream=True)) if event["type"] != "ping"]
    start, _, *pieces, _, delta, _ = streamed
    assert [event["type"] for event in streamed if event not in pieces] == [
        *("message_start", "content_block_start"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert start["message"]["usage"]["input_tokens"] == length
    assert "".join(piece["delta"]["text"] for piece in pieces) == want.text
    assert delta["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert delta["usage"] == message["usage"]


def test_stop_reasons(http, own):
    want = expected(own).text
    message = ask(http, stop_sequences=["never", want[4:6], want[3:5]]).json()
    assert message["content"][0]["text"] == want[:3]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", want[3:5])
    room = own.model.config.max_position_embeddings - ask(http).json()["usage"]["input_tokens"]
    long = " ".join(["river"] * ((room - 10) // own.count_tokens(" river")))
    cut = ask(http, system=long, max_tokens=10_000).json()
    assert cut["stop_reason"] == "model_context_window_exceeded"


def test_only_what_is_marked_is_kept(http):
    asked = {"system": LONG_SYSTEM + "unmarked", "messages": ASKED["messages"]}
    assert [usage(http, **asked)[1:] for _ in range(2)] == [[0, 0]] * 2
    system = [text(LONG_SYSTEM), text(DOCUMENTS[0], **EPHEMERAL), text(DOCUMENTS[1], **EPHEMERAL)]
    reordered = [system[0], *system[:0:-1]]
    first, again, other = (usage(http, system=given) for given in (system, system, reordered))
    assert first[1] > 100
    assert (again[1], again[2]) == (0, first[1])
    assert other[2] > first[1] // 2, "documents are reused in another order"
    assert len({sum(counts) for counts in (first, again, other)}) == 1


@pytest.mark.parametrize("mark", ["whole", "last block"])
def test_a_marked_conversation_goes_on_after_itself(http, mark):
    own, last_own = (EPHEMERAL, {}) if mark == "whole" else ({}, EPHEMERAL)

    def turn(*contents):
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": c} for role, c in zip(roles, contents, strict=False)]
        messages[-1]["content"] = [text(contents[-1], **last_own)]
        return usage(http, system=f"{mark}. {LONG_SYSTEM}", messages=messages, **own)

    question = f"{DOCUMENTS[0]} {QUESTION}"
    first, second = turn(question), turn(question, "The Spree.", "And in Rome?")
    assert first[1] > 100
    assert second[2] >= first[1]


SAID = {"role": "assistant", "content": "b"}
IMAGE = {"role": "user", "content": [{"type": "image"}]}
REFUSED = {
    "max_tokens": ({"max_tokens": None}, 400, "max_tokens"),
    "role": ({"messages": [*ASKED["messages"], SAID]}, 400, "must end with a user"),
    "tools": ({"tools": [{"name": "a", "input_schema": {}}]}, 400, "does not render tools"),
    "tool": ({"tools": [{"name": "a", "type": "bash_20250124", "input_schema": {}}]}, 400, "'tools[0].type'"),
    "choice": ({"tool_choice": {"type": "any"}}, 400, "'tool_choice.type'"),
    "image": ({"messages": [IMAGE]}, 400, "content"),
    "ttl": ({"cache_control": {"type": "ephemeral", "ttl": "long"}}, 400, "ttl"),
    "unknown": ({"prompt": "a"}, 400, "prompt"),
    "model": ({"model": "claude"}, 404, "claude"),
    "long": ({"system": "Berlin " * 9000}, 400, "context"),
    "key": ({}, 401, "Incorrect API key"),
}
TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}


@pytest.mark.parametrize(("changes", "status", "message"), REFUSED.values(), ids=REFUSED)
def test_errors_have_anthropics_form(http, changes, status, message):
    key = {"x-api-key": "wrong"} if status == 401 else {}
    response = http.post("/messages", json={**GREEDY, **changes}, headers=key)
    error = response.json()
    assert (response.status_code, error["type"], error["error"]["type"]) == (status, "error", TYPES[status])
    assert message in error["error"]["message"]


def test_a_stream_pings_while_it_waits_and_ends_with_its_error(http, own, monkeypatch):
    with held(own), http.stream("POST", "/messages", json={**ASKED, "stream": True}) as response:
        lines = response.iter_lines()
        assert [next(line for line in lines if line == "event: ping") for _ in range(3)]
    submit = own.submit
    monkeypatch.setattr(own, "submit", lambda *a, **o: submit(*a, **{**o, "deadline": 1e-4}))
    *_, last = events(ask(http, stream=True))
    assert (last["type"], last["error"]["type"]) == ("error", "timeout_error")


async def test_the_anthropic_client(address, own):
    anthropic = pytest.importorskip("anthropic")
    want, (url, key) = expected(own), address
    with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=LONG) as client:
        given = client.messages.create(**BY_CLIENT)
        message = anthropic.types.Message.model_validate(given.model_dump(), strict=True)
        assert message.content[0].text == want.text
        assert given._request_id.startswith("req_")
        with client.messages.stream(**BY_CLIENT) as stream:
            assert "".join(stream.text_stream) == want.text
            final = stream.get_final_message()
        assert (final.stop_reason, final.usage) == (message.stop_reason, message.usage)
        marked = {"system": [text(DOCUMENTS[2], **EPHEMERAL)]}
        used = [client.messages.create(**BY_CLIENT, **marked).usage for _ in range(2)]
        assert used[0].cache_creation_input_tokens == used[1].cache_read_input_tokens > 20
        assert [model.id for model in client.models.list()] == [MODEL]
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            client.messages.create(**{**ASKED, "model": "other"})
    async with (
        anthropic.AsyncAnthropic(base_url=url, auth_token=key, max_retries=0) as client,
        client.messages.stream(**BY_CLIENT) as stream,
    ):
        assert "".join([piece async for piece in stream.text_stream]) == want.text


TOOL = {"name": "born", "description": "Where?", "input_schema": {"type": "object", "properties": {}}}
ADA = {"name": "Ada"}
CALL = f'<tool_call>{{"name": "born", "arguments": {json.dumps(ADA)}}}</tool_call>'


def test_tools(url, client, saying):
    """The exchange has the tokens of the same one in OpenAI's form."""
    anthropic = pytest.importorskip("anthropic")
    asked, one_call = {**BY_CLIENT, "tools": [TOOL]}, {"type": "auto", "disable_parallel_tool_use": True}
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0, timeout=LONG) as own:
        for more, calls in (({}, 2), ({"tool_choice": one_call}, 1)):
            saying(f"I look. {CALL} {CALL} Soon.")
            message = own.messages.create(**asked, **more)
            said, *used = message.content
            assert (message.stop_reason, said.text) == ("tool_use", "I look. Soon.")
            assert [(one.type, one.name, one.input) for one in used] == [("tool_use", "born", ADA)] * calls
            with own.messages.stream(**asked, **more) as stream:
                final = stream.get_final_message()
            kinds = [block.type for block in final.content]
            assert kinds == ["text", *["tool_use"] * calls, "text"], "calls come when they are complete"
            assert final.content[1].input == ADA
            assert (final.stop_reason, final.usage) == (message.stop_reason, message.usage)
        result = {"type": "tool_result", "tool_use_id": used[0].id, "content": [text("Bern")]}
        said_so = {"role": "assistant", "content": message.content}
        turns = [*ASKED["messages"], said_so, {"role": "user", "content": [result, text("So?")]}]
        saying("In Bern.")
        answer = own.messages.create(**{**asked, "messages": turns})
        counted = own.messages.count_tokens(model=MODEL, tools=[TOOL], messages=turns)
    assert answer.content[0].text == "In Bern."
    function = {"name": "born", "arguments": json.dumps(ADA)}
    called = {"id": used[0].id, "type": "function", "function": function}
    chat = [
        *ASKED["messages"],
        {"role": "assistant", "content": said.text, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": used[0].id, "content": "Bern"},
        {"role": "user", "content": "So?"},
    ]
    function = {"name": "born", "description": "Where?", "parameters": TOOL["input_schema"]}
    tools = [{"type": "function", "function": function}]
    want = client.chat.completions.create(model=MODEL, messages=chat, tools=tools).usage.prompt_tokens
    assert counted.input_tokens == answer.usage.input_tokens == want

"""What requests say: documents, marks, tools; and what is refused, as OpenAI does."""

import errno
import json

import httpx
import pytest

from ragcachekit.errors import DeadlineExceeded, EngineError, PromptTooLong, QueueFull
from ragcachekit.server.errors import ApiError, api_error
from server_kit import DOCUMENTS, MODEL, QUESTION

USER = {"role": "user", "content": QUESTION}
NO_PLACE = {"role": "system", "content": "a"}
SYSTEM = {"role": "system", "content": "Use them."}
TOOL = {"type": "function", "function": {"name": "born", "parameters": {"type": "object", "properties": {}}}}
TOOL_RESULT = {"role": "tool", "tool_call_id": "abc", "content": "Bern"}


@pytest.fixture(scope="module")
def http(url):
    with httpx.Client(base_url=f"{url}/v1", timeout=60) as http:
        yield http


def ask(http, **changes):
    body = {"model": MODEL, "messages": [USER], "max_tokens": 4, "temperature": 0, **changes}
    return http.post("/chat/completions", json={k: v for k, v in body.items() if v is not ...})


UNSUPPORTED, VALUE, INVALID = "unsupported_parameter", "unsupported_value", "invalid_value"
MISSING, TOO_LONG = "missing_required_parameter", "context_length_exceeded"
CHAT = "/chat/completions"
REFUSED = {  # what is changed; then of the error: a part of its message, param, code
    "unknown": ({"foo": 1}, "Unrecognized request argument supplied: foo", None, None),
    "value": ({"service_tier": "flex"}, "Unsupported value", "service_tier", VALUE),
    "type": ({"temperature": "1"}, "Invalid type for 'temperature'", "temperature", "invalid_type"),
    "range": ({"temperature": 2.5}, "Invalid value for 'temperature'", "temperature", INVALID),
    "missing": ({"messages": ...}, "Missing required parameter: 'messages'", "messages", MISSING),
    "role": ({"messages": [{"role": "x", "content": ""}]}, "'messages[0].role'", "messages[0].role", INVALID),
    "no content": ({"messages": [{"role": "user"}]}, "got null", "messages[0].content", INVALID),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "Input should be 'text'",
        "messages[0].content[0].type",
        INVALID,
    ),
    "n": ({"n": 33}, "at most 32", "n", INVALID),
    "ttl": ({"prompt_cache_options": {"ttl": "soon"}}, "pattern", "prompt_cache_options.ttl", INVALID),
    "mode": ({"prompt_cache_options": {"mode": "x"}}, "'implicit'", "prompt_cache_options.mode", INVALID),
    "stops": ({"stop": ["a"] * 5}, "at most 4", "stop", INVALID),
    "empty stop": ({"stop": ""}, "empty stop string", None, None),
    "top": ({"top_logprobs": 2}, "needs 'logprobs'", "top_logprobs", INVALID),
    "partition of ids": ({"chunk_ids": ["a"], "cache_salt": "b"}, "partition", "cache_salt", UNSUPPORTED),
    "no place": ({"messages": [NO_PLACE], "documents": ["a"]}, "need a user", "documents", INVALID),
    "partition": (
        {"cached_content": "cachedContents/0", "prompt_cache_key": "a"}, "partition", "prompt_cache_key",
        UNSUPPORTED,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "message", "param", "code"), REFUSED.values(), ids=REFUSED)
def test_refusals(http, changes, message, param, code):
    response = ask(http, **changes)
    error = response.json()["error"]
    assert response.status_code == 400
    assert message in error["message"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)


def test_other_statuses(http):
    assert ask(http, model="other").json()["error"]["code"] == "model_not_found"
    assert ask(http, cached_content="cachedContents/" + "0" * 32).status_code == 404
    for path, status in (("/nowhere", 404), ("/models", 405)):
        response = http.put(path)
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"
    for body in (b"{", b"[]", b"\xff", b'{"model": "\\ud800"}', b"[" * 10**5):
        response = http.post(CHAT, content=body)
        assert response.status_code == 400
        assert response.json()["error"]["message"]
    for prompt in ([], "", [[]], [10**6], [-1]):
        assert http.post("/completions", json={"model": MODEL, "prompt": prompt}).status_code == 400


def test_values_that_change_nothing_are_taken(http):
    neutral = {
        **{"frequency_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"}, "n": None},
        **{"store": False, "user": "a", "metadata": {"a": "b"}, "parallel_tool_calls": True, "stop": None},
    }
    assert ask(http, **neutral).status_code == 200


LARGE = "x" * 100_000
ASKED = {"model": MODEL, "messages": [USER]}


@pytest.mark.parametrize(
    ("path", "body", "status", "ends"),
    [
        ("/v1/completions", {"model": LARGE, "prompt": "a"}, 404, "` does not exist."),
        ("/v1/chat/completions", {**ASKED, LARGE: 1}, 400, "xxx"),
        ("/v1beta/cachedContents", {"model": LARGE, "contents": []}, 404, f"; it is 'models/{MODEL}'."),
        (f"/v1/models/{LARGE[:30_000]}", None, 404, "` does not exist."),
        (f"/v1/{LARGE[:30_000]}", None, 404, ")"),
    ],
)
def test_an_error_is_short_and_still_says_what_is_wrong(url, path, body, status, ends):
    answer = httpx.get(url + path) if body is None else httpx.post(url + path, json=body)
    assert answer.status_code == status
    assert len(answer.content) < 1000
    message = answer.json()["error"]["message"]
    assert "…" in message
    assert message.endswith(ends)


def test_short_messages_are_whole():
    message = "The model `tiny` does not exist."
    assert str(ApiError(404, message)) == message
    assert ApiError(400, "no", param=LARGE).body()["error"]["param"].count("x") < 500


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (QueueFull(), 503), (DeadlineExceeded(), 504), (EngineError("x"), 500), (PromptTooLong("x"), 400),
        (KeyError("secret"), 500), (ValueError("x"), 400), (ImportError("x"), 400), (ApiError(418, "x"), 418),
        (OSError(errno.EIO, "failed"), 500), (OSError(errno.ENOSPC, "full", "/secret"), 507),
    ],
)  # fmt: skip
def test_errors_of_the_engine(error, status):
    found = api_error(error, {"type": "http", "path": "/v1/chat/completions"})
    assert found.status == status
    assert found.headers == ({"Retry-After": "1"} if status == 503 else {})
    assert "secret" not in str(found)


def test_a_prompt_that_is_too_long_names_its_parameter(http, rag):
    context = rag.model.config.max_position_embeddings
    for path, param, asked in (
        (CHAT, "messages", {"messages": [{"role": "user", "content": "a " * context}]}),
        ("/completions", "prompt", {"prompt": "a " * context}),
    ):
        for stream in (False, True):
            error = http.post(path, json={"model": MODEL, "stream": stream, **asked}).json()["error"]
            assert (error["param"], error["code"]) == (param, "context_length_exceeded")


def test_a_full_queue_is_refused_with_a_time_to_wait(http, rag, monkeypatch):
    monkeypatch.setattr(rag.queue, "has_room", lambda: False)
    for stream in (False, True):
        response = ask(http, stream=stream, n=2)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")


def test_a_late_stream_ends_with_an_error(http, rag, monkeypatch):
    submit = rag.submit
    monkeypatch.setattr(rag, "submit", lambda *a, **o: submit(*a, **{**o, "deadline": 1e-4}))
    response = ask(http, stream=True)
    *_, last = (line for line in response.text.splitlines() if line.startswith("data: "))
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    assert ask(http).status_code == 504


def test_a_silent_stream_gets_heartbeats(http, rag, monkeypatch):
    from queue_kit import held

    with held(rag), http.stream("POST", CHAT, json={"model": MODEL, "messages": [USER], "max_tokens": 2,
                                                    "stream": True}) as response:  # fmt: skip
        lines = response.iter_lines()
        assert next(line for line in lines if line.startswith(":")) == ": heartbeat"
    assert ask(http).status_code == 200


MARKS = [{"cache_control": {"type": "ephemeral"}}, {"prompt_cache_breakpoint": {"mode": "explicit"}}]


@pytest.mark.parametrize("mark", MARKS)
def test_marked_parts_are_chunks(http, rag, mark):
    parts = [{"type": "text", "text": DOCUMENTS[0], **mark}, {"type": "text", "text": "\n\n" + QUESTION}]
    messages = [{"role": "user", "content": parts}]
    salt = {"cache_salt": json.dumps(mark)}
    first, again = (ask(http, messages=messages, **salt).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["prompt_tokens_details"]["cached_tokens"] >= rag.count_tokens(DOCUMENTS[0]) - 1


def test_explicit_mode_keeps_only_what_is_marked(http, rag):
    def usage(*parts, **options):
        salt = {
            "cache_salt": "explicit",
            "prompt_cache_options": {"mode": "explicit", "ttl": "30m", **options},
        }
        details = ask(http, messages=[{"role": "user", "content": list(parts)}], **salt).json()["usage"]
        return details["prompt_tokens_details"]

    text = {"type": "text", "text": DOCUMENTS[0]}
    question = {"type": "text", "text": "\n\n" + QUESTION}
    marked = {**text, **MARKS[1]}
    *_, once, again = (usage(part, question) for part in (text, text, marked, marked))
    assert once["cached_tokens"] == 0, "nothing was kept before"
    assert again["cached_tokens"] >= rag.count_tokens(DOCUMENTS[0]) - 1
    assert again["cache_write_tokens"] == 0


def test_a_lifetime_retains_what_is_kept(http, rag, monkeypatch):
    asked, submit = [], rag.submit
    monkeypatch.setattr(rag, "submit", lambda *args, **o: asked.append(o.get("retain")) or submit(*args, **o))
    for options in ({"ttl": "30m"}, {"ttl": "2h"}, {}):
        assert ask(http, prompt_cache_options=options).status_code == 200
    assert asked == [1800.0, 7200.0, None]
    assert ask(http, prompt_cache_options={"ttl": "soon"}).status_code == 400


@pytest.mark.parametrize(
    "names", [("cache_salt",), ("prompt_cache_key",), ("cache_salt", "prompt_cache_key")]
)
def test_partitions_share_nothing(http, names):
    def cached(value):
        asked = {"documents": list(DOCUMENTS[:1]), **dict.fromkeys(names, value)}
        return ask(http, **asked).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    value = "-".join(names)
    assert cached(value) == 0
    assert cached(value) > 0
    assert cached(f"{value}2") == 0


def test_documents_stand_before_the_question(http):
    parts = [{"type": "text", "text": f"{text}\n\n"} for text in DOCUMENTS[:2]]
    written = [SYSTEM, {**USER, "content": [*parts, {"type": "text", "text": QUESTION}]}]
    by_text, by_field = (
        ask(http, messages=messages, documents=documents, policy="full").json()
        for messages, documents in ((written, []), ([SYSTEM, USER], DOCUMENTS[:2]))
    )
    assert by_text["usage"]["prompt_tokens"] == by_field["usage"]["prompt_tokens"]
    assert by_text["choices"] == by_field["choices"]


def test_titles_are_the_first_line(http):
    document = {"id": "1", "title": "Cities", "text": DOCUMENTS[0]}
    with_title = ask(http, documents=[document]).json()["usage"]["prompt_tokens"]
    written = ask(http, documents=[f"Cities\n{DOCUMENTS[0]}"]).json()["usage"]["prompt_tokens"]
    assert with_title == written


class TestTools:
    def test_calls_are_read(self, http, saying):
        saying('I look. <tool_call>{"name": "born", "arguments": {"name": "Ada"}}</tool_call>')
        choice = ask(http, tools=[TOOL]).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "I look."
        (call,) = choice["message"]["tool_calls"]
        assert (call["type"], call["function"]["name"]) == ("function", "born")
        assert json.loads(call["function"]["arguments"]) == {"name": "Ada"}
        back = [USER, {**choice["message"]}, {**TOOL_RESULT, "tool_call_id": call["id"]}]
        saying("In Bern.")
        assert ask(http, messages=back, tools=[TOOL]).json()["choices"][0]["message"]["content"] == "In Bern."

    def test_calls_are_streamed(self, http, saying):
        saying("a " + 2 * '<tool_call>{"name": "born"}</tool_call>' + " b")
        for parallel, count in ((True, 2), (False, 1)):
            text = ask(http, tools=[TOOL], stream=True, parallel_tool_calls=parallel).text
            events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            deltas = [event["choices"][0]["delta"] for event in events]
            calls = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
            assert [call["index"] for (call,) in calls] == list(range(count))
            assert "".join(delta.get("content") or "" for delta in deltas) == "a b"
            assert "content" in deltas[-2], "calls come as soon as they are complete, before what follows"
            assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"

    def test_what_is_no_call_stays_text(self, http, saying):
        saying("<tool_call>{broken</tool_call>")
        message = ask(http, tools=[TOOL]).json()["choices"][0]["message"]
        assert message["content"] == "<tool_call>{broken"
        assert ask(http, tools=[TOOL], tool_choice="none").json()["choices"][0]["message"]["content"] == (
            "<tool_call>{broken</tool_call>"
        )

    def test_arguments_that_are_no_object_are_refused(self, http):
        call = {"id": "abc", "type": "function", "function": {"name": "born", "arguments": "[1]"}}
        messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, TOOL_RESULT]
        assert ask(http, messages=messages).json()["error"]["param"].startswith("messages[1].tool_calls[0]")

    def test_a_template_without_tools_refuses_them(self, http, rag, monkeypatch):
        monkeypatch.setattr(type(rag), "renders_tools", False)
        for asked in ({"tools": [TOOL]}, {"messages": [USER, TOOL_RESULT]}):
            assert ask(http, **asked).json()["error"]["code"] == UNSUPPORTED

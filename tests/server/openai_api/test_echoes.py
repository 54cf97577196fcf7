"""No error repeats a large part of what a client sent."""

from __future__ import annotations

import httpx
import pytest

from ragcachekit.server.errors import ApiError
from server_kit import MODEL, QUESTION

LARGE = "x" * 100_000
USER = {"role": "user", "content": QUESTION}
CHAT = {"model": MODEL, "messages": [USER]}


@pytest.mark.parametrize(
    ("path", "body", "status", "ends"),
    [
        ("/v1/chat/completions", {**CHAT, "model": LARGE}, 404, "` does not exist."),
        ("/v1/completions", {"model": LARGE, "prompt": "a"}, 404, "` does not exist."),
        ("/v1/chat/completions", {**CHAT, LARGE: 1}, 400, "xxx"),
        ("/v1/chat/completions", {**CHAT, "cached_content": LARGE}, 404, "."),
        ("/v1beta/cachedContents", {"model": LARGE, "contents": []}, 404, f"; it is 'models/{MODEL}'."),
        ("/v1beta/cachedContents", {"model": MODEL, "contents": [], LARGE: 1}, 400, "xxx"),
        (f"/v1/models/{LARGE[:30_000]}", None, 404, "' does not exist"),
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

"""What the ingress passes on, wherever the application is mounted."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from ragcachekit.cluster.ingress import Ingress

BODY = b'{"documents": ["Rome"]}'


class Replicas:
    """Notes what it is sent, and answers 200."""

    def __init__(self):
        self.bodies = []

    def remote(self, scope, body, chunks):
        self.bodies.append(body)

        async def messages():
            yield {"type": "http.response.start", "status": 200, "headers": []}
            yield {"type": "http.response.body", "body": b"{}"}

        return messages()


class Reader:
    def chunks(self, headers, body):
        return {}


async def ask(path, root_path="", has_contexts=True):
    """Status, JSON, and the bodies that reached a replica."""
    ingress = SimpleNamespace(_replicas=Replicas(), _reader=Reader(), _has_contexts=has_contexts)
    arriving = iter([{"type": "http.request", "body": BODY, "more_body": False}])
    sent = []

    async def receive():
        return next(arriving, {"type": "http.disconnect"})

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": root_path + path, "root_path": root_path, "headers": [],
    }  # fmt: skip
    await Ingress._forward(ingress, scope, receive, send)
    text = b"".join(one.get("body", b"") for one in sent)
    return sent[0]["status"], json.loads(text), ingress._replicas.bodies


@pytest.mark.parametrize("root_path", ["", "/llm", "/v1beta"])
async def test_a_body_arrives_wherever_the_application_is_mounted(root_path):
    assert await ask("/v1/chat/completions", root_path) == (200, {}, [BODY])
    assert await ask("/v1beta/cachedContents", root_path) == (200, {}, [BODY])


@pytest.mark.parametrize("root_path", ["", "/llm"])
async def test_without_a_common_folder_contexts_are_refused(root_path):
    for path in ("/v1beta/cachedContents", "/v1beta/cachedContents/x"):
        status, body, bodies = await ask(path, root_path, has_contexts=False)
        assert (status, body["error"]["status"], bodies) == (501, "UNIMPLEMENTED", [])
        assert "'contexts'" in body["error"]["message"]
    assert (await ask("/v1/chat/completions", root_path, has_contexts=False))[2] == [BODY]


async def test_other_paths_have_no_body():
    assert await ask("/health") == (200, {}, [b""])

"""Contexts on a volume that takes no more bytes: 507 with a reason, and what was there stays as it was."""

from __future__ import annotations

import errno

import pytest

from context_kit import ONE, TWO, Engine
from faults import Faults, injected
from ragcachekit.server.contexts import ContextStore
from ragcachekit.server.responses import api_error

BODY = {"model": "models/tiny", "contents": [{"parts": [{"text": ONE}]}], "ttl": "60s"}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "contexts"


@pytest.fixture
def rag():
    return Engine()


@pytest.fixture
def store(rag, folder, clock):
    return ContextStore(rag, folder, clock=clock)


def full(folder, code):
    """The volume is full: all fails but what removes."""
    faults = Faults(folder, code, lambda _: faults.calls[-1] != "unlink")
    return injected(faults)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
async def test_a_full_volume_is_507_and_loses_nothing(client_of, folder, rag, code):
    async with client_of("ada") as client:
        made = (await client.post("/cachedContents", json=BODY)).json()
        path, encoded = "/" + made["name"], set(rag.encoded)
        files = {file: file.read_bytes() for file in folder.rglob("*.json")}
        other = {**BODY, "contents": [{"parts": [{"text": TWO}]}]}
        with full(folder, code):
            answers = [
                await client.patch(path, json={"ttl": "900s"}),
                await client.post("/cachedContents", json=other),
                await client.delete(path),
            ]
            assert (await client.get(path)).json() == made
        for answer in answers:
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (507, 507)
            assert error["status"] == "RESOURCE_EXHAUSTED"
            assert "full" in error["message"]
            assert str(folder) not in error["message"]
        assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == files
        assert encoded <= rag.encoded
        assert (await client.get("/cachedContents")).json()["cachedContents"] == [
            {name: value for name, value in made.items() if name != "chunkIds"}
        ]
        changed = (await client.patch(path, json={"ttl": "900s"})).json()
        assert changed["expireTime"] != made["expireTime"]
        assert (await client.post("/cachedContents", json=other)).status_code == 200
        assert (await client.delete(path)).status_code == 200


def test_other_routes_have_it_in_openais_form():
    error = api_error(
        OSError(errno.ENOSPC, "No space left on device", "/secret"), {"type": "http", "path": "/v1/x"}
    )
    assert error.status == 507
    assert error.body()["error"]["code"] == "insufficient_storage"
    assert error.body()["error"]["type"] == "server_error"
    assert "/secret" not in str(error)


def test_another_failure_of_the_disk_stays_500():
    assert api_error(OSError(errno.EIO, "failed"), {"type": "http", "path": "/v1/x"}).status == 500

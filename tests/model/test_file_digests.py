"""File digests are remembered while a file is unchanged, and never otherwise."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time

import pytest

from ragcachekit.model import weights as weights_digest
from ragcachekit.model.weights import FileDigests

LONG_AGO = 1_700_000_000


class CountingHasher:
    def __init__(self) -> None:
        self.reads = 0

    def __call__(self, path) -> str:
        self.reads += 1
        return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def hasher(monkeypatch):
    counting = CountingHasher()
    monkeypatch.setattr(weights_digest, "hash_file", counting)
    return counting


@pytest.fixture
def weights(tmp_path):
    file = tmp_path / "model.safetensors"
    write(file, b"some weights")
    return file


def write(file, content: bytes, when: int = LONG_AGO) -> None:
    file.write_bytes(content)
    os.utime(file, (when, when))


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_an_unchanged_file_is_read_once(hasher, weights, tmp_path) -> None:
    cache = tmp_path / "new" / "digests.json"
    for _ in range(3):  # a new process each time
        assert FileDigests(cache).get(weights) == digest_of(b"some weights")
    assert hasher.reads == 1
    assert cache.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in cache.parent.iterdir()] == ["digests.json"]


def test_size_time_and_inode_each_make_it_read_again(hasher, weights, tmp_path) -> None:
    cache = tmp_path / "digests.json"
    FileDigests(cache).get(weights)
    write(weights, b"more weights than before")
    assert FileDigests(cache).get(weights) == digest_of(b"more weights than before")
    write(weights, b"else weights than before", LONG_AGO + 1)
    assert FileDigests(cache).get(weights) == digest_of(b"else weights than before")
    write(tmp_path / "swapped", b"swap weights than before", LONG_AGO + 1)
    os.replace(tmp_path / "swapped", weights)
    assert FileDigests(cache).get(weights) == digest_of(b"swap weights than before")
    assert hasher.reads == 4


def test_a_file_that_has_just_changed_is_not_remembered(hasher, weights, tmp_path, monkeypatch) -> None:
    cache = tmp_path / "digests.json"
    monkeypatch.setattr(time, "time", lambda: LONG_AGO + 1.0)
    FileDigests(cache).get(weights)
    assert not cache.exists()
    monkeypatch.setattr(time, "time", lambda: LONG_AGO + 3.0)
    FileDigests(cache).get(weights)
    monkeypatch.setattr(time, "time", lambda: LONG_AGO + 4.0)
    FileDigests(cache).get(weights)
    assert hasher.reads == 2


def test_a_file_that_changes_while_it_is_read_has_no_digest(weights, tmp_path, monkeypatch) -> None:
    def changing(path) -> str:
        write(path, b"changed meanwhile", LONG_AGO + 5)
        return digest_of(b"some weights")

    monkeypatch.setattr(weights_digest, "hash_file", changing)
    with pytest.raises(OSError, match="changed while it was read"):
        FileDigests(tmp_path / "digests.json").get(weights)
    assert not (tmp_path / "digests.json").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"x": 3}', b"\xff\xfe", b'{"PATH": {"file": 3}}', b'{"PATH": []}'],
)
def test_a_damaged_memory_is_as_good_as_none(hasher, weights, tmp_path, content) -> None:
    cache = tmp_path / "digests.json"
    cache.write_bytes(content.replace(b"PATH", str(weights).encode()))
    assert FileDigests(cache).get(weights) == digest_of(b"some weights")
    assert FileDigests(cache).get(weights) == digest_of(b"some weights")
    assert hasher.reads == 1


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_memory_that_others_may_write_is_not_believed(hasher, weights, tmp_path, mode, caplog) -> None:
    cache = tmp_path / "digests.json"
    FileDigests(cache).get(weights)
    entry = json.loads(cache.read_text())
    entry[str(weights)]["sha256"] = "0" * 64
    cache.write_text(json.dumps(entry))
    cache.chmod(mode)
    with caplog.at_level(logging.WARNING):
        assert FileDigests(cache).get(weights) == digest_of(b"some weights")
    assert hasher.reads == 2
    assert "written by others" in caplog.text


def test_a_memory_that_cannot_be_written_is_logged_and_done_without(
    weights, tmp_path, monkeypatch, caplog
) -> None:
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with caplog.at_level(logging.WARNING):
        assert FileDigests(tmp_path / "digests.json").get(weights) == digest_of(b"some weights")
    assert "No space left" in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors"]

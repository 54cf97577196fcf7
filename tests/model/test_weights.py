"""Models from a folder or a hub's cache, and digests of their files."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from types import SimpleNamespace

import pytest
import transformers

from families import build, greedy, plain, tokens
from ragcachekit import RagCache
from ragcachekit.model import weights as weights_digest
from ragcachekit.model.weights import FileDigests, default_cache_dir, load_model, weights_folder
from speaking import byte_level, speaker


def test_from_pretrained_is_the_saved_model(tmp_path):
    folder = tmp_path / "model"
    model = speaker()
    model.save_pretrained(folder)
    byte_level().save_pretrained(folder)
    with RagCache.from_pretrained(folder, cache_dir=tmp_path / "cache", device="cpu", cold="never") as rag:
        answer = rag.generate("Where is Berlin?", max_new_tokens=5, do_sample=False)
        ids = rag.link("Where is Berlin?").input_ids[0].tolist()
        assert not rag.model.training
    assert answer.token_ids == greedy(model, ids, 5)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c"])
def test_a_path_that_is_no_folder_is_not_looked_up_elsewhere(name):
    with pytest.raises(FileNotFoundError, match="no model folder at"):
        RagCache.from_pretrained(name)


def test_a_wrapped_model_saves_as_it_was(tmp_path):
    model = build("llama")
    RagCache(model, cache_dir=tmp_path / "cache")
    model.save_pretrained(tmp_path / "saved")
    assert "ragcachekit" not in (tmp_path / "saved" / "config.json").read_text()
    again = type(model).from_pretrained(tmp_path / "saved").eval()
    assert greedy(again, tokens(20), 4) == greedy(plain("llama"), tokens(20), 4)


def test_where_things_lie(tmp_path, monkeypatch):
    assert weights_folder(tmp_path) == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "ragcachekit"


@pytest.fixture
def hub(tmp_path):
    """A hub's cache folder with two revisions of one model."""
    repo = tmp_path / "models--someone--small"
    (repo / "refs").mkdir(parents=True)
    for name, commit in (("main", "a" * 40), ("v1", "b" * 40)):
        (repo / "refs" / name).write_text(commit)
        (repo / "snapshots" / commit / "part").mkdir(parents=True)
        for folder in (repo / "snapshots" / commit, repo / "snapshots" / commit / "part"):
            (folder / "config.json").write_text("{}")
    return tmp_path


def test_the_folder_is_that_of_the_revision(hub):
    snapshots = hub / "models--someone--small" / "snapshots"
    asked = {"cache_dir": hub, "dtype": "auto"}
    assert weights_folder("someone/small", **asked) == snapshots / ("a" * 40)
    assert weights_folder("someone/small", revision="v1", **asked) == snapshots / ("b" * 40)
    assert weights_folder("someone/small", revision="b" * 40, **asked) == snapshots / ("b" * 40)
    part = weights_folder("someone/small", revision="v1", subfolder="part", **asked)
    assert part == snapshots / ("b" * 40) / "part"
    assert weights_folder("someone/small", revision="v2", **asked) is None
    assert weights_folder(hub, subfolder="x") == hub / "x"


def test_the_tokenizer_is_of_the_same_source(monkeypatch):
    given = {}

    class Model(SimpleNamespace):
        def eval(self):
            return self

        def to(self, device):
            return self

    def loader(kind, result):
        def load(name, **options):
            given[kind] = options
            return result

        return load

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", loader("tokenizer", "tokens"))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", loader("model", Model()))
    source = {"revision": "v1", "cache_dir": "there", "token": "secret", "trust_remote_code": True}
    load_model("someone/small", "cpu", dtype="float32", **source)
    assert given == {"tokenizer": source, "model": {"dtype": "float32", **source}}


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

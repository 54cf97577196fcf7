"""ragcachekit cache: what lies in the folder, and emptying it."""

import pytest
import torch

from ragcachekit.bench.workspace import DAMAGED, CacheFolder
from ragcachekit.errors import RagCacheError
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.disk import DiskStore
from ragcachekit.types import KVKey


@pytest.fixture
def folder(tmp_path):
    """Two entries of acme, one of other, and an index."""
    store = DiskStore(tmp_path / "kv", 1 << 20)
    tensors = (torch.arange(24.0).reshape(2, 3, 4),)
    for namespace, chunk in (("acme", "a"), ("acme", "b"), ("other", "a")):
        assert store.put(KVKey("f", namespace, chunk), ChunkKV(tensors, tensors))
    store.close()
    (tmp_path / "indexes").mkdir()
    (tmp_path / "indexes" / "one.index").write_bytes(b"x" * 10)
    return tmp_path


def held(folder):
    return {use.namespace: use.entries for use in CacheFolder(folder).usage()}


def test_stats_by_namespace(command, folder):
    result = command("cache", "stats", "--cache", folder)
    assert result.exit_code == 0
    words = [line.replace("│", " ").split() for line in result.stdout.splitlines()]
    counts = {line[0]: int(line[1]) for line in words if len(line) == 4 and line[1].isdigit()}
    assert counts == {"acme": 2, "other": 1, "all": 3}
    assert "vector indexes: 10 bytes" in result.stdout
    sizes = sum(file.stat().st_size for file in (folder / "kv").glob("*.safetensors"))
    assert sum(use.nbytes for use in CacheFolder(folder).usage()) == sizes


def test_stats_of_nothing_creates_nothing(command, tmp_path):
    result = command("cache", "stats", "--cache", tmp_path / "new")
    assert result.exit_code == 0
    assert not (tmp_path / "new").exists()


def test_clear_asks_first(command, folder):
    result = command("cache", "clear", "--cache", folder, input="n\n")
    assert result.exit_code == 1
    assert held(folder) == {"acme": 2, "other": 1}
    result = command("cache", "clear", "--cache", folder, input="y\n")
    assert (result.exit_code, held(folder)) == (0, {})
    assert "deleted 3 entries" in result.stdout


def test_clear_of_one_namespace_leaves_the_others(command, folder):
    result = command("cache", "clear", "--cache", folder, "--namespace", "acme", "--yes")
    assert "deleted 2 entries" in result.stdout
    assert held(folder) == {"other": 1}
    assert CacheFolder(folder).index_bytes() == 10
    command("cache", "clear", "--cache", folder, "--yes")
    assert CacheFolder(folder).index_bytes() == 0


def test_clear_of_nothing_creates_nothing(command, tmp_path):
    result = command("cache", "clear", "--cache", tmp_path / "new", "--yes")
    assert "deleted 0 entries" in result.stdout
    assert not (tmp_path / "new").exists()


def test_damaged_entries_are_counted_apart_and_cleared(command, folder):
    (folder / "kv" / f"{'0' * 64}.safetensors").write_bytes(b"no entry")
    assert held(folder) == {DAMAGED: 1, "acme": 2, "other": 1}
    command("cache", "clear", "--cache", folder, "--yes")
    assert held(folder) == {}


def test_a_folder_that_cannot_be_read_is_an_error(folder, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("ragcachekit.bench.workspace.read_key", refuse)
    with pytest.raises(RagCacheError, match="Permission denied; choose another --cache"):
        CacheFolder(folder).usage()

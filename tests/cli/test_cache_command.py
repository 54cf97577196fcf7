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


def damaged(folder, number=0):
    """The path of an entry whose last byte is another one now."""
    path = sorted((folder / "kv").glob("*.safetensors"))[number]
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    return path


def bytes_of(folder):
    return {path: path.read_bytes() for path in (folder / "kv").glob("*.safetensors")}


def test_verify_of_whole_entries(command, folder):
    before = bytes_of(folder)
    result = command("cache", "verify", "--cache", folder)
    assert result.exit_code == 0
    assert "3 entries" in result.stdout
    assert "none damaged" in result.stdout
    assert bytes_of(folder) == before


def test_verify_names_what_is_damaged_and_leaves_it(command, folder):
    path = damaged(folder)
    orphan = folder / "kv" / f"999999999-{'0' * 16}.tmp"
    orphan.write_bytes(b"half")
    result = command("cache", "verify", "--cache", folder)
    assert result.exit_code == 1
    assert f"damaged: {path.stem[:16]}: layer 0 does not match its CRC" in result.stdout
    assert "3 entries" in result.stdout
    assert "1 damaged" in result.stdout
    assert "1 files of interrupted writes" in result.stdout
    assert path.exists()
    assert orphan.exists()


def test_an_entry_under_anothers_name_is_damaged(command, folder):
    one, other, _ = sorted((folder / "kv").glob("*.safetensors"))
    other.write_bytes(one.read_bytes())
    result = command("cache", "verify", "--cache", folder)
    assert result.exit_code == 1
    assert f"damaged: {other.stem[:16]}: holds the entry of another key" in result.stdout


def test_repair_drops_the_damaged_and_rebuilds_the_index(command, folder):
    path = damaged(folder, 1)
    (folder / "kv" / f"999999999-{'0' * 16}.tmp").write_bytes(b"half")
    (folder / "kv" / "index" / "cache.db").write_bytes(b"no database" * 400)
    beside = DiskStore(folder / "kv", 1 << 20)  # another process, at work meanwhile
    (folder / "kv" / "index" / "cache.db").write_bytes(b"no database" * 400)
    result = command("cache", "repair", "--cache", folder)
    assert result.exit_code == 0
    assert "dropped 1 damaged entries" in result.stdout
    assert "2 entries" in result.stdout
    assert not path.exists()
    assert not list((folder / "kv").glob("*.tmp"))
    left = [path.stat().st_size for path in (folder / "kv").glob("*.safetensors")]
    stats = beside.stats()[0]
    assert (stats.entries, stats.nbytes) == (2, sum(left)) == (len(left), sum(left))
    beside.close()
    assert command("cache", "verify", "--cache", folder).exit_code == 0


@pytest.mark.parametrize("what", ["verify", "repair"])
def test_nothing_to_look_through_creates_nothing(command, tmp_path, what):
    result = command("cache", what, "--cache", tmp_path / "new")
    assert result.exit_code == 0
    assert "no chunk KV" in result.stdout
    assert not (tmp_path / "new").exists()

"""ragcachekit cache: what lies in the folder, and emptying it."""

import os
import shutil

import pytest
import torch

from ragcachekit.commands.cache import DAMAGED, tiers_in, usage
from ragcachekit.commands.workspace import CacheFolder
from ragcachekit.config import TreeConfig
from ragcachekit.errors import RagCacheError
from ragcachekit.model.kv import ChunkKV
from ragcachekit.prefix_tree import knowledge_tree as factory
from ragcachekit.prefix_tree.nodes import Root, Step
from ragcachekit.store.disk import DiskStore
from ragcachekit.types import KVKey

INDEX = "minilm-0123456789abcdef/index-1"


@pytest.fixture
def folder(tmp_path):
    """Two entries of acme, one of other, and an index."""
    store = DiskStore(tmp_path / "kv", 1 << 20)
    tensors = (torch.arange(24.0).reshape(2, 3, 4),)
    for namespace, chunk in (("acme", "a"), ("acme", "b"), ("other", "a")):
        assert store.put(KVKey("f", namespace, chunk), ChunkKV(tensors, tensors))
    store.close()
    (tmp_path / "indexes" / INDEX).parent.mkdir(parents=True)
    (tmp_path / "indexes" / INDEX).write_bytes(b"x" * 10)
    return tmp_path


def held(folder):
    tiers = tiers_in(CacheFolder(folder))
    return {name: len(sizes) for tier in tiers for name, sizes in usage(tier).items()}


def test_stats_by_namespace(command, folder):
    result = command("cache", "stats", "--cache", folder)
    assert result.exit_code == 0
    words = [line.replace("│", " ").split() for line in result.stdout.splitlines()]
    counts = {line[0]: int(line[1]) for line in words if len(line) == 4 and line[1].isdigit()}
    assert counts == {"acme": 2, "other": 1, "all": 3}
    assert "vector indexes: 10 bytes" in result.stdout
    sizes = sum(file.stat().st_size for file in (folder / "kv").glob("*.safetensors"))
    assert sum(map(sum, usage(folder / "kv").values())) == sizes


def test_an_empty_folder_stays_empty(command, tmp_path):
    for what in (("stats",), ("clear", "--yes")):
        result = command("cache", *what, "--cache", tmp_path)
        assert (result.exit_code, f"no chunk KV in {tmp_path}" in result.stdout) == (0, True)
        assert not list(tmp_path.iterdir())


def test_a_folder_that_is_none_is_an_error(command, tmp_path):
    result = command("cache", "clear", "--yes", "--cache", tmp_path / "typo")
    assert result.exit_code == 2
    assert f"the folder {tmp_path / 'typo'} does not exist; give" in result.output
    assert not (tmp_path / "typo").exists()
    (tmp_path / "file").write_text("")
    result = command("cache", "stats", "--cache", tmp_path / "file")
    assert (result.exit_code, "is a file; give" in result.output) == (2, True)


def test_before_the_first_run_the_users_own_folder_is_no_error(command, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = command("cache", "stats")
    assert (result.exit_code, f"no chunk KV in {tmp_path / 'ragcachekit'}" in result.stdout) == (0, True)


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
    assert (folder / "indexes" / INDEX).stat().st_size == 10
    command("cache", "clear", "--cache", folder, "--yes")
    assert not (folder / "indexes" / INDEX).exists()


def test_clear_deletes_what_the_commands_wrote(command, prepared, tmp_path):
    folder = shutil.copytree(prepared, tmp_path / "cache")
    (index,) = (folder / "indexes").glob("minilm-*")
    (index / ".index-2.a1_b2c3d").write_text("its writer was killed")
    result = command("cache", "clear", "--cache", folder, "--yes")
    assert "left" not in result.stdout
    assert not any(path.is_file() for path in (folder / "indexes").rglob("*"))


def test_clear_leaves_what_others_wrote(command, folder):
    strangers = [
        *("indexes/my_faiss.index", "indexes/sub/my.index", f"indexes/x{INDEX}", "indexes/index-1"),
        *("indexes/minilm-1111111111111111/file", "kv/mine.safetensors"),
    ]
    for name in strangers:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    assert command("cache", "clear", "--cache", folder, "--yes").exit_code == 0
    assert [(folder / name).read_text() for name in strangers] == ["mine"] * len(strangers)
    assert not (folder / "indexes" / INDEX).exists()
    assert held(folder) == {}


def test_clear_says_what_it_could_not_delete(command, folder, monkeypatch):
    monkeypatch.setattr(os, "unlink", refuse)
    result = command("cache", "clear", "--cache", folder, "--yes", "--namespace", "acme")
    assert result.exit_code == 2
    assert "2 entries could not be read or deleted" in result.stderr


def refuse(path, *_, **__):
    raise PermissionError(13, "Permission denied", str(path))


def test_damaged_entries_are_counted_apart_and_cleared(command, folder):
    (folder / "kv" / f"{'0' * 32}-{'0' * 64}.safetensors").write_bytes(b"no entry")
    assert held(folder) == {DAMAGED: 1, "acme": 2, "other": 1}
    command("cache", "clear", "--cache", folder, "--yes")
    assert held(folder) == {}


@pytest.mark.parametrize("step", ["entry.read_key", "disk_folder.entry_files"])
def test_a_folder_that_cannot_be_read_is_an_error(folder, monkeypatch, step):
    monkeypatch.setattr(f"ragcachekit.store.{step}", refuse)
    with pytest.raises(RagCacheError, match="Permission denied; choose another --cache"):
        held(folder)


@pytest.mark.parametrize("at", ["kv", "elsewhere"])
def test_the_folder_of_a_disk_tier_is_taken_as_such(command, folder, at):
    tier = (folder / "kv").rename(folder / at)
    assert held(tier) == {"acme": 2, "other": 1}
    command("cache", "clear", "--cache", tier, "--yes")
    assert not list(tier.glob("*.safetensors"))
    result = command("cache", "stats", "--cache", tier)
    assert f"no chunk KV in {tier}" in result.stdout


STEP = Step(("text", "chunk"), 3)
STEPS_KV = ChunkKV((torch.arange(24.0).reshape(2, 3, 4),), (torch.ones(2, 3, 4),), start=0)


def open_tree(folder):
    """As an engine opens it whose ``disk_path`` is the folder."""
    config = TreeConfig(host_bytes=1 << 20, disk_bytes=1 << 20)
    return factory.open_tree(config, torch.device("cpu"), folder=folder)


def request(tree, namespace):
    """As one that uses the step, and leaves it in memory."""
    match = tree.match(Root("f", namespace), [STEP])
    tree.insert(match, [] if match.found else [STEPS_KV], new=3)
    assert tree.match(Root("f", namespace), [STEP]).found[0].tier == "tree:host"


@pytest.fixture
def tree_folder(folder):
    """With a tree beside the chunk KV: one node of acme, one of tenant, who has no chunk KV."""
    tree = open_tree(folder / "kv")
    request(tree, "acme")
    request(tree, "tenant")
    tree.close()
    return folder


@pytest.mark.parametrize("at", ["", "kv", "kv/tree"])
def test_stats_tell_of_the_tree(command, tree_folder, at):
    result = command("cache", "stats", "--cache", tree_folder / at)
    assert f"Knowledge tree in {tree_folder / 'kv' / 'tree'}" in result.stdout
    assert "tenant" in result.stdout


@pytest.mark.parametrize("namespace", ["acme", "tenant", None])
def test_clear_reaches_the_tree(command, tree_folder, namespace):
    only = () if namespace is None else ("--namespace", namespace)
    result = command("cache", "clear", "--cache", tree_folder, "--yes", *only)
    assert result.exit_code == 0
    tree = open_tree(tree_folder / "kv")
    found = {name for name in ("acme", "tenant") if tree.match(Root("f", name), [STEP]).found}
    tree.close()
    assert found == ({"acme", "tenant"} - {namespace} if namespace else set())


def test_a_running_tree_does_not_bring_back_what_was_cleared(command, tree_folder):
    running = open_tree(tree_folder / "kv")
    request(running, "acme")
    command("cache", "clear", "--cache", tree_folder, "--yes")
    assert not running.match(Root("f", "acme"), [STEP]).found
    running.close()
    assert not list((tree_folder / "kv" / "tree").glob("*.safetensors"))

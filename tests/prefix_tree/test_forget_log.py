"""Several processes on one disk folder: what one of them forgets, none of the others brings back."""

import os
import threading
from _thread import interrupt_main
from contextlib import nullcontext
from pathlib import Path

import pytest

from ragcachekit import files
from ragcachekit.errors import StoreError
from ragcachekit.prefix_tree import disk as forgets
from ragcachekit.prefix_tree.disk import ForgetLog
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree, Turn
from ragcachekit.prefix_tree.nodes import Root
from ragcachekit.store.disk import DiskStore
from tree_kit import ROOT, ROW, kv_of, path_of, request

PATH = path_of("s2", "a3", "b4")


def tree_on(folder: Path, **options: int) -> KnowledgeTree:
    return KnowledgeTree(**{"host_bytes": 1 << 20, **options}, disk=DiskStore(folder, 1 << 24))


def on_disk(folder: Path, *names: str, root: Root = ROOT) -> int:
    """Steps that a process finds which begins now."""
    tree = tree_on(folder)
    found = len(tree.match(root, path_of(*names)))
    tree.close()
    return found


@pytest.mark.parametrize("gone", [None, frozenset({"a3"})])
def test_closing_brings_nothing_back_that_another_process_forgot(tmp_path: Path, gone) -> None:
    one, other = tree_on(tmp_path), tree_on(tmp_path)
    for tree in (one, other):
        request(tree, PATH)
        request(tree, PATH, Root("weights-1", "globex"))
    request(other, path_of("s2", "c5"))
    one.close()
    one = tree_on(tmp_path)
    one.forget("acme", gone)
    assert len(one.match(ROOT, PATH)) == (0 if gone is None else 1)
    other.close()
    assert on_disk(tmp_path, "s2", "a3", "b4") == (0 if gone is None else 1)
    assert on_disk(tmp_path, "s2", "c5") == (0 if gone is None else 1), "it is computed again"
    assert on_disk(tmp_path, "s2", "a3", "b4", root=Root("weights-1", "globex")) == 3


def test_a_look_up_hears_of_it_and_requests_under_way_leave_nothing(tmp_path: Path) -> None:
    one, other = tree_on(tmp_path), tree_on(tmp_path, turns_bytes=1 << 20)
    under_way = other.match(ROOT, PATH)
    request(other, PATH)
    other.turns.keep(Turn(ROOT, tuple(range(20)), kv_of(ROOT, PATH), 20, frozenset({"a3"})), 0)
    one.forget("acme", frozenset({"a3"}))
    assert len(other.match(ROOT, PATH)) == 0
    assert other.turns.longest(ROOT, range(20)) is None
    assert other.insert(under_way, [kv_of(ROOT, PATH[: i + 1]) for i in range(3)]) == 0
    other.close()
    assert on_disk(tmp_path, "s2", "a3") == 0


@pytest.mark.parametrize("killed", [False, True])
def test_a_forget_waits_for_a_writer_and_reaches_whoever_read_from_it(tmp_path: Path, killed: bool) -> None:
    """A killed writer's lock is freed; a reader has taken in what was about to be forgotten."""
    one, reader = tree_on(tmp_path), tree_on(tmp_path)
    forgetting, waited = threading.Thread(target=one.forget, args=("acme",)), []

    class Overtaken(DiskStore):
        def put(self, key, kv) -> bool:  # type: ignore[no-untyped-def]
            if not waited:
                forgetting.start()
                forgetting.join(0.3)
            waited.append(forgetting.is_alive())
            stored = super().put(key, kv)
            if len(waited) == len(PATH):
                request(reader, PATH)
                if killed:
                    interrupt_main()
            return stored

    writer = KnowledgeTree(host_bytes=1 << 20, disk=Overtaken(tmp_path, 1 << 24))
    for tree in (one, reader):
        tree.match(ROOT, PATH)
    with pytest.raises(KeyboardInterrupt) if killed else nullcontext():
        request(writer, PATH)
        writer.close()
    forgetting.join(30)
    assert waited == [True] * len(PATH)
    assert len(reader.match(ROOT, PATH)) == 0
    assert on_disk(tmp_path, "s2", "a3", "b4") == 0


def test_two_forgets_at_once_hide_neither(tmp_path: Path, monkeypatch) -> None:
    one, other = tree_on(tmp_path), tree_on(tmp_path)
    for tree in (one, other):
        request(tree, PATH)
        request(tree, path_of("c5"))
    theirs = threading.Thread(target=other.forget, args=("acme", frozenset({"a3"})))

    def overtaken(*what) -> None:  # type: ignore[no-untyped-def]
        if theirs.ident is None:
            theirs.start()
            theirs.join(0.3)
        files.replace_file(*what)

    monkeypatch.setattr(forgets, "replace_file", overtaken)
    one.forget("acme", frozenset({"c5"}))
    theirs.join(30)
    assert len(one.match(ROOT, PATH)) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this test forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_the_log_tells_others_and_not_oneself(tmp_path: Path, monkeypatch) -> None:
    one, other = ForgetLog(tmp_path), ForgetLog(tmp_path)
    assert [log.changed("acme") for log in (one, other)] == [False, False]
    for _ in range(8):
        with one.forgetting("acme"):
            pass
        assert not one.changed("acme")
        assert not other.changed("globex")
        assert other.changed("acme")
        assert not other.changed("acme")
    assert not ForgetLog(tmp_path).changed("acme"), "who begins now has nothing that it could forget"
    child = os.fork()
    if not child:
        try:
            with ForgetLog(tmp_path).forgetting("acme"):
                pass
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert one.changed("acme")
    with other.forgetting("acme"):
        pass
    assert other.changed("acme"), "its own hides nobody else's"
    (file,) = (path for path in tmp_path.iterdir() if path.name != "lock")
    file.unlink()
    assert one.changed("acme"), "what is lost counts as a forget"


def test_a_stopped_forgetter_keeps_no_writer_waiting_for_ever(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(forgets, "_SECONDS_TO_WRITE", 0.0)
    log, other = ForgetLog(tmp_path), ForgetLog(tmp_path)
    with other.forgetting("acme"), log.writing() as may_write:
        assert not may_write
    assert "is a process stopped" in caplog.text
    with log.writing() as may_write:
        assert may_write
    with other.writing() as may_write, log.writing() as also:
        assert (may_write, also) == (True, False)


def test_a_stopped_writer_keeps_no_forget_waiting_for_ever(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(forgets, "_SECONDS_TO_FORGET", 0.0)
    log, other, done = ForgetLog(tmp_path), ForgetLog(tmp_path), []
    assert not other.changed("acme")
    with (
        other.writing(),
        pytest.raises(StoreError, match="forget again") as failure,
        log.forgetting("acme"),
    ):
        done.append(True)
    assert done == [True]
    assert "is a process stopped" in str(failure.value)
    assert other.changed("acme")
    with log.forgetting("acme"):
        done.append(True)
    assert len(done) == 2


def test_a_failing_medium_stops_no_forget_and_writes_nothing(tmp_path: Path, caplog) -> None:
    tree = tree_on(tmp_path, host_bytes=9 * ROW)
    request(tree, PATH)
    (tmp_path / "forgets").mkdir()
    (tmp_path / "forgets" / "lock").symlink_to(tmp_path)
    request(tree, path_of("c9"))  # pushes all of it out
    assert tree.forget("acme", frozenset({"c9"})) == 1
    assert tree.disk.stats()[0].entries == 0
    assert {"the tree is not writte", "other processes do not"} == {
        r.getMessage()[:22] for r in caplog.records
    }


@pytest.mark.parametrize("theirs", [True, False], ids=["another process", "this process"])
def test_what_is_found_while_it_is_being_deleted_is_not_kept(tmp_path: Path, monkeypatch, theirs) -> None:
    one = tree_on(tmp_path)
    request(one, PATH)
    one.close()
    one = tree_on(tmp_path)
    reader = tree_on(tmp_path) if theirs else one
    forget, matches = one.disk.store.forget, []

    def slow(*what):  # type: ignore[no-untyped-def]
        matches.append(reader.match(ROOT, PATH))
        return forget(*what)

    monkeypatch.setattr(one.disk.store, "forget", slow)
    one.forget("acme", frozenset({"a3"}))
    (match,) = matches
    assert len(match) == 3
    reader.insert(match, new=10)
    assert len(reader.match(ROOT, PATH)) == 1
    reader.close()
    one.close()
    assert on_disk(tmp_path, "s2", "a3", "b4") == 1

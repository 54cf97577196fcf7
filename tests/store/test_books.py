"""The common books of a bulk folder: reservations, leases, forgets, losses, and a crowd of writers."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from redis_kit import KEY_BYTES, RedisServer, booked_store, running_server
from store_kit import KEY, contents, key_of, kv_of

from ragcachekit.config import StoreConfig
from ragcachekit.store import books_scripts
from ragcachekit.store.booked_backend import BookedBackend
from ragcachekit.store.books import Books
from ragcachekit.store.entry_bytes import to_bytes
from ragcachekit.store.factory import open_store
from ragcachekit.store.fsspec_store import FsspecStore
from ragcachekit.store.guard import Guard
from ragcachekit.store.remote_store import RemoteStore
from ragcachekit.store.seal import OVERHEAD, Seal
from ragcachekit.types import KVKey

ONE = OVERHEAD + sum(len(part) for part in to_bytes(key_of(0), kv_of(0)))


@pytest.fixture(scope="module")
def running() -> Iterator[RedisServer]:
    with running_server() as server:
        yield server


@pytest.fixture
def server(running: RedisServer) -> RedisServer:
    running.empty()
    return running


def files(path: Path) -> dict[str, int]:
    """Digest → size, as they lie there; a file that goes meanwhile is not there."""
    found = {}
    for file in path.glob("*/*.kv"):
        try:
            found[file.stem] = file.stat().st_size
        except FileNotFoundError:
            continue
    return found


def there(path: Path, numbers: range) -> list[int]:
    return [number for number in numbers if key_of(number).digest() in files(path)]


def ten_seconds_later(server: RedisServer) -> None:
    """Whoever marked a folder has done it, or never will."""
    server.client.delete(*server.client.keys("*-bulk-new:*") or ["none"])


class Paused(LocalFileSystem):
    """Calls ``before`` with the name of each operation on objects."""

    cachable = False
    before: Callable[[str], None] = staticmethod(lambda name: None)

    def mv(self, *args: Any, **options: Any) -> None:
        self.before("mv")
        super().mv(*args, **options)

    def rm_file(self, path: str) -> None:
        self.before("rm_file " + path)
        super().rm_file(path)

    def find(self, *args: Any, **options: Any) -> Any:
        self.before("find")
        return super().find(*args, **options)


def store_on(fs: Any, server: RedisServer, path: Path, budget: int) -> RemoteStore:
    def books(**told: Any) -> Books:
        return Books(server.url, 10.0, 30.0, cooldown=0.0, **told)

    backend = BookedBackend(fs, str(path), budget, {}, books)
    return RemoteStore("bulk", backend, Seal(KEY_BYTES), Guard("bulk", 40.0, failures=1_000), budget)


def test_a_read_in_one_process_keeps_an_entry_from_the_other_ones_writes(
    server: RedisServer, tmp_path: Path
) -> None:
    reader, writer = (booked_store(server, tmp_path.as_uri(), 3 * ONE) for _ in range(2))
    assert all(writer.put(key_of(number), kv_of(number)) for number in range(3))
    assert reader.get(key_of(0)) is not None
    assert reader.put(key_of(3), kv_of(3))
    assert there(tmp_path, range(4)) == [0, 2, 3]
    assert reader.get(key_of(2)) is not None
    scores = dict(server.client.zrange(server.client.keys("*:use")[0], 0, -1, withscores=True))
    newest = max(scores, key=scores.__getitem__)
    while key_of(2).digest() not in newest.decode():  # told behind the reader's back
        scores = dict(server.client.zrange(server.client.keys("*:use")[0], 0, -1, withscores=True))
        newest = max(scores, key=scores.__getitem__)
    assert writer.put(key_of(4), kv_of(4))
    assert there(tmp_path, range(5)) == [2, 3, 4]
    assert writer.stats()[0].nbytes == reader.stats()[0].nbytes == 3 * ONE


def test_quotas_count_what_all_writers_wrote(server: RedisServer, tmp_path: Path) -> None:
    stores = [
        booked_store(server, tmp_path.as_uri(), 20 * ONE, quotas={"acme/docs": 2 * ONE}) for _ in range(3)
    ]
    for number in range(9):
        assert stores[number % 3].put(key_of(number), kv_of(number))
        assert stores[number % 3].put(key_of(number, namespace="other"), kv_of(number))
    assert there(tmp_path, range(9)) == [7, 8]
    assert len(files(tmp_path)) == 2 + 9


def test_books_that_were_lost_are_made_again_from_the_folder(server: RedisServer, tmp_path: Path) -> None:
    first, second = (booked_store(server, tmp_path.as_uri(), 3 * ONE) for _ in range(2))
    assert all(first.put(key_of(number), kv_of(number)) for number in range(3))
    server.empty()
    assert second.put(key_of(3), kv_of(3))
    assert len(files(tmp_path)) == 3
    assert first.stats()[0].nbytes == 3 * ONE
    assert first.put(key_of(4), kv_of(4))
    assert sum(files(tmp_path).values()) == 3 * ONE


def test_a_server_that_went_back_in_time_is_not_believed(tmp_path: Path) -> None:
    """Restarted on a snapshot: the books are there, and wrong."""
    with running_server() as server:
        store = booked_store(server, (tmp_path / "kv").as_uri(), 3 * ONE, cooldown=0.0)
        assert store.put(key_of(0), kv_of(0))
        saved = {name: server.client.dump(name) for name in server.client.keys("*")}
        assert all(store.put(key_of(number), kv_of(number)) for number in (1, 2))
        server.kill()
        server.start()
        for name, value in saved.items():
            server.client.restore(name, 0, value)
        assert store.put(key_of(3), kv_of(3))
        assert sum(files(tmp_path / "kv").values()) == store.stats()[0].nbytes == 3 * ONE
        store.close()


def test_a_write_during_which_the_server_went_back_in_time_does_not_count(tmp_path: Path) -> None:
    with running_server() as server:
        fs = Paused()
        store = store_on(fs, server, tmp_path / "kv", 3 * ONE)
        assert store.put(key_of(0), kv_of(0))

        def restart(name: str) -> None:
            if name == "mv":
                saved = {key: server.client.dump(key) for key in server.client.keys("*")}
                server.kill()
                server.start()
                for key, value in saved.items():
                    server.client.restore(key, 0, value)

        fs.before = restart
        assert not store.put(key_of(1), kv_of(1))
        fs.before = lambda name: None
        assert there(tmp_path / "kv", range(2)) == [0]
        assert store.stats()[0].nbytes == ONE
        store.close()


def test_a_folder_that_was_wiped_gets_new_books(server: RedisServer, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    first, second = (booked_store(server, folder.as_uri(), 3 * ONE) for _ in range(2))
    assert first.put(KEY, kv_of(0))
    shutil.rmtree(folder)
    while first.stats()[0].nbytes:  # a read that finds nothing has it looked into
        assert first.get(KEY) is None
    ten_seconds_later(server)
    assert first.put(key_of(1), kv_of(1))
    assert second.get(KEY) is None
    assert second.get(key_of(1)) is not None
    third = booked_store(server, folder.as_uri(), 3 * ONE)
    assert third.put(key_of(2), kv_of(2))
    assert first.stats()[0].nbytes == 2 * ONE, "the same books"


def test_a_census_puts_right_what_the_books_know_too_much(server: RedisServer, tmp_path: Path) -> None:
    store = booked_store(server, tmp_path.as_uri(), 3 * ONE)
    assert all(store.put(key_of(number), kv_of(number)) for number in range(3))
    next(tmp_path.glob(f"*/{key_of(1).digest()}.kv")).unlink()
    assert store.stats()[0].nbytes == 3 * ONE
    server.client.delete(*server.client.keys("*:ready"))  # as if the last census were out of date
    assert (store.stats()[0].entries, store.stats()[0].nbytes) == (2, 2 * ONE)


def test_what_was_written_since_is_not_meant_by_a_late_word_that_it_is_gone(
    server: RedisServer, tmp_path: Path
) -> None:
    store = booked_store(server, tmp_path.as_uri(), 3 * ONE)
    assert store.put(key_of(0), kv_of(0))
    books: Books = store._backend._books  # type: ignore[attr-defined]
    before = books.stamps([dead_name(tmp_path, 0)])
    assert len(before) == 1
    assert store.put(key_of(0), kv_of(0))
    books.gone(before)
    assert store.stats()[0].nbytes == ONE
    books.gone(books.stamps([dead_name(tmp_path, 0)]))
    assert store.stats()[0].nbytes == 0


def test_what_was_read_is_no_victim_of_the_reader_although_the_books_have_not_heard(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = booked_store(server, tmp_path.as_uri(), 3 * ONE)
    monkeypatch.setattr(Guard, "post", lambda guard, operation: False)
    assert all(store.put(key_of(number), kv_of(number)) for number in range(3))
    assert store.get(key_of(0)) is not None
    assert store.put(key_of(3), kv_of(3))
    assert there(tmp_path, range(4)) == [0, 2, 3]


def test_the_same_path_on_other_machines_has_its_own_books(server: RedisServer, tmp_path: Path) -> None:
    """Seen from another machine, the same path holds another folder: each has the budget to itself."""
    link, one, other = tmp_path / "kv", tmp_path / "one", tmp_path / "other"
    for folder in (one, other, one):
        folder.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(folder)
        ten_seconds_later(server)
        store = booked_store(server, link.as_uri(), 2 * ONE)
        assert all(store.put(key_of(number), kv_of(number)) for number in range(2))
        store.close()
    assert len(files(one)) == len(files(other)) == 2
    mounted = booked_store(server, one.as_uri(), 2 * ONE)
    assert mounted.stats()[0].nbytes == 2 * ONE
    assert mounted.put(key_of(3), kv_of(3))
    assert sum(files(one).values()) == 2 * ONE


def test_without_the_server_entries_are_read_and_none_written(tmp_path: Path) -> None:
    with running_server() as server:
        store = booked_store(server, tmp_path.as_uri(), 3 * ONE, cooldown=0.0)
        assert store.put(KEY, kv_of(1))
        server.kill()
        for _ in range(10):
            found = store.get(KEY)
            assert found is not None
            assert contents(found.kv) == contents(kv_of(1))
            assert not store.put(key_of(2), kv_of(2))
        assert not store.health.is_open, "the bulk tier itself is well"
        assert store.stats()[0].failed_writes == 10
        late = booked_store(server, tmp_path.as_uri(), 3 * ONE, cooldown=0.0)
        assert late.get(KEY) is not None
        server.start()
        assert late.put(key_of(2), kv_of(2))
        assert store.put(key_of(3), kv_of(3))
        assert len(files(tmp_path)) == 3
        store.close()
        late.close()


def test_a_server_that_hangs_is_no_failure_of_the_bulk_tier(tmp_path: Path) -> None:
    with running_server() as server:
        store = booked_store(server, tmp_path.as_uri(), 9 * ONE, books_deadline=0.05, cooldown=0.0)
        while not store.put(KEY, kv_of(1)):
            pass
        server.hang()
        try:
            for _ in range(8):
                assert store.get(KEY) is not None
                assert store.get(key_of(2)) is None
                assert not store.put(key_of(3), kv_of(3))
                assert KEY in store
        finally:
            server.go_on()
        assert (store.health.timeouts, store.health.errors) == (0, 0)
        store.close()


def test_small_entries_lie_in_both_and_large_ones_in_bulk_alone(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIGNING_KEY", "0" * 64)
    config = StoreConfig(
        host_bytes=0,
        redis_url=server.url,
        redis_entry_bytes=kv_of(0).nbytes,
        bulk_url=tmp_path.as_uri(),
        bulk_bytes=100 * ONE,
        remote_key="SIGNING_KEY",
        remote_deadline=10.0,
        bulk_deadline=40.0,
    )
    stores = [open_store(config) for _ in range(2)]
    assert stores[0].put(key_of(0), kv_of(0))
    assert stores[0].put(key_of(1), kv_of(1, tokens=5))
    for number, tokens, tier in ((0, 4, "redis"), (1, 5, "bulk")):
        found = stores[1].get(key_of(number))
        assert found is not None
        assert found.tier == tier
        assert contents(found.kv) == contents(kv_of(number, tokens=tokens))
    assert [(s.tier, s.entries) for s in stores[1].stats()] == [("redis", 1), ("bulk", 2)]
    assert stores[1].forget("acme/docs") == 2
    assert [stores[0].get(key_of(number)) for number in (0, 1)] == [None, None]
    for store in stores:
        store.close()


def test_a_write_that_its_forget_overtakes_does_not_count(server: RedisServer, tmp_path: Path) -> None:
    fs = Paused()
    writer = store_on(fs, server, tmp_path, 3 * ONE)
    other = booked_store(server, tmp_path.as_uri(), 3 * ONE)

    def forget(name: str) -> None:
        if name == "mv":
            assert other.forget(KEY.namespace, frozenset({"somebody"})) == 0

    assert writer.put(key_of(1), kv_of(1))
    fs.before = forget
    assert not writer.put(KEY, kv_of(1)), "reserved before, written after"
    assert list(files(tmp_path)) == [key_of(1).digest()]
    assert writer.stats()[0].nbytes == ONE


def test_a_refused_write_that_cannot_be_deleted_is_served_to_nobody(
    server: RedisServer, tmp_path: Path
) -> None:
    """Forgotten between reserving and writing; then the service fails once to delete what was written."""
    fs, once = Paused(), [1]
    writer = store_on(fs, server, tmp_path, 3 * ONE)
    forgetter, reader = (booked_store(server, tmp_path.as_uri(), 3 * ONE) for _ in range(2))
    assert writer.put(key_of(4), kv_of(4))

    def before(name: str) -> None:
        if name == "mv":
            assert forgetter.forget(KEY.namespace, frozenset({KEY.chunk_id})) == 0
            assert forgetter.pending_forgets == 1, "a write that is under way may still bring it back"
        if name.startswith("rm_file") and KEY.digest() in name and once:
            once.pop()
            raise OSError("503 slow down")

    fs.before = before
    assert not writer.put(KEY, kv_of(4))
    assert list(files(tmp_path)).count(KEY.digest()) == 1
    assert forgetter.get(KEY) is None
    assert reader.get(KEY) is None, "the forgetter deleted it"
    assert writer.get(KEY) is None
    assert forgetter.get(KEY) is None
    assert forgetter.pending_forgets == 0, "the write has ended"
    assert forgetter.put(KEY, kv_of(4))
    for store in (writer, forgetter, reader):
        assert store.get(KEY) is not None
    assert writer.stats()[0].nbytes == sum(files(tmp_path).values()) == 2 * ONE


def test_the_writer_hides_what_it_cannot_delete_and_tries_again(server: RedisServer, tmp_path: Path) -> None:
    fs, fails = Paused(), [True]
    writer = store_on(fs, server, tmp_path, 3 * ONE)
    other = booked_store(server, tmp_path.as_uri(), 3 * ONE)
    assert writer.put(key_of(4), kv_of(4))

    def before(name: str) -> None:
        if name == "mv":
            other.forget(KEY.namespace, frozenset({"somebody"}))
        if name.startswith("rm_file") and KEY.digest() in name and fails[0]:
            raise OSError("503 slow down")

    fs.before = before
    assert not writer.put(KEY, kv_of(4))
    for _ in range(3):
        assert writer.get(KEY) is None
        assert KEY not in writer
        assert not writer.put(KEY, kv_of(4))
    fails[0] = False
    assert writer.get(key_of(4)) is not None, "any operation tries again"
    assert list(files(tmp_path)) == [key_of(4).digest()]
    assert writer.stats()[0].nbytes == ONE


def test_a_forget_waits_for_no_dead_writer_longer_than_its_lease(server: RedisServer, tmp_path: Path) -> None:
    store = store_on(LocalFileSystem(), server, tmp_path, 3 * ONE)
    assert store.put(key_of(1), kv_of(1))
    dead: BookedBackend = store._backend  # type: ignore[assignment]
    name = dead_name(tmp_path, 0)
    assert dead._room(name, ONE, (3 * ONE, 0), "d" * 16)[0] == "new"
    assert store.forget(KEY.namespace, frozenset({"somebody"})) == 0
    assert store.get(key_of(1)) is not None, "it is about others"
    assert store.pending_forgets == 1
    (leases,) = server.client.keys("*:leases")
    server.client.zadd(leases, {name: 0})
    assert store.get(key_of(7, context=("somebody",))) is None
    assert store.pending_forgets == 0


def test_writes_after_a_forget_are_not_refused_for_its_being_told_again(
    server: RedisServer, tmp_path: Path
) -> None:
    store = store_on(LocalFileSystem(), server, tmp_path, 9 * ONE)
    assert store.put(key_of(1), kv_of(1))
    dead: BookedBackend = store._backend  # type: ignore[assignment]
    assert dead._room(dead_name(tmp_path, 0), ONE, (9 * ONE, 0), "d" * 16)[0] == "new"
    store.forget(KEY.namespace, frozenset({"somebody"}))
    fs = Paused()
    writer = store_on(fs, server, tmp_path, 9 * ONE)
    concerned = key_of(7, context=("somebody",))
    fs.before = lambda name: store.get(concerned) and None if name == "mv" else None
    assert writer.put(key_of(2), kv_of(2))
    assert store.pending_forgets == 1


def test_uses_that_were_held_back_do_not_keep_a_write_waiting(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One script of them goes with the wish for room, the newest; all are told in order afterwards."""
    store = booked_store(server, tmp_path.as_uri(), 5 * ONE)
    assert all(store.put(key_of(number), kv_of(number)) for number in range(5))
    books: Books = store._backend._books  # type: ignore[attr-defined]
    told: list[tuple[Any, ...]] = []
    ask = books._eval

    def eval_(script: str, *arguments: Any) -> Any:
        if script is books_scripts.TOUCH:
            told.append(arguments)
        return ask(script, *arguments)

    monkeypatch.setattr(books, "_eval", eval_)
    with monkeypatch.context() as held:
        held.setattr(Guard, "post", lambda guard, operation: False)
        for number in range(1200):
            books.used(f"group/{number}")
        assert store.get(key_of(0)) is not None
        assert store.put(key_of(5), kv_of(5))
    assert [len(names) for names in told] == [500, 500], "asked twice: one had to leave"
    assert there(tmp_path, range(6)) == [0, 2, 3, 4, 5]
    books.used("group/last")
    while told[-1][-1] != "group/last":
        pass
    names = [name for names in told[2:] for name in names]
    assert names == [*(f"group/{n}" for n in range(1200)), dead_name(tmp_path, 0), "group/last"]


def test_a_write_during_which_the_books_are_lost_does_not_count(server: RedisServer, tmp_path: Path) -> None:
    fs = Paused()
    writer = store_on(fs, server, tmp_path, 3 * ONE)
    fs.before = lambda name: server.empty() if name == "mv" else None
    assert not writer.put(key_of(0), kv_of(0))
    assert files(tmp_path) == {}
    fs.before = lambda name: None
    assert writer.put(key_of(0), kv_of(0))


def test_a_write_under_a_name_at_which_another_process_is_gives_way(
    server: RedisServer, tmp_path: Path
) -> None:
    fs = Paused()
    writer = store_on(fs, server, tmp_path, 3 * ONE)
    other = booked_store(server, tmp_path.as_uri(), 3 * ONE)
    kept = []
    fs.before = lambda name: kept.append(other.put(KEY, kv_of(2))) if name == "mv" else None
    assert writer.put(KEY, kv_of(1))
    assert kept == [False]
    found = other.get(KEY)
    assert found is not None
    assert contents(found.kv) == contents(kv_of(1))


def test_reservations_of_others_are_never_passed(server: RedisServer, tmp_path: Path) -> None:
    """Three entries fit, three are being written: the fourth gets nothing, and nobody's object goes."""
    fs = Paused()
    stores = [store_on(fs, server, tmp_path, 3 * ONE) for _ in range(4)]
    assert stores[0].stats()[0].entries == 0  # by now the folder is marked, which also takes a rename
    depth = [0]
    kept: dict[int, bool] = {}

    def before(name: str) -> None:
        if name == "mv" and len(depth) < 4:
            number = len(depth)
            depth.append(number)
            kept[number] = stores[number].put(key_of(number), kv_of(number))

    fs.before = before
    kept[0] = stores[0].put(key_of(0), kv_of(0))
    assert kept == {0: True, 1: True, 2: True, 3: False}
    assert there(tmp_path, range(4)) == [0, 1, 2]
    assert stores[0].stats()[0].nbytes == 3 * ONE


def test_what_a_dead_writer_reserved_and_wrote_goes_when_its_lease_ends(
    server: RedisServer, tmp_path: Path
) -> None:
    store = store_on(LocalFileSystem(), server, tmp_path, 3 * ONE)
    assert store.put(key_of(0), kv_of(0))
    # Two writers that reserved, one of which wrote; then nobody heard of them again.
    dead: BookedBackend = store._backend  # type: ignore[assignment]
    names = [dead_name(tmp_path, number) for number in (1, 2)]
    for name in names:
        assert dead._room(name, ONE, (3 * ONE, 0), "d" * 16)[0] == "new"
    (path,) = tmp_path.glob("*/*.kv")
    (path.parent / f"{key_of(1).digest()}.kv").write_bytes(path.read_bytes())
    living = booked_store(server, tmp_path.as_uri(), 3 * ONE)
    assert living.put(key_of(0), kv_of(0)), "in place of what it has"
    assert there(tmp_path, range(3)) == [0, 1], "their time has not come"
    (leases,) = server.client.keys("*:leases")
    server.client.zadd(leases, dict.fromkeys(names, 0))
    assert all(living.put(key_of(number), kv_of(number)) for number in (3, 4, 5))
    assert there(tmp_path, range(6)) == [3, 4, 5]
    assert living.stats()[0].nbytes == 3 * ONE


def test_victims_of_a_deleter_that_died_are_deleted_by_the_next(server: RedisServer, tmp_path: Path) -> None:
    store = store_on(LocalFileSystem(), server, tmp_path, 3 * ONE)
    assert all(store.put(key_of(number), kv_of(number)) for number in range(3))
    dead: BookedBackend = store._backend  # type: ignore[assignment]
    answer = dead._books.reserve(dead_name(tmp_path, 9), ONE, (3 * ONE, 0), "d" * 16)
    assert answer == ("evict", (dead_name(tmp_path, 0),))
    assert store.stats()[0].nbytes == 3 * ONE, "it counts until its object has gone"
    assert store.put(key_of(3), kv_of(3)), "another has to leave"
    assert there(tmp_path, range(4)) == [0, 2, 3]
    (leases,) = server.client.keys("*:leases")
    server.client.zadd(leases, {dead_name(tmp_path, 0): 0})
    assert store.put(key_of(3), kv_of(3))
    assert there(tmp_path, range(4)) == [2, 3]
    assert sum(files(tmp_path).values()) == store.stats()[0].nbytes <= 3 * ONE


def test_one_object_that_cannot_be_deleted_does_not_stop_the_others(
    server: RedisServer, tmp_path: Path
) -> None:
    fs = Paused()
    store = store_on(fs, server, tmp_path, 2 * ONE)

    def refuse(name: str) -> None:
        if key_of(0).digest() in name:
            raise PermissionError("kept")

    fs.before = refuse
    assert all(store.put(key_of(number), kv_of(number)) for number in range(2))
    assert not store.put(key_of(2), kv_of(2)), "the one that would have to go cannot"
    assert store.put(key_of(3), kv_of(3))
    assert there(tmp_path, range(4)) == [0, 3]
    assert store.stats()[0].nbytes == 2 * ONE


def test_a_smaller_budget_is_kept_from_the_next_opening_on(server: RedisServer, tmp_path: Path) -> None:
    store = booked_store(server, tmp_path.as_uri(), 5 * ONE)
    assert all(store.put(key_of(number), kv_of(number)) for number in range(5))
    smaller = booked_store(server, tmp_path.as_uri(), 2 * ONE)
    assert there(tmp_path, range(5)) == [3, 4]
    assert smaller.stats()[0].nbytes == 2 * ONE


def dead_name(path: Path, number: int) -> str:
    return f"{next(path.glob('*/*.kv')).parent.name}/{key_of(number).digest()}"


class Crowd:
    """Threads at random over few keys, each with one of three stores; every value and sum is checked."""

    KEYS, ENTRIES, THREADS = 14, 5, 6

    def __init__(self, stores: list[FsspecStore], path: Path, air: int) -> None:
        self.stores, self.path, self.air = stores, path, air
        self.wrong: list[object] = []
        self.hits = self.kept = 0
        self.lock = threading.Lock()

    def run(self, steps: int, disturb: Callable[[random.Random], None] = lambda random: None) -> None:
        def work(worker: int) -> None:
            draw = random.Random(worker)
            try:
                for _ in range(steps):
                    self.step(self.stores[worker % len(self.stores)], draw)
                    if not worker and draw.random() < 0.1:
                        disturb(draw)
            except BaseException as error:
                self.wrong.append(error)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(self.THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def step(self, store: FsspecStore, draw: random.Random) -> None:
        number, kind = draw.randrange(self.KEYS), draw.random()
        key: KVKey = key_of(number, namespace="small" if number % 4 == 1 else "acme/docs")
        if kind < 0.5:
            kept = store.put(key, kv_of(number))
            with self.lock:
                self.kept += kept
        elif kind < 0.51:
            store.forget(key.namespace, frozenset({key.chunk_id}))
        else:
            found = store.get(key)
            if found is not None:
                with self.lock:
                    self.hits += 1
                if contents(found.kv) != contents(kv_of(number)):
                    self.wrong.append(key)
        nbytes = sum(files(self.path).values())
        if nbytes > self.ENTRIES * ONE + self.air + 64:  # chunk ids and namespaces differ by some letters
            self.wrong.append(nbytes)


def test_a_crowd_never_passes_the_budget(server: RedisServer, tmp_path: Path) -> None:
    budget = Crowd.ENTRIES * ONE + 64
    stores = [booked_store(server, tmp_path.as_uri(), budget, quotas={"small": 2 * ONE}) for _ in range(3)]
    crowd = Crowd(stores, tmp_path, 0)
    crowd.run(60)
    assert crowd.wrong == []
    assert crowd.kept > 60
    assert crowd.hits > 15
    assert sum(store.forget("acme/docs") for store in stores) > 0
    for store in stores:
        store.forget("small")
    assert files(tmp_path) == {}
    while stores[0].stats()[0].nbytes:  # what was read as gone while it was written is looked into
        assert all(stores[0].get(key_of(number)) is None for number in range(Crowd.KEYS))


def test_a_crowd_stays_near_the_budget_while_the_books_are_lost_again_and_again(
    server: RedisServer, tmp_path: Path
) -> None:
    budget = Crowd.ENTRIES * ONE + 64
    stores = [booked_store(server, tmp_path.as_uri(), budget) for _ in range(3)]
    crowd = Crowd(stores, tmp_path, Crowd.THREADS * ONE)  # one entry per writer that is at it
    crowd.run(60, lambda draw: server.empty())
    assert crowd.wrong == []
    assert crowd.kept > 40
    assert any(stores[0].put(key_of(0), kv_of(0)) for _ in range(100))
    assert sum(files(tmp_path).values()) <= budget
    assert stores[0].stats()[0].nbytes >= sum(files(tmp_path).values())

"""What the tree promises, case by case: matching, eviction order, tiers, pins, forgetting, faults."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from tree_check import check

from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from ragcachekit.prefix_tree.nodes import Root, Step
from ragcachekit.store.base import StoreStats
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.eviction import open_eviction
from ragcachekit.store.forgets import ForgottenTexts
from ragcachekit.store.memory import HostStore
from tree_kit import ROOT, ROW, kv_of, nodes, path_of, request, same, tiers


def host_tree(rows: int = 1000, **options) -> KnowledgeTree:
    return KnowledgeTree(host_bytes=rows * ROW, **options)


def two_tiers(gpu: int, host: int, **options) -> KnowledgeTree:
    return KnowledgeTree(gpu_bytes=gpu * ROW, host_bytes=host * ROW, device="cpu", **options)


def known(tree: KnowledgeTree, *names: str) -> int:
    return len(tree.match(ROOT, path_of(*names)))


def record(tree: KnowledgeTree, tier: str) -> StoreStats:
    return next(one for one in tree.stats() if one.tier == f"tree:{tier}")


def evictions(tree: KnowledgeTree, tier: str) -> int:
    return record(tree, tier).evictions


def test_shared_beginnings_are_shared_and_orders_are_kept_apart() -> None:
    tree = host_tree()
    request(tree, path_of("s3", "a4", "b5", "c6"))
    assert known(tree, "s3", "a4", "b5", "c6") == 4
    assert known(tree, "s3", "a4", "b5", "d6") == 3
    assert known(tree, "s3", "b5", "a4") == 1
    assert known(tree, "a4", "b5") == 0, "without the system text it is another path"
    assert tree.match(ROOT, path_of("s3", "a4", "d6")).tokens == 7
    request(tree, path_of("s3", "a4", "d6"))
    assert len(nodes(tree)) == 5


def test_nothing_is_shared_across_models_tenants_and_frequencies() -> None:
    tree = host_tree()
    request(tree, path_of("s3", "a4"))
    for other in (
        replace(ROOT, fingerprint="weights-2"),
        replace(ROOT, namespace="globex"),
        replace(ROOT, regime="long"),
    ):
        assert len(tree.match(other, path_of("s3", "a4"))) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantised": "int8"}, "rounded to int8"),
        ({"start": None}, "turned for position None"),
        ({"start": 4}, "turned for position 4"),
    ],
)
def test_what_is_not_exact_is_refused(change, message) -> None:
    tree = host_tree()
    path = path_of("s3", "a4")
    kvs = [kv_of(ROOT, path[:1]), replace(kv_of(ROOT, path), **change)]
    with pytest.raises(ValueError, match=message):
        tree.insert(tree.match(ROOT, path), kvs)
    assert len(nodes(tree)) == 0


def test_kv_of_another_length_or_too_much_of_it_is_refused() -> None:
    tree, path = host_tree(), path_of("s3")
    match = tree.match(ROOT, path)
    with pytest.raises(ValueError, match="has 4 tokens, the step 3"):
        tree.insert(match, [kv_of(ROOT, path_of("s4"))])
    with pytest.raises(ValueError, match="2 KVs for the 1 steps"):
        tree.insert(match, [kv_of(ROOT, path)] * 2)


def test_leaves_leave_first_and_parents_after_their_last_child() -> None:
    tree = host_tree(12)
    request(tree, path_of("s3", "a4", "b5"))  # 12 rows
    request(tree, path_of("s3", "c2"))  # the oldest leaf is b5
    assert known(tree, "s3", "a4", "b5") == 2
    assert known(tree, "s3", "c2") == 2
    request(tree, path_of("s3", "d7"))  # 3 + 4 + 2 + 7: a4, without children now and the oldest, goes
    assert known(tree, "s3", "a4") == 1
    assert (known(tree, "s3", "c2"), known(tree, "s3", "d7")) == (2, 2)
    check(tree)


def test_what_a_request_holds_is_not_evicted_until_it_is_let_go() -> None:
    tree = host_tree(12)
    request(tree, path_of("s3", "a4"))
    held = tree.match(ROOT, path_of("s3", "a4"))
    request(tree, path_of("c9"))  # 7 rows are held, 5 are left
    assert known(tree, "c9") == 0
    assert len(held) == 2
    del held
    request(tree, path_of("c9"))
    assert (known(tree, "c9"), known(tree, "s3", "a4")) == (1, 1)


def test_costly_prefixes_stay_under_pgdsf() -> None:
    tree = host_tree(12, policy=lambda: open_eviction("pgdsf"), cost=lambda cached, new: float(new**3))
    dear, cheap = tree.match(ROOT, path_of("a4")), tree.match(ROOT, path_of("b4"))
    tree.insert(dear, [kv_of(ROOT, path_of("a4"))], new=1000)
    tree.insert(cheap, [kv_of(ROOT, path_of("b4"))], new=10)
    del dear, cheap
    request(tree, path_of("c5"))
    assert (known(tree, "a4"), known(tree, "b4")) == (1, 0)


def test_how_often_a_path_was_asked_for_outlives_its_eviction() -> None:
    """RAGCache section 5.1 counts retrievals of a document within a window, cached or not."""
    tree = host_tree(8, policy=lambda: open_eviction("pgdsf"))
    # Priorities when they come: a4 2, b4 1, c4 1 + 1, d4 2 + 1 (then a4 has left), a4 2 + 3, e4 3 + 1.
    for name in ("a4", "a4", "b4", "c4", "d4", "a4", "e4"):
        request(tree, path_of(name))
    assert known(tree, "d4") == 0
    request(tree, path_of("f4"))
    assert (known(tree, "a4"), known(tree, "e4"), known(tree, "f4")) == (1, 0, 1)


def test_swapped_out_once_and_later_only_let_go() -> None:
    tree = two_tiers(8, 100)
    request(tree, path_of("a4"))
    request(tree, path_of("b8"))  # a4 is swapped out
    assert tiers(tree.match(ROOT, path_of("a4"))) == ["host"]
    host = tree.levels.host
    assert host is not None
    copy = host.get(next(iter(tree.levels.walk(ROOT, path_of("a4")))))
    request(tree, path_of("a4"))  # comes up again, b8 is swapped out
    assert tiers(tree.match(ROOT, path_of("a4"))) == ["gpu"]
    request(tree, path_of("b8"))  # a4 leaves a second time
    (again,) = tree.match(ROOT, path_of("a4")).found
    assert again.tier == "tree:host"
    assert again.kv is copy, "nothing was copied the second time"
    assert evictions(tree, "gpu") == 3


def test_what_leaves_memory_is_found_on_the_disk_also_after_a_restart(tmp_path: Path) -> None:
    path = path_of("s3", "a4", "b5")
    tree = host_tree(12, disk=DiskStore(tmp_path, 1 << 20))
    request(tree, path)
    request(tree, path_of("c9"))
    match = tree.match(ROOT, path)
    assert len(match) == 3
    assert "disk" in tiers(match)
    del match
    tree.close()
    tree = host_tree(disk=DiskStore(tmp_path, 1 << 20))
    match = tree.match(ROOT, path)
    assert tiers(match) == ["disk"] * 3
    tree.insert(match)
    assert all(same(r.kv, kv_of(ROOT, path[: i + 1])) for i, r in enumerate(match.found))
    assert tiers(tree.match(ROOT, path)) == ["host"] * 3, "taken into memory"
    tree.close()


@pytest.mark.parametrize(
    "change",
    [{"quantised": "int8"}, {"start": 0}, {"keys": (), "values": ()}],
    ids=["rounded", "moved", "cut"],
)
def test_what_a_disk_gives_back_must_be_exact_and_whole(change) -> None:
    class Changing(HostStore):
        def get(self, key, weight=1.0):
            found = super().get(key, weight)
            if found is None or len(key.context) < 2:
                return found
            kv = kv_of(ROOT, path_of("s3", "a5")) if "keys" in change else replace(found.kv, **change)
            return replace(found, kv=kv)

    tree = KnowledgeTree(disk=Changing(1 << 20))
    request(tree, path_of("s3", "a4"))
    assert tiers(tree.match(ROOT, path_of("s3", "a4"))) == ["disk"]


def test_a_full_disk_keeps_the_beginnings(tmp_path: Path) -> None:
    paths = [path_of("s9", f"{letter}9") for letter in "abcdefgh"]
    tree = host_tree(disk=DiskStore(tmp_path / "probe", 1 << 20))
    request(tree, paths[0])
    tree.close()
    budget = 5 * max(path.stat().st_size for path in (tmp_path / "probe").glob("*.safetensors"))
    tree = host_tree(disk=DiskStore(tmp_path / "disk", budget))
    for path in paths:
        request(tree, path)
    tree.close()
    new = host_tree(disk=DiskStore(tmp_path / "disk", budget))
    assert [len(new.match(ROOT, path)) for path in paths] == [1] * 4 + [2] * 4
    new.close()


def test_a_forgotten_chunk_takes_along_what_stands_behind_it(tmp_path: Path) -> None:
    tree = two_tiers(8, 12, disk=DiskStore(tmp_path, 1 << 20))
    for names in (("s3", "a4", "b5"), ("s3", "b5", "a4"), ("s3", "c6")):
        request(tree, path_of(*names))
    other = Root("weights-1", "globex")
    request(tree, path_of("s3", "a4"), other)
    assert tree.forget("acme", frozenset({"a4"})) == 3
    assert known(tree, "s3", "a4", "b5") == 1
    assert known(tree, "s3", "b5", "a4") == 2
    assert known(tree, "s3", "c6") == 2
    assert len(tree.match(other, path_of("s3", "a4"))) == 2
    assert tree.forget("acme", frozenset({"text-c6"})) == 1, "fixed text has an id, too"
    tree.forget("acme")
    assert known(tree, "s3", "b5") == 0
    assert len(tree.match(other, path_of("s3", "a4"))) == 2
    tree.close()


def test_what_was_computed_before_a_forget_is_not_taken_in_after_it() -> None:
    tree, path = host_tree(), path_of("s3", "a4")
    match = tree.match(ROOT, path)
    tree.forget("acme", frozenset({"a4"}))
    assert tree.insert(match, [kv_of(ROOT, path[:1]), kv_of(ROOT, path)]) == 0
    assert known(tree, "s3", "a4") == 0


def test_what_was_computed_before_a_forget_of_something_else_is_taken_in() -> None:
    tree, path = host_tree(), path_of("s3", "a4")
    match = tree.match(ROOT, path)
    tree.forget("acme", frozenset({"b5"}))
    tree.forget("globex")
    assert tree.insert(match, [kv_of(ROOT, path[:1]), kv_of(ROOT, path)]) == 2
    assert known(tree, "s3", "a4") == 2


@pytest.mark.parametrize(
    ("text", "taken"), [("bcd", False), ("cdefg", False), ("cdea", True), ("x", True), (None, False)]
)
def test_texts_forgotten_meanwhile_are_looked_for_in_the_path(text, taken) -> None:
    tree = host_tree()
    ids = tuple(map(ord, "abcdef")) if text else ()
    path = (Step(("one",), 6, True, ids),)
    match = tree.match(ROOT, path)
    decode = lambda token_ids: "".join(map(chr, token_ids))  # noqa: E731
    tree.forget("acme", frozenset({"other"}), ForgottenTexts([text or "of unknown tokens"], decode))
    assert tree.insert(match, [kv_of(ROOT, path)]) == taken


def test_what_waits_to_be_written_is_forgotten_too() -> None:
    disk = HostStore(1 << 20)
    tree = two_tiers(8, 100, disk=disk)
    request(tree, path_of("a8", "b4"))
    tree.levels.clear()  # queued to be written with the next request
    tree.forget("acme", frozenset({"a8"}))
    request(tree, path_of("c4"))
    assert disk.stats()[0].entries == 0


def test_discarding_takes_a_branch_out() -> None:
    tree = host_tree()
    request(tree, path_of("s3", "a4", "b5"))
    request(tree, path_of("s3", "a4", "c6"))
    tree.discard(ROOT, path_of("s3", "a4", "c6"))
    assert known(tree, "s3", "a4", "b5") == 3
    tree.discard(ROOT, path_of("s3", "d7"))
    assert len(nodes(tree)) == 3
    tree.discard(ROOT, path_of("s3"))
    assert len(nodes(tree)) == 0


def test_pins_of_a_discarded_node_do_not_reach_the_one_that_follows_it() -> None:
    tree = host_tree(8)
    request(tree, path_of("a4"))
    held = tree.match(ROOT, path_of("a4"))
    tree.discard(ROOT, path_of("a4"))
    request(tree, path_of("a4"))  # the same path again, another node
    newer = tree.match(ROOT, path_of("a4"))
    del held
    request(tree, path_of("b8"))
    assert (known(tree, "a4"), known(tree, "b8")) == (1, 0), "the newer one is still held"
    assert len(newer) == 1
    check(tree)


def test_threads_see_nothing_but_whole_nodes() -> None:
    tree = two_tiers(20, 40)
    names = [f"{letter}{number}" for letter in "abcd" for number in (2, 5)]
    wrong: list[object] = []

    def work(offset: int) -> None:
        for number in range(150):
            chosen = [names[(offset * 7 + number * k) % len(names)] for k in (1, 3, 5)]
            path = path_of("s3", *dict.fromkeys(chosen))
            match = request(tree, path)
            for i, reused in enumerate(match.found):
                if not same(reused.kv, kv_of(ROOT, path[: i + 1])):
                    wrong.append(path[: i + 1])
            if number % 40 == 39:
                tree.forget("acme", frozenset({chosen[0]}))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    check(tree)


def test_look_ups_do_not_wait_for_one_that_reads_the_disk() -> None:
    reading, read = threading.Event(), threading.Event()

    class Slow(HostStore):
        def get(self, key, weight=1.0):
            reading.set()
            assert read.wait(30)
            return super().get(key, weight)

    disk = Slow(1 << 20)
    tree = host_tree(5, disk=disk)
    request(tree, path_of("a4"))
    request(tree, path_of("b5"))  # writes a4 to the disk
    found: list[int] = []
    asking = threading.Thread(target=lambda: found.append(len(tree.match(ROOT, path_of("a4")))))
    asking.start()
    assert reading.wait(30)
    assert tiers(tree.match(ROOT, path_of("b5"))) == ["host"]
    assert not found
    read.set()
    asking.join(30)
    assert found == [1]


def test_a_tier_counts_the_uses_that_another_one_served() -> None:
    """What was used in the GPU 30 times comes to the host as such."""
    tree = two_tiers(4, 8, policy=lambda: open_eviction("lfu:100000"))
    for _ in range(30):
        request(tree, path_of("a4"))
    for _ in range(20):
        request(tree, path_of("b4"))  # a goes to the host
    for name in ("c4", "d4", "e4"):
        request(tree, path_of(name))  # b goes there too, and the others have to leave
        check(tree)
    assert tiers(tree.match(ROOT, path_of("a4"))) == ["host"]


def test_hot_nodes_of_the_gpu_outlive_it_on_the_host() -> None:
    """RAGCache section 6; the device is the CPU here."""
    tree = two_tiers(100, 100)
    for name in ("a4", "b5", "a4", "a4", "a4"):
        request(tree, path_of("s3", name))
    assert tiers(tree.match(ROOT, path_of("s3", "a4"))) == ["gpu", "gpu"]
    assert record(tree, "host").entries == 2, "the system text and a4, which were looked up more than twice"
    tree.levels.give_up_gpu()
    check(tree)
    assert tiers(tree.match(ROOT, path_of("s3", "a4"))) == ["host", "host"]
    assert known(tree, "s3", "b5") == 1
    lost = record(tree, "gpu")
    assert (lost.entries, lost.failures, lost.writable) == (0, 1, False)
    request(tree, path_of("s3", "b5"))
    assert known(tree, "s3", "b5") == 2


def test_a_gpu_that_cannot_be_read_is_given_up_and_closing_writes_what_is_left(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, 1 << 20)
    tree = KnowledgeTree(gpu_bytes=9 * ROW, host_bytes=90 * ROW, device="meta", disk=disk)
    request(tree, path_of("s3", "a4"))  # a meta tensor has lost its numbers
    request(tree, path_of("b5"))  # evicts a4, which cannot be copied
    assert known(tree, "s3", "a4") == 1
    tree.check_gpu()
    assert (known(tree, "s3"), known(tree, "b5")) == (0, 0)
    request(tree, path_of("s3", "a4"))
    assert tiers(tree.match(ROOT, path_of("s3", "a4"))) == ["host", "host"]
    check(tree)
    tree.close()
    with_disk = KnowledgeTree(host_bytes=90 * ROW, disk=DiskStore(tmp_path, 1 << 20))
    assert known(with_disk, "s3", "a4") == 2
    with_disk.close()

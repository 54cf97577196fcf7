"""Any sequence of operations against a plain dict from paths to KV: the very KV, or not known."""

import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tree_check import check

from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from ragcachekit.prefix_tree.nodes import Match, Root, Step
from ragcachekit.store.disk import DiskStore
from tree_kit import kv_of, path_of, same

ROOTS = [Root("weights-1", "acme"), Root("weights-1", "globex"), Root("weights-1", "acme", "long")]
BUDGETS = {"gpu": 600, "host": 1200}  # some 40 rows on the device, some 80 on the host
NAMES = ("a1", "b2", "c5", "d9", "e30")
roots = st.sampled_from(ROOTS)
paths = st.builds(
    lambda system, documents: path_of(system, *documents),
    st.sampled_from(["s3", "s4"]),
    st.lists(st.sampled_from(NAMES), max_size=4, unique=True),
)


class TreeMachine(RuleBasedStateMachine):
    """``self.model`` is the oracle: what was ever inserted and not forgotten since."""

    options: dict[str, int] = {"gpu_bytes": BUDGETS["gpu"], "host_bytes": BUDGETS["host"]}  # noqa: RUF012
    on_disk = False

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.model: set[tuple[Root, tuple[Step, ...]]] = set()
        self.held: list[Match] = []
        self.stale: list[Match] = []
        self.overtaken: list[Match] = []
        """Requests that began before something of their path was forgotten."""
        self.tree = self.open()

    def open(self) -> KnowledgeTree:
        disk = DiskStore(self.folder, 1 << 20) if self.on_disk else None
        return KnowledgeTree(device="cpu", disk=disk, **self.options)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.tree.close()
            shutil.rmtree(self.folder)

    def looked_up(self, root: Root, path: tuple[Step, ...]) -> Match:
        match = self.tree.match(root, path)
        for number, reused in enumerate(match.found):
            known = path[: number + 1]
            assert (root, known) in self.model, "neither forgotten nor made up"
            assert reused.step == known[-1]
            assert same(reused.kv, kv_of(root, known))
        return match

    @rule(root=roots, path=paths, computed=st.integers(0, 5), hold=st.booleans())
    def request(self, root: Root, path: tuple[Step, ...], computed: int, hold: bool) -> None:
        match = self.looked_up(root, path)
        stop = min(len(path), len(match) + computed)
        kvs = [kv_of(root, path[: i + 1]) for i in range(len(match), stop)]
        assert 0 <= self.tree.insert(match, kvs, new=7) <= len(kvs)
        self.model |= {(root, path[: i + 1]) for i in range(stop)}
        if hold:
            self.held.append(match)

    @rule(root=roots, path=paths)
    def look_up(self, root: Root, path: tuple[Step, ...]) -> None:
        self.looked_up(root, path)

    @rule(root=roots, path=paths)
    def begin(self, root: Root, path: tuple[Step, ...]) -> None:
        """A request that is still under way when other things happen."""
        self.stale.append(self.looked_up(root, path))

    @rule(choice=st.randoms(use_true_random=False))
    def finish(self, choice: random.Random) -> None:
        if not self.stale:
            return
        match = self.stale.pop(choice.randrange(len(self.stale)))
        overtaken = match in self.overtaken
        kvs = [kv_of(match.root, match.path[: i + 1]) for i in range(len(match), len(match.path))]
        added = self.tree.insert(match, kvs)
        if overtaken:
            assert added == 0
        else:
            self.model |= {(match.root, match.path[: i + 1]) for i in range(len(match.path))}

    @rule()
    def let_go(self) -> None:
        self.held.clear()

    @rule(namespace=st.sampled_from(["acme", "globex"]), names=st.sets(st.sampled_from([*NAMES, "s3"])))
    def forget(self, namespace: str, names: set[str]) -> None:

        def concerns(root: Root, path: tuple[Step, ...]) -> bool:
            return root.namespace == namespace and any(names & set(s.ids) for s in path)

        gone = {(root, path) for root, path in self.model if concerns(root, path)}
        assert self.tree.forget(namespace, frozenset(names)) <= len(gone)
        self.model -= gone
        self.overtaken += [match for match in self.stale if concerns(match.root, match.path)]

    @rule(namespace=st.sampled_from(["acme", "globex"]))
    def forget_all(self, namespace: str) -> None:
        self.tree.forget(namespace)
        self.model = {(root, path) for root, path in self.model if root.namespace != namespace}
        self.overtaken += [match for match in self.stale if match.root.namespace == namespace]

    @rule(root=roots, path=paths)
    def discard(self, root: Root, path: tuple[Step, ...]) -> None:
        self.tree.discard(root, path)
        assert len(self.tree.match(root, path)) < len(path)

    @invariant()
    def holds_together(self) -> None:
        if hasattr(self, "tree"):
            check(self.tree)
            for record in self.tree.stats():
                assert record.nbytes <= record.budget

    @invariant()
    def pinned_nodes_stay(self) -> None:
        """What a request holds is still there, unless it was forgotten or discarded."""
        for match in getattr(self, "held", []):
            for number, reused in enumerate(match.found):
                assert same(reused.kv, kv_of(match.root, match.path[: number + 1]))


class HostOnly(TreeMachine):
    options = {"host_bytes": BUDGETS["host"]}  # noqa: RUF012


class SmallHost(TreeMachine):
    """Nodes that the device has room for and the host has not."""

    options = {"gpu_bytes": 1400, "host_bytes": 500}  # noqa: RUF012


class OnDisk(TreeMachine):
    on_disk = True

    @rule()
    def restart(self) -> None:
        self.held.clear()
        self.stale.clear()
        self.tree.close()
        self.tree = self.open()


MACHINES = [TreeMachine, HostOnly, SmallHost, OnDisk]


def run(machine: type[TreeMachine], examples: int, steps: int) -> None:
    class Run(machine.TestCase):  # type: ignore[misc, name-defined]
        settings = settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )

    Run("runTest").runTest()


@pytest.mark.parametrize("machine", MACHINES)
def test_tree_against_a_dict(machine: type[TreeMachine]) -> None:
    run(machine, examples=5 if machine.on_disk else 50, steps=30)


@pytest.mark.soak
@pytest.mark.parametrize("machine", MACHINES)
def test_tree_against_a_dict_for_long(machine: type[TreeMachine]) -> None:
    run(machine, examples=30 if machine.on_disk else 150, steps=80)

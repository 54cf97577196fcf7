"""An engine with every tier, a look into each of them, and a forget that another thread runs meanwhile."""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from engine_kit import FOLDER
from loading_kit import WAIT
from ragcachekit import RagCache
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from ragcachekit.prefix_tree.nodes import key_of
from ragcachekit.store.base import concerns
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.disk_folder import entry_files
from ragcachekit.store.entry import read_key
from ragcachekit.store.memory import GpuStore, HostStore
from ragcachekit.store.tiered import TieredStore
from ragcachekit.types import KVKey, chunk_id
from snapshots_kit import hybrid_speaker
from speaking import ONE, THREE, TWO, byte_level, speaker
from tree_kit import nodes

ROOM = 1 << 26
SPACE = "acme"
BEFORE = "Answer from the context.\n\nContext:\n"
QUESTION = "\nWhere does the river flow?"
TEXTS = [ONE, TWO, THREE, "Where does the river Tiber flow? The answer is in Rome, the town of Rome."]


def prompt_of(*texts: str) -> str:
    return BEFORE + "\n".join(texts) + QUESTION


class Engine:
    """A RagCache over a GPU tier (on the CPU), host, disk, and a tree with host, disk and turns.

    ``grade`` ``prefix`` gives a hybrid model, which uses the tree alone.
    """

    def __init__(
        self, folder: Path, *, tree_bytes: int = ROOM, grade: str = "linked", **options: Any
    ) -> None:
        self.folder = folder
        self.gpu, self.host = GpuStore(ROOM, "cpu"), HostStore(ROOM)
        self.disk = DiskStore(folder / "kv", ROOM)
        self.store = TieredStore([self.gpu, self.host, self.disk], hot=1)
        self.tree = KnowledgeTree(
            host_bytes=tree_bytes, disk=DiskStore(folder / "tree", ROOM), turns_bytes=ROOM
        )
        self.rag = RagCache(
            speaker() if grade == "linked" else hybrid_speaker(),
            byte_level(),
            cache_dir=FOLDER.name,
            namespace=SPACE,
            **{
                "store": self.store,
                "tree": self.tree,
                "policy": "reuse",
                "encoder": "standalone",
                "load": "always",
                **options,
            },
            encode_after=1,
        )
        assert self.rag.grade == grade

    def chunk_ids(self, texts: Iterable[str], namespace: str = SPACE) -> frozenset[str]:
        return frozenset(chunk_id(self.rag.components.parser.chunk_ids(text), namespace) for text in texts)

    def left(self, gone: frozenset[str] | None, namespace: str = SPACE) -> list[str]:
        """Where something of these chunks, or (None) of the namespace, lies: looked at, not asked for."""
        at = {"gpu": list(self.gpu.keys()), "host": list(self.host.keys())}
        at["disk"] = _keys_in(self.folder / "kv")
        at["tree:host"] = [key_of(node.root, node.path()) for node in nodes(self.tree)]
        at["tree:disk"] = _keys_in(self.folder / "tree")
        out = [name for name, keys in at.items() if any(concerns(key, namespace, gone) for key in keys)]
        turns = [turn for turn in self.tree.turns.kept.values() if turn.root.namespace == namespace]
        if any(gone is None or gone & turn.members for turn in turns):
            out.append("tree:turns")
        return out

    def reused(self, text: str, namespace: str = SPACE) -> int:
        """Tokens of ``text`` that a prompt with it reuses, and does not compute."""
        report = self.rag.link(prompt_of(text), namespace=namespace, policy="reuse").report
        (own,) = self.chunk_ids([text], namespace)
        return sum(use.tokens for use in report.chunks if use.chunk_id == own and use.source != "computed")

    def recognised(self, text: str, namespace: str = SPACE) -> bool:
        """Whether prompts are searched for it."""
        return bool(self.rag.components.parser.registry.find(namespace, prompt_of(text)).found)

    def close(self) -> None:
        self.rag.close()
        self.tree.close()
        self.store.close()


def _keys_in(folder: Path) -> list[KVKey]:
    files = [folder / name for name in entry_files(folder)]
    return [read_key(file) for file in files]


class Meanwhile:
    """Has another thread do something when it is called for the ``at``-th time, and waits for that.

    If ``wait`` is False, it only sees to it that the other thread has begun.
    """

    def __init__(self, work: Callable[[], object], at: int = 1, wait: bool = True) -> None:
        self._work, self.at, self._wait = work, at, wait
        self.calls = 0
        self._lock = threading.Lock()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forgets")
        self.errors: list[BaseException] = []

    def _run(self) -> None:
        self._begun.set()
        try:
            self._work()
        except BaseException as error:
            self.errors.append(error)

    def __call__(self) -> None:
        with self._lock:
            self.calls += 1
            now = self.calls == self.at
        if now:
            self._thread.start()
            assert self._begun.wait(WAIT)
            if self._wait:
                self._joined()

    def finish(self) -> bool:
        """Whether it has happened; then it has also ended."""
        with self._lock:
            began = self.calls >= self.at
            self.calls = self.at  # too late from now on
        if began:
            self._joined()
        return began

    def _joined(self) -> None:
        self._thread.join(WAIT)
        assert not self._thread.is_alive()
        assert self.errors == []


def around(monkeypatch: Any, owner: Any, name: str, call: Callable[[], object], after: bool) -> None:
    """Have ``call`` happen just before or just after each call of ``owner.name``."""
    original = getattr(owner, name)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        if not after:
            call()
        result = original(*args, **kwargs)
        if after:
            call()
        return result

    monkeypatch.setattr(owner, name, replaced)

"""What a refusal leaves behind: nothing."""

import pytest

from families import build
from ragcachekit import PrecedingChunks, RagCache, StoreConfig, TreeConfig
from ragcachekit.engine import components as stock
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from ragcachekit.quality import records
from ragcachekit.store.memory import HostStore


class Watched(HostStore):
    """Says when it is closed."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.closed = 0

    def close(self) -> None:
        self.closed += 1
        super().close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"encoder": "nonsense"},
        {"neighbours": PrecedingChunks([]), "encoder": "system"},
        {"shadow": 7.0},
        {"policy": "budget:0.01"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_refused_engine_closes_what_it_opened(monkeypatch, tmp_path, wrong):
    opened = []

    def open_watched(config, **_):
        opened.append(Watched())
        return opened[-1]

    def open_tree(*_, **__):
        opened.append(KnowledgeTree(host_bytes=1 << 20, disk=Watched()))
        return opened[-1]

    closed_trees = []
    monkeypatch.setattr(stock, "open_store", open_watched)
    monkeypatch.setattr(stock, "open_tree", open_tree)
    monkeypatch.setattr(KnowledgeTree, "close", lambda tree: closed_trees.append(tree))
    if "policy" in wrong:
        monkeypatch.setattr(records, "read_calibration", refuse)
    with pytest.raises(ValueError, match=r"encoder|neighbours|share|refused"):
        RagCache(build("llama"), cache_dir=tmp_path, store=StoreConfig(), tree=TreeConfig(), **wrong)
    if wrong == {"encoder": "nonsense"}:
        assert not opened, "a name is checked before anything is opened"
        return
    store, tree = opened
    assert store.closed == 1
    assert closed_trees == [tree]


def refuse(*_):
    raise ValueError("refused")

"""A store that cannot forget just now: the error comes through, and everybody else has forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine_kit import chunk, rag_for, text
from ragcachekit import Prompt
from ragcachekit.errors import StoreError
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from ragcachekit.store.memory import HostStore

PROMPT = Prompt([text(9, 1), chunk(33, 11), chunk(25, 12), text(6, 4)])


class FailingStore(HostStore):
    def stats(self):
        return tuple(replace(record, tier="slow") for record in super().stats())

    def forget(self, namespace, chunk_ids=None):
        raise StoreError("cannot forget now")


class FailingTree(KnowledgeTree):
    def forget(self, namespace, ids=None):
        super().forget(namespace, ids)
        raise StoreError("nor the tree")


def tree_entries(rag):
    return sum(record.entries for record in rag.stats() if record.tier.startswith("tree"))


@pytest.mark.parametrize("make", [KnowledgeTree, FailingTree])
def test_tree_and_loads_are_told_and_the_error_goes_on(make, monkeypatch):
    tree = make(host_bytes=1 << 26)
    with rag_for("llama", policy="prefix", store=FailingStore(1 << 26), tree=tree, cold="now") as rag:
        rag.generate(PROMPT, max_new_tokens=1)
        assert tree_entries(rag) > 0
        told = []
        monkeypatch.setattr(rag.components.loads.loader, "forget", lambda *which: told.append(which))
        with pytest.raises(
            StoreError, match="cannot forget now" if make is KnowledgeTree else "nor the tree"
        ):
            rag.forget()
        assert tree_entries(rag) == 0
        assert told == [("default", None)]

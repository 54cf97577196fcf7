"""Steps that get a state later, in tiers that have room for it and in those that have not."""

from dataclasses import replace

import pytest
import torch

from ragcachekit.model.kv import STATE
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from tree_kit import ROOT, ROW, kv_of, nodes, path_of, request, same

PATH, OTHER = path_of("s4", "a4"), path_of("s4", "b4")
NUMBERS = 100


def with_state(path):
    return replace(kv_of(ROOT, path), sums={f"{STATE}tensor.x": torch.ones(NUMBERS)})


def give_state(tree):
    """Insert the first step of the path once more, as a request that missed it and now has its state."""
    match = tree.match(ROOT, PATH)
    missed = replace(match, found=())
    tree.insert(missed, [with_state(PATH[:1]), kv_of(ROOT, PATH)], new=8)


@pytest.mark.parametrize("room", [False, True])
def test_a_state_that_no_tier_can_hold_evicts_nothing(room):
    tree = KnowledgeTree(host_bytes=12 * ROW + (4 * NUMBERS if room else 0))
    for path in (PATH, OTHER):
        request(tree, path)
    give_state(tree)
    assert len(nodes(tree)) == 3
    assert [found.kv.has_state for found in tree.match(ROOT, PATH).found] == [room, False]
    assert all(record.nbytes <= record.budget for record in tree.stats())


def test_a_copy_with_a_state_comes_before_a_faster_one_without():
    tree = KnowledgeTree(gpu_bytes=9 * ROW, host_bytes=1000 * ROW, device="cpu")
    request(tree, path_of("s1", "c8"))
    request(tree, PATH)  # evicts the others to the host, and is on the device
    request(tree, path_of("s1", "c8"))  # and the other way round: now all are on the host
    request(tree, PATH)
    give_state(tree)
    first = tree.match(ROOT, PATH).found[0]
    assert first.kv.has_state
    assert same(first.kv, kv_of(ROOT, PATH[:1]))

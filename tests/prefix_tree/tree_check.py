"""What must hold of a tree after any operation, looked at from inside."""

from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from tree_kit import nodes


def check(tree: KnowledgeTree) -> None:
    """Assert what must hold after any operation."""
    with tree._lock:
        tree._unpin_released()
        gpu, known = tree.levels.gpu, nodes(tree)
        for node in known:
            assert node.copies == sum(node in tier for tier in tree.levels.tiers) > 0
            if gpu is not None and node in gpu:
                assert node.parent is None or node.parent in gpu
        for tier in tree.levels.tiers:
            copies = tier._copies
            assert {node for node, _ in copies.values()} <= set(known)
            assert tier.stats().nbytes == sum(kv.nbytes for _, kv in copies.values()) <= tier.budget
            assert copies.keys() == set(tier._ranking)
            for name, (node, _) in copies.items():
                children = sum(child in tier for child in node.children.values())
                assert children == tier._children.get(name, 0)
                assert tier._ranking._live[name].holds == node.pins + children

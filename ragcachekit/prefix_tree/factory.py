"""From a configuration to a knowledge tree."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from ragcachekit.config import TreeConfig
from ragcachekit.prefix_tree.base import Cost
from ragcachekit.prefix_tree.disk import FOLDER
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from ragcachekit.store.base import KVStore
from ragcachekit.store.disk.disk_store import DiskStore
from ragcachekit.store.eviction.policies import open_eviction


def open_tree(
    config: TreeConfig, device: torch.device, *, folder: Path | None = None, cost: Cost | None = None
) -> KnowledgeTree:
    """A tree with the tiers that ``config`` asks for; no GPU tier where ``device`` is a CPU.

    Its disk entries go to ``tree`` in ``folder``, which is that of the chunk store's disk tier. ValueError
    for an unknown eviction policy or a disk tier without a folder, StoreError for an unusable folder.
    """
    policy = partial(open_eviction, config.eviction)
    policy()  # a typo is an error even where no tier needs one
    disk: KVStore | None = None
    if config.disk_bytes:
        if folder is None:
            raise ValueError("the tree's disk_bytes need a StoreConfig with a disk_path")
        disk = DiskStore(folder / FOLDER, config.disk_bytes)
    on_gpu = device.type != "cpu"
    return KnowledgeTree(
        gpu_bytes=config.gpu_bytes if on_gpu else 0,
        host_bytes=config.host_bytes,
        device=device,
        disk=disk,
        policy=policy,
        cost=cost,
        keep_first=config.keep_first,
        turns_bytes=config.turns_bytes,
    )

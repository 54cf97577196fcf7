"""Prompts of token ids, and a RagCache around a family's model."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from families import greedy, plain, tokens, wrapped
from ragcachekit import Chunk, Prompt, RagCache, Text
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.memory import HostStore
from ragcachekit.types import KVKey

FOLDER = tempfile.TemporaryDirectory(prefix="ragcachekit-tests-")
"""Passed admission checks of the shared models; gone when the tests are."""


def checked(folder: Path) -> Path:
    """The folder, made if need be, as an engine's cache_dir: the checks of equal models are shared."""
    folder.mkdir(parents=True, exist_ok=True)
    shared = Path(FOLDER.name, "admitted")
    shared.mkdir(exist_ok=True)
    if not (folder / "admitted").exists():
        (folder / "admitted").symlink_to(shared)
    return folder


def text(count: int, seed: int) -> Text:
    return Text(token_ids=tokens(count, seed))


def chunk(count: int, seed: int) -> Chunk:
    return Chunk(token_ids=tokens(count, seed))


def ids(prompt: Prompt) -> tuple[int, ...]:
    return tuple(i for segment in prompt.segments for i in segment.token_ids or ())


PROMPT = Prompt([text(9, 1), chunk(33, 2), chunk(25, 3), text(6, 4)])
EXACT = Prompt([text(9, 1), chunk(40, 2), text(6, 4)])
"""With encoder ``system`` nothing of this is approximate."""


def rag_for(name: str, **options: Any) -> RagCache:
    """The family's shared model in a RagCache that encodes what it missed before it returns.

    Chunks are encoded alone unless ``options`` name an encoder or a policy that has one.
    """
    options = {"cold": "now", "policy": "lego:16", **options}
    if options["policy"] not in ("auto", "lego0"):
        options = {"encoder": "standalone", **options}
    return RagCache(wrapped(name), cache_dir=FOLDER.name, **options)


def warmed(name: str, *prompts: Prompt, **options: Any) -> RagCache:
    rag = rag_for(name, **options)
    for prompt in prompts:
        rag.generate(prompt, max_new_tokens=1)
    return rag


def bare(name: str, prompt: Prompt, count: int = 5) -> tuple[int, ...]:
    """What the family's own model answers, greedily."""
    return greedy(plain(name), ids(prompt), count)


def stored_in(rag: RagCache) -> list[KVKey]:
    return list(rag.components.store.keys())


class RecordingStore(HostStore):
    """Keeps a copy of every entry's bytes as they were put."""

    def __init__(self) -> None:
        super().__init__(1 << 28)
        self.originals: dict[KVKey, tuple[ChunkKV, list[torch.Tensor]]] = {}

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        self.originals[key] = (kv, [t.clone() for t in (*kv.keys, *kv.values)])
        return super().put(key, kv)

    def unchanged(self) -> bool:
        return all(
            torch.equal(now.view(torch.uint8), then.view(torch.uint8))
            for kv, copies in self.originals.values()
            for now, then in zip((*kv.keys, *kv.values), copies, strict=True)
        )

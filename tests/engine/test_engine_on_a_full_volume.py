"""A volume that is full when an engine opens on it: every construction answers, as a full prefill does."""

import errno
import shutil
from pathlib import Path

from engine_kit import PROMPT, ids
from families import greedy, plain, wrapped
from faults import Faults, injected
from ragcachekit import RagCache, StoreConfig, TreeConfig

EXPECTED = greedy(plain("llama"), ids(PROMPT), 2)


def opened(root: Path, cache_dir: Path | None = None) -> RagCache:
    return RagCache(
        wrapped("llama"),
        policy="prefix",
        cold="now",
        store=StoreConfig(host_bytes=0, disk_path=root / "kv" / "of" / "corpus"),
        tree=TreeConfig(disk_bytes=1 << 22),
        cache_dir=cache_dir or root / "cache",
    )


def answers(rag: RagCache) -> bool:
    return rag.generate(PROMPT, max_new_tokens=2, do_sample=False).token_ids == EXPECTED


def test_every_call_of_a_construction_may_find_the_volume_full(tmp_path: Path) -> None:
    with opened(tmp_path / "before") as rag:
        assert answers(rag)

    def constructed(number: int) -> list[str]:
        root = Path(shutil.copytree(tmp_path / "before", tmp_path / str(number)))
        faults = Faults(root, errno.ENOSPC, number.__le__)
        with injected(faults):
            rag = opened(root)
            calls = list(faults.calls)
            assert answers(rag), calls
            rag.close()
        return calls

    calls = constructed(1 << 30)
    assert len(calls) > 15
    for number in range(1, len(calls) + 1):
        constructed(number)

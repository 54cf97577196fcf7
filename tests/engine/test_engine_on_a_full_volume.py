"""A volume that is full when an engine opens on it: every construction answers, as a full prefill does."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_kit import PROMPT, chunk, ids, text
from families import greedy, plain, wrapped
from faults import Faults, injected
from ragcachekit import Prompt, RagCache, StoreConfig, TreeConfig

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


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    root = tmp_path / "volume"
    root.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(root)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"this user may not mount: {done.stderr.strip()}")
    yield root
    subprocess.run(["umount", "-l", str(root)], check=True)


def fill(root: Path, left: int) -> Path:
    """Take all space of the volume but ``left`` bytes."""
    ballast = root / "ballast"
    with ballast.open("wb", buffering=0) as file:
        while os.statvfs(root).f_bavail:
            file.write(bytes(4096))
        file.truncate(max(0, file.tell() - left))
    return ballast


def test_a_volume_that_really_is_full(volume: Path, tmp_path: Path, caplog: Any) -> None:
    """40 constructions with 0, 4, 8, ... KB left; the first one keeps what it makes once there is space."""
    with opened(tmp_path / "elsewhere", tmp_path / "cache") as rag:  # where the admission check is noted
        assert answers(rag)
    for pages in range(40):
        ballast = fill(volume, 4096 * pages)
        with caplog.at_level(logging.WARNING), opened(volume, tmp_path / "cache") as rag:
            assert answers(rag)
            if pages == 0:
                disk = next(record for record in rag.stats() if record.tier == "disk")
                assert (disk.writable, disk.entries, disk.failed_writes > 0) == (False, 0, True)
                assert "disk tier: cannot be written to for now" in caplog.text
                ballast.unlink()
                other = Prompt([text(9, 7), chunk(33, 2), text(6, 4)])
                rag.generate(other, max_new_tokens=1)
                disk = next(record for record in rag.stats() if record.tier == "disk")
                assert (disk.writable, disk.entries) == (True, 1)
        ballast.unlink(missing_ok=True)
        shutil.rmtree(volume / "kv", ignore_errors=True)

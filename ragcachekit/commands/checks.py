"""What commands check before they begin to work; light, so that it answers before torch is imported."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

from ragcachekit.errors import RagCacheError

INSTALL = "pip install -c constraints.txt '.[demo]' in the folder of RagCacheKit's clone"
"""How to get what the commands need; the package is on no index."""

PICTURES = (".png", ".svg", ".pdf")


def check_writable(cache: Path) -> None:
    """Try to write where a cache folder is or will be made; leaves nothing behind.

    Asking for permissions does not do: root has all of them on a file system that takes nothing.

    Raises RagCacheError: names the folder and the reason.
    """
    place = cache.absolute()
    while not os.path.lexists(place):
        place = place.parent
    for folder in (place, cache / "kv", cache / "indexes"):
        if why := _unwritable(folder, probe=folder == place):
            raise RagCacheError(
                f"the cache folder {cache} cannot be written ({folder} {why}); choose another --cache"
            )


def _unwritable(folder: Path, *, probe: bool) -> str | None:
    if not folder.is_dir():
        return "is a file" if os.path.lexists(folder) else None
    if not os.access(folder, os.W_OK | os.X_OK):
        return "does not let you"
    try:
        if probe:
            tempfile.TemporaryDirectory(prefix=".ragcachekit-", dir=folder).cleanup()
    except OSError as error:
        return f"says: {error.strerror}"
    return None


def check_picture(path: Path) -> None:
    """Whether a picture can be drawn into ``path``.

    Raises ValueError for an ending that is not among :data:`PICTURES`, or a folder that does not exist;
    RagCacheError: matplotlib is not installed.
    """
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"--plot {path}: give a name that ends in {', '.join(PICTURES)}")
    if not path.parent.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {path.parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise RagCacheError(f"--plot needs matplotlib: {INSTALL}")


def check_device(name: str) -> None:
    """Whether this machine has a device to compute on.

    Raises ValueError: says which devices there are.
    """
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

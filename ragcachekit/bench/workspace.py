"""The cache folder of the command line, and the models that it names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ragcachekit.errors import RagCacheError
from ragcachekit.model.loading import default_cache_dir

READER = "reader"
"""The name of the small trained model that comes with the package."""

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class CacheFolder:
    """Where ``ask`` and ``precompute`` keep chunk KV (``kv``) and vector indexes (``indexes``)."""

    path: Path

    @classmethod
    def at(cls, path: str | os.PathLike[str] | None) -> CacheFolder:
        """The folder named, or the user's own cache folder; nothing is created yet."""
        return cls(Path(path).expanduser() if path is not None else default_cache_dir())

    @property
    def kv(self) -> Path:
        """Folder of the disk tier."""
        return self.path / "kv"

    @property
    def indexes(self) -> Path:
        """Folder of the vector indexes."""
        return self.path / "indexes"

    @property
    def manifests(self) -> Path:
        """Folder of the lists of what ``precompute`` encoded."""
        return self.path / "precomputed"


def model_path(name: str) -> str:
    """The folder or hub id that ``name`` stands for: ``reader`` is the model inside the package."""
    return str(Path(__file__).parent / "reader") if name == READER else name


@contextmanager
def explained(name: str, *kinds: type[Exception]) -> Iterator[None]:
    """Say in one line that the model called ``name`` cannot be loaded, and what to give instead.

    ``kinds``: errors that mean this, beside OSError.
    """
    caught: tuple[type[Exception], ...] = (OSError, *kinds)
    try:
        yield
    except caught as error:
        where = "is no model folder" if Path(name).exists() else "is neither a folder nor a model at hand"
        raise RagCacheError(
            f"cannot load the model: {name} {where}; give the folder of a Hugging Face model, a hub id, "
            f"or {READER!r} for the small model that comes with the package"
        ) from error


@contextmanager
def one_thread(tiny: bool = True) -> Iterator[None]:
    """One torch thread for the reader, whose tensors are tiny: threads would only wait for each other."""
    threads = torch.get_num_threads()
    if tiny:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def load_tokenizer(name: str) -> Any:
    """The model's tokenizer; long before its weights, so that a corpus is checked first."""
    from transformers import AutoTokenizer  # half a second that a look into the cache folder does without

    with explained(name, ValueError):  # what transformers raises for a folder without tokenizer
        path = model_path(name)
        if not Path(path).is_dir() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
            raise FileNotFoundError(path)  # not a hub id: do not ask the hub
        return AutoTokenizer.from_pretrained(path)


def check_dtype(dtype: str) -> None:
    """ValueError for a dtype that models are not loaded in."""
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")


def disk_bytes(gigabytes: float | None) -> int | None:
    """A disk budget in bytes; None for the library's default, which the volume decides."""
    if gigabytes is not None and not gigabytes > 0:
        raise ValueError(f"the disk budget must be > 0 GB, got {gigabytes}")
    return None if gigabytes is None else int(gigabytes * 1e9)

"""The cache folder of the command line, and the models that it names."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer

from ragcachekit.bench.precompute_manifest import manifests
from ragcachekit.config import DEFAULT_DISK_BYTES
from ragcachekit.errors import RagCacheError
from ragcachekit.model.loading import default_cache_dir
from ragcachekit.store.entry_file import read_key
from ragcachekit.store.entry_header import EntryDamaged

if TYPE_CHECKING:
    from ragcachekit.store.disk_check import Repaired, Verified

READER = "reader"
"""The name of the small trained model that comes with the package."""

DAMAGED = "(damaged)"
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Usage:
    """What one namespace takes on disk."""

    namespace: str
    entries: int
    nbytes: int


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

    def usage(self) -> tuple[Usage, ...]:
        """Chunk KV by namespace, read from the entries' headers; changes nothing."""
        entries, nbytes = defaultdict[str, int](int), defaultdict[str, int](int)
        for path in sorted(self.kv.glob("*.safetensors")):
            try:
                size = path.stat().st_size
                namespace = read_key(path).namespace
            except FileNotFoundError:  # evicted just now
                continue
            except EntryDamaged:
                namespace = DAMAGED
            except OSError as error:
                raise RagCacheError(
                    f"cannot read {path}: {error.strerror}; choose another --cache"
                ) from error
            entries[namespace] += 1
            nbytes[namespace] += size
        return tuple(Usage(name, entries[name], nbytes[name]) for name in sorted(entries))

    def index_bytes(self) -> int:
        """Bytes of the vector indexes."""
        return sum(path.stat().st_size for path in self.indexes.glob("*") if path.is_file())

    def verify(self, progress: Callable[[int, int], None] | None = None) -> Verified | None:
        """Read every entry whole, changing nothing; None if there is no chunk KV.

        ``progress`` hears how many bytes of how many have been read.
        """
        from ragcachekit.store.disk_check import verify  # POSIX only

        return verify(self.kv, progress) if self.kv.is_dir() else None

    def repair(self, progress: Callable[[int, int], None] | None = None) -> Repaired | None:
        """Drop damaged entries, sweep what writers left behind, rebuild the index; None if there is none."""
        from ragcachekit.store.disk_check import repair

        return repair(self.kv, progress) if self.kv.is_dir() else None

    def clear(self, namespace: str | None = None) -> int:
        """Delete the KV of one namespace, or of all with the indexes; returns the number of entries."""
        from ragcachekit.store.disk import DiskStore  # POSIX only

        if not self.kv.is_dir() and not self.indexes.is_dir():
            return 0
        spaces = [namespace] if namespace is not None else [use.namespace for use in self.usage()]
        store = DiskStore(self.kv, sys.maxsize)  # any smaller budget would evict on opening
        try:
            dropped = sum(store.forget(space) for space in spaces)
        finally:
            store.close()
        if namespace is None:
            for path in self.indexes.glob("*"):
                path.unlink()
        for path in manifests(self.manifests, namespace):
            path.unlink(missing_ok=True)
        return dropped


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
    with explained(name, ValueError):  # what transformers raises for a folder without tokenizer
        path = model_path(name)
        if not Path(path).is_dir() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
            raise FileNotFoundError(path)  # not a hub id: do not ask the hub
        return AutoTokenizer.from_pretrained(path)


def check_dtype(dtype: str) -> None:
    """ValueError for a dtype that models are not loaded in."""
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")


def disk_bytes(gigabytes: float | None) -> int:
    """A disk budget in bytes; None for the library's default."""
    if gigabytes is not None and not gigabytes > 0:
        raise ValueError(f"the disk budget must be > 0 GB, got {gigabytes}")
    return DEFAULT_DISK_BYTES if gigabytes is None else int(gigabytes * 1e9)

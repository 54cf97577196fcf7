"""Cache folder of the command line, and loading of the models that users name; light to import."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragcachekit.errors import RagCacheError

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class CacheFolder:
    """Folder of what ``ask`` and ``precompute`` store."""

    path: Path

    @classmethod
    def at(cls, path: str | os.PathLike[str] | None) -> CacheFolder:
        """The folder named, or the user's own cache folder, not created yet."""
        if path is not None:
            return cls(Path(path).expanduser())
        from ragcachekit.model.pretrained import default_cache_dir

        return cls(default_cache_dir())

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
        """Folder of the manifests of ``precompute``."""
        return self.path / "precomputed"

    def check_writable(self) -> None:
        """RagCacheError if the folder cannot be written, or made where it does not exist.

        A real write is tried: permissions do not show that a file system is read-only.
        """
        place = self.path.absolute()
        while not os.path.lexists(place):
            place = place.parent
        for folder in (place, self.kv, self.indexes):
            try:
                if os.path.lexists(folder):
                    tempfile.TemporaryDirectory(prefix=".ragcachekit-", dir=folder).cleanup()
            except OSError as error:
                why = error.strerror if folder.is_dir() else "it is a file"
                where = f"the cache folder {self.path} cannot be written ({folder}: {why})"
                raise RagCacheError(f"{where}; choose another --cache") from error


@contextmanager
def explained(name: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn OSError and ``kinds`` into a RagCacheError that names the model and what to give instead."""
    caught: tuple[type[Exception], ...] = (OSError, *kinds)
    try:
        yield
    except caught as error:
        where = "is no model folder" if Path(name).exists() else "is neither a folder nor a model at hand"
        raise RagCacheError(
            f"cannot load the model: {name} {where}; give the folder of a Hugging Face model or a hub id"
        ) from error


def load_tokenizer(name: str) -> Any:
    """Load the model's tokenizer, before its weights, so that a corpus is checked first."""
    from transformers import AutoTokenizer

    from ragcachekit.commands.sample_model import resolve_model

    name = resolve_model(name)
    with explained(name, ValueError):  # what transformers raises for a folder without tokenizer
        if not Path(name).is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
            raise FileNotFoundError(name)  # not a hub id: do not ask the hub
        return AutoTokenizer.from_pretrained(name)


def load_checked(name: str, device: str | None, dtype: str) -> tuple[Any, Any]:
    """Load model and tokenizer of a folder or hub id; ``dtype`` ``auto`` is that of its file."""
    from ragcachekit.commands.sample_model import resolve_model
    from ragcachekit.model.pretrained import load_model

    name = resolve_model(name)
    with explained(name, ValueError):
        return load_model(name, device, dtype=dtype)


def check_dtype(dtype: str) -> None:
    """ValueError for an unknown dtype."""
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")

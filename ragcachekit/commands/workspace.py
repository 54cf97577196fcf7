"""Cache folder, corpus and model that a user names, and the engine around them; light to import."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ragcachekit.commands.corpus import DEFAULT_CHUNK_TOKENS, Corpus, documents, read_corpus
from ragcachekit.errors import RagCacheError
from ragcachekit.types import DEFAULT_ENCODER, DEFAULT_POLICY

if TYPE_CHECKING:
    from ragcachekit.config import StoreConfig
    from ragcachekit.engine.rag_cache import RagCache
    from ragcachekit.plan.companions import Neighbours
    from ragcachekit.store.base import KVStore


@dataclass(frozen=True)
class CacheFolder:
    """Folder of what ``ask`` and ``precompute`` store."""

    path: Path

    @classmethod
    def at(cls, path: str | os.PathLike[str] | None) -> CacheFolder:
        """The folder named, or the user's own cache folder, not created yet."""
        if path is not None:
            return cls(Path(path).expanduser())
        from ragcachekit.model.identity import default_cache_dir

        return cls(default_cache_dir())

    @property
    def kv(self) -> Path:
        return self.path / "kv"

    @property
    def indexes(self) -> Path:
        return self.path / "indexes"

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


def needs_neighbours(encoder: str) -> bool:
    """Whether an encoder looks for the chunks before a chunk, or similar ones."""
    return encoder.startswith("similar")


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
    from ragcachekit.model.loading import load_tokenizer

    with explained(name, ValueError):  # what transformers raises for a folder without tokenizer
        return load_tokenizer(name)


def load_checked(name: str, device: str | None, dtype: str) -> tuple[Any, Any]:
    """Load model and tokenizer of a folder or hub id; ``dtype`` ``auto`` is that of its file."""
    from ragcachekit.model.loading import load_model

    with explained(name, ValueError):
        return load_model(name, device, dtype=dtype)


def open_engine(model: str, **options: Any) -> RagCache:
    """Load a model of a folder or hub id with its caches, for chunks that are meant to come again."""
    from ragcachekit.engine.rag_cache import RagCache

    with explained(model):
        return RagCache.from_pretrained(model, encode_after=1, **options)


@dataclass(frozen=True)
class OwnFiles:
    """Settings of ``ask``, ``precompute`` and ``estimate``, checked before anything is loaded.

    ``corpus`` is a folder of documents, ``model`` a folder or hub id, ``cache`` the cache folder (None: the
    user's own), ``chunk_tokens`` the greatest size of a chunk, ``k`` the number of chunks per prompt,
    ``tolerance`` that of the query cache; the rest is as for :class:`~ragcachekit.RagCache`.
    """

    corpus: str
    model: str
    policy: str = DEFAULT_POLICY
    encoder: str | None = None
    cache: str | None = None
    namespace: str = "default"
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    device: str | None = None
    dtype: str = "auto"
    disk_gb: float | None = None
    k: int = 4
    tolerance: float = 0.0
    max_new_tokens: int = 128

    @property
    def chunk_encoder(self) -> str:
        """The encoder that was given, else the policy's own, else the default one."""
        from ragcachekit.policies.registry import open_policy

        return self.encoder or open_policy(self.policy).encoder or DEFAULT_ENCODER

    @property
    def folder(self) -> CacheFolder:
        """The cache folder, not created yet."""
        return CacheFolder.at(self.cache)

    @property
    def disk_bytes(self) -> int | None:
        """Disk budget; None for the library's default."""
        return None if self.disk_gb is None else int(self.disk_gb * 1e9)

    def read_corpus(self) -> Corpus:
        """Read the corpus, cut by the model's tokenizer, once embedding model and cache folder are there."""
        from ragcachekit.commands.embedding import model_folder

        model_folder()
        self.folder.check_writable()
        return read_corpus(self.corpus, chunk_tokens=self.chunk_tokens, tokenizer=load_tokenizer(self.model))

    def neighbours(self, corpus: Corpus) -> dict[str, Neighbours] | None:
        """For ``similar:n``: the preceding chunks of the file."""
        from ragcachekit.plan.companions import PrecedingChunks

        if not needs_neighbours(self.chunk_encoder):
            return None
        return {self.namespace: PrecedingChunks(documents(corpus.chunks))}

    def open_engine(
        self,
        store: StoreConfig | KVStore,
        corpus: Corpus,
        *,
        cache_dir: Path | None = None,
        cold: Literal["background", "never"] = "background",
    ) -> RagCache:
        return open_engine(
            self.model,
            device=self.device,
            policy=self.policy,
            encoder=self.chunk_encoder,
            neighbours=self.neighbours(corpus),
            store=store,
            namespace=self.namespace,
            cold=cold,
            cache_dir=cache_dir or self.folder.path,
            dtype=self.dtype,
        )

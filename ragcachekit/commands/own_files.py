"""Settings, corpus and engine of the commands over a user's own files; light to import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ragcachekit.commands.corpus import DEFAULT_CHUNK_TOKENS, Corpus, documents, read_corpus
from ragcachekit.commands.workspace import CacheFolder, check_dtype, explained, load_tokenizer

if TYPE_CHECKING:
    from ragcachekit.config import StoreConfig
    from ragcachekit.engine.rag_cache import RagCache
    from ragcachekit.plan.companions import Neighbours
    from ragcachekit.plan.planner import Planner
    from ragcachekit.prompt.parser import PromptParser
    from ragcachekit.store.base import KVStore

DEFAULT_POLICY = "impact:0.1"
"""Over ``system`` unless an encoder is given. Not ``auto``: what was encoded ahead must stay what is used."""


@dataclass(frozen=True)
class OwnFiles:
    """Settings of ``ask`` and ``precompute``, checked before anything is loaded.

    ``corpus`` is a folder of documents, ``model`` a folder or hub id, ``cache`` the cache folder (None: the
    user's own), ``chunk_tokens`` the greatest size of a chunk; the rest is as for
    :class:`~ragcachekit.RagCache`.
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

    def __post_init__(self) -> None:
        from ragcachekit.policies.registry import open_policy

        open_policy(self.policy)
        check_dtype(self.dtype)
        at_least_1(self, "chunk_tokens")

    @property
    def chunk_encoder(self) -> str | None:
        """The encoder that was given, else ``system``; None where the policy brings its own."""
        return self.encoder or (None if self._policy_encoder else "system")

    @property
    def folder(self) -> CacheFolder:
        """The cache folder, not created yet."""
        return CacheFolder.at(self.cache)

    @property
    def disk_bytes(self) -> int | None:
        """Disk budget; None for the library's default."""
        if self.disk_gb is not None and not self.disk_gb > 0:
            raise ValueError(f"the disk budget must be > 0 GB, got {self.disk_gb}")
        return None if self.disk_gb is None else int(self.disk_gb * 1e9)

    def read_corpus(self) -> Corpus:
        """Read the corpus, cut by the model's tokenizer, before the model is loaded."""
        tokenizer = load_tokenizer(self.model)
        return read_corpus(self.corpus, chunk_tokens=self.chunk_tokens, tokenizer=tokenizer)

    def checked_corpus(self) -> Corpus:
        """Read the corpus, after a look for the embedding model and at the cache folder."""
        from ragcachekit.commands.embedding import model_folder

        model_folder()
        self.folder.check_writable()
        return self.read_corpus()

    def open_engine(
        self,
        store: StoreConfig | KVStore,
        corpus: Corpus,
        *,
        cache_dir: Path | None = None,
        cold: Literal["background", "never"] = "background",
    ) -> RagCache:
        """Load the model over ``store``."""
        from ragcachekit.commands.sample_model import resolve_model
        from ragcachekit.engine.rag_cache import RagCache

        with explained(self.model):
            return RagCache.from_pretrained(
                resolve_model(self.model),
                device=self.device,
                policy=self.policy,
                encoder=self.chunk_encoder,
                neighbours=self._neighbours(corpus),
                store=store,
                namespace=self.namespace,
                cold=cold,
                encode_after=1,  # the next question comes in another process
                cache_dir=cache_dir or self.folder.path,
                dtype=self.dtype,
            )

    def planner(self, model: Any, parser: PromptParser, fingerprint: str, corpus: Corpus) -> Planner:
        """Planner over an empty store: what it misses is what the engine looks up or encodes."""
        from ragcachekit.model.rope.probe import describe_rope
        from ragcachekit.plan.planner import Planner
        from ragcachekit.store.base import NullStore

        return Planner(
            model,
            parser,
            rope=describe_rope(model),
            store=NullStore(),
            fingerprint=fingerprint,
            encoder=self.chunk_encoder,
            neighbours=self._neighbours(corpus),
        )

    @property
    def _policy_encoder(self) -> str | None:
        from ragcachekit.policies.registry import open_policy

        return open_policy(self.policy).encoder

    def _neighbours(self, corpus: Corpus) -> dict[str, Neighbours] | None:
        """For ``similar:n``: the preceding chunks of the file."""
        from ragcachekit.plan.companions import PrecedingChunks

        if not (self.chunk_encoder or self._policy_encoder or "").startswith("similar"):
            return None
        return {self.namespace: PrecedingChunks(documents(corpus.chunks))}


def at_least_1(settings: object, *names: str) -> None:
    """ValueError for numbers below 1 among the named fields."""
    for name in names:
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(settings, name)}")

"""``ragcachekit precompute``: encode a corpus ahead of the questions (EPIC's compile step)."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal as size

from ragcachekit.cluster.shared_tier import KEY, shared_tier
from ragcachekit.commands import options as opt
from ragcachekit.commands.ask import corpus_index
from ragcachekit.commands.console import INTERRUPTED, counted, note, pairs, quiet_loading, show
from ragcachekit.commands.manifest import Scope, read_manifests, write_manifest
from ragcachekit.commands.own_files import OwnFiles, at_least_1
from ragcachekit.config import StoreConfig
from ragcachekit.errors import RagCacheError, StoreError, missing_extra

if TYPE_CHECKING:
    from rich.table import Table

    from ragcachekit.commands.corpus import Corpus
    from ragcachekit.commands.workspace import CacheFolder
    from ragcachekit.engine.rag_cache import RagCache
    from ragcachekit.plan.link_plan import Missing
    from ragcachekit.store.base import KVStore


def precompute(
    corpus: opt.CorpusDir,
    model: opt.Model = "",
    policy: opt.Policy = "impact:0.1",
    encoder: opt.Encoder = None,
    cache: opt.CacheDir = None,
    namespace: opt.Namespace = "default",
    chunk_tokens: opt.ChunkTokens = 200,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show how much it is.")] = False,
    keep_gone: Annotated[bool, typer.Option("--keep-gone", help="Leave KV of what is gone.")] = False,
    device: opt.Device = None,
    dtype: opt.Dtype = "auto",
    disk_gb: opt.DiskGb = None,
    shared: Annotated[
        str | None,
        typer.Option(help="Store the KV here, not in the cache folder: redis://..., s3://..., file:///..."),
    ] = None,
    shared_key: Annotated[
        str, typer.Option(help="Environment variable with the key that signs shared entries.")
    ] = KEY,
    ray: Annotated[
        bool, typer.Option("--ray", help="Encode with Ray, on the cluster of RAY_ADDRESS or here.")
    ] = False,
    actors: Annotated[int, typer.Option(min=1, help="Models that encode, with --ray.")] = 2,
) -> None:
    """Encode and embed a corpus now, so that the first question about it is as quick as the others.

    What is stored is skipped: interrupt it when you like and run it again. When documents changed, run
    it again: what changed is encoded, what is gone is forgotten. Give `ask` the same model, cache,
    namespace, chunk size, encoder and dtype.
    """
    settings = opt.settings_of(PrecomputeSettings, locals())
    quiet_loading()
    if dry_run:
        work = dry_work(settings)
        show(_amount(work))
        typer.echo(f"it would be: {_changes(work)}")
        return
    try:
        with open_run(settings) as opened:
            work = opened.work
            show(_amount(work))
            seconds = opened.run(progress=work.todo_tokens > 0)
    except KeyboardInterrupt:
        note("interrupted; what was stored stays, the same command goes on from there")
        raise typer.Exit(INTERRUPTED) from None
    typer.echo(
        f"encoded {counted(work.new, 'chunk')} ({work.todo_tokens} tokens, {size(work.todo_bytes)}) "
        f"in {seconds:.1f} s, {work.stored} {'was' if work.stored == 1 else 'were'} stored already"
    )
    typer.echo(_changes(work))


@dataclass(frozen=True)
class PrecomputeSettings(OwnFiles):
    """What ``ragcachekit precompute`` takes; with ``keep_gone`` no KV is forgotten.

    ``policy`` counts for the encoder that it asks for (``lego0``: ``sinks:4``). All else must be as in
    :class:`~ragcachekit.commands.ask.AskSettings` for the KV to be found. ``shared`` is the url of a tier to
    store the KV in instead of the cache folder, ``shared_key`` the environment variable with its key. With
    ``ray``, ``actors`` models encode on the cluster that ``RAY_ADDRESS`` names, or else on this machine.
    """

    keep_gone: bool = False
    shared: str | None = None
    shared_key: str = KEY
    ray: bool = False
    actors: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_1(self, "actors")
        if self.ray and find_spec("ray") is None:
            install = missing_extra("ray", "'ray[data,serve]'")
            raise RagCacheError(f"--ray needs Ray: {install}")
        if self.ray and str(self.chunk_encoder).startswith(("average", "in-prompt")):
            raise ValueError(f"--ray cannot encode by {self.chunk_encoder}; take system, sinks or similar")

    @property
    def store(self) -> StoreConfig:
        """The tier that is written: the shared one, or the cache folder."""
        if self.shared is None:
            return StoreConfig(host_bytes=0, disk_path=self.folder.kv, disk_bytes=self.disk_bytes)
        return shared_tier(self.shared, self.disk_bytes, self.shared_key)

    @property
    def lists(self) -> Path:
        """Folder of the manifests; those of each shared tier are apart."""
        if self.shared is None:
            return self.folder.manifests
        return self.folder.path / "shared" / hashlib.sha256(self.shared.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Work:
    """How much there is to do.

    ``todo_tokens`` are those of chunks that are not among the ``stored`` ones, ``token_bytes`` is the KV of
    one token over all layers, ``id_bytes`` are those of the entries' token ids, ``gone`` counts chunks to
    forget, ``notes`` name what was skipped.
    """

    files: int
    chunks: int
    tokens: int
    stored: int
    todo_tokens: int
    token_bytes: int
    id_bytes: int
    gone: int
    notes: tuple[str, ...]

    @property
    def new(self) -> int:
        """Chunks to encode."""
        return self.chunks - self.stored

    @property
    def todo_bytes(self) -> int:
        """Bytes of KV to be stored."""
        return self.todo_tokens * self.token_bytes + self.id_bytes


def dry_work(settings: PrecomputeSettings) -> Work:
    """Count the work without touching the cache folder.

    Raises CorpusError, RagCacheError, ModelNotSupported, ValueError as :func:`open_run`.
    """
    from ragcachekit.store.base import NullStore
    from ragcachekit.store.tiered import open_store

    corpus = settings.read_corpus()
    with (
        tempfile.TemporaryDirectory(prefix="ragcachekit-") as scratch,
        settings.open_engine(NullStore(), corpus, cache_dir=Path(scratch), cold="never") as rag,
        closing(open_store(settings.store)) if settings.shared else nullcontext() as tier,
    ):
        return PrecomputeRun(settings, rag, corpus, tier).work


@contextmanager
def open_run(settings: PrecomputeSettings) -> Iterator[PrecomputeRun]:
    """Load everything for a run, and check that its KV fits.

    Raises CorpusError, RetrievalError, RagCacheError, ModelNotSupported, StoreError if the corpus, the model
    or the cache folder cannot be used, or the KV does not fit; ValueError for a wrong setting, or a chunk
    longer than the model's context.
    """
    from ragcachekit.store.tiered import open_store

    corpus = settings.checked_corpus()
    tier = open_store(settings.store)
    with closing(tier), settings.open_engine(tier, corpus, cold="never") as rag:
        run = PrecomputeRun(settings, rag, corpus, tier if settings.shared else None)
        needed = run.work.todo_bytes - sum(run.gone.values()) * run.work.token_bytes
        room = sum(record.budget - record.nbytes for record in tier.stats())
        _check_room(needed, room, None if settings.shared else settings.folder)
        yield run


class PrecomputeRun:
    """A corpus ready to be encoded.

    ``work`` is how much there is to do, ``todo`` the chunks to encode, ``gone`` the ids of chunks to forget,
    with their tokens. ``shared`` is the tier to look in, by default the cache folder.
    """

    def __init__(
        self,
        settings: PrecomputeSettings,
        rag: RagCache,
        corpus: Corpus,
        shared: KVStore | None = None,
    ) -> None:
        from ragcachekit.commands.reading_prompt import prompt_for
        from ragcachekit.policies.registry import open_policy
        from ragcachekit.prompt.parser import PromptParser

        self._settings, self._rag, self._corpus = settings, rag, corpus
        self._shared = shared
        self._system = prompt_for(rag.tokenizer).before
        planner = settings.planner(rag.model, PromptParser(rag.tokenizer), rag.fingerprint, corpus)
        policy = open_policy(settings.policy)
        self._chunks = planner.missing(corpus.texts, rag.namespace, policy, self._system)
        self.todo = [chunk for chunk in self._chunks if not self._is_stored(chunk)]
        self._scope = Scope(
            rag.namespace,
            str(Path(settings.corpus).expanduser().resolve()),
            self._chunks[0].key.encoding.partition("@")[0],
            rag.fingerprint,
            settings.chunk_tokens,
        )
        present = {chunk.key.chunk_id: len(chunk.token_ids) for chunk in self._chunks}
        earlier = read_manifests(settings.lists, self._scope)
        keep = settings.keep_gone or earlier.notes
        self.gone = {} if keep else {i: n for i, n in earlier.chunks.items() if i not in present}
        # What is not forgotten stays listed.
        self._listed = {i: n for i, n in earlier.chunks.items() if i not in self.gone} | present
        self.work = Work(
            corpus.files,
            len(self._chunks),
            sum(len(chunk.token_ids) for chunk in self._chunks),
            len(self._chunks) - len(self.todo),
            sum(len(chunk.token_ids) for chunk in self.todo),
            _token_bytes(rag.model),
            sum(chunk.id_bytes for chunk in self.todo),
            len(self.gone),
            (*corpus.notes, *earlier.notes),
        )

    def run(self, *, progress: bool = False) -> float:
        """Forget what is gone, encode what is missing, embed what the index of ``ask`` lacks.

        Returned are the seconds that the KV took. What was stored stays if this is interrupted.

        Raises StoreError if some KV, or the list of what is encoded, could not be written.
        """
        from ragcachekit.commands.embedding import MiniLM

        start = time.perf_counter()
        if self.gone:
            self._rag.forget(self.gone)
        # Listed before anything is encoded: after an interruption a later run can forget all that is stored.
        write_manifest(self._settings.lists, self._scope, self._listed)
        if self._settings.ray:
            self._encode_on_ray(progress)
        else:
            self._rag.encode(self._corpus.texts, system=self._system, progress=progress)
        if lost := sum(not self._is_stored(chunk) for chunk in self._chunks):
            raise StoreError(
                f"{lost} of {self.work.chunks} chunks could not be stored; free some space "
                "and run the same command again"
            )
        seconds = time.perf_counter() - start
        corpus_index(self._settings, self._corpus, MiniLM())
        return seconds

    def _encode_on_ray(self, progress: bool) -> None:
        from ragcachekit.cluster import EncodingJob, encode_chunks  # Ray is an extra

        settings, todo = self._settings, {chunk.key.chunk_id for chunk in self.todo}
        ids = [chunk.key.chunk_id for chunk in self._chunks]
        encode_chunks(
            EncodingJob(
                partial(settings.open_engine, corpus=self._corpus, cold="never"), settings.store, self._system
            ),
            list(dict(zip(ids, self._corpus.texts, strict=True)).items()),
            stored=set(ids) - todo,
            actors=settings.actors,
            checkpoint=settings.lists / "ray" / self._scope.name.removesuffix(".json"),
            progress=progress,
        )

    def _is_stored(self, chunk: Missing) -> bool:
        from ragcachekit.store.entry import entry_name

        if self._shared is not None:
            return chunk.key in self._shared
        return (self._settings.folder.kv / entry_name(chunk.key)).is_file()


def _token_bytes(model: Any) -> int:
    """Bytes of one token's entry over all layers, with what is kept for policies."""
    from ragcachekit.encode.standalone import ChunkEncoder
    from ragcachekit.forward.attention_sums import ObservedCache
    from ragcachekit.model.encoding import Encoding
    from ragcachekit.model.rope.probe import describe_rope

    encoder = ChunkEncoder(model, describe_rope(model), ObservedCache)
    ((_, kv),) = encoder.encode([[1]], Encoding("standalone"))
    return kv.nbytes


def _check_room(needed: int, room: int, folder: CacheFolder | None) -> None:
    if needed > room:
        raise ValueError(
            f"the KV takes {needed / 1e9:.2f} GB more, the disk budget has {max(room, 0) / 1e9:.2f} GB left; "
            "raise --disk-gb, here and in `ask`, or clear what is not needed (ragcachekit cache clear)"
        )
    if folder is None:
        return
    free = shutil.disk_usage(folder.kv).free
    if needed > free:
        raise StoreError(
            f"the KV takes {needed / 1e9:.2f} GB, {folder.path} has {free / 1e9:.2f} GB free; "
            "free some space or choose another --cache"
        )


def _changes(work: Work) -> str:
    return f"{work.new} new, {work.stored} kept, {work.gone} forgotten"


def _amount(work: Work) -> Table:
    for skipped in work.notes:
        note(skipped)
    rows = {
        "corpus": f"{counted(work.files, 'file')}, {counted(work.chunks, 'chunk')}, {work.tokens} tokens",
        "KV of a token": size(work.token_bytes),
        "stored already": counted(work.stored, "chunk"),
        "to encode": f"{counted(work.new, 'chunk')}, {work.todo_tokens} tokens, "
        f"{size(work.todo_bytes)} of KV",
    }
    return pairs(rows)

"""``ragcachekit precompute``: encode a corpus ahead of the questions (EPIC's compile step)."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal as size

from ragcachekit.cluster.shared_tier import KEY, shared_tier
from ragcachekit.commands import options as opt
from ragcachekit.commands.ask import corpus_index
from ragcachekit.commands.console import INTERRUPTED, counted, note, pairs, quiet_loading, show
from ragcachekit.commands.workspace import OwnFiles
from ragcachekit.config import StoreConfig
from ragcachekit.errors import RagCacheError, StoreError
from ragcachekit.types import DEFAULT_ENCODER, DEFAULT_POLICY

if TYPE_CHECKING:
    from ragcachekit.commands.corpus import Corpus
    from ragcachekit.engine.rag_cache import RagCache
    from ragcachekit.plan.link_plan import Missing
    from ragcachekit.store.base import KVStore

FEW = 8  # chunks for which no time is predicted


def precompute(
    corpus: opt.CorpusDir,
    model: opt.Model = "",
    policy: opt.Policy = DEFAULT_POLICY,
    encoder: opt.Encoder = None,
    cache: opt.CacheDir = None,
    namespace: opt.Namespace = "default",
    chunk_tokens: opt.ChunkTokens = 200,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show how much it is.")] = False,
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
    it again: what changed is encoded; what is gone stays until there is no room for it, or `cache clear`.
    Give `ask` the same model, cache, namespace, chunk size, encoder and dtype. --encoder system is quick.
    """
    settings = opt.settings_of(PrecomputeSettings, locals())
    quiet_loading()
    try:
        with open_run(settings, dry=dry_run) as run:
            for skipped in run.corpus.notes:
                note(skipped)
            if (ray or shared) and encoder is None and settings.chunk_encoder == "system":
                note(f"encoded by system for other engines; their prompts add contexts ({DEFAULT_ENCODER})")
            show(pairs(run.rows))
            if dry_run:
                seconds = run.estimated_seconds()
                about = "" if seconds is None else f"; about {seconds:.1f} s"
                typer.echo(f"it would be: {run.changes}{about}")
                return
            seconds = run.run(progress=bool(run.todo))
    except KeyboardInterrupt:
        note("interrupted; what was stored stays, the same command goes on from there")
        raise typer.Exit(INTERRUPTED) from None
    amount = f"{run.todo_tokens} tokens, {size(run.todo_bytes)}"
    typer.echo(f"encoded {counted(len(run.todo), 'chunk')} ({amount}) in {seconds:.1f} s: {run.changes}")


@dataclass(frozen=True)
class PrecomputeSettings(OwnFiles):
    """What ``ragcachekit precompute`` takes.

    ``policy`` counts for the encoder that it asks for (``lego0``: ``sinks:4``). All else must be as in
    :class:`OwnFiles` of ``ask`` for the KV to be found. ``shared`` is the url of a tier to store the KV in
    instead of the cache folder, ``shared_key`` the environment variable with its key. With ``ray``,
    ``actors`` models encode on the cluster that ``RAY_ADDRESS`` names, or else on this machine.
    """

    shared: str | None = None
    shared_key: str = KEY
    ray: bool = False
    actors: int = 2

    def __post_init__(self) -> None:
        if self.ray and self.chunk_encoder.startswith(("average", "in-prompt")):
            raise ValueError(f"--ray cannot encode by {self.chunk_encoder}; take system, sinks or similar")

    @property
    def chunk_encoder(self) -> str:
        """The encoder that was given, else the policy's own, else ``average:2``.

        With ``ray`` or ``shared`` ``system`` instead: another engine does not know the companions that name
        a mean, and a shared tier does not list them. Its prompts add their contexts.
        """
        usual, is_apart = super().chunk_encoder, self.ray or self.shared is not None
        return "system" if is_apart and self.encoder is None and usual == DEFAULT_ENCODER else usual

    @property
    def store(self) -> StoreConfig:
        """The tier that is written: the shared one, or the cache folder."""
        if self.shared is None:
            return StoreConfig(host_bytes=0, disk_path=self.folder.kv, disk_bytes=self.disk_bytes)
        return shared_tier(self.shared, self.shared_key)


@contextmanager
def open_run(settings: PrecomputeSettings, *, dry: bool = False) -> Iterator[PrecomputeRun]:
    """Load everything for a run, and check that its KV fits; ``dry``: do not touch the cache folder.

    Raises CorpusError, RetrievalError, RagCacheError, ModelNotSupported, StoreError if the corpus, the model
    or the cache folder cannot be used, or the KV does not fit; ValueError for a wrong setting, or a chunk
    longer than the model's context.
    """
    from ragcachekit.store.base import NullStore
    from ragcachekit.store.tiered import open_store

    config = settings.store
    corpus = settings.read_corpus()
    with ExitStack() as stack:
        is_read = settings.shared or not dry or settings.folder.kv.is_dir()
        if dry and not settings.shared:
            config = replace(config, disk_bytes=1 << 62)  # a dry run evicts nothing
        tier: KVStore = open_store(config) if is_read else NullStore()
        stack.callback(tier.close)
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="ragcachekit-"))
        written = StoreConfig(host_bytes=0, disk_path=Path(scratch) / "kv")  # a dry run times writing, too
        engine = settings.open_engine(
            written if dry else tier, corpus, cache_dir=Path(scratch) if dry else None, cold="never"
        )
        rag = stack.enter_context(engine)
        if rag.grade == "prefix":
            raise RagCacheError(
                f"precompute encodes chunks to be linked; this model's grade is prefix "
                f"({rag.components.grade.why}): its first prompts fill the cache, exactly"
            )
        run = PrecomputeRun(settings, rag, corpus, tier)
        if not dry:
            run.check_room()
        yield run


class PrecomputeRun:
    """A corpus ready to be encoded.

    ``chunks`` are all of it, ``todo`` those to encode, ``entries`` what is stored for these. ``token_bytes``
    is the KV of one token over all layers.
    """

    def __init__(self, settings: PrecomputeSettings, rag: RagCache, corpus: Corpus, tier: KVStore) -> None:
        from ragcachekit.commands.questions import PromptMaker
        from ragcachekit.encode.encoders import with_ingredients
        from ragcachekit.model.kv import KVLayout
        from ragcachekit.plan.variants import VariantPool

        self._settings, self._rag, self._tier, self.corpus = settings, rag, tier, corpus
        self._system = PromptMaker(rag.tokenizer).before
        self._means = VariantPool()
        self.chunks = self._missing()
        self.token_bytes = KVLayout.of(rag.model).token_bytes
        self._means.recall(tier, rag.fingerprint, variants=False)
        self.todo = [chunk for chunk in self.chunks if not self._is_stored(chunk)]
        self.entries = with_ingredients(self.todo, tier)

    @property
    def rows(self) -> dict[str, str]:
        """What there is to do, for people."""
        tokens, files = sum(len(chunk.token_ids) for chunk in self.chunks), counted(self.corpus.files, "file")
        return {
            "corpus": f"{files}, {counted(len(self.chunks), 'chunk')}, {tokens} tokens",
            "KV of a token": size(self.token_bytes),
            "stored already": counted(len(self.chunks) - len(self.todo), "chunk"),
            "to encode": f"{counted(len(self.todo), 'chunk')}, {self.todo_tokens} tokens, "
            f"{size(self.todo_bytes)} of KV",
        }

    def estimated_seconds(self) -> float | None:
        """The time to encode, by that of some chunks, which are encoded now; None if there are none."""
        if not self.todo:
            return None
        blocks = _blocks(self.todo)
        timed = [chunk for at in sorted({0, len(blocks) // 2}) for chunk in blocks[at]]
        encoder = self._rag.components.background_encoder
        entries = encoder.complete(timed)
        encoder.now(entries[:1])  # a model's first forward is slower
        start = time.perf_counter()
        encoder.now(entries)
        spent = time.perf_counter() - start
        return spent * self.todo_tokens / sum(len(chunk.token_ids) for chunk in timed)

    @property
    def todo_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.todo)

    @property
    def todo_bytes(self) -> int:
        return sum(len(one.token_ids) * self.token_bytes + 4 * len(one.content) for one in self.entries)

    @property
    def changes(self) -> str:
        """The numbers of chunks to encode and stored, for people."""
        new = len(self.todo)
        return f"{new} new, {len(self.chunks) - new} kept"

    def check_room(self) -> None:
        """ValueError if the KV does not fit into the budget, if there is one."""
        rooms = [record.budget - record.nbytes for record in self._tier.stats() if record.budget]
        room = sum(rooms)
        if rooms and self.todo_bytes > room:
            raise ValueError(
                f"the KV takes {self.todo_bytes / 1e9:.2f} GB more, the disk budget has "
                f"{max(room, 0) / 1e9:.2f} GB left; raise --disk-gb, here and in `ask`, or clear what is not "
                "needed (ragcachekit cache clear)"
            )

    def run(self, *, progress: bool = False) -> float:
        """Encode what is missing, embed what the index of ``ask`` lacks.

        Returned are the seconds that the KV took. What was stored stays if this is interrupted.

        Raises StoreError if some KV could not be written.
        """
        from ragcachekit.commands.embedding import MiniLM

        start = time.perf_counter()
        if self._settings.ray:
            self._encode_on_ray(progress)
        else:
            if len(self.todo) > FEW and (seconds := self.estimated_seconds()):
                note(f"this takes about {seconds:.0f} s")
            self._rag.encode(self.corpus.texts, system=self._system, progress=progress)
        self._means.recall(self._tier, self._rag.fingerprint, variants=False)
        if lost := sum(not self._is_stored(chunk) for chunk in self.chunks):
            raise StoreError(
                f"{lost} of {len(self.chunks)} chunks could not be stored; free some space "
                "and run the same command again"
            )
        seconds = time.perf_counter() - start
        corpus_index(self._settings, self.corpus, MiniLM())
        return seconds

    def _missing(self) -> list[Missing]:
        """What the engine looks up or encodes, whatever is stored."""
        from ragcachekit.policies.registry import open_policy

        rag, texts = self._rag, self.corpus.texts
        planner = rag.components.planner
        planner.companions.register(rag.namespace, texts)
        return planner.missing(texts, rag.namespace, open_policy(self._settings.policy), self._system)

    def _encode_on_ray(self, progress: bool) -> None:
        from ragcachekit.cluster import EncodingJob, encode_chunks  # Ray is an extra

        settings, todo = self._settings, {chunk.key.chunk_id for chunk in self.todo}
        ids = [chunk.key.chunk_id for chunk in self.chunks]
        encode_chunks(
            EncodingJob(
                partial(settings.open_engine, corpus=self.corpus, cold="never"), settings.store, self._system
            ),
            list(dict(zip(ids, self.corpus.texts, strict=True)).items()),
            stored=set(ids) - todo,
            actors=settings.actors,
            progress=progress,
        )

    def _is_stored(self, chunk: Missing) -> bool:
        from ragcachekit.engine.chunks import is_stored

        return is_stored(chunk, self._tier, self._means)


def _blocks(chunks: Sequence[Missing]) -> list[Sequence[Missing]]:
    """The chunks by four, or by the forwards that they share."""
    from ragcachekit.encode.in_prompt import blocks
    from ragcachekit.model.encoding import AverageEncoding

    if averaged := [chunk for chunk in chunks if isinstance(chunk.encoding, AverageEncoding)]:
        return list(blocks(averaged))
    return [chunks[at : at + 4] for at in range(0, len(chunks), 4)]

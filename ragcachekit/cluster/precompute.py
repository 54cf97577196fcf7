"""Encoding chunks with Ray Data: one model per actor, a shared tier."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy

from ragcachekit.config import StoreConfig
from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.errors import StoreError
from ragcachekit.model.kv import ChunkKV
from ragcachekit.store.base import KVStore
from ragcachekit.store.memory import HostStore
from ragcachekit.store.tiered import open_store
from ragcachekit.types import KVKey

BATCH = 16
"""Chunks that an actor encodes and stores together: what its death loses at most."""

_PUTS = 3  # attempts to store one entry
_WARM_UP = "One chunk ahead of the others."


@dataclass(frozen=True)
class EncodingJob:
    """What actors need to encode chunks of one namespace.

    - ``open_engine``: Opens the engine over the given store; it is sent to the actors.
    - ``store``: The tier that all actors write into: :func:`ragcachekit.cluster.shared_tier`, or
      a folder on this machine.
    - ``system``: Text before a prompt's first chunk, as for :meth:`ragcachekit.RagCache.encode`.
    """

    open_engine: Callable[[KVStore], RagCache]
    store: StoreConfig
    system: str | None = None


def encode_chunks(
    job: EncodingJob,
    chunks: Sequence[tuple[str, str]],
    *,
    actors: int,
    stored: Container[str] = (),
    progress: bool = False,
) -> int:
    """Encode ``(chunk id, text)`` pairs with a pool of actors; returns how many were encoded in this run.

    Batches are the same slices of ``chunks`` in every run, and each is encoded as a whole. So a run that was
    interrupted, or whose actors died, stores the same bytes as one that was not. A dead actor is replaced and
    its batch encoded again. Actors share the cluster's CPUs and GPUs evenly.

    Parameters
    ----------
    chunks : sequence of (str, str)
        Ids, each once, and texts.
    actors : int
        Models that are loaded.
    stored : container of str
        Ids of chunks that the tier has: batches of such chunks alone are left out.
    progress : bool
        Whether to show Ray Data's progress bars.

    Raises
    ------
    StoreError
        If the shared tier does not take an entry.
    ValueError
        For ``actors`` below 1.
    """
    if actors < 1:
        raise ValueError(f"actors must be at least 1, got {actors}")
    slices = (chunks[start : start + BATCH] for start in range(0, len(chunks), BATCH))
    todo = [table(part) for part in slices if not all(one in stored for one, _ in part)]
    if not todo:
        return 0
    with _ray_data(progress):
        encoded = ray.data.from_arrow(todo).map_batches(
            EncodingActor,
            fn_constructor_args=(job,),
            batch_size=None,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(size=actors),
            **_resources(actors),
        )
        try:
            return int(encoded.materialize().count())
        except StoreError as error:
            raise StoreError(str(getattr(error, "cause", error))) from error


def table(chunks: Sequence[tuple[str, str]]) -> pa.Table:
    """A batch as Ray Data's actors get it."""
    return pa.table({"chunk_id": [one for one, _ in chunks], "text": [text for _, text in chunks]})


class EncodingActor:
    """Holds one model, and encodes batches of chunks into the shared tier."""

    def __init__(self, job: EncodingJob) -> None:
        self._job = job
        self._own = HostStore(1 << 62)  # one batch, so that it is encoded whole whatever is stored already
        self._shared = open_store(job.store)
        self._rag = job.open_engine(self._own)
        # An engine's first batch is smaller than later ones, whose sums have another order.
        self._rag.encode([_WARM_UP], system=job.system)
        self._own.forget(self._rag.namespace)

    def __call__(self, rows: pa.Table) -> pa.Table:
        """Encode and store the column ``text``; returned are the ids."""
        self._rag.encode(rows["text"].to_pylist(), system=self._job.system)
        for key in list(self._own.keys()):
            found = self._own.get(key)
            if found is not None and not self._store(key, found.kv):
                raise StoreError(
                    "the shared tier refused the KV of a chunk: check its space, its key, and that every "
                    "machine can reach it; then run the same command again"
                )
            self._own.discard(key, damaged=False)
        return rows.select(["chunk_id"])

    def _store(self, key: KVKey, kv: ChunkKV) -> bool:
        return key in self._shared or any(self._shared.put(key, kv) for _ in range(_PUTS))


def _resources(actors: int) -> dict[str, Any]:
    """CPUs and GPUs of one actor: the cluster's, shared evenly, with one CPU left for reading and writing."""
    here = ray.cluster_resources()  # type: ignore[no-untyped-call]
    share = max(here.get("CPU", 1.0) - 1, 0.5) / actors
    largest = max(float(node["Resources"].get("CPU", 1)) for node in ray.nodes())  # type: ignore[no-untyped-call]
    whole = float(int(min(share, largest))) or min(share, 0.5)
    return {"num_cpus": whole, "num_gpus": min(1.0, here.get("GPU", 0.0) / actors)}


@contextmanager
def _ray_data(progress: bool) -> Iterator[None]:
    """Ray Data for one run, on the cluster that ``RAY_ADDRESS`` names or that runs, else on this machine."""
    starts = not ray.is_initialized()
    if starts:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    context = ray.data.DataContext.get_current()
    before, context.enable_progress_bars = context.enable_progress_bars, progress
    try:
        yield
    finally:
        context.enable_progress_bars = before
        if starts:
            ray.shutdown()

"""The encoder ``similar:n``: a chunk after other chunks' KV (FusionRAG section 3.1, eq. 10)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ragcachekit.encode.standalone import ChunkEncoder
from ragcachekit.forward.linker import link
from ragcachekit.forward.rows import AttentionSums
from ragcachekit.model.encoding import AverageEncoding, Encoding, NeighbourEncoding
from ragcachekit.model.kv import SENSITIVITY, ChunkKV, KVLayout, Stretch, extract
from ragcachekit.model.rope import Rope
from ragcachekit.plan.encodings import system_encoding
from ragcachekit.plan.link_plan import LinkPlan, Missing, Piece
from ragcachekit.plan.lookup import Fetch
from ragcachekit.reports import LinkReport
from ragcachekit.store.base import KVStore
from ragcachekit.types import ENCODING_PREFIX, KVKey, chunk_id


def ingredients(item: Missing) -> list[tuple[int, Missing]]:
    """Start positions and entries of the context that ``item`` is encoded after.

    These are the system text as ``prefix``, then each neighbour after that text alone, as ``system``
    (without a text: ``standalone``). Empty for encodings other than ``similar:n``.
    """
    encoding = item.encoding
    if not isinstance(encoding, NeighbourEncoding):
        return []
    system, out, at = encoding.before, [], 0
    if system:
        out.append((0, _entry(item, system, Encoding(ENCODING_PREFIX))))
        at = len(system)
    for ids in encoding.neighbours:
        out.append((at, alone(item, ids)))
        at += len(ids)
    return out


def with_ingredients(missing: Iterable[Missing], store: KVStore) -> list[Missing]:
    """``missing`` after the entries that go with it and that ``store`` lacks, each once.

    Of ``similar:n`` these are its context; of ``average:n`` the chunk after the system text alone, which is
    exact where the chunk is a prompt's first.
    """
    missing = list(missing)
    needed = {part.key: part for item in missing for _, part in ingredients(item)}
    firsts = (alone(item, item.token_ids) for item in missing if isinstance(item.encoding, AverageEncoding))
    needed |= {part.key: part for part in firsts}
    absent = {key: part for key, part in needed.items() if key not in store}
    return list((absent | {item.key: item for item in missing}).values())


class NeighbourEncoder:
    """Encodes chunks after the KV of a system text and of other chunks.

    The neighbours do not attend to each other: each is its own ``system`` encoding, rotated to its place.
    The chunk's rows run in one linked forward over them. Neighbours that ``store`` lacks are encoded for
    this use and not stored.
    """

    def __init__(
        self,
        model: Any,
        rope: Rope,
        encoder: ChunkEncoder,
        store: KVStore,
        layout: KVLayout | None = None,
    ) -> None:
        self._layout = layout
        self._model = model
        self._rope = rope
        self._encoder = encoder
        self._store = store

    def encode(self, items: Iterable[Missing]) -> Iterator[tuple[Missing, ChunkKV]]:
        """Yield every item of a :class:`NeighbourEncoding` with its KV, keys without RoPE, on the host."""
        for item in items:
            yield item, self._forward(item, [Piece(at, self._kv(part)) for at, part in ingredients(item)])

    def _kv(self, part: Missing) -> ChunkKV:
        found = Fetch(self._store, layout=self._layout).get(part.key, len(part.token_ids))
        if found is not None and isinstance(found.kv, ChunkKV):
            return found.kv
        ((_, kv),) = self._encoder.encode([part.token_ids], part.encoding)
        return kv

    @torch.no_grad()
    def _forward(self, item: Missing, pieces: list[Piece]) -> ChunkKV:
        assert isinstance(item.encoding, NeighbourEncoding)
        before = tuple(token for _, part in ingredients(item) for token in part.token_ids)
        ids = (*before, *item.encoding.joint, *item.token_ids)
        rows, start = range(len(before), len(ids)), len(ids) - len(item.token_ids)
        report = LinkReport("reuse", item.encoding.name, item.key.namespace, len(ids))
        plan = LinkPlan(ids, tuple(pieces), tuple(rows), (), report)
        sums = AttentionSums([(start, len(ids))], first=[0])
        inputs = link(plan, self._rope, self._model.device, observer=sums)
        inputs.run(self._model, len(rows))
        (kv,) = extract(inputs.cache.layers, [Stretch(0, start, len(ids))], self._rope, len(ids))
        own = self._kv(alone(item, item.token_ids)).to("cpu")
        return ChunkKV(*kv, None, {**sums.sums[0], SENSITIVITY: sensitivity(kv[1], own.values)})


def sensitivity(values: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> torch.Tensor:
    """How far each token's values moved between two encodings: ``[layers, tokens]`` float32.

    ``values`` and ``others`` are ``[kv_heads, tokens, head_dim]`` per layer; the norm is over heads and
    dimensions.
    """
    pairs = zip(values, others, strict=True)
    return torch.stack([(one.float() - other.float()).square().sum((0, 2)).sqrt() for one, other in pairs])


def alone(item: Missing, ids: tuple[int, ...]) -> Missing:
    """A chunk after the system text of ``item`` alone, or after nothing."""
    return _entry(item, ids, system_encoding(item.encoding.before))


def _entry(item: Missing, ids: tuple[int, ...], encoding: Encoding) -> Missing:
    """An entry of the same model, namespace and epoch as ``item``."""
    key = item.key
    context = (chunk_id(encoding.before, key.namespace),) if encoding.before else ()
    own = KVKey(key.fingerprint, key.namespace, chunk_id(ids, key.namespace), encoding.name, context)
    return Missing(own, ids, encoding, item.epoch)

"""Running the link room by itself: plans from token ids, one linked forward, what came of it."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from families import Prefill, wrapped
from ragcachekit.encode.encoders import ChunkEncoder
from ragcachekit.forward.attention import install
from ragcachekit.forward.linker import link
from ragcachekit.model.encoding import Encoding
from ragcachekit.model.kv import ChunkKV
from ragcachekit.model.rope import Rope, describe_rope
from ragcachekit.plan.encodings import Encodings, Fetch
from ragcachekit.plan.link_plan import LinkPlan, Piece, PromptRequest, make_plan
from ragcachekit.plan.variants import VariantPool
from ragcachekit.policies.base import PlacedChunk
from ragcachekit.policies.registry import open_policy
from ragcachekit.prompt.segments import TokenSegment
from ragcachekit.reports import LinkReport
from ragcachekit.store.base import KVStore
from ragcachekit.store.memory import HostStore
from ragcachekit.types import KVKey, chunk_id

BOS = 1


@functools.cache
def described(name: str, dtype: torch.dtype = torch.float32) -> Rope:
    return describe_rope(wrapped(name, dtype))


@dataclass(frozen=True)
class Everything:
    """A policy that recomputes all cached rows."""

    name = "everything"
    encoder: str | None = None
    reads_cache = True

    def select(self, chunks: Sequence[PlacedChunk]) -> list[int]:
        return [p for chunk in chunks for p in range(chunk.start, chunk.stop)]


def segments(*parts: tuple[str, tuple[int, ...]]) -> list[TokenSegment]:
    """``("text", ids)`` and ``("chunk", ids)``."""
    return [TokenSegment(ids, kind == "chunk") for kind, ids in parts]


def key_of(ids: tuple[int, ...], encoding: Encoding, context: Sequence[tuple[int, ...]]) -> KVKey:
    """The store key of a chunk that is encoded so."""
    names = tuple(chunk_id(one, "space") for one in context)
    return KVKey("model", "space", chunk_id(ids, "space"), encoding.name, names)


def ids_of(parts: Sequence[TokenSegment]) -> tuple[int, ...]:
    return tuple(i for part in parts for i in part.token_ids)


def plan_from(
    parts: Sequence[TokenSegment],
    policy: Any,
    encodings: Encodings,
    store: KVStore | Fetch,
    fingerprint: str,
    namespace: str,
    pool: VariantPool | None = None,
) -> LinkPlan:
    """The plan of a prompt over a store, or over what already looks entries up for it."""
    fetch = store if isinstance(store, Fetch) else Fetch(store)
    request = request_of(parts, policy, encodings, fetch, fingerprint, namespace)
    return make_plan(request, pool or VariantPool())


def request_of(
    parts: Sequence[TokenSegment],
    policy: Any,
    encodings: Encodings,
    fetch: Fetch,
    fingerprint: str,
    space: str,
) -> PromptRequest:
    """The request of a prompt, without a tree."""
    wanted = tuple(encodings.wanted(parts, fingerprint, space))
    return PromptRequest(tuple(parts), policy, encodings.name, space, wanted, fetch=fetch)


def planned(
    name: str,
    parts: Sequence[TokenSegment],
    policy: Any,
    *,
    encoder: str | None = None,
    store: KVStore | None = None,
    dtype: torch.dtype = torch.float32,
) -> LinkPlan:
    """A plan after everything that the prompt misses was encoded."""
    rope, chosen = described(name, dtype), open_policy(policy)
    encodings = Encodings(encoder or chosen.encoder or "standalone", rope, BOS)
    store = store or HostStore(1 << 26)
    arguments = (parts, chosen, encodings, store, "fingerprint", "space")
    for item in plan_from(*arguments).missing:
        for _, kv in ChunkEncoder(wrapped(name, dtype), rope).encode([item.token_ids], item.encoding):
            assert store.put(item.key, kv)
    plan = plan_from(*arguments)
    assert not plan.missing
    return plan


def plan_of(ids: Sequence[int], pieces: Sequence[Piece], rows: Sequence[int]) -> LinkPlan:
    """A plan made by hand."""
    report = LinkReport("by hand", "standalone", "space", len(ids))
    return LinkPlan(tuple(ids), tuple(pieces), tuple(rows), (), report)


def piece(run: Prefill, start: int, stop: int) -> Piece:
    """Columns of an ordinary prefill, keys as the model rotated them (so no code of ours touches them)."""
    return Piece(
        start,
        ChunkKV(
            tuple(k[:, start:stop].clone() for k in run.keys),
            tuple(v[:, start:stop].clone() for v in run.values),
            start,
        ),
    )


@torch.no_grad()
def linked(name: str, plan: LinkPlan, dtype: torch.dtype = torch.float32) -> Prefill:
    """One linked forward; logits of rows that were kept are NaN."""
    model = wrapped(name, dtype)
    install(model)
    inputs = link(plan, described(name, dtype), torch.device("cpu"))
    count = len(plan.rows)
    out = model(
        input_ids=inputs.input_ids[:, -count:],
        position_ids=inputs.position_ids[:, -count:],
        attention_mask=inputs.attention_mask,
        past_key_values=inputs.cache,
        use_cache=True,
    ).logits[0]
    logits = torch.full((len(plan.token_ids), out.shape[-1]), float("nan"), dtype=out.dtype)
    logits[list(plan.rows)] = out
    layers = inputs.cache.layers
    return Prefill(logits, tuple(x.keys[0] for x in layers), tuple(x.values[0] for x in layers))


def linked_columns(rope: Rope, plan: LinkPlan) -> list[dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """Per layer, keys and values ``[kv_heads, head_dim]`` of the cached rows, each placed by us."""
    out = []
    for layer in range(plan.pieces[0].kv.layers):
        rows = {}
        for piece in plan.pieces:
            at = torch.arange(piece.start, piece.start + piece.kv.tokens)
            keys, values = piece.kv.keys[layer], piece.kv.values[layer]
            if piece.kv.start is None:
                keys, _ = rope.place(layer, keys, keys, rope.angles(at, len(plan.token_ids)))
            rows |= {p: (keys[:, i], values[:, i]) for i, p in enumerate(at.tolist())}
        out.append(rows)
    return out


class Overriding(DynamicCache):
    """Whatever a full forward computes for these columns, the given ones are what it attends to."""

    def __init__(self, columns):
        super().__init__()
        self.columns = columns

    def update(self, keys, values, layer, *args, **kwargs):
        keys, values = keys.clone(), values.clone()
        for p, (k, v) in self.columns[layer].items():
            keys[0, :, p], values[0, :, p] = k, v
        return super().update(keys, values, layer, *args, **kwargs)

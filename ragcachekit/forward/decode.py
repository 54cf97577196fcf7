"""Requests that are decoded together: one forward with a token of each, over KV of its own and shared KV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache, DynamicLayer

from ragcachekit.errors import ModelChanged
from ragcachekit.forward.attention import is_installed, tagged
from ragcachekit_kernels import dispatch
from ragcachekit_kernels.dispatch import AttentionOptions

GROWTH = 256
"""Rows that a full buffer grows by: a copy every so many tokens, not memory for all that may come."""

MIN_SHARED = 32
"""Rows that are shared at least: fewer save little, and every part costs a call of attention."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""What torch's attention runs on a CPU; it returns the log-sum-exp, too."""


class Part(NamedTuple):
    """Rows of a prompt: per layer, keys and values ``[kv_heads, rows, head_dim]``."""

    keys: list[Tensor]
    values: list[Tensor]

    @property
    def rows(self) -> int:
        return self.keys[0].shape[1]

    def copied(self, start: int, stop: int) -> Part:
        return Part(*([_moved(side[:, start:stop], stop - start) for side in sides] for sides in self))

    def equal(self, other: Part, count: int) -> int:
        """How many of the first ``count`` rows are those of ``other``, in all layers."""
        for ours, theirs in zip(chain(*self), chain(*other), strict=True):
            one, same = ours[:, :count], theirs[:, :count]
            if not torch.equal(one, same):
                count = int((one != same).any(2).any(0).int().argmax())
        return count


class RequestKV:
    """KV of one request: the ``shared`` parts that begin it, then rows of its ``own`` from ``start`` on.

    ``rows`` are written, in all. They come out of ``cache`` (``[1, kv_heads, tokens, head_dim]`` per layer),
    whose layers are emptied one by one, so that no more than one layer is held twice.
    """

    def __init__(self, cache: Any, rows: int, new: int) -> None:
        self.rows, self.start = rows, 0
        self.shared: list[Part] = []
        self.own = Part([], [])
        room = rows + min(new, GROWTH)
        for layer in cache.layers:
            self.own.keys.append(_moved(layer.keys[0, :, :rows], room))
            self.own.values.append(_moved(layer.values[0, :, :rows], room))
            layer.keys = layer.values = None

    @property
    def parts(self) -> list[tuple[int, int, Part]]:
        """The shared parts and its own, with the first row of each and the one after its last."""
        starts = [0, *accumulate(part.rows for part in self.shared)]
        return list(zip(starts, [*starts[1:], self.rows], [*self.shared, self.own], strict=True))

    def make_room(self) -> None:
        """Grow full buffers by :data:`GROWTH` rows."""
        rows = self.rows - self.start
        if rows == self.own.rows:
            for sides in self.own:
                for index, old in enumerate(sides):
                    sides[index] = _moved(old, rows + GROWTH)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write the row after the last one, ``[kv_heads, 1, head_dim]``; ``rows`` counts it later."""
        self.own.keys[layer].narrow(1, self.rows - self.start, 1).copy_(keys)
        self.own.values[layer].narrow(1, self.rows - self.start, 1).copy_(values)

    def share(self, other: RequestKV, most: int, every: Iterable[RequestKV]) -> None:
        """Hold the rows that begin this request and ``other`` once, as far as they are equal to the bit.

        At most the first ``most`` rows, and none of this request's are shared yet. ``every`` are all requests
        that may share parts with ``other``.
        """
        for start, stop, part in other.parts:
            rows = min(stop, most) - start
            count = self.own.equal(part, rows) if rows >= MIN_SHARED and start == self.start else 0
            if count < MIN_SHARED:
                break
            first, own = part, self.own.copied(count, self.own.rows)
            if part is other.own:
                first, rest = part.copied(0, count), part.copied(count, part.rows)
                other.own, other.start = rest, other.start + count
                other.shared.append(first)
            elif count < part.rows:
                first, rest = part.copied(0, count), part.copied(count, part.rows)
                for one in every:
                    one.shared = [
                        new for old in one.shared for new in ([first, rest] if old is part else [old])
                    ]
            self.own, self.start = own, self.start + count
            self.shared.append(first)

    def as_cache(self) -> Any:
        """``layers`` with the written rows, ``[1, kv_heads, rows, head_dim]``: views, or copies if shared."""
        layers, rows = [], self.rows - self.start
        for number in range(len(self.own.keys)):
            keys, values = (sides[number][None, :, :rows] for sides in self.own)
            if self.shared:
                keys = torch.cat([*(part.keys[number][None] for part in self.shared), keys], 2)
                values = torch.cat([*(part.values[number][None] for part in self.shared), values], 2)
            layers.append(SimpleNamespace(keys=keys, values=values))
        return SimpleNamespace(layers=layers)


def _moved(side: Tensor, room: int) -> Tensor:
    out = side.new_empty(side.shape[0], room, side.shape[2])
    out[:, : side.shape[1]] = side
    return out


class BatchRows(NamedTuple):
    """What one layer attends over: per item of the batch its KV, whose next row is written already."""

    requests: Sequence[RequestKV]
    number: int

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attention ``[batch, 1, heads, value_head_dim]`` of ``query``, ``[batch, heads, 1, head_dim]``.

        ``key`` are the new keys as the model attends over them. ValueError if these are not the ones that it
        put into its cache (multi-head latent attention expands them in between).
        """
        one = self.requests[0].own.keys[self.number]
        if query.shape[2] != 1 or key.shape[1:] != (one.shape[0], 1, one.shape[2]):
            raise ValueError(f"attention over keys {tuple(key.shape)} with {tuple(one.shape)} in the cache")
        if any(request.shared for request in self.requests):
            return self._over_parts(query[:, :, 0], options)[:, None]
        out = []
        for own, request in zip(query, self.requests, strict=True):
            keys, values = (sides[self.number] for sides in request.own)
            if options.softcap is None and options.sinks is None:
                out.append(_attend(own, keys, values, request.rows + 1, options))
            else:
                out.append(dispatch.sparse_attention(own, keys, values, (request.rows,), options)[:, 0])
        return torch.stack(out)[:, None]

    def _over_parts(self, query: Tensor, options: AttentionOptions) -> Tensor:
        """``[batch, heads, value_head_dim]`` of ``query`` ``[batch, heads, head_dim]``, part by part.

        Parts are merged by their log-sum-exp. A shared one is read once for all that see the same rows.
        """
        own = list[tuple[Tensor, Tensor]]()
        readers = dict[tuple[int, int], tuple[Part, list[int]]]()
        for item, request in enumerate(self.requests):
            first = 0 if options.window is None else max(0, request.rows + 1 - options.window)
            for start, stop, part in request.parts:
                low, rows = max(0, first - start), stop - start + (part is request.own)
                if part is request.own:
                    keys, values = (sides[self.number][:, low:rows] for sides in part)
                    own.append(_attend_part(query[item : item + 1], keys, values, options))
                elif low < rows:
                    readers.setdefault((id(part), low), (part, []))[1].append(item)
        wide = torch.promote_types(query.dtype, torch.float32)
        out, total = (torch.cat(parts).to(wide) for parts in zip(*own, strict=True))
        if options.sinks is not None:  # which take attention, and give nothing
            both = torch.logaddexp(total, options.sinks.to(total))
            out, total = out * (total - both).exp()[..., None], both
        for (_, low), (part, items) in readers.items():
            keys, values = (sides[self.number][:, low:] for sides in part)
            more, extra = _attend_part(query[items], keys, values, options)
            before, both = total[items], torch.logaddexp(total[items], extra)
            weighed = more * (extra - both).exp()[..., None]
            out[items], total[items] = out[items] * (before - both).exp()[..., None] + weighed, both
        return out.to(query.dtype)


class BatchCache(Cache):  # type: ignore[misc]
    """A cache for one forward with a new token of each request, after its ``rows``; the caller counts it."""

    def __init__(self, requests: Sequence[RequestKV]) -> None:
        layers = range(len(requests[0].own.keys))
        super().__init__(layers=[_BatchLayer(BatchRows(requests, layer)) for layer in layers])


class _BatchLayer(DynamicLayer):  # type: ignore[misc]
    def __init__(self, rows: BatchRows) -> None:
        super().__init__()
        self._rows = rows
        keys = rows.requests[0].own.keys[rows.number]
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return max(request.rows for request in self._rows.requests)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """No keys: every request attends to all of its own, and no mask is made."""
        return 0, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write each request's new row, ``[batch, kv_heads, 1, head_dim]``; the tag has the others."""
        requests, layer = self._rows
        for request, keys, values in zip(requests, key_states, value_states, strict=True):
            request.write(layer, keys, values)
        return tagged(key_states, self._rows), value_states


def _attend(query: Tensor, key: Tensor, value: Tensor, rows: int, options: AttentionOptions) -> Tensor:
    """Query heads that share a KV head are rows of one attention without a mask; ``[heads, dim]``."""
    start = 0 if options.window is None else max(0, rows - options.window)
    out = scaled_dot_product_attention(
        query.reshape(1, key.shape[0], -1, query.shape[-1]),
        key[None, :, start:rows],
        value[None, :, start:rows],
        scale=options.scale,
    )
    return out.reshape(query.shape[0], -1)


def _attend_part(
    query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Attention ``[requests, heads, dim]`` over some keys, and log-sum-exp of the scores, without a mask."""
    requests, heads, dim = query.shape
    rows = query.view(requests, len(keys), -1, dim).transpose(0, 1).reshape(len(keys), -1, dim)
    if options.softcap is None and keys.shape[-1] == values.shape[-1]:
        mixed, total = _flash(rows[None], keys[None], values[None], scale=options.scale)
    else:
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = torch.bmm(rows.to(wide), keys.to(wide).mT) * options.scale
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        total = scores.logsumexp(-1)
        mixed = torch.bmm((scores - total[..., None]).exp(), values.to(wide))
    out = mixed.view(len(keys), requests, -1, values.shape[-1]).transpose(0, 1)
    return (
        out.reshape(requests, heads, -1),
        total.reshape(len(keys), requests, -1).transpose(0, 1).reshape(requests, heads),
    )


@torch.no_grad()
def decode(model: Any, requests: Sequence[RequestKV], new: Sequence[int]) -> Tensor:
    """Logits ``[requests, vocab]`` after the ``new`` token of each, whose KV is added to the request's.

    If the forward fails, the requests are as they were. ModelChanged where the model attends by other code
    than ours, which would see the new rows alone.
    """
    if not is_installed(model):
        raise ModelChanged("the model's attention was exchanged while requests were decoded")
    for request in requests:
        request.make_room()
    out = model(
        input_ids=torch.tensor(new, device=model.device)[:, None],
        position_ids=torch.tensor([[request.rows] for request in requests], device=model.device),
        past_key_values=BatchCache(requests),
        use_cache=True,
    )
    for request in requests:
        request.rows += 1
    return out.logits[:, -1]  # type: ignore[no-any-return]

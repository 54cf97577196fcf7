"""Captured linked forwards of one model: one per number of rows, made at first use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from ragcachekit.forward.cache import LinkedCache, LinkedLayer, LinkRows, MakeLayer
from ragcachekit.forward.cuda_graphs.capture import Capture, DeviceLock
from ragcachekit.forward.cuda_graphs.captured_cache import (
    CapturedLayer,
    GraphInputs,
    NotCapturable,
    room_for,
    tokens_for,
)
from ragcachekit.store.load import Pair

log = logging.getLogger(__name__)

Pairs = list[Pair]
"""Per layer, keys and values ``[1, kv_heads, slots, head_dim]``."""

Shape = tuple[int, int, int]
"""KV heads, head_dim of keys, head_dim of values."""

ROW, LOGITS = 1e-3, 1e-3
HALF_ROW, HALF_LOGITS = 0.1, 0.25
"""Allowed norm of the difference over that of the value, in single and in half precision. Wrong positions,
masks or rows differ by about 1."""

Shapes = tuple[Shape, ...]
"""One per layer."""

_ALIGNED = 16  # bytes
_OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED")  # in errors of CUDA and cuBLAS

_Key = tuple[int, int, Shapes, torch.dtype]
"""Room, tokens, shapes and dtype of the layers' KV."""


@dataclass(frozen=True, eq=False)
class _Captured:
    """One captured forward; ``output`` is the model's return type."""

    inputs: GraphInputs
    replay: Callable[[], torch.Tensor]
    output: type


@dataclass(frozen=True)
class _Memory:
    """Addresses of a request's KV (table words, layer by layer), and its shape."""

    entries: tuple[int, ...]
    slots: int
    shapes: Shapes
    dtype: torch.dtype


class CaptureFailed(NotCapturable):
    """The capture failed and would fail again."""


class GraphRunner:
    """Captures and replays a model's own ``forward``; ``vocab`` bounds the ids of the trial."""

    def __init__(
        self, forward: Callable[..., Any], capture: Capture, device: torch.device, vocab: int
    ) -> None:
        self._forward, self._capture = forward, capture
        self._device, self._vocab = device, vocab
        self._captured: dict[_Key, _Captured] = {}
        self._too_large: dict[_Key, str] = {}
        self._lock = DeviceLock(device)

    def run(self, cache: LinkedCache, input_ids: torch.Tensor, position_ids: torch.Tensor) -> Any:
        """Run the linked forward of one prompt over its rows ``[1, rows]``.

        Returns the model's own output type, with the logits of the last row ``[1, 1, vocab]`` and the cache.

        ``NotCapturable`` if a table cannot address this request's KV, or memory is short for so many rows;
        ``CaptureFailed`` if the model cannot be captured, or the captured forward differs from the model's.
        """
        assert cache.pending is not None
        positions, memory = cache.pending.positions, _memory(cache)
        with self._lock:
            captured = self._get(room_for(len(positions)), memory)
            captured.inputs.write(input_ids, position_ids, positions, memory.entries)
            logits = captured.replay().clone()
        cache.scattered()
        return captured.output(logits=logits, past_key_values=cache)

    def _get(self, room: int, memory: _Memory) -> _Captured:
        key = room, tokens_for(room, memory.slots), memory.shapes, memory.dtype
        if key in self._too_large:
            raise NotCapturable(self._too_large[key])
        if key not in self._captured:
            self._captured[key] = self._try(key)
        return self._captured[key]

    def _try(self, key: _Key) -> _Captured:
        """Capture; any error counts, as those of models, kernel compilers and CUDA have no common class."""
        # Tensors made in inference mode could not be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            try:
                return self._make(*key)
            except Exception as error:
                why = f"a forward over {key[0]} rows cannot be captured: {error}"
                if not _lacks_memory(error):
                    raise CaptureFailed(why) from error
                log.warning("%s; smaller ones are not affected", why)
                self._too_large[key] = why
                raise NotCapturable(why) from error

    def _make(self, room: int, tokens: int, shapes: Shapes, dtype: torch.dtype) -> _Captured:
        """Capture on a trial prompt: a forward that writes to wrong addresses cannot damage a request."""
        trial = Trial.made_up(room, shapes, self._vocab, dtype, self._device)
        own = trial.copy()
        logits = trial.run(self._forward, own)
        inputs = GraphInputs(room, len(shapes), dtype, self._device)
        made = trial.copy()
        where = _memory(trial.cache(made)).entries
        inputs.write(trial.input_ids, trial.position_ids, trial.positions, where)
        forward = _Forward(self._forward, inputs, tokens)
        replay = self._capture(forward)
        for pair, fresh in zip(made, trial.pairs, strict=True):
            for side, again in zip(pair, fresh, strict=True):
                side.copy_(again)
        compare_logits(replay(), logits)
        trial.compare(made, own)
        return _Captured(inputs, replay, forward.output)


def _lacks_memory(error: BaseException) -> bool:
    """Whether ``error``, or one that it was raised from, is about memory."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or any(word in text for word in _OUT_OF_MEMORY):
        return True
    return error.__context__ is not None and _lacks_memory(error.__context__)


class _Forward:
    """The function to capture: the model's own forward over fixed memory, up to the last row's logits."""

    def __init__(self, forward: Callable[..., Any], inputs: GraphInputs, tokens: int) -> None:
        self._forward, self._inputs = forward, inputs
        layers = range(inputs.table.entries.shape[0])
        self._cache = Cache([CapturedLayer(n, inputs.table, inputs.rows, tokens) for n in layers])
        self.output: type = type(None)

    def __call__(self) -> torch.Tensor:
        input_ids, position_ids = self._inputs.padded()
        out = self._forward(
            input_ids=input_ids,
            position_ids=position_ids,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=self._inputs.last,
            return_dict=True,
        )
        more = sorted(set(out.keys()) - {"logits", "past_key_values"})
        if more:
            raise NotCapturable(f"its forward returns {', '.join(more)} too")
        self.output = type(out)
        logits: torch.Tensor = out.logits
        return logits


def _memory(cache: LinkedCache) -> _Memory:
    """Addresses of the cache's KV; ``NotCapturable`` if kernels could not read it by a table."""
    entries, shapes, dtypes = list[int](), list[Shape](), set[torch.dtype]()
    for layer in cache.layers:
        keys, values = layer.keys, layer.values
        for side in (keys, values):
            entries.append(side.data_ptr())
            dtypes.add(side.dtype)
            size = side.element_size()
            apart = side.stride(2) != side.shape[3] or side.stride(3) != 1
            if apart or entries[-1] % _ALIGNED or side.stride(1) * size % _ALIGNED:
                raise NotCapturable("its keys and values do not lie in aligned rows")
        entries += (keys.stride(1), values.stride(1))
        shapes.append((keys.shape[1], keys.shape[3], values.shape[3]))
    if len(dtypes) != 1:
        raise NotCapturable(f"its keys and values have several dtypes: {', '.join(map(str, dtypes))}")
    return _Memory(tuple(entries), keys.shape[2], tuple(shapes), dtypes.pop())


@dataclass(frozen=True, eq=False)
class Trial:
    """The prompt: every fifth row is kept, the other ``room - 3`` are computed.

    Ids and positions are ``[1, rows]``; ``pairs`` are random KV, NaN where rows have to be written.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    positions: tuple[int, ...]
    pairs: Pairs

    @classmethod
    def made_up(
        cls, room: int, shapes: tuple[Shape, ...], vocab: int, dtype: torch.dtype, device: torch.device
    ) -> Trial:
        """For a forward over ``room`` rows."""
        slots = room * 5 // 4 + 1
        positions = tuple([p for p in range(slots) if p % 5][: room - 3])
        random = torch.Generator(device).manual_seed(0)
        pairs = []
        for heads, *dims in shapes:
            pair = [torch.randn(1, heads, slots, d, generator=random, device=device).to(dtype) for d in dims]
            for side in pair:
                side[:, :, list(positions)] = float("nan")
            pairs.append((pair[0], pair[1]))
        ids = torch.randint(vocab, (1, len(positions)), generator=random, device=device)
        return cls(ids, torch.tensor([positions], device=device), positions, pairs)

    def copy(self) -> Pairs:
        """A copy of the KV."""
        return [(keys.clone(), values.clone()) for keys, values in self.pairs]

    def cache(self, pairs: Pairs) -> LinkedCache:
        """A linked cache over ``pairs`` before its forward."""
        rows = LinkRows(self.positions)
        slots = pairs[0][0].shape[2]
        kept = slots - len(self.positions)
        return LinkedCache(
            [LinkedLayer(_given(p), p[0].dtype, p[0].device, slots, rows, kept) for p in pairs]
        )

    def run(self, forward: Callable[..., Any], pairs: Pairs) -> torch.Tensor:
        """The model's own linked forward over ``pairs``: logits ``[1, 1, vocab]``."""
        slots = pairs[0][0].shape[2]
        logits: torch.Tensor = forward(
            input_ids=self.input_ids,
            position_ids=self.position_ids,
            attention_mask=torch.ones(1, slots, dtype=torch.long, device=self.input_ids.device),
            past_key_values=self.cache(pairs),
            use_cache=True,
            logits_to_keep=1,
            return_dict=True,
        ).logits
        return logits

    def compare(self, ours: Pairs, theirs: Pairs) -> None:
        """Raise ``NotCapturable`` for a layer whose KV differs after the two forwards."""
        rows = torch.tensor(self.positions, device=self.input_ids.device)
        kept = torch.ones(ours[0][0].shape[2], dtype=torch.bool, device=rows.device)
        kept[rows] = False
        for layer, sides in enumerate(zip(ours, theirs, strict=True)):
            for own, other in zip(*sides, strict=True):
                if not torch.equal(own[:, :, kept], other[:, :, kept]):
                    raise NotCapturable(f"layer {layer} writes outside of its rows")
                apart = _apart(*(side[0, :, rows].transpose(0, 1).flatten(1) for side in (own, other)))
                _demand(apart, ROW if own.dtype.itemsize > 2 else HALF_ROW, f"the rows of layer {layer}")


def _given(pair: Pair) -> MakeLayer:
    return lambda: pair


def compare_logits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Raise ``NotCapturable`` if the logits ``[1, 1, vocab]`` of the last row differ."""
    if ours.shape != theirs.shape:
        raise NotCapturable(f"its logits have shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}")
    _demand(_apart(ours[0], theirs[0]), LOGITS if theirs.dtype.itemsize > 2 else HALF_LOGITS, "the logits")


def _apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative distance over ``[rows, width]``: the worst row's; in half precision, where MoE routers
    may choose otherwise, the median row's."""
    size = theirs.float().norm(dim=-1).clamp_min(1e-12)
    apart = (ours.float() - theirs.float()).norm(dim=-1) / size
    return float(apart.max() if theirs.dtype.itemsize > 2 else apart.median())


def _demand(apart: float, allowed: float, what: str) -> None:
    if not apart <= allowed:
        raise NotCapturable(f"{what} differ from the model's own by {apart:.2g} (allowed {allowed:g})")

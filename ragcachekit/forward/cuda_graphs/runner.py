"""Linked forwards of one model as captured ones: one per number of rows, made when it is first needed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ragcachekit.forward.cache import LinkedCache
from ragcachekit.forward.cuda_graphs.capture import Capture, DeviceLock
from ragcachekit.forward.cuda_graphs.captured_cache import CapturedCache, NotCapturable
from ragcachekit.forward.cuda_graphs.inputs import GraphInputs, room_for, tokens_for
from ragcachekit.forward.cuda_graphs.trial import Shape, Trial, compare_logits

log = logging.getLogger(__name__)

Shapes = tuple[Shape, ...]
"""One per layer."""

_ALIGNED = 16  # bytes

_LACKING = ("out of memory", "ALLOC_FAILED")
"""What CUDA and cuBLAS say where torch's own error does not come in between."""

_Key = tuple[int, int, Shapes, torch.dtype]
"""Room, tokens, and what the layers' KV looks like."""


@dataclass(frozen=True, eq=False)
class _Captured:
    """One captured forward and the type of what the model returns."""

    inputs: GraphInputs
    replay: Callable[[], torch.Tensor]
    output: type


@dataclass(frozen=True)
class _Memory:
    """Where a request's KV lies: table words, layer by layer, and what a captured forward relies on."""

    entries: tuple[int, ...]
    slots: int
    shapes: Shapes
    dtype: torch.dtype


class CaptureFailed(NotCapturable):
    """It was tried, and would only be tried again in vain."""


class GraphRunner:
    """Captures and replays a model's linked forward.

    Parameters
    ----------
    forward : callable
        The model's own.
    capture : Capture
    device : torch.device
    vocab : int
        Ids to try it with.
    """

    def __init__(
        self, forward: Callable[..., Any], capture: Capture, device: torch.device, vocab: int
    ) -> None:
        self._forward, self._capture = forward, capture
        self._device, self._vocab = device, vocab
        self._captured: dict[_Key, _Captured] = {}
        self._too_large: dict[_Key, str] = {}
        self._lock = DeviceLock(device)

    def __len__(self) -> int:
        """Forwards captured so far."""
        return len(self._captured)

    def run(self, cache: LinkedCache, input_ids: torch.Tensor, position_ids: torch.Tensor) -> Any:
        """The linked forward of one prompt over its rows ``[1, rows]``, as the model would have run it.

        Returns
        -------
        ModelOutput
            The model's own type, with the logits of the last row ``[1, 1, vocab]`` and the cache.

        Raises
        ------
        NotCapturable
            If this request's KV cannot be reached by a table, or memory was short for so many rows.
        CaptureFailed
            If the model cannot be captured, or what was captured computes something else than the model.
        """
        positions, memory = cache.pending_rows.positions[0], _memory(cache)
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
        """Whatever goes wrong: the model's code, compilers of kernels and CUDA have errors of all kinds."""
        # What is made in inference mode could not be written to outside of it.
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
        """Captured on made-up KV, not the request's: a forward that writes elsewhere harms nobody there."""
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
    """Whether ``error``, or what it came from, is about memory."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or any(word in text for word in _LACKING):
        return True
    return error.__context__ is not None and _lacks_memory(error.__context__)


class _Forward:
    """What is captured: the model's own forward over fixed memory, its last row's logits alone."""

    def __init__(self, forward: Callable[..., Any], inputs: GraphInputs, tokens: int) -> None:
        self._forward, self._inputs = forward, inputs
        self._cache = CapturedCache(inputs.table.entries.shape[0], inputs.table, inputs.rows, tokens)
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
    """Waits until the kept rows are in place (on the device's own clock).

    Raises
    ------
    NotCapturable
        If kernels could not find the KV by a table.
    """
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

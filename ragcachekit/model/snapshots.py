"""Snapshots: whatever a model caches of a prompt's beginning, copied out of its cache and put back.

For models whose chunks cannot be linked: hybrids with recurrent layers, sparse attention, no RoPE. A snapshot
is exact for every prompt that begins with the same tokens, and for no other (RAGCache section 5.1).

It is kept as a :class:`~ragcachekit.model.kv.ChunkKV` per step of the prefix tree. Tensors that grow by a row
per token (keys, values, indexer keys) are cut into the step's own rows ``[1, tokens, numbers per token]``.
All else (recurrent and convolution states, full sliding windows, counters) is the *state* after the step's
last token, in ``sums``. A prompt can go on from any step with a state.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ragcachekit.errors import ModelNotSupported
from ragcachekit.model.kv import STATE, ChunkKV

PAST = "past_key_values"

CACHE_ARGUMENTS = (PAST, "cache_params", "state", "past_buckets_states")
"""Names under which models take their cache and return it."""

PROBED = (7, 12)
"""Tokens of the two prompts that show which tensors grow."""

_TENSOR, _NUMBER, _NONE = f"{STATE}tensor.", f"{STATE}number.", f"{STATE}none."


class Grown(NamedTuple):
    """A tensor with one row per token: ``axis`` is that of the tokens."""

    name: str
    axis: int
    shape: tuple[int, ...]  # of a probe; without the tokens it is that of all prompts
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """Numbers per token."""
        return math.prod(size for axis, size in enumerate(self.shape) if axis != self.axis)

    @property
    def kept(self) -> torch.dtype:
        """The dtype of the copies: stores keep no integers."""
        return self.dtype if self.dtype.is_floating_point else torch.float64

    def cut(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """A copy of some rows, ``[1, tokens, width]``."""
        rows = tensor.narrow(self.axis, start, stop - start).movedim(self.axis, 0).to(self.kept)
        return rows.reshape(1, stop - start, self.width).clone(memory_format=torch.contiguous_format)

    def joined(self, parts: Sequence[Tensor], device: torch.device) -> Tensor:
        """The tensor of rows that follow each other, in memory of its own."""
        nothing = torch.empty(1, 0, self.width, dtype=self.kept, device=device)
        rows = torch.cat((nothing, *parts), 1)[0]
        rest = [size for axis, size in enumerate(self.shape) if axis != self.axis]
        return rows.reshape(len(rows), *rest).movedim(0, self.axis).to(self.dtype).contiguous()


class SnapshotLayout:
    """What one model caches, found by a probe: how to copy it, and how to make a cache of the copies.

    ``has_state``: whether it caches more than rows. Then a prompt goes on only from steps that have the state
    after them. ``token_bytes`` and ``state_bytes`` are the size of a row and of a state; ``stored`` says in
    words what they hold.
    """

    def __init__(self, argument: str, template: Any, grown: Sequence[Grown], state: frozenset[str]) -> None:
        self.argument, self._template = argument, template
        self.grown, self.has_state = tuple(grown), bool(state)
        self._leaves = dict(_leaves(template))
        self._device = next(value.device for value in self._leaves.values() if isinstance(value, Tensor))
        self.token_bytes = sum(one.width * one.kept.itemsize for one in self.grown)
        tensors = {name: value for name in state if isinstance(value := self._leaves[name], Tensor)}
        self.state_bytes = sum(tensor.nbytes for tensor in tensors.values())
        numbers = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
        self.stored = "; ".join(
            f"{self._attributes(names)} per {unit}"
            for names, unit in (([one.name for one in grown], "token"), (numbers, "state"))
            if names
        )

    @classmethod
    def of(cls, model: Any) -> SnapshotLayout:
        """The layout of a model; ModelNotSupported if it returns no cache, or one that cannot be copied."""
        ids = torch.randint(
            model.config.get_text_config().vocab_size,
            (1, PROBED[1]),
            generator=torch.Generator().manual_seed(0),
        ).to(model.device)
        argument, cache, _ = run(model, ids[:, : PROBED[0]])
        before = {name: _copied(value) for name, value in _leaves(cache)}
        try:
            _, cache, _ = run(model, ids, PROBED[0], argument, cache)
        except Exception as error:  # of the model's own code
            why = " ".join(str(error).split()) or type(error).__name__
            raise ModelNotSupported(f"its code cannot run several tokens after its cache ({why})") from error
        grown, state = list[Grown](), set[str]()
        for name, value in _leaves(cache):
            axis = _token_axis(before.get(name), value)
            if axis is not None:
                grown.append(Grown(name, axis, tuple(value.shape), value.dtype))
            elif not _equal(before.get(name), value):
                state.add(name)
        if not grown and not state:
            raise ModelNotSupported(f"{type(model).__name__} caches nothing")
        return cls(argument, copy.deepcopy(cache), grown, frozenset(state))

    def captured(
        self, cache: Any, steps: Iterable[tuple[int, int]], length: int, *, state: bool
    ) -> list[ChunkKV]:
        """Copies of a cache of ``length`` tokens, one per ``(start, stop)``; ``state``: for the last one.

        Rows that the cache has dropped, as outside a full sliding window, are in the state alone.
        """
        leaves = dict(_leaves(cache))
        whole = [one for one in self.grown if leaves[one.name].shape[one.axis] == length]
        steps, out = list(steps), list[ChunkKV]()
        for number, (start, stop) in enumerate(steps):
            nothing = torch.empty(0, stop - start, 1)
            sides = [
                one.cut(leaves[one.name], start, stop) if one in whole else nothing for one in self.grown
            ]
            sides += [nothing] * (len(sides) % 2 or (2 if not sides else 0))
            sums = {}
            if state and number == len(steps) - 1:
                rows = {one.name for one in whole}
                sums = self._state((name, value) for name, value in leaves.items() if name not in rows)
            out.append(ChunkKV(tuple(sides[0::2]), tuple(sides[1::2]), start, sums))
        return out

    def restored(self, found: Sequence[ChunkKV]) -> Any:
        """A cache, in memory of its own, of the tokens of consecutive steps; the last has a state.

        Without steps an empty one, for models without state.
        """
        sums = found[-1].sums if found else {}
        new: dict[str, Any] = {}
        sides = [[side for pair in zip(kv.keys, kv.values, strict=True) for side in pair] for kv in found]
        for number, one in enumerate(self.grown):
            if f"{_TENSOR}{one.name}" not in sums:
                own = self._leaves[one.name]
                new[one.name] = one.joined([parts[number].to(own.device) for parts in sides], own.device)
        for name, tensor in sums.items():
            if name.startswith(_TENSOR):
                own = self._leaves.get(name := name.removeprefix(_TENSOR))
                like = own if isinstance(own, Tensor) else tensor.to(self._device)
                new[name] = tensor.to(like.device, like.dtype, copy=True)
            elif name.startswith(_NUMBER):
                own = self._leaves[name := name.removeprefix(_NUMBER)]
                new[name] = type(own)(tensor.item()) if own is not None else int(tensor.item())
            elif name.startswith(_NONE):
                new[name.removeprefix(_NONE)] = None
        return _rebuilt(self._template, new)

    def tokens_in(self, cache: Any) -> int:
        """Rows of a cache of a model without state; 0 without a cache."""
        leaves = dict(_leaves(cache))
        rows = (leaves[one.name].shape[one.axis] for one in self.grown if one.name in leaves)
        return min(rows, default=0)

    def misfit(self, kv: Any, tokens: int) -> str | None:
        """Why ``kv`` cannot be a step of so many tokens of this model, or None."""
        sides = [side for pair in zip(kv.keys, kv.values, strict=True) for side in pair]
        if kv.tokens != tokens or len(sides) < len(self.grown):
            return f"it has {kv.tokens} tokens and {len(sides)} tensors"
        for one, side in zip(self.grown, sides, strict=False):
            if side.shape[0] and (side.shape[-1] != one.width or side.dtype != one.kept):
                return f"{one.name} has {list(side.shape)} {side.dtype}, the model {one.width} {one.kept}"
        return None

    def _attributes(self, names: Iterable[str]) -> str:
        """The attributes that hold some values, as ``conv states, recurrent states``."""
        parts = (
            [part for part in name.split(".") if not part.isdigit()] or [self.argument] for name in names
        )
        return ", ".join(sorted({part[-1].replace("_", " ") for part in parts}))

    def _state(self, leaves: Iterable[tuple[str, Any]]) -> dict[str, Tensor]:
        out = dict[str, Tensor]()
        for name, value in leaves:
            own = self._leaves.get(name)
            if isinstance(value, Tensor):
                kept = value.to(torch.float64) if not value.is_floating_point() else value
                out[f"{_TENSOR}{name}"] = kept.clone(memory_format=torch.contiguous_format)
            elif value is None and own is not None:
                out[f"{_NONE}{name}"] = torch.empty(0)
            elif isinstance(value, int | float):
                out[f"{_NUMBER}{name}"] = torch.tensor(float(value), dtype=torch.float64)
        return out


class Ran(NamedTuple):
    """What a forward returned: its cache and the argument that takes it, and its logits."""

    argument: str
    cache: Any
    logits: Tensor  # [tokens, vocab]


@torch.no_grad()
def run(
    model: Any, ids: Tensor, known: int = 0, argument: str = "", cache: Any = None, *, keep: int = 1
) -> Ran:
    """Run the tokens of ``ids`` ``[1, tokens]`` after the ``known`` ones, which are in ``cache``.

    ``keep`` is the number of logits that are wanted, at least; 0: all.
    ModelNotSupported if the model returns no cache.
    """
    inputs: dict[str, Any] = {"input_ids": ids[:, known:]}
    known_arguments = inspect.signature(model.forward).parameters
    if argument in ("", PAST):  # as generate does: some models derive positions from the mask
        given: dict[str, Any] = {"attention_mask": torch.ones_like(ids)}
        if argument:
            given[PAST] = cache
        if "position_ids" in known_arguments:
            given["position_ids"] = torch.arange(known, ids.shape[1], device=ids.device)[None]
        inputs = model.prepare_inputs_for_generation(ids[:, known:], **given)
    if argument:
        inputs[argument] = cache
    if "logits_to_keep" in known_arguments:
        inputs["logits_to_keep"] = keep
    output = model(**{**inputs, "use_cache": True, "return_dict": True})
    for name in CACHE_ARGUMENTS:
        if (found := getattr(output, name, None)) is not None:
            if hasattr(found, "__dict__") and not hasattr(found, "is_compileable"):
                found.is_compileable = False  # generate asks this of every cache that it is given
            return Ran(name, found, output.logits[0])
    if cache is not None:
        return Ran(argument, cache, output.logits[0])
    raise ModelNotSupported(f"{type(model).__name__} returns no cache")


# -- the values of a cache -----------------------------------------------------------------------------

_CONSTANT = (str, bytes, torch.dtype, torch.device, type, PreTrainedConfig)


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors, numbers and None in the public attributes and items of a cache, by their names."""
    if value is None or isinstance(value, Tensor | bool | int | float):
        yield name, value
        return
    for key, item in _items(value):
        yield from _leaves(item, f"{name}.{key}" if name else str(key))


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list | tuple):
        return enumerate(value)
    if isinstance(value, _CONSTANT) or callable(value) or not hasattr(value, "__dict__"):
        return ()
    return ((key, item) for key, item in vars(value).items() if not key.startswith("_"))


def _rebuilt(value: Any, new: Mapping[str, Any], name: str = "") -> Any:
    """A copy with new values at some names."""
    if name in new:
        return new[name]
    if isinstance(value, Tensor):
        return value.clone()
    items = [(key, _rebuilt(item, new, f"{name}.{key}" if name else str(key))) for key, item in _items(value)]
    if isinstance(value, list):
        return [item for _, item in items]
    if isinstance(value, tuple):
        values = [item for _, item in items]
        return type(value)(*values) if hasattr(value, "_fields") else tuple(values)
    if not items:
        return value
    out = copy.copy(value)
    if isinstance(value, Mapping):
        for key, item in items:
            out[key] = item
    else:
        vars(out).update(items)
    return out


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _equal(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return before.shape == after.shape and torch.equal(before, after)
    return type(before) is type(after) and before == after


def _token_axis(before: Any, after: Any) -> int | None:
    """The axis along which a tensor grew by the tokens of the probe and kept what it had, or None."""
    if not isinstance(before, Tensor) or not isinstance(after, Tensor) or before.dim() != after.dim():
        return None
    pairs = list(zip(before.shape, after.shape, strict=True))
    axes = [axis for axis, pair in enumerate(pairs) if pair == PROBED]
    if len(axes) != 1 or any(one != other for at, (one, other) in enumerate(pairs) if at != axes[0]):
        return None
    return axes[0] if torch.equal(after.narrow(axes[0], 0, PROBED[0]), before) else None

"""Rotary embedding of each layer: found by probing the model, with tables from its own rotary modules."""

from __future__ import annotations

import copy
import hashlib
import inspect
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ragcachekit.errors import ModelNotSupported
from ragcachekit_kernels.dispatch import Rotation, rotate

PROBE_POSITIONS = (1, 7, 131)  # positions at which a lone token's key is compared with its key at position 0

MIN_TABLE = 2048  # positions of the first table

MAX_TABLES = 4  # tables that are kept; models with frequencies per length would fill memory

MAX_LOCK_WAIT = 10.0  # seconds that a forward waits for the lock of a rotary module, which takes milliseconds

Turns = tuple[tuple[Tensor, Tensor], ...]
"""Per rotary table cos and sin ``[positions, pairs]``; all of them again backwards if a layer needs it."""

_KV = tuple[Tensor, Tensor]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Angles:
    """Unit rotations of some positions: ``cos``/``sin`` float32 ``[tokens, pairs]``, and the factor m.

    m is the attention scaling of YaRN and longrope, apart so that rotations compose.
    """

    cos: Tensor
    sin: Tensor
    m: float

    def factors(self, inverse: bool = False) -> tuple[Tensor, Tensor]:
        """cos and sin of the rotation with m, or of its inverse."""
        if self.m == 1.0:
            return self.cos, -self.sin if inverse else self.sin
        if inverse:
            return self.cos / self.m, -self.sin / self.m
        return self.cos * self.m, self.sin * self.m


class RotaryTable:
    """Angles for any positions, from a private copy of the model's rotary module of this name.

    A copy, because longrope modules rewrite their buffers in ``forward``.
    """

    def __init__(self, name: str, module: torch.nn.Module, arguments: Mapping[str, Any]) -> None:
        self.name, self.arguments = name, dict(arguments)
        self._module = copy.deepcopy(module).to("cpu")
        self._lock = threading.Lock()
        self._x = next(iter(inspect.signature(module.forward).parameters))
        # Not at position 0: where every angle is 0, all columns look like repetitions of each other.
        self._columns = _one_per_pair(torch.cat(self._table(torch.tensor([1, 2, 3]))))

    def angles(self, positions: Tensor, length: int) -> Angles:
        """Angles of ``positions`` (``[tokens]``, integers) in a prompt of ``length`` tokens in all."""
        # The last entry makes the module choose the frequencies that it would use for the whole prompt.
        padded = torch.cat((positions.cpu(), torch.tensor([max(length - 1, 0)]))).long()
        cos, sin = (table[:, self._columns].contiguous() for table in self._table(padded))
        m = float((cos[-1, 0] ** 2 + sin[-1, 0] ** 2).sqrt())
        m = 1.0 if abs(m - 1) < 1e-6 else m  # within rounding
        return Angles(cos[:-1] / m, sin[:-1] / m, m)

    def _table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        arguments = {**self.arguments, self._x: torch.zeros(1, 1, 1), "position_ids": positions[None]}
        with self._lock, torch.inference_mode(False), torch.no_grad():
            output = self._module(**arguments)
        if isinstance(output, Tensor) and output.is_complex():
            output = output.real, output.imag
        if not (isinstance(output, tuple) and len(output) == 2):
            raise ModelNotSupported(f"the rotary module returns {type(output).__name__}, not cos and sin")
        return output[0][0].float(), output[1][0].float()

    def regime(self, length: int) -> str:
        """Name of the frequencies for prompts of ``length`` tokens; equal names, equal angles."""
        angles = self.angles(torch.tensor([1]), length)
        return hashlib.sha256(angles.cos.numpy().tobytes() + angles.sin.numpy().tobytes()).hexdigest()[:8]


def _one_per_pair(table: Tensor) -> slice:
    """Columns with one entry per pair: modules repeat them by halves, one by one or not at all."""
    width = table.shape[-1]
    if width % 2 == 0 and torch.equal(table[:, : width // 2], table[:, width // 2 :]):
        return slice(0, width // 2)
    if width % 2 == 0 and torch.equal(table[:, 0::2], table[:, 1::2]):
        return slice(0, width, 2)
    return slice(0, width)


@dataclass(frozen=True)
class LayerRope:
    """Rotation of one layer's keys.

    - ``table``: None for a layer without rotation (NoPE).
    - ``interleaved``: Pairs are neighbours, not halves apart.
    - ``offset``: First rotated dimension.
    - ``backwards``: Rotates the other way (NanoChat).
    - ``values``: The rotated part is cached as values: latent attention (DeepSeek-V2, section 2.1).
    """

    table: int | None
    interleaved: bool = False
    offset: int = 0
    backwards: bool = False
    values: bool = False


class Rope:
    """Rotary embedding of a whole model: tables shared by layers, one :class:`LayerRope` each.

    ``exact_up_to`` is the length of the longest prompt that can be linked, by default ``context``: from that
    position on, attention depends on positions and not on distances alone.
    """

    def __init__(
        self,
        tables: Sequence[RotaryTable],
        layers: Sequence[LayerRope],
        context: int,
        exact_up_to: int | None = None,
    ) -> None:
        self.tables = tuple(tables)
        self.layers = tuple(layers)
        self.context = context
        self.exact_up_to = context if exact_up_to is None else min(exact_up_to, context)
        self.depends_on_length = self.regime(2) != self.regime(context)
        self._lock = threading.Lock()
        self._turns: OrderedDict[tuple[torch.device, str], Turns] = OrderedDict()

    def angles(self, positions: Tensor, length: int) -> tuple[Angles, ...]:
        """Angles of ``positions``, one :class:`Angles` per table."""
        return tuple(table.angles(positions, length) for table in self.tables)

    def why_not_linked(self, length: int) -> str | None:
        """Why a prompt of ``length`` tokens cannot be linked, or None."""
        if length <= self.exact_up_to:
            return None
        return (
            f"the prompt has {length} tokens; beyond {self.exact_up_to} the model's attention depends on "
            "positions, and chunks cannot be moved"
        )

    def regime(self, length: int) -> str:
        """Name of the frequencies for prompts of ``length`` tokens, over all tables."""
        return "-".join(table.regime(length) for table in self.tables)

    def strip(self, layer: int, keys: Tensor, values: Tensor, angles: Sequence[Angles]) -> _KV:
        """The inverse of :meth:`place`."""
        return self.place(layer, keys, values, angles, inverse=True)

    def place(
        self, layer: int, keys: Tensor, values: Tensor, angles: Sequence[Angles], *, inverse: bool = False
    ) -> _KV:
        """Keys and values ``[..., tokens, head_dim]`` without RoPE, at the positions of ``angles``."""
        rope = self.layers[layer]
        if rope.table is None:
            return keys, values
        cos, sin = angles[rope.table].factors(inverse)
        if rope.values:
            return keys, turn(rope, values, cos, sin)
        return turn(rope, keys, cos, sin), values

    def rotations(self, layer: int, turns: Turns) -> tuple[Rotation | None, Rotation | None]:
        """How the kernels rotate one layer's keys and its values; ``turns`` are of :meth:`turns_on`."""
        rope = self.layers[layer]
        if rope.table is None:
            return None, None
        table = turns[rope.table + (len(self.tables) if rope.backwards else 0)]
        how = Rotation(*table, rope.interleaved, rope.offset)
        return (None, how) if rope.values else (how, None)

    def turns_on(self, device: torch.device, length: int) -> Turns:
        """Factors of :meth:`place` for positions 0, 1, 2, ..., computed once per device and copied there.

        For ``length`` positions or more, with the frequencies of a prompt of ``length`` tokens.
        """
        varies = self.depends_on_length or length > self.context
        regime = self.regime(length) if varies else ""
        with self._lock:
            turns = self._turns.pop((device, regime), None)
            if turns is None or any(cos.shape[0] < length for cos, _ in turns):
                # More positions than needed, where the frequencies are still the same.
                size = max(MIN_TABLE, 1 << (length - 1).bit_length())
                size = min(size, self.context) if length <= self.context else size
                if varies and self.regime(size) != regime:
                    size = length
                turns = self._make_turns(device, size)
            self._turns[device, regime] = turns
            while len(self._turns) > MAX_TABLES:
                self._turns.popitem(last=False)
        return turns

    def _make_turns(self, device: torch.device, size: int) -> Turns:
        onward = [a.factors() for a in self.angles(torch.arange(size), size)]
        if any(layer.backwards for layer in self.layers):
            onward += [(cos, -sin) for cos, sin in onward]
        return tuple((cos.to(device).contiguous(), sin.to(device).contiguous()) for cos, sin in onward)


def turn(rope: LayerRope, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``keys`` ``[..., tokens, head_dim]`` as the layer does, by ``[tokens, pairs]`` cos and sin."""
    cos, sin = cos.to(keys.device), sin.to(keys.device)
    sin = -sin if rope.backwards else sin
    return rotate(keys, cos, sin, interleaved=rope.interleaved, offset=rope.offset)


# -- probe of a model ----------------------------------------------------------------------------------


def describe_rope(model: Any) -> Rope:
    """Find every layer's rotation by probing the model with a lone token.

    A lone token attends only to itself, so its key at position p is its key at position 0 rotated by p, in
    every layer. This shows layout, rotated dimensions, theta per layer type and layers without rotation.

    ModelNotSupported if the model calls no rotary module, or a layer's keys fit none.
    """
    with _recorded_rotary_calls(model) as calls:
        try:
            at_zero, *others = [lone_kv(model, p) for p in (0, *PROBE_POSITIONS)]
        except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise _no_plain_cache(model, error) from error
    if not calls:
        raise ModelNotSupported(
            f"{type(model).__name__} uses no rotary module (learned or relative positions, or a rotation "
            "inside its attention); only with one can a chunk's keys be placed at a new position"
        )
    names = {module: name for name, module in model.named_modules()}
    tables = [RotaryTable(names[module], module, arguments) for module, arguments in calls]
    layers = [
        _fit_layer(index, kv, [kvs[index] for kvs in others], tables) for index, kv in enumerate(at_zero)
    ]
    return Rope(tables, layers, context_of(model), _exact_up_to(model.config.get_text_config()))


def note_of(rope: Rope) -> dict[str, Any]:
    """What :func:`rope_of_note` needs beside the model, for JSON."""
    return {
        "tables": [(table.name, table.arguments) for table in rope.tables],
        "layers": [astuple(layer) for layer in rope.layers],
    }


def rope_of_note(model: Any, note: Mapping[str, Any]) -> Rope:
    """What :func:`describe_rope` found, without its forwards; LookupError or TypeError if damaged."""
    modules = dict(model.named_modules())
    tables = [RotaryTable(name, modules[name], arguments) for name, arguments in note["tables"]]
    layers = [LayerRope(*layer) for layer in note["layers"]]
    return Rope(tables, layers, context_of(model), _exact_up_to(model.config.get_text_config()))


def _exact_up_to(config: Any) -> int | None:
    """The longest prompt without attention by position, as far as a configuration names such thresholds.

    The admission check runs a chunk just below. Models that do it elsewhere, too, are refused there.
    """
    limits: list[int] = []
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("llama_4_scaling_beta"):  # Ministral 3 scales queries from this position on
        limits.append(parameters["original_max_position_embeddings"])
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        limits.append(config.attention_chunk_size)
    if getattr(config, "attn_temperature_tuning", False):  # Llama 4's layers without rotation
        limits.append(int(config.floor_scale) - 1)
    return min(limits, default=None)


def context_of(model: Any) -> int:
    """Longest prompt in tokens; 2^20 where the configuration names none."""
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return known if isinstance(known, int) and known > 0 else 1 << 20


def _fit_layer(index: int, at_zero: _KV, others: Sequence[_KV], tables: Sequence[RotaryTable]) -> LayerRope:
    sources = [tensor.float().cpu() for tensor in at_zero]
    targets = [torch.cat([kv[side] for kv in others], -2).float().cpu() for side in (0, 1)]
    tolerance = 1e-4 if at_zero[0].dtype in (torch.float32, torch.float64) else 3e-2
    moved = [_off(source, target) > tolerance for source, target in zip(sources, targets, strict=True)]
    if not any(moved):
        return LayerRope(None)
    best, error = LayerRope(None), float("inf")
    side = 0 if moved[0] else 1
    for rope, angles in _candidates(tables, targets[side].shape[-1]):
        source = sources[side].expand(*sources[side].shape[:-2], len(others), -1)
        off = _off(turn(rope, source, *angles), targets[side])
        if off < error:
            best, error = replace(rope, values=side == 1), off
    if not error <= tolerance:
        raise ModelNotSupported(
            f"layer {index}: the keys of a lone token at positions {PROBE_POSITIONS} are no rotation of its "
            f"key at position 0 by the model's rotary module (off by {error:.2g}, allowed {tolerance:.0e})"
        )
    return best


def _candidates(tables: Sequence[RotaryTable], width: int) -> Iterator[tuple[LayerRope, _KV]]:
    """Ways to rotate, with cos and sin at the probe's positions: each token is a prompt of its own length."""
    for number, table in enumerate(tables):
        each = [table.angles(torch.tensor([p]), p + 1) for p in PROBE_POSITIONS]
        angles = torch.cat([a.cos for a in each]), torch.cat([a.sin for a in each])
        spare = width - 2 * angles[0].shape[-1]
        for offset in {0, spare} if spare >= 0 else set[int]():
            for interleaved, backwards in product((False, True), repeat=2):
                yield LayerRope(number, interleaved, offset, backwards), angles


def _off(ours: Tensor, theirs: Tensor) -> float:
    size = float(theirs.abs().max()) or 1.0
    return float((ours - theirs).abs().max()) / size


def _no_plain_cache(model: Any, error: Exception | None = None) -> ModelNotSupported:
    text = model.config.get_text_config()
    kinds = [*(getattr(text, "layer_types", None) or ()), *(getattr(text, "layers_block_type", None) or ())]
    others = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    why = f": {error}" if error else ": it puts no keys and values there"
    if others:
        why = f": it has layers of type {', '.join(others)}"
    return ModelNotSupported(f"{type(model).__name__} does not run on a plain key/value cache{why}")


@torch.no_grad()
def lone_kv(model: Any, position: int = 0) -> list[_KV]:
    """Keys and values of every layer, each ``[kv_heads, 1, head_dim]``, of one token at ``position``."""
    from transformers import DynamicCache  # slow, and not needed by those that only import the types

    cache, token = DynamicCache(), min(5, model.config.get_text_config().vocab_size - 1)
    model(
        input_ids=torch.tensor([[token]], device=model.device),
        position_ids=torch.tensor([[position]], device=model.device),
        past_key_values=cache,
        use_cache=True,
    )
    kv: list[Any] = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]
    if not kv or any(not isinstance(t, Tensor) or t.dim() != 4 for pair in kv for t in pair):
        raise _no_plain_cache(model)
    return [(keys[0], values[0]) for keys, values in kv]


def _rotary_modules(model: Any) -> list[torch.nn.Module]:
    return [
        module
        for module in model.modules()
        if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))
    ]


@contextmanager
def _recorded_rotary_calls(model: Any) -> Iterator[list[tuple[torch.nn.Module, dict[str, Any]]]]:
    """Collect each distinct call of a rotary module: the module and its fixed arguments."""
    calls: list[tuple[torch.nn.Module, dict[str, Any]]] = []

    def record(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        first = next(iter(bound))
        fixed = {
            name: value
            for name, value in bound.items()
            if name not in (first, "position_ids") and not isinstance(value, Tensor)
        }
        if "position_ids" in bound and not any(m is module and f == fixed for m, f in calls):
            calls.append((module, fixed))

    handles = [
        module.register_forward_pre_hook(record, with_kwargs=True) for module in _rotary_modules(model)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


# -- one thread at a time in modules that rewrite their frequencies -------------------------------------


def guard_rotary(model: Any) -> None:
    """Let one thread at a time run each rotary module of the model; idempotent.

    Length-dependent modules (longrope) write the prompt's frequencies into a buffer and then read it. The
    hooks stay: removing them would change the model under other threads.
    """
    for module in _rotary_modules(model):
        hooks = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
        if not any(isinstance(owner, _Turn) for owner in hooks):
            turn = _Turn()
            # In this order: every thread that acquires the lock also releases it.
            module.register_forward_hook(turn.release, always_call=True)
            module.register_forward_pre_hook(turn.acquire)


class _Turn:
    """A lock that one hook acquires and another releases; taken over after an interrupt in between."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: int | None = None

    def acquire(self, *_: Any) -> None:
        me = threading.get_ident()
        # This thread may hold it already, where an interrupt prevented the release.
        if self._inside != me and not self._lock.acquire(timeout=MAX_LOCK_WAIT):
            _log.warning("a forward was interrupted inside a rotary module; going on without it")
        self._inside = me

    def release(self, *_: Any) -> None:
        if self._inside == threading.get_ident():
            self._inside = None
            self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Turn, ()  # a copied or saved model gets a lock of its own

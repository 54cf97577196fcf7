"""What each layer of a model rotates its keys with, read from the model's own rotary modules."""

from __future__ import annotations

import copy
import hashlib
import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from ragcachekit.errors import ModelNotSupported
from ragcachekit_kernels.dispatch import rotate

PROBE_POSITIONS = (1, 7, 131)
"""Where the probe compares a lone token's key with its key at position 0."""


@dataclass(frozen=True, eq=False)
class Angles:
    """Unit rotations of some positions: ``cos``/``sin`` float32 ``[tokens, pairs]``, and the factor m.

    m is the attention scaling that YaRN and longrope multiply into cos and sin; it is kept apart so
    that rotations stay unit rotations and compose.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    m: float


class RotaryTable:
    """Angles for any positions, from a private copy of one of the model's rotary modules.

    A copy, because modules with length-dependent frequencies (longrope) rewrite their buffers in
    ``forward``, and the user's own ``generate`` may be running in another thread.
    """

    def __init__(self, module: torch.nn.Module, arguments: Mapping[str, Any]) -> None:
        self._module = copy.deepcopy(module).to("cpu")
        self._arguments = dict(arguments)
        self._lock = threading.Lock()
        names = list(inspect.signature(module.forward).parameters)
        self._x = names[0]

    def angles(self, positions: torch.Tensor, length: int) -> Angles:
        """Angles of ``positions`` (``[tokens]``, integers) in a prompt of ``length`` tokens in all."""
        # The last entry makes the module choose the frequencies that it would use for the whole prompt.
        padded = torch.cat((positions.cpu(), torch.tensor([max(length - 1, 0)]))).long()[None]
        arguments = dict(self._arguments)
        arguments[self._x] = torch.zeros(1, 1, 1)
        arguments["position_ids"] = padded
        with self._lock, torch.inference_mode(False), torch.no_grad():
            cos, sin = _cos_sin(self._module(**arguments))
        cos, sin = _pairs(cos[0].float()), _pairs(sin[0].float())
        m = float((cos[-1, 0] ** 2 + sin[-1, 0] ** 2).sqrt())
        # A scaling within rounding of 1 is 1.
        m = 1.0 if abs(m - 1) < 1e-6 else m
        return Angles(cos[:-1] / m, sin[:-1] / m, m)

    def regime(self, length: int) -> str:
        """Names the frequencies used for prompts of ``length`` tokens; equal names, equal angles."""
        angles = self.angles(torch.tensor([1]), length)
        return hashlib.sha256(angles.cos.numpy().tobytes() + angles.sin.numpy().tobytes()).hexdigest()[:8]


def _cos_sin(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(output, torch.Tensor) and output.is_complex():
        return output.real, output.imag
    if isinstance(output, tuple) and len(output) == 2:
        return output
    raise ModelNotSupported(f"the rotary module returns {type(output).__name__}, not cos and sin")


def _pairs(table: torch.Tensor) -> torch.Tensor:
    """One column per pair, whether the module repeats its columns half by half, one by one or not at all."""
    width = table.shape[-1]
    if width % 2 == 0 and torch.equal(table[:, : width // 2], table[:, width // 2 :]):
        return table[:, : width // 2].contiguous()
    if width % 2 == 0 and torch.equal(table[:, 0::2], table[:, 1::2]):
        return table[:, 0::2].contiguous()
    return table.contiguous()


@dataclass(frozen=True)
class LayerRope:
    """How one layer rotates its keys; ``table`` is None for a layer without rotation (NoPE)."""

    table: int | None
    interleaved: bool = False
    offset: int = 0


class Rope:
    """The rotary embedding of a whole model: tables shared by layers, one :class:`LayerRope` each."""

    def __init__(self, tables: Sequence[RotaryTable], layers: Sequence[LayerRope], context: int) -> None:
        self.tables = tuple(tables)
        self.layers = tuple(layers)
        self.context = context
        self.depends_on_length = self.regime(2) != self.regime(context)

    def angles(self, positions: torch.Tensor, length: int) -> tuple[Angles, ...]:
        """One :class:`Angles` per table."""
        return tuple(table.angles(positions, length) for table in self.tables)

    def regime(self, length: int) -> str:
        """Names the frequencies that prompts of ``length`` tokens use, over all tables."""
        return "-".join(table.regime(length) for table in self.tables)

    def apply(self, layer: int, keys: torch.Tensor, angles: Sequence[Angles]) -> torch.Tensor:
        """Rotate RoPE-free ``keys`` ``[..., tokens, head_dim]`` to the positions of ``angles``."""
        rope = self.layers[layer]
        if rope.table is None:
            return keys
        a = angles[rope.table]
        return self._turn(rope, keys, a.cos * a.m, a.sin * a.m)

    def remove(self, layer: int, keys: torch.Tensor, angles: Sequence[Angles]) -> torch.Tensor:
        """Undo :meth:`apply`."""
        rope = self.layers[layer]
        if rope.table is None:
            return keys
        a = angles[rope.table]
        return self._turn(rope, keys, a.cos / a.m, -a.sin / a.m)

    @staticmethod
    def _turn(rope: LayerRope, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return rotate(
            keys, cos.to(keys.device), sin.to(keys.device), interleaved=rope.interleaved, offset=rope.offset
        )


def context_length(model: Any) -> int:
    """Tokens that the model can attend over, prompt and answer together."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 1 << 20)


def describe_rope(model: Any) -> Rope:
    """Find every layer's rotation by probing the model with a lone token.

    A token alone attends only to itself, so its hidden states do not depend on its position, and
    its key at position p is the key at position 0 rotated by p, in every layer. Layout (half-split,
    interleaved), rotated dimensions, theta per layer type and layers without rotation all show.

    Raises
    ------
    ModelNotSupported
        If the model calls no rotary module, or a layer's keys fit none of them.
    """
    with _recorded_rotary_calls(model) as calls:
        try:
            at_zero = _lone_keys(model, 0)
            at = {p: _lone_keys(model, p) for p in PROBE_POSITIONS}
        except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise ModelNotSupported(
                f"{type(model).__name__} cannot fill a plain key/value cache (state-space or "
                f"linear-attention layers?): {error}"
            ) from error
    if not calls:
        raise ModelNotSupported(
            f"{type(model).__name__} uses no rotary position embedding; only rotary models can place "
            "a chunk's keys at a new position"
        )
    tables = [RotaryTable(module, arguments) for module, arguments in calls]
    layers = [
        _fit_layer(index, key, {p: keys[index] for p, keys in at.items()}, tables)
        for index, key in enumerate(at_zero)
    ]
    return Rope(tables, layers, context_length(model))


def _fit_layer(
    index: int, at_zero: torch.Tensor, at: Mapping[int, torch.Tensor], tables: Sequence[RotaryTable]
) -> LayerRope:
    positions = torch.tensor(list(at))
    target = torch.cat(list(at.values()), -2).float()
    source = at_zero.float().expand_as(target)
    size = float(target.abs().max()) or 1.0
    tolerance = 1e-4 if at_zero.dtype in (torch.float32, torch.float64) else 3e-2
    best, error = LayerRope(None), float((source - target).abs().max()) / size
    for number, table in enumerate(tables):
        # Each lone token was a prompt of its own length, which decides the frequencies of longrope.
        each = [table.angles(positions[i : i + 1], p + 1) for i, p in enumerate(at)]
        cos, sin = torch.cat([a.cos for a in each]), torch.cat([a.sin for a in each])
        spare = target.shape[-1] - 2 * cos.shape[-1]
        for offset in {0, spare} if spare >= 0 else set():
            for interleaved in (False, True):
                turned = rotate(source, cos, sin, interleaved=interleaved, offset=offset)
                off = float((turned - target).abs().max()) / size
                if off < error:
                    best, error = LayerRope(number, interleaved, offset), off
    if not error <= tolerance:
        raise ModelNotSupported(
            f"layer {index}: the keys of a lone token at positions {list(at)} are no rotation of its key at "
            f"position 0 by the model's rotary module (off by {error:.2g}, allowed {tolerance:.0e})"
        )
    return best


@torch.no_grad()
def _lone_keys(model: Any, position: int) -> list[torch.Tensor]:
    """Keys of every layer, each ``[kv_heads, 1, head_dim]``, of one token at ``position``."""
    device = model.device
    token = torch.tensor([[min(5, model.config.get_text_config().vocab_size - 1)]], device=device)
    cache = DynamicCache()
    model(
        input_ids=token,
        position_ids=torch.tensor([[position]], device=device),
        past_key_values=cache,
        use_cache=True,
    )
    keys = [getattr(layer, "keys", None) for layer in cache.layers]
    if not keys or any(not isinstance(key, torch.Tensor) or key.dim() != 4 for key in keys):
        raise ModelNotSupported(
            f"{type(model).__name__} keeps no plain key/value cache (state-space or linear-attention layers?)"
        )
    return [key[0].cpu() for key in keys if key is not None]


@contextmanager
def _recorded_rotary_calls(model: Any) -> Iterator[list[tuple[torch.nn.Module, dict[str, Any]]]]:
    """Collect each distinct call of a rotary module (module and its fixed arguments) while inside."""
    calls: list[tuple[torch.nn.Module, dict[str, Any]]] = []

    def record(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        names = list(bound)
        fixed = {
            name: value
            for name, value in bound.items()
            if name != names[0] and name != "position_ids" and not isinstance(value, torch.Tensor)
        }
        if "position_ids" in bound and not any(m is module and f == fixed for m, f in calls):
            calls.append((module, fixed))

    handles = [
        module.register_forward_pre_hook(record, with_kwargs=True)
        for module in model.modules()
        if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()

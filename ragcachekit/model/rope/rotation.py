"""Rotary embedding of each layer, with tables from the model's own rotary modules."""

from __future__ import annotations

import copy
import hashlib
import inspect
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ragcachekit.errors import ModelNotSupported
from ragcachekit_kernels.dispatch import Rotation, rotate

Turns = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""Per rotary table cos and sin ``[positions, pairs]``; all of them again backwards if a layer needs it."""

MIN_TABLE = 2048  # positions of the first table

MAX_TABLES = 4  # tables that are kept; models with frequencies per length would fill memory


@dataclass(frozen=True, eq=False)
class Angles:
    """Unit rotations of some positions: ``cos``/``sin`` float32 ``[tokens, pairs]``, and the factor m.

    m is the attention scaling of YaRN and longrope, apart so that rotations compose.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    m: float

    def factors(self, inverse: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the rotation with m, or of its inverse."""
        if self.m == 1.0:
            return self.cos, -self.sin if inverse else self.sin
        if inverse:
            return self.cos / self.m, -self.sin / self.m
        return self.cos * self.m, self.sin * self.m


class RotaryTable:
    """Angles for any positions, from a private copy of one of the model's rotary modules.

    A copy, because longrope modules rewrite their buffers in ``forward``.
    """

    def __init__(self, module: torch.nn.Module, arguments: Mapping[str, Any]) -> None:
        self._module = copy.deepcopy(module).to("cpu")
        self._arguments = dict(arguments)
        self._lock = threading.Lock()
        names = list(inspect.signature(module.forward).parameters)
        self._x = names[0]
        # Not at position 0: where every angle is 0, all columns look like repetitions of each other.
        self._columns = _one_per_pair(torch.cat(self._table(torch.tensor([1, 2, 3]))))

    def angles(self, positions: torch.Tensor, length: int) -> Angles:
        """Angles of ``positions`` (``[tokens]``, integers) in a prompt of ``length`` tokens in all."""
        # The last entry makes the module choose the frequencies that it would use for the whole prompt.
        padded = torch.cat((positions.cpu(), torch.tensor([max(length - 1, 0)]))).long()
        cos, sin = (table[:, self._columns].contiguous() for table in self._table(padded))
        m = float((cos[-1, 0] ** 2 + sin[-1, 0] ** 2).sqrt())
        # A scaling within rounding of 1 is 1.
        m = 1.0 if abs(m - 1) < 1e-6 else m
        return Angles(cos[:-1] / m, sin[:-1] / m, m)

    def _table(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = {**self._arguments, self._x: torch.zeros(1, 1, 1), "position_ids": positions[None]}
        with self._lock, torch.inference_mode(False), torch.no_grad():
            cos, sin = _cos_sin(self._module(**arguments))
        return cos[0].float(), sin[0].float()

    def regime(self, length: int) -> str:
        """Name of the frequencies for prompts of ``length`` tokens; equal names, equal angles."""
        angles = self.angles(torch.tensor([1]), length)
        return hashlib.sha256(angles.cos.numpy().tobytes() + angles.sin.numpy().tobytes()).hexdigest()[:8]


def _cos_sin(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(output, torch.Tensor) and output.is_complex():
        return output.real, output.imag
    if isinstance(output, tuple) and len(output) == 2:
        return output
    raise ModelNotSupported(f"the rotary module returns {type(output).__name__}, not cos and sin")


def _one_per_pair(table: torch.Tensor) -> slice:
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
    - ``values``: The rotated part is cached as values: multi-head latent attention (DeepSeek-V2, section
      2.1).
    """

    table: int | None
    interleaved: bool = False
    offset: int = 0
    backwards: bool = False
    values: bool = False


class Rope:
    """Rotary embedding of a whole model: tables shared by layers, one :class:`LayerRope` each."""

    def __init__(self, tables: Sequence[RotaryTable], layers: Sequence[LayerRope], context: int) -> None:
        self.tables = tuple(tables)
        self.layers = tuple(layers)
        self.context = context
        self.depends_on_length = self.regime(2) != self.regime(context)
        self.turns = TurnTables(self)

    def angles(self, positions: torch.Tensor, length: int) -> tuple[Angles, ...]:
        """Angles of ``positions``, one :class:`Angles` per table."""
        return tuple(table.angles(positions, length) for table in self.tables)

    def regime(self, length: int) -> str:
        """Name of the frequencies for prompts of ``length`` tokens, over all tables."""
        return "-".join(table.regime(length) for table in self.tables)

    def place(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, angles: Sequence[Angles]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[..., tokens, head_dim]`` without RoPE, at the positions of ``angles``."""
        return self._turned(layer, keys, values, angles, inverse=False)

    def strip(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, angles: Sequence[Angles]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Undo :meth:`place`."""
        return self._turned(layer, keys, values, angles, inverse=True)

    def _turned(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, angles: Sequence[Angles], *, inverse: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rope = self.layers[layer]
        if rope.table is None:
            return keys, values
        cos, sin = angles[rope.table].factors(inverse)
        if rope.values:
            return keys, turn(rope, values, cos, sin)
        return turn(rope, keys, cos, sin), values

    def rotations(self, layer: int, turns: Turns) -> tuple[Rotation | None, Rotation | None]:
        """How the kernels rotate one layer's keys and its values; ``turns`` are of :attr:`turns`."""
        rope = self.layers[layer]
        if rope.table is None:
            return None, None
        table = turns[rope.table + (len(self.tables) if rope.backwards else 0)]
        how = Rotation(*table, rope.interleaved, rope.offset)
        return (None, how) if rope.values else (how, None)


def turn(rope: LayerRope, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``keys`` ``[..., tokens, head_dim]`` as the layer does, by ``[tokens, pairs]`` cos and sin."""
    cos, sin = cos.to(keys.device), sin.to(keys.device)
    sin = -sin if rope.backwards else sin
    return rotate(keys, cos, sin, interleaved=rope.interleaved, offset=rope.offset)


def context_length(model: Any) -> int:
    """Tokens that the model can attend over, prompt and answer together."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 1 << 20)


class TurnTables:
    """Factors of :meth:`Rope.place` for positions 0, 1, 2, ..., computed once per device and copied there.

    A table grows to twice its size. Thread safe.
    """

    def __init__(self, rope: Rope) -> None:
        self._rope = rope
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[torch.device, str], Turns] = OrderedDict()

    def on(self, device: torch.device, length: int) -> Turns:
        """Tables of ``length`` positions or more, with the frequencies of a prompt of ``length`` tokens."""
        regime = self._regime(length)
        with self._lock:
            turns = self._kept.pop((device, regime), None)
            if turns is None or any(cos.shape[0] < length for cos, _ in turns):
                turns = self._make(device, self._size(length, regime))
            self._kept[device, regime] = turns
            while len(self._kept) > MAX_TABLES:
                self._kept.popitem(last=False)
        return turns

    def _regime(self, length: int) -> str:
        rope = self._rope
        return rope.regime(length) if rope.depends_on_length or length > rope.context else ""

    def _size(self, length: int, regime: str) -> int:
        """More positions than needed, where the frequencies are still the same."""
        more = max(MIN_TABLE, 1 << (length - 1).bit_length())
        more = min(more, self._rope.context) if length <= self._rope.context else more
        return more if self._regime(more) == regime else length

    def _make(self, device: torch.device, size: int) -> Turns:
        angles = self._rope.angles(torch.arange(size), size)
        onward = [a.factors() for a in angles]
        if any(layer.backwards for layer in self._rope.layers):
            onward += [(cos, -sin) for cos, sin in onward]
        return tuple((cos.to(device).contiguous(), sin.to(device).contiguous()) for cos, sin in onward)

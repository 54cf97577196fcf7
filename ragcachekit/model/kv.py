"""Chunk KV: what the encoder makes, the store keeps and the linker places."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from ragcachekit.model.blocks import TensorShape as TensorShape
from ragcachekit.model.blocks import stretch
from ragcachekit_kernels.dispatch import ChunkTensors

SCALE_OF_KEYS, SCALE_OF_VALUES = "scale.k.", "scale.v."
"""Among the ``sums`` of KV that is in eight bits, before the number of a layer: what its elements are
multiplied by, ``[kv_heads, 1, head_dim]`` and ``[kv_heads, tokens, 1]``."""


def is_packed(sums: Mapping[str, torch.Tensor]) -> bool:
    """Whether KV with these ``sums`` is in eight bits (:mod:`ragcachekit.model.packed`)."""
    return f"{SCALE_OF_KEYS}0" in sums


def scales_of(sums: Mapping[str, torch.Tensor], layer: int) -> tuple[torch.Tensor, ...]:
    """Scales of a layer's keys and values; none if they are not in eight bits."""
    if not is_packed(sums):
        return ()
    return sums[f"{SCALE_OF_KEYS}{layer}"], sums[f"{SCALE_OF_VALUES}{layer}"]


def with_scales(
    shapes: tuple[tuple[TensorShape, TensorShape], ...], sums: Mapping[str, torch.Tensor]
) -> tuple[tuple[TensorShape, ...], ...]:
    """Per layer, keys, values and, where there are any, their scales."""
    if not is_packed(sums):
        return shapes
    scales = (scales_of(sums, layer) for layer in range(len(shapes)))
    return tuple(
        (*pair, *((scale.dtype, tuple(scale.shape)) for scale in of))
        for pair, of in zip(shapes, scales, strict=True)
    )


@dataclass(frozen=True, eq=False)
class ChunkKV:
    """Keys and values of one chunk, layer by layer. Shared and never written to.

    Attributes
    ----------
    keys, values : tuple of torch.Tensor
        One tensor per layer, shape ``[kv_heads, tokens, head_dim]``; keys after any q/k norm.
    start : int or None
        None: RoPE is removed from the keys (and the attention scaling m of YaRN/longrope divided
        out), so that they can be placed at any position. An int: the keys are exactly as the model
        rotated them from that position on (exact prefixes, which are only ever reused there).
    sums : mapping of str to torch.Tensor
        Attention summed while the chunk was encoded, float32, for policies; empty where nothing was
        watched. ``attended`` ``[tokens]``: what each token got from the chunk's own rows, over layers,
        heads and rows. Of ``in-prompt`` KV, over heads and rows of the chunk: ``inter`` ``[layers,
        segments]``, what each segment before it got; ``intra`` ``[layers]``, what it kept to itself;
        ``outward`` ``[tokens]``, what each token gave to segments before, mean over layers; and
        ``behind`` ``[segments]``, how many tokens these have.
    quantised : str
        Empty: as the model computed it. ``int8``, ``fp8``: it was rounded to that in some tier, so it is
        exact nowhere.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    start: int | None = None
    sums: Mapping[str, torch.Tensor] = field(default_factory=dict)
    quantised: str = ""

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.values) or not self.keys:
            raise ValueError("keys and values need the same, non-zero number of layers")
        tokens = {t.shape[1] for t in (*self.keys, *self.values)}
        if len(tokens) != 1 or any(t.dim() != 3 for t in (*self.keys, *self.values)):
            raise ValueError(
                "every layer must be [kv_heads, tokens, head_dim] with the same number of tokens"
            )

    @classmethod
    def checked(
        cls,
        keys: tuple[torch.Tensor, ...],
        values: tuple[torch.Tensor, ...],
        start: int | None,
        sums: Mapping[str, torch.Tensor],
        quantised: str,
    ) -> ChunkKV:
        """As the constructor, for tensors of which the caller knows that their shapes agree.

        To ask sixty tensors for their shapes takes a tenth of the time in which a small entry is read.
        """
        made = object.__new__(cls)
        made.__dict__.update(keys=keys, values=values, start=start, sums=sums, quantised=quantised)
        return made

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ChunkKV:
        """The same with every key, value and scale tensor changed (other ``sums`` stay where they are)."""
        kv, scales = self.unpacked(), (SCALE_OF_KEYS, SCALE_OF_VALUES)
        sums = {name: change(t) if name.startswith(scales) else t for name, t in kv.sums.items()}
        keys, values = tuple(map(change, kv.keys)), tuple(map(change, kv.values))
        return replace(kv, keys=keys, values=values, sums=sums)

    def to(self, device: str | torch.device) -> ChunkKV:
        """What is :meth:`unpacked`, with keys and values on ``device``; that itself if they are there."""
        device, kv = torch.device(device), self.unpacked()
        for tensor in (*kv.keys, *kv.values):
            at = tensor.device
            if at != device and (at.type != device.type or device.index is not None):
                return kv.each(lambda tensor: tensor.to(device))
        return kv

    def unpacked(self) -> ChunkKV:
        """For whoever keeps it: itself; of a :class:`~ragcachekit.model.packed.PackedKV` an ordinary one."""
        return self

    @property
    def tokens(self) -> int:
        """Number of tokens of the chunk."""
        return self.keys[0].shape[1]

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.keys)

    @cached_property
    def shapes(self) -> tuple[tuple[TensorShape, TensorShape], ...]:
        """Per layer, dtype and shape of keys and of values."""
        return tuple(
            ((keys.dtype, tuple(keys.shape)), (values.dtype, tuple(values.shape)))
            for keys, values in zip(self.keys, self.values, strict=True)
        )

    @cached_property
    def planes(self) -> ChunkTensors:
        """Keys and values in turn, as the kernels that place them want them: their addresses are read once.

        Only for tensors that lie where those kernels run.
        """
        pairs = zip(self.keys, self.values, strict=True)
        scales = [s.contiguous() for layer in range(self.layers) for s in scales_of(self.sums, layer)]
        return ChunkTensors([side.contiguous() for pair in pairs for side in pair], scales)

    def stored_layer(self, number: int) -> tuple[torch.Tensor, ...]:
        """Keys and values of one layer as they lie in memory; if that is in eight bits, then their scales."""
        return self.keys[number], self.values[number], *scales_of(self.sums, number)

    @cached_property
    def stored_shapes(self) -> tuple[tuple[TensorShape, ...], ...]:
        """Per layer, dtypes and shapes of :meth:`stored_layer`."""
        return with_scales(self.shapes, self.sums)

    @cached_property
    def stretches(self) -> tuple[torch.Tensor | None, ...]:
        """Per layer, :meth:`stored_layer` as one stretch of bytes (:func:`ragcachekit.model.blocks.carved`);
        None where its tensors do not lie so."""
        return tuple(stretch(self.stored_layer(layer)) for layer in range(self.layers))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (*self.keys, *self.values, *self.sums.values())
        return sum(t.nbytes for t in tensors)

"""Chunk KV: what the encoder makes, the store keeps and the linker places."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from ragcachekit_kernels.dispatch import ChunkTensors

TensorShape = tuple[torch.dtype, tuple[int, ...]]


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
        """The same with every key and value tensor changed (``sums`` stay where they are)."""
        return replace(self, keys=tuple(map(change, self.keys)), values=tuple(map(change, self.values)))

    def to(self, device: str | torch.device) -> ChunkKV:
        """The same with keys and values on ``device``; itself if they are there."""
        device = torch.device(device)
        here = {tensor.device for tensor in (*self.keys, *self.values)}
        if all(at.type == device.type and device.index in (None, at.index) for at in here):
            return self
        return self.each(lambda tensor: tensor.to(device))

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
        return ChunkTensors([side.contiguous() for pair in pairs for side in pair])

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (*self.keys, *self.values, *self.sums.values())
        return sum(t.numel() * t.element_size() for t in tensors)

"""``bench kernels``: a whole prompt of chunks placed and rotated, as it was computed and from eight bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from benchmarks.kernels.cases import CHUNK, TOLERANCE, Case, Sizes, distance, largest
from ragcachekit_kernels import dispatch
from ragcachekit_kernels.dispatch import Place, Places, Rotation

Pieces = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Tensors of the chunks in one plane, and their scales (none unless they are in eight bits)."""


def assembly_cases(sizes: Sizes) -> Iterator[Case]:
    """A whole prompt of chunks, keys and values of all layers; as kept and from int8."""
    into = [sizes.random(sizes.kv_heads, sizes.tokens, sizes.head_dim) for _ in range(2 * sizes.layers)]
    starts = range(0, sizes.tokens, CHUNK)
    places = Places(tuple(Place(start, min(CHUNK, sizes.tokens - start)) for start in starts))
    rotation = _angles(sizes)
    for name in ("as computed", "from int8"):
        pieces = [_pieces(sizes, places, plane, name) for plane in range(len(into))]

        def all_layers(pieces: Sequence[Pieces] = pieces) -> None:
            for plane, (out, (tensors, scales)) in enumerate(zip(into, pieces, strict=True)):
                dispatch.assemble(out, tensors, places, None if plane % 2 else rotation, scales)

        moved = sum(t.nbytes for t in into) + sum(t.nbytes for tensors, _ in pieces for t in tensors)
        yield Case(
            "assembly",
            f"{name}, {sizes.layers} layers",
            moved,
            "GB/s",
            [all_layers],
            partial(_assembly_error, all_layers, into, places, pieces, rotation),
            TOLERANCE[sizes.dtype],
        )


def _angles(sizes: Sizes) -> Rotation:
    pairs = torch.arange(sizes.head_dim // 2, device=sizes.device, dtype=torch.float64)
    angles = torch.arange(sizes.tokens, device=sizes.device)[:, None] * 500_000.0 ** (
        -2 * pairs / sizes.head_dim
    )
    return Rotation(angles.cos().float(), angles.sin().float())


def _pieces(sizes: Sizes, places: Places, plane: int, name: str) -> Pieces:
    tensors, scales = list[torch.Tensor](), list[torch.Tensor]()
    for number, place in enumerate(places):
        shape = (sizes.kv_heads, place.tokens, sizes.head_dim)
        if name == "as computed":
            tensors.append(sizes.random(*shape, salt=1000 * number + plane))
            continue
        tensors.append(
            (40 * sizes.random(*shape, salt=1000 * number + plane)).clamp(-127, 127).to(torch.int8)
        )
        of = (shape[0], place.tokens, 1) if plane % 2 else (shape[0], 1, shape[2])
        scales.append(sizes.random(*of, salt=1000 * number + plane).float().abs() / 127)
    return tensors, scales


def _assembly_error(
    call: Callable[[], None],
    into: Sequence[torch.Tensor],
    places: Places,
    pieces: Sequence[Pieces],
    rotation: Rotation,
) -> float:
    """Keys and values of the first and last layer, every piece, by the formula (RoFormer eq. 34)."""
    for out in into:
        out.fill_(float("nan"))
    call()
    distances = []
    for plane in {0, 1, len(into) - 2, len(into) - 1}:
        tensors, scales = pieces[plane]
        for number, place in enumerate(places):
            at = slice(place.start, place.start + place.tokens)
            expected = tensors[number].double()
            if scales:
                expected = expected * scales[number].double()
            if plane % 2 == 0:
                cos, sin = rotation.cos[at].double(), rotation.sin[at].double()
                x, y = expected.chunk(2, -1)
                expected = torch.cat((x * cos - y * sin, x * sin + y * cos), -1)
            distances.append(distance(into[plane][:, at], expected))
    return largest(distances, into)

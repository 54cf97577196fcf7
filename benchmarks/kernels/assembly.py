"""``bench kernels``: a whole prompt of chunks placed and rotated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from benchmarks.kernels.cases import CHUNK, TOLERANCE, Case, Sizes, distance, largest
from ragcachekit_kernels import dispatch
from ragcachekit_kernels.dispatch import Place, Places, Rotation


def assembly_cases(sizes: Sizes) -> Iterator[Case]:
    """A whole prompt of chunks, keys and values of all layers."""
    into = [sizes.random(sizes.kv_heads, sizes.tokens, sizes.head_dim) for _ in range(2 * sizes.layers)]
    starts = range(0, sizes.tokens, CHUNK)
    places = Places(tuple(Place(start, min(CHUNK, sizes.tokens - start)) for start in starts))
    rotation = _angles(sizes)
    pieces = [_pieces(sizes, places, plane) for plane in range(len(into))]

    def all_layers() -> None:
        for plane, (out, tensors) in enumerate(zip(into, pieces, strict=True)):
            dispatch.assemble(out, tensors, places, None if plane % 2 else rotation)

    yield Case(
        "assembly",
        f"as computed, {sizes.layers} layers",
        sum(t.nbytes for t in into) + sum(t.nbytes for tensors in pieces for t in tensors),
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


def _pieces(sizes: Sizes, places: Places, plane: int) -> list[torch.Tensor]:
    shapes = ((sizes.kv_heads, place.tokens, sizes.head_dim) for place in places)
    return [sizes.random(*shape, salt=1000 * number + plane) for number, shape in enumerate(shapes)]


def _assembly_error(
    call: Callable[[], None],
    into: Sequence[torch.Tensor],
    places: Places,
    pieces: Sequence[Sequence[torch.Tensor]],
    rotation: Rotation,
) -> float:
    """Keys and values of the first and last layer, every piece, by the formula (RoFormer eq. 34)."""
    for out in into:
        out.fill_(float("nan"))
    call()
    distances = []
    for plane in {0, 1, len(into) - 2, len(into) - 1}:
        for number, place in enumerate(places):
            at = slice(place.start, place.start + place.tokens)
            expected = pieces[plane][number].double()
            if plane % 2 == 0:
                cos, sin = rotation.cos[at].double(), rotation.sin[at].double()
                x, y = expected.chunk(2, -1)
                expected = torch.cat((x * cos - y * sin, x * sin + y * cos), -1)
            distances.append(distance(into[plane][:, at], expected))
    return largest(distances, into)

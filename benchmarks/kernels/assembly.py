"""``bench kernels``: a whole prompt of chunks placed and rotated, as it was computed and from eight bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from benchmarks.kernels.checks import TOLERANCE, Case, distance, largest
from benchmarks.kernels.sizes import CHUNK, Sizes
from ragcachekit_kernels import dispatch
from ragcachekit_kernels.dispatch import ChunkTensors, Place, Plane


def assembly_cases(sizes: Sizes) -> Iterator[Case]:
    """Putting a whole prompt of chunks into place, all layers in one launch; as kept and from int8."""
    into = [sizes.random(sizes.kv_heads, sizes.tokens, sizes.head_dim) for _ in range(2 * sizes.layers)]
    planes = [Plane(kv, None if number % 2 else 0) for number, kv in enumerate(into)]
    places = [Place(s, min(CHUNK, sizes.tokens - s)) for s in range(0, sizes.tokens, CHUNK)]
    table = _angles(sizes)
    for name in ("as computed", "from int8"):
        chunks = [_chunk(sizes, place.tokens, number, name) for number, place in enumerate(places)]
        ready = dispatch.assembly(planes, places, chunks, [table])
        moved = sum(t.numel() * t.element_size() for kv in (into, *(c.tensors for c in chunks)) for t in kv)
        yield Case(
            "assembly",
            f"{name}, {sizes.layers} layers",
            moved,
            "GB/s",
            [ready.run],
            partial(_assembly_error, ready, into, places, chunks, table),
            TOLERANCE[sizes.dtype],
        )
        del chunks, ready


def _angles(sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = torch.arange(sizes.head_dim // 2, device=sizes.device, dtype=torch.float64)
    angles = torch.arange(sizes.tokens, device=sizes.device)[:, None] * 500_000.0 ** (
        -2 * pairs / sizes.head_dim
    )
    return angles.cos().float(), angles.sin().float()


def _chunk(sizes: Sizes, tokens: int, number: int, name: str) -> ChunkTensors:
    shape = (sizes.kv_heads, tokens, sizes.head_dim)
    planes = range(2 * sizes.layers)
    if name == "as computed":
        return ChunkTensors([sizes.random(*shape, salt=1000 * number + i) for i in planes])
    generator = torch.Generator(sizes.device).manual_seed(number)
    tensors = [
        torch.randint(-127, 128, shape, generator=generator, device=sizes.device, dtype=torch.int8)
        for _ in planes
    ]
    scales = [
        torch.rand(
            (shape[0], tokens, 1) if i % 2 else (shape[0], 1, shape[2]),
            generator=generator,
            device=sizes.device,
        )
        / 127
        for i in planes
    ]
    return ChunkTensors(tensors, scales)


def _assembly_error(
    ready: dispatch.Assembly,
    into: Sequence[torch.Tensor],
    places: Sequence[Place],
    chunks: Sequence[ChunkTensors],
    table: tuple[torch.Tensor, torch.Tensor],
) -> float:
    """Every plane of the first and last layer, every piece, by the formula (RoFormer eq. 34)."""
    for kv in into:
        kv.fill_(float("nan"))
    ready.run()
    distances = []
    for number in {0, 1, len(into) - 2, len(into) - 1}:
        for place, chunk in zip(places, chunks, strict=True):
            at = slice(place.start, place.start + place.tokens)
            expected, scale = chunk.tensors[number].double(), chunk.scale(number)
            if scale is not None:
                expected = expected * scale.double()
            if number % 2 == 0:
                cos, sin = (part[at].double() for part in table)
                x, y = expected.chunk(2, -1)
                expected = torch.cat((x * cos - y * sin, x * sin + y * cos), -1)
            distances.append(distance(into[number][:, at], expected))
    return largest(distances, into)

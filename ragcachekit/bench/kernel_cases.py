"""What ``bench kernels`` measures: inputs of each kernel, the work in them, the check before a figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ragcachekit_kernels import dispatch
from ragcachekit_kernels.dispatch import ChunkTensors, KVTable, Place, Plane, Rows, Spans

CHUNK = 512
"""Tokens of a chunk."""

QUESTION = 64
"""Rows of the question, which stands last."""

CAPTURED_ROWS = 1024
"""Up to so many rows linked forwards run as graphs (:class:`ragcachekit.config.GraphConfig`)."""


@dataclass(frozen=True)
class Sizes:
    """One model and prompt.

    Attributes
    ----------
    tokens, layers, heads, kv_heads, head_dim : int
    dtype : torch.dtype
    device : torch.device
    seed : int
    """

    tokens: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    seed: int

    def random(self, *shape: int, salt: int = 0) -> torch.Tensor:
        """Normal numbers; the same salt and shape, the same numbers."""
        generator = torch.Generator(self.device).manual_seed(self.seed * 1_000_003 + salt)
        return torch.randn(*shape, generator=generator, device=self.device, dtype=torch.float32).to(
            self.dtype
        )

    @property
    def sets(self) -> int:
        """Sets of inputs that calls go round, so that a GPU's cache does not hold them."""
        return 2 if self.device.type == "cuda" else 1

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, eq=False)
class Case:
    """One figure.

    Attributes
    ----------
    kernel, name : str
    work : float
        Operations or bytes of one call, as ``unit`` says.
    unit : {"TFLOP/s", "GB/s"}
    calls : sequence of callable
        One per set of inputs.
    error : callable
        How far the result is from the float64 derivation: of attention and assembly the largest length of
        an output vector's difference over the length of that vector, so that a small output counts like a
        large one; of sums the largest difference over the largest sum. NaN if anything was not written.
    allowed : float
    rows : tuple of int
        Positions of the query rows, for baselines of the same work; empty where there are none.
    """

    kernel: str
    name: str
    work: float
    unit: str
    calls: Sequence[Callable[[], Any]]
    error: Callable[[], float]
    allowed: float
    rows: tuple[int, ...] = ()


def row_sets(tokens: int, seed: int) -> dict[str, tuple[int, ...]]:
    """Positions of the rows by name: a share of all tokens, LegoLink's, the question alone, all."""
    question = set(range(tokens - QUESTION, tokens))
    picked = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))[: round(0.15 * tokens)]
    lego = {start + i for start in range(0, tokens, CHUNK) for i in range(min(16, tokens - start))}
    sets = {"15%": set(picked.tolist()) | question, "lego:16": lego | question, "question": question}
    return {name: tuple(sorted(rows)) for name, rows in sets.items()} | {"full": tuple(range(tokens))}


TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
"""Allowed distance of an output vector: rounding weights and outputs to bfloat16 costs about 2e-3."""


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest length of a difference over the length of the expected vector, along the last dimension."""
    expected = expected.double()
    away = (found.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(away.max()) if bool(torch.isfinite(away).all()) else float("nan")


def attention_cases(sizes: Sizes) -> Iterator[Case]:
    """Sparse-row attention of one layer."""
    kv = [
        (
            sizes.random(sizes.kv_heads, sizes.tokens, sizes.head_dim, salt=2 * i),
            sizes.random(sizes.kv_heads, sizes.tokens, sizes.head_dim, salt=2 * i + 1),
        )
        for i in range(sizes.sets)
    ]
    for name, positions in row_sets(sizes.tokens, sizes.seed).items():
        rows = Rows(positions)
        query = sizes.random(sizes.heads, len(positions), sizes.head_dim, salt=99)
        calls = [partial(dispatch.sparse_attention, query, k, v, rows, scale=sizes.scale) for k, v in kv]
        seen = sum(p + 1 for p in positions)
        # The question alone is bound by reading the KV, all others by multiplying.
        few = name == "question"
        yield Case(
            "sparse_attention",
            name,
            _kv_bytes(sizes) if few else 4.0 * sizes.heads * sizes.head_dim * seen,
            "GB/s" if few else "TFLOP/s",
            calls,
            partial(_attention_error, calls[0], query, *kv[0], positions, sizes.scale),
            TOLERANCE[sizes.dtype],
            positions,
        )
        if dispatch.uses_triton(sizes.device) and len(positions) <= CAPTURED_ROWS:
            yield _by_table(sizes, name, query, kv, rows)


def _by_table(
    sizes: Sizes, name: str, query: torch.Tensor, kv: Sequence[tuple[torch.Tensor, torch.Tensor]], rows: Rows
) -> Case:
    """The same with addresses from a table: what captured linked forwards run."""
    at = rows.on(sizes.device)
    entries = [[k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0)] for k, v in kv]
    table = KVTable(torch.tensor(entries, device=sizes.device), sizes.dtype)
    one = partial(dispatch.sparse_attention_at, scale=sizes.scale, tokens=sizes.tokens)
    calls = [
        partial(one, query, table, layer, sizes.kv_heads, sizes.head_dim, at) for layer in range(len(kv))
    ]
    seen = sum(p + 1 for p in rows)
    few = name == "question"
    return Case(
        "sparse_attention",
        f"{name}, table",
        _kv_bytes(sizes) if few else 4.0 * sizes.heads * sizes.head_dim * seen,
        "GB/s" if few else "TFLOP/s",
        calls,
        partial(_attention_error, calls[0], query, *kv[0], tuple(rows), sizes.scale),
        TOLERANCE[sizes.dtype],
    )


def _kv_bytes(sizes: Sizes) -> float:
    """Keys and values of one layer."""
    return 2.0 * sizes.kv_heads * sizes.tokens * sizes.head_dim * sizes.dtype.itemsize


def _attention_error(
    call: Callable[[], torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: Sequence[int],
    scale: float,
) -> float:
    """All heads, one row at a time over exactly the keys that it sees, at rows all over the prompt."""
    out = call()
    group = query.shape[0] // key.shape[0]
    worst = 0.0
    for at in _spread(len(positions), 24):
        stop = positions[at] + 1
        rows = query[:, at].double().view(key.shape[0], group, -1)
        scores = rows @ key[:, :stop].double().transpose(1, 2) * scale
        expected = torch.softmax(scores, -1) @ value[:, :stop].double()
        found = out[:, at].double().view_as(expected)
        worst = max(worst, distance(found, expected), key=_nan_first)
    return worst if bool(torch.isfinite(out).all()) else float("nan")


def score_cases(sizes: Sizes) -> Iterator[Case]:
    """Column scores of the question's rows over every layer, in one softmax and one per chunk."""
    positions = row_sets(sizes.tokens, sizes.seed)["question"]
    rows = Rows(positions)
    query = sizes.random(sizes.heads, len(positions), sizes.head_dim, salt=98)
    keys = [
        sizes.random(sizes.kv_heads, sizes.tokens, sizes.head_dim, salt=200 + i) for i in range(sizes.layers)
    ]
    # Attention over the same keys, which has to be computed anyway, hands its log-sum-exps over.
    known = [dispatch.sparse_attention_lse(query, key, key, rows, scale=sizes.scale)[1] for key in keys]
    behind = range(0, sizes.tokens - QUESTION, CHUNK)
    chunked = Spans(tuple((start, min(start + CHUNK, sizes.tokens - QUESTION)) for start in behind))
    for name, spans, lses in (
        ("log-sum-exp given", None, known),
        ("all keys", None, None),
        ("per chunk", chunked, None),
    ):
        one = partial(dispatch.column_scores, positions=rows, spans=spans, scale=sizes.scale)

        def all_layers(
            one: Callable[..., torch.Tensor] = one, lses: list[torch.Tensor] | None = lses
        ) -> list[torch.Tensor]:
            if lses is None:
                return [one(query, key) for key in keys]
            return [one(query, key, lse=lse) for key, lse in zip(keys, lses, strict=True)]

        yield Case(
            "column_scores",
            f"{name}, {sizes.layers} layers",
            sum(key.numel() * key.element_size() for key in keys),
            "GB/s",
            [all_layers],
            partial(_score_error, all_layers, query, keys, positions, spans, sizes.scale),
            # Sums of float32 weights; what differs is the rounding of scores from 16-bit products.
            1e-4,
            positions,
        )


def _score_error(
    call: Callable[[], list[torch.Tensor]],
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    positions: Sequence[int],
    spans: Sequence[tuple[int, int]] | None,
    scale: float,
) -> float:
    found, key = call()[-1].double(), keys[-1]
    group = query.shape[0] // key.shape[0]
    expected = torch.zeros_like(found)
    for at, position in enumerate(positions):
        rows = query[:, at].double().view(key.shape[0], group, -1)
        scores = rows @ key.double().transpose(1, 2) * scale
        for start, stop in spans or [(0, key.shape[1])]:
            stop = min(stop, position + 1)
            if start < stop:
                expected[start:stop] += torch.softmax(scores[..., start:stop], -1).sum((0, 1))
    return float((found - expected).abs().max() / expected.abs().max())


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
    worst = 0.0
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
            worst = max(worst, distance(into[number][:, at], expected), key=_nan_first)
    written = all(bool(torch.isfinite(kv).all()) for kv in into)
    return worst if written else float("nan")


def deviation_cases(sizes: Sizes) -> Iterator[Case]:
    """KV deviation of all tokens of one layer (CacheBlend)."""
    rows = Rows(tuple(range(sizes.tokens)))
    new, old = (sizes.random(sizes.kv_heads, sizes.tokens, sizes.head_dim, salt=70 + i) for i in range(2))
    call = partial(dispatch.kv_deviation, new, old, rows)

    def error() -> float:
        expected = (new.double() - old.double()).square().sum((0, 2))
        return float((call().double() - expected).abs().max() / expected.max())

    yield Case(
        "kv_deviation",
        "all tokens, 1 layer",
        2 * new.numel() * new.element_size(),
        "GB/s",
        [call],
        error,
        1e-5,
    )


KERNELS: dict[str, Callable[[Sizes], Iterator[Case]]] = {
    "sparse_attention": attention_cases,
    "column_scores": score_cases,
    "assembly": assembly_cases,
    "kv_deviation": deviation_cases,
}
"""By name; each makes its inputs when it is asked for the next case."""


def _spread(count: int, wanted: int) -> list[int]:
    """Up to ``wanted`` of ``count`` indices, first and last among them."""
    return sorted({round(i * (count - 1) / max(wanted - 1, 1)) for i in range(wanted)})


def _nan_first(error: float) -> float:
    return error if error == error else float("inf")

"""Tuning of the sparse-row attention kernel: the fastest config on the device at hand.

Every candidate is first compared with attention in float64 and refused if it differs. Results go into a file
that the library reads (:data:`ragcachekit_kernels.attention.configs.SETTING`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.kernels.checks import TOLERANCE, distance
from benchmarks.kernels.device_timing import timed
from benchmarks.kernels.run import KernelSettings
from benchmarks.kernels.sizes import CAPTURED_ROWS, row_sets
from ragcachekit.commands.bench.shapes import dtype_named
from ragcachekit_kernels.attention.configs import Case, Config
from ragcachekit_kernels.dispatch import AttentionOptions, KVTable, Rows, sparse_attention, uses_triton

RUNS = 20
"""Timed calls per candidate; the median counts."""

CHECKED_ROWS = 48
"""Rows that are compared, spread over all; their float64 scores must fit into memory."""

Timer = Callable[[Callable[[], object]], float]
"""Returns the milliseconds of a call."""


@dataclass(frozen=True)
class Shape:
    """Case to tune for: query rows at ``positions`` over ``tokens`` keys."""

    heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    positions: Sequence[int]
    dtype: torch.dtype = torch.bfloat16
    value_dim: int | None = None
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class Tried:
    """Result of one candidate: its error, and its time or why it was refused."""

    config: Config
    error: float | None = None
    milliseconds: float | None = None
    refused: str | None = None


@dataclass(frozen=True)
class Tuned:
    """Fastest correct candidate of all that were tried; ``key`` is its name in a tuning file."""

    key: str
    best: Config
    tried: tuple[Tried, ...]


def tune(
    settings: KernelSettings, path: str | Path, step: Callable[[str], object] = lambda _: None
) -> tuple[str, ...]:
    """Tune for many rows and, with addresses from a table, for few, as captured graphs have; takes minutes.

    Many rows are 15 % of the first prompt, few its question and the beginnings of its chunks.

    Parameters
    ----------
    path : path
        Tuning file, written after each result. ``RAGCACHEKIT_KERNEL_TUNING`` set to it makes the library use
        what is found for this device, dtype and head_dim.
    step : callable
        Called with one line per candidate.

    Returns
    -------
    tuple of str
        One line per result: its name in the file and its config.

    Raises
    ------
    ValueError
        If Triton does not run on the device, or no candidate is correct.
    """
    device, tokens = torch.device(settings.device), settings.tokens[0]
    if not uses_triton(device):
        raise ValueError(f"there is nothing to tune on {device}: the Triton kernels do not run there")

    def timer(call: Callable[[], object]) -> float:
        took = timed([call], RUNS, device).median
        step(f"{took:.3f} ms")
        return took

    results: list[Tuned] = []
    sets = row_sets(tokens, settings.seed)
    for rows, table in ((sets["15%"], False), (sets["lego:16"][-CAPTURED_ROWS:], True)):
        sizes = (settings.heads, settings.kv_heads, settings.head_dim, tokens)
        shape = Shape(*sizes, rows, dtype_named(settings.dtype))
        results.append(fastest(shape, device, candidates(shape.dtype, table=table), timer, table=table))
        Path(path).write_text(file_of(results))
    return tuple(f"{one.key}: {one.best}, the best of {len(one.tried)} tried" for one in results)


def candidates(dtype: torch.dtype, *, table: bool) -> tuple[Config, ...]:
    """Candidate configs; those that do not fit a device or a head_dim are refused when they are tried."""
    if dtype == torch.float32:
        sizes = [(32, 16, 4, 2), (32, 32, 8, 2), (64, 32, 8, 2), (64, 32, 8, 3), (64, 64, 8, 2)]
        return tuple(Config(*size) for size in sizes)
    # One warpgroup (four warps) per 64 rows of a tile. Each candidate takes seconds to compile.
    sizes = [(128, n, 8, stages) for n in (32, 64, 128) for stages in (2, 3)] + [(128, 64, 8, 4)]
    sizes += [(64, n, 4, stages) for n in (64, 128) for stages in (2, 3)]
    loads = (False,) if table else (True, False)
    # Of two small programs on a multiprocessor, one computes weights while the other multiplies.
    return tuple(
        Config(*size, descriptors=by, resident=resident)
        for size in sizes
        for by in loads
        for resident in (0, 1, 2)
        if resident < 2 or size[2] == 4
    )


def fastest(
    shape: Shape, device: torch.device, among: Iterable[Config], timer: Timer, *, table: bool = False
) -> Tuned:
    """Fastest correct candidate on random tensors of this shape; ``table``: addresses come from a table.

    Raises
    ------
    ValueError
        If no candidate is correct.
    """
    problem = _Problem(shape, device, table)
    tried = tuple(_attempt(problem, config, timer) for config in among)
    right = [t for t in tried if t.milliseconds is not None]
    if not right:
        reasons = "; ".join(sorted({str(t.refused) for t in tried}))
        raise ValueError(f"no candidate computes attention of {problem.key} rightly: {reasons}")
    best = min(right, key=lambda t: t.milliseconds or 0.0)
    return Tuned(problem.key, best.config, tried)


def file_of(results: Iterable[Tuned]) -> str:
    """Text of a tuning file."""
    entries = {one.key: asdict(one.best) for one in results}
    return json.dumps({"schema": 1, "sparse_attention": entries}, indent=2) + "\n"


class _Problem:
    """Random tensors of a shape, and attention in float64 for some of their rows."""

    def __init__(self, shape: Shape, device: torch.device, table: bool) -> None:
        value_dim = shape.value_dim or shape.head_dim
        self.dtype = shape.dtype
        self._options = AttentionOptions(shape.head_dim**-0.5, shape.window, shape.softcap)
        case = Case(device, shape.dtype, shape.head_dim, value_dim, table, self._options.is_plain)
        self.key = case.key
        self._rows = Rows(tuple(shape.positions))
        random = torch.Generator(device).manual_seed(0)

        def drawn(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=random, device=device).to(shape.dtype)

        # Token-major, as a model hands its queries over.
        self._query = drawn(len(self._rows), shape.heads, shape.head_dim).transpose(0, 1)
        self._key = drawn(shape.kv_heads, shape.tokens, shape.head_dim)
        self._value = drawn(shape.kv_heads, shape.tokens, value_dim)
        both = (self._key, self._value)
        entry = [t.data_ptr() for t in both] + [t.stride(0) for t in both]
        self._table = KVTable(torch.tensor([entry], device=device), shape.dtype) if table else None
        self._checked = sorted({i * (len(self._rows) - 1) // (CHECKED_ROWS - 1) for i in range(CHECKED_ROWS)})
        self._want = sparse_attention(
            self._query[:, self._checked].double(),
            self._key.double(),
            self._value.double(),
            [self._rows[i] for i in self._checked],
            self._options,
        )

    def run(self, config: Config) -> torch.Tensor:
        from ragcachekit_kernels.attention import row_attention

        rows = self._rows.on(self._key.device)
        if self._table is None:
            both = (self._key, self._value)
            return row_attention.attention(self._query, *both, rows, self._options, config=config)
        kv_heads, tokens, _ = self._key.shape
        at = (self._table, 0, kv_heads, self._value.shape[-1], rows)
        return row_attention.attention_at(self._query, *at, self._options, tokens=tokens, config=config)

    def error(self, out: torch.Tensor) -> float:
        """Largest relative distance of an output vector."""
        return distance(out[:, self._checked], self._want)


def _attempt(problem: _Problem, config: Config, timer: Timer) -> Tried:
    try:
        error = problem.error(problem.run(config))
    except Exception as failure:  # too large for the device, or refused by the compiler
        return Tried(config, refused=f"{type(failure).__name__}: {failure}"[:200])
    if not error <= TOLERANCE[problem.dtype]:  # NaN is wrong too
        return Tried(config, error, refused="differs from float64")
    return Tried(config, error, timer(partial(problem.run, config)))

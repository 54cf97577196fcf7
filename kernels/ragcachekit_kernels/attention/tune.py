"""Tuning of the sparse-row attention kernel: the fastest config on the device at hand.

Every candidate is first compared with the reference and refused if it differs. Results go into a file that
dispatch reads (:data:`ragcachekit_kernels.attention.configs.SETTING`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ragcachekit_kernels import reference
from ragcachekit_kernels.attention import configs
from ragcachekit_kernels.attention.configs import Config
from ragcachekit_kernels.backend import uses_triton
from ragcachekit_kernels.options import AttentionOptions
from ragcachekit_kernels.rows import KVTable, Rows

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
"""Largest relative distance of an output vector from the reference's; bfloat16 rounding costs about 2e-3."""

LSE_TOLERANCE = 1e-3
"""Largest difference of a log-sum-exp, which is a float32 sum for all types."""

CHECKED_ROWS = 48
"""Rows that are compared, spread over all; their float64 scores must fit into memory."""


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


def tune(
    shape: Shape,
    device: torch.device,
    *,
    table: bool = False,
    among: Iterable[Config] | None = None,
    timer: Callable[[Callable[[], object]], float] | None = None,
) -> Tuned:
    """Fastest of the candidates ``among`` (by default all) on random tensors of this shape.

    Parameters
    ----------
    table : bool
        Tune for keys and values whose addresses come from a table (captured graphs).
    timer : callable, optional
        Returns the milliseconds of a call; by default the median of 20 calls.

    Raises
    ------
    ValueError
        If no candidate is correct.
    """
    problem = _Problem(shape, device, table)
    chosen = candidates(shape.dtype, table=table) if among is None else among
    tried = tuple(_attempt(problem, config, timer or milliseconds) for config in chosen)
    right = [t for t in tried if t.milliseconds is not None]
    if not right:
        reasons = "; ".join(sorted({str(t.refused) for t in tried}))
        raise ValueError(f"no candidate computes attention of {problem.key} rightly: {reasons}")
    best = min(right, key=lambda t: t.milliseconds or 0.0)
    return Tuned(problem.key, best.config, tried)


def save(path: str | Path, tuned: Iterable[Tuned]) -> None:
    """Write a tuning file; ``RAGCACHEKIT_KERNEL_TUNING`` set to its path makes dispatch use it."""
    Path(path).write_text(configs.dumps({one.key: one.best for one in tuned}))


def tune_attention(
    path: str | Path,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    tokens: int,
    positions: Sequence[int],
    few: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    heard: Callable[[str], object] = lambda _: None,
) -> tuple[str, ...]:
    """Tune for many rows and, with addresses from a table, for few, as captured graphs have; takes minutes.

    Parameters
    ----------
    path : path
        Tuning file, written after each result. ``RAGCACHEKIT_KERNEL_TUNING`` set to it makes dispatch use
        what is found for this device, dtype and head_dim.
    positions, few : sequence of int
        Rows of a large forward, and of one that is captured.
    heard : callable
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
    if not uses_triton(device):
        raise ValueError(f"there is nothing to tune on {device}: the Triton kernels do not run there")

    def timer(call: Callable[[], object]) -> float:
        took = milliseconds(call)
        heard(f"{took:.3f} ms")
        return took

    results: list[Tuned] = []
    for rows, table in ((positions, False), (few, True)):
        shape = Shape(heads, kv_heads, head_dim, tokens, rows, dtype)
        results.append(tune(shape, device, table=table, timer=timer))
        save(path, results)
    return tuple(f"{one.key}: {one.best}, the best of {len(one.tried)} tried" for one in results)


def milliseconds(call: Callable[[], object], repeats: int = 20) -> float:
    """Median time of a call, by CUDA events where there are any; the first call is not counted."""
    call()
    return statistics.median(_once(call) for _ in range(repeats))


def _once(call: Callable[[], object]) -> float:
    if not torch.cuda.is_available():
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    first.record()
    call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last))


class _Problem:
    """Random tensors of a shape, and the reference's results for some of their rows."""

    def __init__(self, shape: Shape, device: torch.device, table: bool) -> None:
        value_dim = shape.value_dim or shape.head_dim
        self.dtype = shape.dtype
        self._options = AttentionOptions(shape.head_dim**-0.5, shape.window, shape.softcap)
        case = (device, shape.dtype, shape.head_dim, value_dim)
        self.key = configs.key_of(*case, table=table, plain=self._options.is_plain)
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
        self._want = reference.sparse_attention_lse(
            self._query[:, self._checked].double(),
            self._key.double(),
            self._value.double(),
            torch.tensor([self._rows[i] for i in self._checked]),
            self._options,
        )

    def run(self, config: Config) -> tuple[torch.Tensor, torch.Tensor | None]:
        from ragcachekit_kernels.attention import row_attention

        rows = self._rows.on(self._key.device)
        how: dict[str, Any] = {"config": config, "with_lse": True}
        if self._table is None:
            both = (self._key, self._value)
            return row_attention.attention(self._query, *both, rows, self._options, **how)
        kv_heads, tokens, _ = self._key.shape
        at = (self._table, 0, kv_heads, self._value.shape[-1], rows)
        return row_attention.attention_at(self._query, *at, self._options, tokens=tokens, **how)

    def error(self, out: torch.Tensor, lse: torch.Tensor | None) -> tuple[float, float]:
        """Largest relative distance of an output vector, largest difference of a log-sum-exp."""
        assert lse is not None
        want, want_lse = self._want
        off = (out[:, self._checked].double() - want).norm(dim=-1) / want.norm(dim=-1)
        return float(off.max()), float((lse[:, self._checked].double() - want_lse).abs().max())


def _attempt(problem: _Problem, config: Config, timer: Callable[[Callable[[], object]], float]) -> Tried:
    try:
        error, of_lse = problem.error(*problem.run(config))
    except Exception as failure:  # too large for the device, or refused by the compiler
        return Tried(config, refused=f"{type(failure).__name__}: {failure}"[:200])
    if not (error <= TOLERANCE[problem.dtype] and of_lse <= LSE_TOLERANCE):  # NaN is wrong too
        return Tried(config, error, refused="differs from the reference")
    return Tried(config, error, timer(partial(problem.run, config)))

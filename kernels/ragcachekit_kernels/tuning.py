"""Try configs of the sparse-row attention kernel on the device at hand and write the best into a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ragcachekit_kernels.backend import uses_triton


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
    """Tune for many rows (addresses as arguments) and for few (captured: addresses from a table).

    Takes minutes; what is found is written as soon as it is.

    Every candidate is compared with the reference before it is timed (:mod:`ragcachekit_kernels.tune`).
    The environment variable ``RAGCACHEKIT_KERNEL_TUNING`` set to ``path`` makes dispatch use what is
    found for this device, dtype and head_dim.

    Parameters
    ----------
    path : path
        The tuning file to write.
    heads, kv_heads, head_dim, tokens, dtype
        The model and prompt.
    positions, few : sequence of int
        Rows of a large forward, and of one that is captured.
    device : torch.device
    heard : callable
        Hears one line per candidate.

    Returns
    -------
    tuple of str
        One line per result: its name in the file and its config.

    Raises
    ------
    ValueError
        If Triton does not run on the device, or no candidate computes the right thing.
    """
    if not uses_triton(device):
        raise ValueError(f"there is nothing to tune on {device}: the Triton kernels do not run there")
    from ragcachekit_kernels import tune

    def timer(call: Callable[[], object]) -> float:
        took = tune.milliseconds(call)
        heard(f"{took:.3f} ms")
        return took

    results: list[tune.Tuned] = []
    for rows, table in ((positions, False), (few, True)):
        shape = tune.Shape(heads, kv_heads, head_dim, tokens, rows, dtype)
        results.append(tune.tune(shape, device, table=table, timer=timer))
        tune.save(path, results)
    return tuple(f"{one.key}: {one.best}, the best of {len(one.tried)} tried" for one in results)

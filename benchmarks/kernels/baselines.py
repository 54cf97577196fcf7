"""What ``bench kernels`` compares attention with: torch's own attentions, full and for chosen rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels.cases import Sizes

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value, ``[1, heads, rows or tokens, head_dim]``."""

Calls = Sequence[Callable[[], Any]]
"""One per set of inputs; each gives ``[1, heads, rows, head_dim]`` or ``[1, rows, heads, head_dim]``, or
nothing where only a preparation is timed. The first set is that of our own kernel's first call."""


@dataclass(frozen=True, eq=False)
class Baseline:
    """Another way to the same rows, or to all rows.

    ``make`` makes its inputs and gives the calls; it may fail where the way does not run. ``prepares``: this
    is what must be done once per prompt before the calls named alike.
    """

    name: str
    make: Callable[[], Calls]
    prepares: bool = False


def full_baselines(sizes: Sizes) -> list[Baseline]:
    """Causal attention of all rows: what an ordinary prefill does in every layer."""
    every = range(sizes.tokens)
    out = [Baseline("transformers sdpa, all rows", partial(_each, sizes, every, _transformers_sdpa))]
    if sizes.device.type == "cuda":
        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            out.append(Baseline(f"{name}, all rows", partial(_each, sizes, every, partial(_forced, backend))))
    return out


def row_baselines(sizes: Sizes, positions: Sequence[int]) -> list[Baseline]:
    """Attention of the given rows alone, masked by their positions."""
    out = [Baseline("sdpa with a mask", partial(_masked, sizes, positions))]
    if sizes.device.type == "cuda":
        out.append(Baseline("flex mask", lambda: [_flex_mask(sizes, positions)], prepares=True))
        out.append(Baseline("flex", partial(_flex, sizes, positions)))
    return out


def _each(sizes: Sizes, rows: Sequence[int], way: Callable[..., Any], **options: Any) -> Calls:
    return [partial(way, *inputs, scale=sizes.scale, **options) for inputs in _inputs(sizes, len(rows))]


def _inputs(sizes: Sizes, rows: int) -> list[Inputs]:
    """As many sets as our own kernel has."""
    query = sizes.random(1, sizes.heads, rows, sizes.head_dim, salt=99)
    shape = (1, sizes.kv_heads, sizes.tokens, sizes.head_dim)
    return [
        (query, sizes.random(*shape, salt=2 * i), sizes.random(*shape, salt=2 * i + 1))
        for i in range(sizes.sets)
    ]


def _transformers_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """As a model of transformers calls it, without a mask in a prefill."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    groups = query.shape[1] // key.shape[1]
    module = SimpleNamespace(is_causal=True, num_key_value_groups=groups, training=False)
    out: torch.Tensor = sdpa_attention_forward(module, query, key, value, mask, scaling=scale)[0]
    return out


def _forced(
    backend: SDPBackend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float
) -> torch.Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)


def _masked(sizes: Sizes, positions: Sequence[int]) -> Calls:
    at = torch.tensor(positions, device=sizes.device)
    mask = torch.arange(sizes.tokens, device=sizes.device) <= at[:, None]
    return _each(sizes, positions, _transformers_sdpa, mask=mask[None, None])


def _flex_mask(sizes: Sizes, positions: Sequence[int]) -> Callable[[], Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    at = torch.tensor(positions, device=sizes.device)

    def seen(_batch: Any, _head: Any, row: Any, column: Any) -> Any:
        return column <= at[row]

    make: Any = torch.compile(create_block_mask)
    return partial(make, seen, None, None, len(positions), sizes.tokens, device=sizes.device)


def _flex(sizes: Sizes, positions: Sequence[int]) -> Calls:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Any = torch.compile(flex_attention, dynamic=False)
    block_mask = _flex_mask(sizes, positions)()
    return _each(sizes, positions, compiled, block_mask=block_mask, enable_gqa=True)

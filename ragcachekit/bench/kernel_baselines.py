"""What ``bench kernels`` compares attention with: torch's own attentions, full and for chosen rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ragcachekit.bench.kernel_cases import Sizes


@dataclass(frozen=True, eq=False)
class Baseline:
    """Another way to the same rows, or to all rows.

    Attributes
    ----------
    name : str
    call : callable
        Gives ``[1, heads, rows, head_dim]`` or ``[1, rows, heads, head_dim]``, or nothing where only the
        preparation is timed.
    prepares : bool
        Whether this is what must be done once per prompt before the calls named alike.
    """

    name: str
    call: Callable[[], Any]
    prepares: bool = False


def full_baselines(sizes: Sizes) -> Iterator[Baseline]:
    """Causal attention of all rows: what an ordinary prefill does in every layer."""
    query, key, value = _inputs(sizes, sizes.tokens)
    yield Baseline("transformers sdpa, all rows", partial(_transformers_sdpa, query, key, value, sizes.scale))
    if sizes.device.type == "cuda":
        for name, backend in (
            ("flash", SDPBackend.FLASH_ATTENTION),
            ("cudnn", SDPBackend.CUDNN_ATTENTION),
        ):
            yield Baseline(f"{name}, all rows", partial(_forced, backend, query, key, value, sizes.scale))


def row_baselines(sizes: Sizes, positions: Sequence[int]) -> Iterator[Baseline]:
    """Attention of the given rows alone, masked by their positions."""
    query, key, value = _inputs(sizes, len(positions))
    at = torch.tensor(positions, device=sizes.device)
    mask = torch.arange(sizes.tokens, device=sizes.device) <= at[:, None]
    masked = partial(
        scaled_dot_product_attention, query, key, value, mask[None, None], scale=sizes.scale, enable_gqa=True
    )
    yield Baseline("sdpa with a mask", masked)
    if sizes.device.type == "cuda":
        yield from _flex(sizes, query, key, value, at)


def _flex(
    sizes: Sizes, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, at: torch.Tensor
) -> Iterator[Baseline]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def seen(_batch: Any, _head: Any, row: Any, column: Any) -> Any:
        return column <= at[row]

    make: Any = torch.compile(create_block_mask)
    prepare = partial(make, seen, None, None, len(at), sizes.tokens, device=sizes.device)
    yield Baseline("flex mask", prepare, prepares=True)
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    yield Baseline(
        "flex",
        partial(compiled, query, key, value, block_mask=prepare(), scale=sizes.scale, enable_gqa=True),
    )


def _inputs(sizes: Sizes, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    key, value = (sizes.random(1, sizes.kv_heads, sizes.tokens, sizes.head_dim, salt=salt) for salt in (0, 1))
    return sizes.random(1, sizes.heads, rows, sizes.head_dim, salt=99), key, value


def _transformers_sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """As a model of transformers calls it in a prefill without a mask."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module = SimpleNamespace(
        is_causal=True, num_key_value_groups=query.shape[1] // key.shape[1], training=False
    )
    out: torch.Tensor = sdpa_attention_forward(module, query, key, value, None, scaling=scale)[0]
    return out


def _forced(
    backend: SDPBackend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)

"""The kernels that ``bench kernels`` measures, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ragcachekit.bench.kernel_assembly import assembly_cases
from ragcachekit.bench.kernel_attention import attention_cases
from ragcachekit.bench.kernel_checks import Case
from ragcachekit.bench.kernel_scores import deviation_cases, score_cases
from ragcachekit.bench.kernel_sizes import Sizes

KERNELS: dict[str, Callable[[Sizes], Iterator[Case]]] = {
    "sparse_attention": attention_cases,
    "column_scores": score_cases,
    "assembly": assembly_cases,
    "kv_deviation": deviation_cases,
}
"""By name; each makes its inputs when it is asked for the next case."""

"""The kernels that ``bench kernels`` measures, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.kernels.assembly import assembly_cases
from benchmarks.kernels.attention import attention_cases
from benchmarks.kernels.checks import Case
from benchmarks.kernels.scores import score_cases
from benchmarks.kernels.sizes import Sizes

KERNELS: dict[str, Callable[[Sizes], Iterator[Case]]] = {
    "sparse_attention": attention_cases,
    "column_scores": score_cases,
    "assembly": assembly_cases,
}
"""By name; each makes its inputs when it is asked for the next case."""

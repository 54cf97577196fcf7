"""Public functions and types of the kernels: callers import from here and nowhere else."""

from __future__ import annotations

from ragcachekit_kernels import reference
from ragcachekit_kernels.attention import attention as attending
from ragcachekit_kernels.attention import tune
from ragcachekit_kernels.backend import uses_triton as uses_triton
from ragcachekit_kernels.options import AttentionOptions as AttentionOptions
from ragcachekit_kernels.placement import moving
from ragcachekit_kernels.placement.planes import Assembly as Assembly
from ragcachekit_kernels.placement.planes import ChunkTensors as ChunkTensors
from ragcachekit_kernels.placement.planes import Place as Place
from ragcachekit_kernels.placement.planes import Plane as Plane
from ragcachekit_kernels.placement.planes import Table as Table
from ragcachekit_kernels.rows import DeviceRows as DeviceRows
from ragcachekit_kernels.rows import KVTable as KVTable
from ragcachekit_kernels.rows import Rows as Rows
from ragcachekit_kernels.scores import scoring
from ragcachekit_kernels.spans import Spans as Spans

rotate = reference.rotate
sparse_attention = attending.sparse_attention
sparse_attention_lse = attending.sparse_attention_lse
sparse_attention_at = attending.sparse_attention_at
attention_choice = attending.attention_choice
tune_attention = tune.tune_attention
column_scores = scoring.column_scores
context_mass = scoring.context_mass
kv_deviation = scoring.kv_deviation
span_sums = scoring.span_sums
scoring_choice = scoring.scoring_choice
assembly = moving.assembly
assemble = moving.assemble
disassemble = moving.disassemble
scatter = moving.scatter
scatter_at = moving.scatter_at
moving_choice = moving.moving_choice

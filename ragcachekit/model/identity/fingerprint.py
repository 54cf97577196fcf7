"""Fingerprint of a model: a digest of all that changes KV values."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ragcachekit.model.identity.guard import adapter_values
from ragcachekit.model.identity.weights_digest import FileDigests, hash_tensor, source_digest, state_digest

KV_SCHEMA = 6  # version of stored KV; raised when KV is stored in another form or computed otherwise

_TOKENIZER = (
    "bos_token",
    "all_special_tokens",
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "legacy",
)
# Configuration fields that change no KV value. All others count: a needless difference costs a miss,
# an overlooked one would serve wrong KV.
_HARMLESS = frozenset(
    {
        *("architectures", "auto_map", "transformers_version", "tokenizer_class"),
        *("id2label", "label2id", "problem_type", "initializer_range"),
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states"),
        *("dtype", "torch_dtype", "quantization_config"),  # parts of their own
    }
)
_ADAPTER_PATHS = frozenset({"base_model_name_or_path", "inference_mode", "revision", "task_type"})
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fingerprint:
    """Identity of a model as far as KV values go."""

    digest: str  # SHA-256 over the parts, as hex; part of every KV key
    parts: dict[str, str]  # by name, e.g. ``weights`` or ``rope``: a digest or a short text

    def __str__(self) -> str:
        return self.digest


def fingerprint(
    model: nn.Module,
    tokenizer: Any = None,
    *,
    source: Path | str | None = None,
    cache: Path | None = None,
) -> Fingerprint:
    """Digest everything that changes the model's KV values.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Its state dict is streamed through SHA-256 unless ``source`` serves.
    tokenizer : transformers tokenizer, optional
        Everything that turns text into ids counts; chat template, padding and truncation do not.
    source : path, optional
        Local folder of safetensors files that the model was loaded from **just now, unmodified**. They are
        hashed instead if they hold every tensor of the state dict and no adapter is attached. The two ways
        give different fingerprints for the same weights, which only costs misses.
    cache : path, optional
        JSON file of file digests (:class:`~ragcachekit.model.identity.weights_digest.FileDigests`).

    Raises
    ------
    ModelNotSupported
        If the weights cannot be read (offloaded to the meta device, opaque tensor types).
    """
    config: Any = getattr(model, "config", None)
    adapter = _adapter(model)
    parts = {
        "schema": str(KV_SCHEMA),
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "weights": _weights(model, source if adapter == "none" else None, cache),
        "adapter": adapter,
        "tokenizer": _tokenizer(tokenizer),
        "rope": _digest(_rotary_buffers(model)),
        "dtype": _dtypes(model),
        "quantization": _quantization(model, config),
        "config": _digest(_without(_plain(config), _is_harmless)),
    }
    return Fingerprint(_digest(parts), parts)


def _weights(model: nn.Module, source: Path | str | None, cache: Path | None) -> str:
    if source is not None and Path(source).is_dir():
        digest = source_digest(model, Path(source), FileDigests(cache))
        if digest is not None:
            return f"files:{digest}"
        _log.info("the files in %s do not hold the weights as loaded; hashing the loaded weights", source)
    return f"state:{state_digest(model)}"


def _adapter(model: nn.Module) -> str:
    acting = [(name, adapter_values(module)) for name, module in model.named_modules()]
    acting = [(name, values) for name, values in acting if values]
    configs = getattr(model, "peft_config", None)
    if not acting and not configs:
        return "none"
    return _digest([acting, _without(_plain(configs), _ADAPTER_PATHS.__contains__)])


def _tokenizer(tokenizer: Any) -> str:
    if tokenizer is None:
        return "none"
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if hasattr(backend, "to_str"):
        content = json.loads(backend.to_str())
        # Calls with padding= or truncation= change these in the backend.
        content = {k: v for k, v in content.items() if k not in ("padding", "truncation")}
    else:
        content = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else None
    return _digest(
        [
            type(tokenizer).__qualname__,
            content,
            {name: _plain(getattr(tokenizer, name, None)) for name in _TOKENIZER},
        ]
    )


def _rotary_buffers(model: nn.Module) -> dict[str, str]:
    """Digests of the frequencies; of the original ones where dynamic scaling rewrites them."""
    buffers = {name: b for name, b in model.named_buffers() if name.endswith("inv_freq")}
    digests: dict[str, str] = {}
    for name, buffer in buffers.items():
        head, _, tail = name.rpartition("inv_freq")
        if f"{head}original_inv_freq{tail}" not in buffers:
            hasher = hashlib.sha256()
            hash_tensor(hasher, buffer, name)
            digests[name] = f"{buffer.dtype} {hasher.hexdigest()}"
    return digests


def _dtypes(model: nn.Module) -> str:
    dtypes = {name: str(p.dtype).removeprefix("torch.") for name, p in model.named_parameters()}
    kinds = sorted(set(dtypes.values()))
    return "".join(kinds) if len(kinds) == 1 else f"{'+'.join(kinds)} {_digest(dtypes)}"


def _quantization(model: nn.Module, config: Any) -> str:
    settings = getattr(config, "quantization_config", None)
    quantizer = getattr(model, "hf_quantizer", None)
    if settings is None and quantizer is None:
        return "none"
    return _digest([type(quantizer).__qualname__, _plain(settings)])


def _plain(value: Any) -> Any:
    """JSON data that is equal in every process (no addresses, no set order)."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_plain(v), sort_keys=True) for v in value)
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict())
    text = str(value)
    return type(value).__qualname__ if " at 0x" in text else text


def _is_harmless(name: str) -> bool:
    return name in _HARMLESS or name.startswith("_") or name.endswith("_token_id")


def _without(value: Any, drop: Callable[[str], bool]) -> Any:
    if isinstance(value, dict):
        return {k: _without(v, drop) for k, v in value.items() if not drop(k)}
    return value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

"""Identity of a model: a digest of all that changes KV values, and a guard against later changes."""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ragcachekit.errors import ModelNotSupported

PIECE_BYTES = 32 << 20  # largest copy of weights held at a time, in bytes

KV_SCHEMA = 6  # version of stored KV; raised when KV is stored in another form or computed otherwise

_TOKENIZER = (
    *("bos_token", "all_special_tokens"),
    *("add_bos_token", "add_eos_token", "add_prefix_space", "legacy"),
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


class Fingerprint(NamedTuple):
    """Identity of a model as far as KV values go."""

    digest: str  # SHA-256 over the parts, as hex; part of every KV key
    parts: dict[str, str]  # by name, e.g. ``weights`` or ``rope``: a digest or a short text


def fingerprint(model: nn.Module, tokenizer: Any = None) -> Fingerprint:
    """Digest everything that changes the model's KV values.

    Of the ``tokenizer`` everything counts that turns text into ids; chat template, padding and truncation do
    not. ModelNotSupported if the weights cannot be read (meta device, opaque tensor types).
    """
    config: Any = getattr(model, "config", None)
    parts = {
        "schema": str(KV_SCHEMA),
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "weights": state_digest(model),
        "adapter": _adapter(model),
        "tokenizer": _tokenizer(tokenizer),
        "rope": _digest(_rotary_buffers(model)),
        "dtype": _dtypes(model),
        "quantization": _quantization(model, config),
        "config": _digest(_without(_plain(config), _is_harmless)),
    }
    return Fingerprint(_digest(parts), parts)


def _adapter(model: nn.Module) -> str:
    every = ((name, adapter_values(module)) for name, module in model.named_modules())
    acting, configs = [one for one in every if one[1]], getattr(model, "peft_config", None)
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
    settings = {name: _plain(getattr(tokenizer, name, None)) for name in _TOKENIZER}
    return _digest([type(tokenizer).__qualname__, content, settings])


def _rotary_buffers(model: nn.Module) -> dict[str, str]:
    """Digests of the frequencies; of the original ones where dynamic scaling rewrites them."""
    buffers = {name: b for name, b in model.named_buffers() if name.endswith("inv_freq")}
    digests: dict[str, str] = {}
    for name, buffer in buffers.items():
        if f"{name.removesuffix('inv_freq')}original_inv_freq" not in buffers:
            hash_tensor(hasher := hashlib.sha256(), buffer, name)
            digests[name] = f"{buffer.dtype} {hasher.hexdigest()}"
    return digests


def _dtypes(model: nn.Module) -> str:
    dtypes = {name: str(p.dtype).removeprefix("torch.") for name, p in model.named_parameters()}
    kinds = sorted(set(dtypes.values()))
    return "".join(kinds) if len(kinds) == 1 else f"{'+'.join(kinds)} {_digest(dtypes)}"


def _quantization(model: nn.Module, config: Any) -> str:
    settings, quantizer = getattr(config, "quantization_config", None), getattr(model, "hf_quantizer", None)
    is_quantised = settings is not None or quantizer is not None
    return _digest([type(quantizer).__qualname__, _plain(settings)]) if is_quantised else "none"


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


# -- the weights --------------------------------------------------------------------------------------


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
    if sum(tensor.numel() for _, tensor in tensors.values()) < PIECE_BYTES:
        lines += map(_tensor_digest, tensors.values())  # quicker than threads can be started
    else:
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


# -- changes after the fingerprint was taken -----------------------------------------------------------

ADAPTER_FIELDS = ("_active_adapter", "active_adapter", "active_adapters")
_LAYER_FIELDS = ("merged_adapters", "_disable_adapters", "scaling")
_CONFIG_FIELDS = (
    *("rope_parameters", "rope_scaling", "sliding_window", "layer_types"),
    *("_attn_implementation", "quantization_config"),
)
_ROOT_FIELDS = (*ADAPTER_FIELDS, "_hf_peft_config_loaded")
_SAMPLES = 8


class ModelGuard:
    """Cheap probe of a model: compare ``state()`` at each request, about 90 µs for 30 layers on one core.

    Detected: in-place writes to parameters or persistent buffers (by torch's version counters); tensors and
    submodules replaced, moved, cast, added or removed; adapters switched, disabled, rescaled or merged
    (peft); another configuration, or a change of its RoPE, sliding window, layer types, quantisation or
    attention implementation; train mode.

    Not detected: writes through ``.data``, NumPy views, foreign kernels or shared memory; in-place writes to
    weights loaded inside ``torch.inference_mode``; rotary buffers; hooks; a patched ``forward``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._children: list[dict[str, nn.Module | None]] = []
        self._slots: list[tuple[Mapping[str, torch.Tensor | None], str]] = []
        self._adapters: list[tuple[nn.Module, tuple[str, ...]]] = []
        for module in model.modules():
            self._follow(module)
        step = max(1, len(self._slots) // _SAMPLES)
        self._sampled = self._slots[::step]
        config: Any = getattr(model, "config", None)
        self._config = config.get_text_config() if hasattr(config, "get_text_config") else config

    def state(self) -> str:
        """Hash that stays equal, within this process, until a change is detected."""
        children = [tuple(map(id, d.values())) for d in self._children]
        tensors: list[Any] = [d.get(name) for d, name in self._slots]
        try:  # the fast way: every request runs this
            versions = [tensor._version for tensor in tensors]
        except (AttributeError, RuntimeError):  # removed, or without a version counter
            versions = list(map(_version, tensors))
        placed = [_placement(d.get(name)) for d, name in self._sampled]
        adapters = repr([[getattr(module, name, None) for name in names] for module, names in self._adapters])
        fields = repr([getattr(self._config, name, None) for name in _CONFIG_FIELDS])
        model = self._model()
        assert model is not None, "the caller holds the model"
        own = vars(model)
        root = repr([own.get(name) for name in _ROOT_FIELDS]), tuple(own.get("peft_config") or ())
        rest = (adapters, fields, root, id(own.get("config")), model.training)
        return f"{hash((*children, *map(id, tensors), *versions, *placed, *rest)) & (1 << 64) - 1:016x}"

    def _follow(self, module: nn.Module) -> None:
        if module._modules:
            self._children.append(module._modules)
        transient = module._non_persistent_buffers_set
        self._slots += ((module._parameters, n) for n, p in module._parameters.items() if p is not None)
        self._slots += ((module._buffers, n) for n in module._buffers if n not in transient)
        if names := adapter_fields(module):
            self._adapters.append((module, names))


def adapter_fields(module: nn.Module) -> tuple[str, ...]:
    """Names of the module's attributes that define its adapters and their state."""

    def readable(names: tuple[str, ...]) -> tuple[str, ...]:
        # Not methods: transformers' method of this name raises where no adapter is loaded.
        own, kind = vars(module), type(module)
        return tuple(n for n in names if n in own or isinstance(getattr(kind, n, None), property))

    return (*names, *readable(_LAYER_FIELDS)) if (names := readable(ADAPTER_FIELDS)) else ()


def adapter_values(module: nn.Module) -> list[tuple[str, str]]:
    """The module's adapter attributes and their values as text; empty where it has none."""
    return [(name, repr(getattr(module, name, None))) for name in adapter_fields(module)]


def _version(tensor: torch.Tensor | None) -> int:
    try:
        return -1 if tensor is None else tensor._version
    except RuntimeError:  # an inference tensor
        return -1


def _placement(tensor: torch.Tensor | None) -> tuple[object, ...]:
    if tensor is None:
        return ()
    try:
        return (tensor.data_ptr(), tensor.dtype, tensor.device)
    except RuntimeError:  # tensor subclasses without storage
        return (tensor.dtype, tensor.device)

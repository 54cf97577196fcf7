"""Detection, at every request, of changes of a model after its fingerprint was taken."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

ADAPTER_FIELDS = ("_active_adapter", "active_adapter", "active_adapters")
_LAYER_FIELDS = ("merged_adapters", "_disable_adapters", "scaling")
_CONFIG_FIELDS = (
    "rope_parameters",
    "rope_scaling",
    "sliding_window",
    "layer_types",
    "_attn_implementation",
    "quantization_config",
)
_ROOT_FIELDS = (*ADAPTER_FIELDS, "_hf_peft_config_loaded")
_SAMPLES = 8


class ModelGuard:
    """Cheap probe of a model's identity: compare ``state()`` at each request.

    ``state()`` takes about 90 µs for 30 layers on one slow core. The model is referenced weakly.

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
        tensors = self._identities()
        placed = [_placement(d.get(name)) for d, name in self._sampled]
        adapters = repr([[getattr(module, name, None) for name in names] for module, names in self._adapters])
        fields = repr([getattr(self._config, name, None) for name in _CONFIG_FIELDS])
        model = self._model()
        assert model is not None, "the caller holds the model"
        own = vars(model)
        root = repr([own.get(name) for name in _ROOT_FIELDS]), tuple(own.get("peft_config") or ())
        rest = (adapters, fields, root, id(own.get("config")), model.training)
        return f"{hash((*children, *tensors, *placed, *rest)) & (1 << 64) - 1:016x}"

    def _identities(self) -> list[int]:
        try:  # the fast way: every request runs this
            tensors: list[Any] = [d[name] for d, name in self._slots]
            return [*map(id, tensors), *[tensor._version for tensor in tensors]]
        except (KeyError, AttributeError, RuntimeError):  # removed, None, or without a version counter
            tensors = [d.get(name) for d, name in self._slots]
            return [*map(id, tensors), *map(_version, tensors)]

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
    names = [n for n in ADAPTER_FIELDS if _readable(module, n)]
    return (*names, *(n for n in _LAYER_FIELDS if _readable(module, n))) if names else ()


def adapter_values(module: nn.Module) -> list[tuple[str, str]]:
    """The module's adapter attributes and their values as text; empty where it has none."""
    return [(name, repr(getattr(module, name, None))) for name in adapter_fields(module)]


def _readable(module: nn.Module, name: str) -> bool:
    # Not methods: transformers' method of this name raises where no adapter is loaded.
    return name in vars(module) or isinstance(getattr(type(module), name, None), property)


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

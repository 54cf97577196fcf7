"""The watch notices what it says it notices, stays still otherwise, and its blind spots are as stated."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ragcachekit.model.identity import ModelGuard


class Adapter(nn.Module):
    """The attributes that peft gives to its layers; set_adapter assigns ``_active_adapter``."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self._active_adapter = ["default"]
        self.merged_adapters: list[str] = []
        self._disable_adapters = False
        self.scaling = {"default": 2.0}

    @property
    def active_adapters(self) -> list[str]:
        return self._active_adapter

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.base_layer(rows)


@pytest.fixture
def model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    scaling = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, rope_parameters=scaling)
    config.max_position_embeddings = 16
    model = LlamaForCausalLM(config).eval()
    attention = model.model.layers[1].self_attn
    attention.o_proj = Adapter(attention.o_proj)
    return model


def layer(model):
    return model.model.layers[1]


def adapter(model):
    return layer(model).self_attn.o_proj


def write_in_place(model) -> None:
    with torch.no_grad():
        layer(model).mlp.up_proj.weight[0, 0] += 1


def write_in_inference_mode(model) -> None:
    with torch.inference_mode():
        layer(model).input_layernorm.weight.mul_(2)


def optimizer_step(model) -> None:
    parameter = model.model.layers[0].self_attn.k_proj.weight
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.1).step()


def replace_module(model) -> None:
    old = layer(model).self_attn.v_proj
    layer(model).self_attn.v_proj = copy.deepcopy(old)


def replace_parameter(model) -> None:
    model.model.norm.weight = nn.Parameter(model.model.norm.weight.clone())


def merge(model) -> None:
    adapter(model).base_layer.weight.data += 1
    adapter(model).merged_adapters.append("default")


def set_(name: str, value: object):
    def change(model) -> None:
        setattr(adapter(model), name, value)

    change.__name__ = f"set {name}"
    return change


def configure(name: str, value: object):
    def change(model) -> None:
        setattr(model.config, name, value)

    change.__name__ = f"configure {name}"
    return change


def change_theta_in_place(model) -> None:
    model.config.rope_parameters["rope_theta"] = 2e4


def replace_config(model) -> None:
    model.config = copy.deepcopy(model.config)


def load_adapter_on_the_model(model) -> None:
    model.peft_config = {"default": object()}


NOTICED = [
    write_in_place,
    write_in_inference_mode,
    optimizer_step,
    replace_module,
    replace_parameter,
    merge,
    set_("_active_adapter", ["other"]),
    set_("_disable_adapters", True),
    set_("scaling", {"default": 1.0}),
    configure("_attn_implementation", "eager"),
    configure("sliding_window", 8),
    change_theta_in_place,
    replace_config,
    load_adapter_on_the_model,
    lambda model: model.load_state_dict(model.state_dict()),
    lambda model: model.half(),
    lambda model: model.train(),
    lambda model: layer(model).mlp.register_module("extra", nn.Linear(2, 2)),
    lambda model: setattr(layer(model).self_attn, "o_proj", adapter(model).base_layer),
    lambda model: setattr(model, "active_adapter", "other"),
]


@pytest.mark.parametrize("change", NOTICED, ids=lambda change: change.__name__)
def test_changes_are_noticed(model, change) -> None:
    guard = ModelGuard(model)
    before = guard.state()
    assert guard.state() == before
    change(model)
    after = guard.state()
    assert after != before
    assert guard.state() == after


def test_every_replaced_parameter_is_noticed_whatever_its_version(model) -> None:
    guard = ModelGuard(model)
    for name, old in list(model.named_parameters()):
        before = guard.state()
        new = nn.Parameter(old.detach().clone())
        with torch.no_grad():
            while new._version < old._version:
                new.copy_(old)
        assert new._version == old._version
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, new)
        assert guard.state() != before, name


def test_using_the_model_is_no_change(model) -> None:
    guard = ModelGuard(model)
    before = guard.state()
    with torch.no_grad():
        model(torch.arange(12)[None])
        model(torch.arange(40)[None])  # beyond the context: the dynamic frequencies are rewritten
        model(torch.arange(12)[None])
    model.generate(torch.arange(5)[None], max_new_tokens=3, do_sample=False, pad_token_id=0)
    model.state_dict()
    assert guard.state() == before


def test_another_model_with_equal_weights_is_another(model) -> None:
    twin = copy.deepcopy(model)
    assert ModelGuard(model).state() == ModelGuard(model).state()
    assert ModelGuard(twin).state() != ModelGuard(model).state()


def test_weights_as_persistent_buffers_are_watched() -> None:
    module = nn.Module()
    module.register_buffer("qweight", torch.zeros(4, dtype=torch.int32))
    module.register_buffer("scratch", torch.zeros(4), persistent=False)
    guard = ModelGuard(module)
    before = guard.state()
    module.scratch.add_(1)
    assert guard.state() == before
    module.qweight.add_(1)
    assert guard.state() != before


def test_the_stated_blind_spots_are_real(model) -> None:
    guard = ModelGuard(model)
    before = guard.state()
    model.model.norm.weight.data.add_(1)
    assert guard.state() == before
    with torch.inference_mode():
        loaded = nn.Linear(3, 3)
        guard = ModelGuard(loaded)
        before = guard.state()
        loaded.weight.add_(1)
    assert guard.state() == before

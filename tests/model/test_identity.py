"""The fingerprint differs for all that changes KV values; the guard notices later changes of a model."""

import copy

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ragcachekit.errors import ModelNotSupported
from ragcachekit.model import identity as weights_digest
from ragcachekit.model.identity import ModelGuard, fingerprint


def tiny(seed: int = 0, **changes) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **changes})).eval()


def tokenizer(*words: str, **options) -> PreTrainedTokenizerFast:
    backend = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(["<unk>", *words])}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **options)


def changed(before, after) -> set[str]:
    names = {*before.parts, *after.parts}
    found = {name for name in names if before.parts.get(name) != after.parts.get(name)}
    assert (before.digest != after.digest) == bool(found)
    return found


@pytest.fixture
def saved(tmp_path):
    tiny().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_equal_models_have_equal_fingerprints(saved) -> None:
    first, second = (LlamaForCausalLM.from_pretrained(saved) for _ in range(2))
    assert fingerprint(first) == fingerprint(second)
    assert fingerprint(first).digest == fingerprint(tiny()).digest
    assert len(fingerprint(first).digest) == 64


def test_one_bit_of_one_weight_counts() -> None:
    model = tiny()
    before = fingerprint(model)
    with torch.no_grad():
        bits = model.model.layers[1].self_attn.v_proj.weight.view(torch.int32)
        bits[3, 5] ^= 1
    assert changed(before, fingerprint(model)) == {"weights"}


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"rope", "config"}),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, {"rope", "config"}),
        ({"rms_norm_eps": 1e-5}, {"config"}),
        ({"hidden_act": "gelu"}, {"config"}),
        ({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}, {"config", "rope"}),
        ({"use_cache": False, "bos_token_id": 7, "architectures": ["X"]}, set()),
    ],
)
def test_configuration_that_changes_kv_counts(change, parts) -> None:
    model, other = tiny(), tiny(**change)
    other.load_state_dict(model.state_dict())
    assert changed(fingerprint(model), fingerprint(other)) == parts


def test_dtype_counts(saved) -> None:
    in_float32 = fingerprint(LlamaForCausalLM.from_pretrained(saved, dtype=torch.float32))
    in_bfloat16 = fingerprint(LlamaForCausalLM.from_pretrained(saved, dtype=torch.bfloat16))
    assert "dtype" in changed(in_float32, in_bfloat16)
    assert changed(fingerprint(tiny()), fingerprint(tiny().to(torch.bfloat16))) >= {"dtype", "weights"}
    mixed = [tiny(), tiny()]
    mixed[0].model.layers[0].to(torch.float64)
    mixed[1].model.layers[1].to(torch.float64)
    assert "dtype" in changed(fingerprint(mixed[0]), fingerprint(mixed[1]))


def test_changed_rotary_frequencies_count_and_dynamic_ones_do_not_drift() -> None:
    model = tiny()
    before = fingerprint(model)
    model.model.rotary_emb.original_inv_freq.mul_(1.5)
    assert changed(before, fingerprint(model)) == {"rope"}
    scaling = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    dynamic = tiny(rope_parameters=scaling, max_position_embeddings=16)
    before = fingerprint(dynamic)
    frequencies = dynamic.model.rotary_emb.inv_freq.clone()
    dynamic(torch.arange(40)[None], past_key_values=DynamicCache())
    assert not torch.equal(dynamic.model.rotary_emb.inv_freq, frequencies)
    assert fingerprint(dynamic) == before


def test_model_class_and_quantisation_count() -> None:
    class Renamed(LlamaForCausalLM):
        pass

    model = tiny()
    other = Renamed(model.config)
    other.load_state_dict(model.state_dict())
    assert changed(fingerprint(model), fingerprint(other)) == {"model"}
    quantised = tiny()
    quantised.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    assert changed(fingerprint(model), fingerprint(quantised)) == {"quantization"}


def test_tokenizer_vocabulary_counts_and_its_template_and_padding_do_not() -> None:
    model = tiny()
    words = tokenizer("a", "b", "c")
    before = fingerprint(model, words)
    assert changed(before, fingerprint(model, tokenizer("a", "c", "b"))) == {"tokenizer"}
    assert changed(before, fingerprint(model)) == {"tokenizer"}
    assert changed(before, fingerprint(model, tokenizer("a", "b", "c", bos_token="a"))) == {"tokenizer"}
    words.chat_template = "{{ messages }}"
    words.pad_token = "<unk>"
    words(["a", "a b"], padding=True, truncation=True, max_length=2)
    assert fingerprint(model, words) == before


class LoraLike(nn.Module):
    """The attributes that peft gives to its layers."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self._active_adapter = ["default"]
        self.merged_adapters: list[str] = []
        self._disable_adapters = False
        self.scaling = {"default": 2.0}

    @property
    def active_adapters(self) -> list[str]:
        return self._active_adapter

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.base_layer(rows)


def adapted(seed: int = 1) -> LlamaForCausalLM:
    model = tiny()
    torch.manual_seed(seed)
    attention = model.model.layers[0].self_attn
    attention.q_proj = LoraLike(attention.q_proj)
    return model


@pytest.mark.parametrize(
    "change",
    [
        {"_active_adapter": ["other"]},
        {"_disable_adapters": True},
        {"scaling": {"default": 1.0}},
        {"merged_adapters": ["default"]},
    ],
)
def test_which_adapter_acts_counts(change) -> None:
    model = adapted()
    before = fingerprint(model)
    assert before == fingerprint(adapted())
    for name, value in change.items():
        setattr(model.model.layers[0].self_attn.q_proj, name, value)
    assert changed(before, fingerprint(model)) == {"adapter"}


def test_adapter_weights_and_configuration_count() -> None:
    assert changed(fingerprint(adapted()), fingerprint(adapted(seed=2))) == {"weights"}
    assert changed(fingerprint(tiny()), fingerprint(adapted())) == {"weights", "adapter"}
    model = adapted()
    before = fingerprint(model)
    model.peft_config = {"default": {"r": 2, "use_rslora": True, "base_model_name_or_path": "x"}}
    with_config = fingerprint(model)
    assert changed(before, with_config) == {"adapter"}
    model.peft_config["default"]["base_model_name_or_path"] = "y"
    assert fingerprint(model) == with_config


class Recorder:
    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.content = bytearray()

    def update(self, data) -> None:
        raw = bytes(data)
        self.sizes.append(len(raw))
        self.content += raw


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("shape", [(40, 30), (7,), (), (0, 4), (3, 5, 11)])
def test_tensors_are_streamed_in_small_pieces(monkeypatch, dtype, shape) -> None:
    monkeypatch.setattr(weights_digest, "PIECE_BYTES", 256)
    torch.manual_seed(0)
    tensor = (torch.randn(shape) * 3).to(dtype)
    recorder = Recorder()
    weights_digest.hash_tensor(recorder, tensor)
    assert recorder.content == bytes(tensor.flatten().view(torch.uint8).tolist())
    assert max(recorder.sizes, default=0) <= 256


def test_names_and_shapes_count_beside_bytes() -> None:
    def holder(**tensors: torch.Tensor) -> nn.Module:
        module = nn.Module()
        for name, tensor in tensors.items():
            module.register_buffer(name, tensor)
        return module

    values = torch.arange(6.0)
    digests = [
        weights_digest.state_digest(holder(a=values.clone(), b=values.clone())),
        weights_digest.state_digest(holder(a=values.clone(), c=values.clone())),
        weights_digest.state_digest(holder(a=values.clone().reshape(2, 3), b=values.clone())),
        weights_digest.state_digest(holder(a=torch.cat([values, values]), b=torch.zeros(0))),
        weights_digest.state_digest(holder(a=values.clone().view(torch.int32), b=values.clone())),
    ]
    assert len(set(digests)) == len(digests)


class Packed(nn.Module):
    """Weights inside an extra state, as those of packed and quantised layers."""

    def __init__(self, last: float) -> None:
        super().__init__()
        self.weights = torch.zeros(5000)
        self.weights[2500] = last

    def get_extra_state(self) -> object:
        return {"packed": (self.weights, None, "qint8")}


def test_every_weight_of_an_extra_state_counts() -> None:
    one, same, other = map(weights_digest.state_digest, (Packed(0.0), Packed(0.0), Packed(1.0)))
    assert one == same != other


def test_weights_that_are_not_here_are_refused_by_name() -> None:
    model = tiny()
    model.model.layers[1].mlp.to("meta")
    with pytest.raises(ModelNotSupported, match=r"layers\.1\.mlp.*meta device"):
        fingerprint(model)


@pytest.fixture
def model() -> LlamaForCausalLM:
    scaling = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = tiny(rope_parameters=scaling, max_position_embeddings=16)
    attention = model.model.layers[1].self_attn
    attention.o_proj = LoraLike(attention.o_proj)
    return model


def layer(model):
    return model.model.layers[1]


def adapter(model):
    return layer(model).self_attn.o_proj


def write_in_place(model) -> None:
    with torch.no_grad():
        layer(model).mlp.up_proj.weight[0, 0] += 1


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


def change_theta_in_place(model) -> None:
    model.config.rope_parameters["rope_theta"] = 2e4


NOTICED = [
    write_in_place,
    optimizer_step,
    replace_module,
    replace_parameter,
    merge,
    lambda model: setattr(adapter(model), "_active_adapter", ["other"]),
    lambda model: setattr(adapter(model), "_disable_adapters", True),
    lambda model: setattr(adapter(model), "scaling", {"default": 1.0}),
    lambda model: setattr(model.config, "_attn_implementation", "eager"),
    lambda model: setattr(model.config, "sliding_window", 8),
    change_theta_in_place,
    lambda model: setattr(model, "config", copy.deepcopy(model.config)),
    lambda model: setattr(model, "peft_config", {"default": object()}),
    lambda model: model.load_state_dict(model.state_dict()),
    lambda model: model.half(),
    lambda model: model.train(),
    lambda model: layer(model).mlp.register_module("extra", nn.Linear(2, 2)),
    lambda model: setattr(layer(model).self_attn, "o_proj", adapter(model).base_layer),
    lambda model: setattr(model, "active_adapter", "other"),
]


@pytest.mark.parametrize("change", NOTICED)
def test_changes_are_noticed(model, change) -> None:
    guard = ModelGuard(model)
    before = guard.state()
    assert guard.state() == before
    change(model)
    after = guard.state()
    assert after != before
    assert guard.state() == after


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

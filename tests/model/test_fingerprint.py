"""The fingerprint: equal for equal models, different for everything that changes KV values."""

from __future__ import annotations

import copy
import hashlib
import json
import os

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ragcachekit.errors import ModelNotSupported
from ragcachekit.model import weights as weights_digest
from ragcachekit.model.identity import fingerprint


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


def test_equal_models_have_equal_fingerprints_by_their_files(saved, tmp_path) -> None:
    tiny().save_pretrained(tmp_path / "copy", max_shard_size="20KB")
    assert (tmp_path / "copy" / "model.safetensors.index.json").exists()
    prints = [fingerprint(LlamaForCausalLM.from_pretrained(saved), source=saved) for _ in range(2)]
    sharded = fingerprint(LlamaForCausalLM.from_pretrained(tmp_path / "copy"), source=tmp_path / "copy")
    assert prints[0] == prints[1]
    assert prints[0].parts["weights"].startswith("files:")
    assert sharded.parts["weights"].startswith("files:")
    assert changed(prints[0], sharded) == {"weights"}


def test_one_bit_of_one_weight_counts() -> None:
    model = tiny()
    before = fingerprint(model)
    with torch.no_grad():
        bits = model.model.layers[1].self_attn.v_proj.weight.view(torch.int32)
        bits[3, 5] ^= 1
    assert changed(before, fingerprint(model)) == {"weights"}


def test_one_bit_of_the_weights_file_counts(saved) -> None:
    before = fingerprint(LlamaForCausalLM.from_pretrained(saved), source=saved)
    file = saved / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)
    assert changed(before, fingerprint(LlamaForCausalLM.from_pretrained(saved), source=saved)) == {"weights"}


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
    in_float32 = fingerprint(LlamaForCausalLM.from_pretrained(saved, dtype=torch.float32), source=saved)
    in_bfloat16 = fingerprint(LlamaForCausalLM.from_pretrained(saved, dtype=torch.bfloat16), source=saved)
    assert "dtype" in changed(in_float32, in_bfloat16)
    assert in_float32.parts["weights"] == in_bfloat16.parts["weights"]
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


def test_a_tokenizer_without_a_backend_is_known_by_its_vocabulary() -> None:
    class Slow:
        def __init__(self, *words: str) -> None:
            self.words = words

        def get_vocab(self) -> dict[str, int]:
            return {word: i for i, word in enumerate(self.words)}

    model = tiny()
    assert fingerprint(model, Slow("a", "b")) == fingerprint(model, Slow("a", "b"))
    assert changed(fingerprint(model, Slow("a", "b")), fingerprint(model, Slow("b", "a"))) == {"tokenizer"}


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


def test_files_do_not_speak_for_a_model_with_an_adapter(saved) -> None:
    assert fingerprint(adapted(), source=saved).parts["weights"].startswith("state:")
    merged = LlamaForCausalLM.from_pretrained(saved)  # every tensor has its name and shape in the files
    merged.peft_config = {"default": {"r": 2}}
    assert fingerprint(merged, source=saved).parts["weights"].startswith("state:")


def test_files_that_lack_or_resize_a_tensor_are_not_believed(saved) -> None:
    model = LlamaForCausalLM.from_pretrained(saved)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    assert fingerprint(model, source=saved).parts["weights"].startswith("files:")
    norm = state.pop("model.norm.weight")
    save_file(state, saved / "model.safetensors")
    assert fingerprint(model, source=saved).parts["weights"] == fingerprint(model).parts["weights"]
    save_file({**state, "model.norm.weight": norm[:16].clone()}, saved / "model.safetensors")
    assert fingerprint(model, source=saved).parts["weights"].startswith("state:")
    save_file({**state, "model.norm.weight": norm, "unused": norm.clone()}, saved / "model.safetensors")
    assert fingerprint(model, source=saved).parts["weights"].startswith("files:")


def test_tied_embeddings_need_only_one_name_in_the_files(tmp_path) -> None:
    model = tiny(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert fingerprint(loaded, source=tmp_path).parts["weights"].startswith("files:")


@pytest.mark.parametrize(
    "content", [b"", b"\x08\0\0\0\0\0\0\0not json", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]"]
)
def test_damaged_files_lead_to_the_state_dict(saved, content) -> None:
    model = tiny()
    (saved / "model.safetensors").write_bytes(content)
    assert fingerprint(model, source=saved) == fingerprint(model)


def test_a_cache_that_cannot_be_kept_does_not_change_the_fingerprint(saved, tmp_path, caplog) -> None:
    (tmp_path / "file").write_text("x")
    model = LlamaForCausalLM.from_pretrained(saved)
    kept = fingerprint(model, source=saved, cache=tmp_path / "digests.json")
    assert fingerprint(model, source=saved, cache=tmp_path / "file" / "digests.json") == kept
    assert "weights files" not in caplog.text, "these can be read"


def test_the_cache_spares_the_second_reading(saved, tmp_path) -> None:
    cache = tmp_path / "cache" / "digests.json"
    os.utime(saved / "model.safetensors", (1_700_000_000, 1_700_000_000))
    before = fingerprint(tiny(), source=saved, cache=cache)
    known = json.loads(cache.read_text())
    (entry,) = known.values()
    assert entry["sha256"] == hashlib.sha256((saved / "model.safetensors").read_bytes()).hexdigest()
    assert fingerprint(tiny(), source=saved, cache=cache) == before
    entry["sha256"] = "0" * 64  # only a reader of the cache can see this
    cache.write_text(json.dumps(known))
    assert changed(before, fingerprint(tiny(), source=saved, cache=cache)) == {"weights"}


class Recorder:
    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.content = bytearray()

    def update(self, data) -> None:
        raw = bytes(data)
        self.sizes.append(len(raw))
        self.content += raw


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(40, 30), (7,), (), (0, 4), (3, 5, 11)])
def test_tensors_are_streamed_in_small_pieces(monkeypatch, dtype, shape) -> None:
    monkeypatch.setattr(weights_digest, "PIECE_BYTES", 256)
    torch.manual_seed(0)
    tensor = (torch.randn(shape) * 3).to(dtype)
    recorder = Recorder()
    weights_digest.hash_tensor(recorder, tensor)
    assert recorder.content == bytes(tensor.flatten().view(torch.uint8).tolist())
    assert max(recorder.sizes, default=0) <= 256


def test_views_are_streamed_in_the_order_of_their_elements(monkeypatch) -> None:
    monkeypatch.setattr(weights_digest, "PIECE_BYTES", 256)
    base = torch.arange(20 * 30, dtype=torch.float32).reshape(20, 30)
    for view in (base.t(), base[::2, 3:9], base[:1].expand(9, 30)):
        recorder = Recorder()
        weights_digest.hash_tensor(recorder, view)
        assert recorder.content == view.clone(memory_format=torch.contiguous_format).numpy().tobytes()
        assert max(recorder.sizes) <= 256


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


def test_weights_that_are_not_here_are_refused_by_name() -> None:
    model = tiny()
    model.model.layers[1].mlp.to("meta")
    with pytest.raises(ModelNotSupported, match=r"layers\.1\.mlp.*meta device"):
        fingerprint(model)


def test_taking_a_fingerprint_changes_nothing() -> None:
    model = tiny()
    state, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    fingerprint(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.config.to_dict() == config

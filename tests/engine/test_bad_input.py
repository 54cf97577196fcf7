"""Bad models, prompts and options: a clear error, or the right answer with the reason in the report."""

import json
import re

import pytest
import torch
import transformers as tf
from torch import nn

from engine_kit import PROMPT, chunk, ids, rag_for, stored_in, text, warmed
from families import SIZES, build, greedy, plain, sharpened
from ragcachekit import (
    LoadConfig,
    ModelNotSupported,
    Prompt,
    RagCache,
    ShadowConfig,
    StoreConfig,
    Text,
    TreeConfig,
)
from ragcachekit.encode.encoders import ChunkEncoder
from ragcachekit.engine import grade
from ragcachekit.errors import PromptTooLong

ASKED = {"max_new_tokens": 4, "do_sample": False}
MOE = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 32}


def tiny(kind, **special):
    torch.manual_seed(0)
    return sharpened(tf.AutoModelForCausalLM.from_config(kind(**{**SIZES, **special})))


class TestModelsThatCannotBeLinked:
    @pytest.mark.parametrize(
        ("kind", "special", "reason"),
        [
            (tf.GPT2Config, {}, "GPT2LMHeadModel uses no rotary"),
            (tf.MambaConfig, {}, "MambaForCausalLM .*key/value cache"),
            (tf.Lfm2Config, {"layer_types": ["conv", "full_attention", "conv"]}, "Lfm2ForCausalLM .*cache"),
        ],
    )
    def test_architectures(self, kind, special, reason, tmp_path):
        with RagCache(tiny(kind, **special), cache_dir=tmp_path) as rag:
            assert rag.grade == "prefix"
            assert re.search(reason, repr(rag))
        assert not list(tmp_path.rglob("admitted/*")), "it is not noted as a pass"

    def test_admission_names_the_devices(self, monkeypatch):
        model = build("llama")
        extra = nn.Parameter(torch.zeros(1, device="meta"))
        model.model.layers[0].register_parameter("elsewhere", extra)
        with pytest.raises(ModelNotSupported, match=r"spread over \['cpu', 'meta'\].*one device"):
            grade.admit(model, rope=None)

    def test_training_mode(self, tmp_path):
        with pytest.raises(ValueError, match=r"training mode; call model.eval\(\)"):
            RagCache(build("llama").train(), cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("kind", "special"),
    [
        (
            tf.Qwen2MoeConfig,
            {"use_sliding_window": True, "max_window_layers": 2, "shared_expert_intermediate_size": 32},
        ),
        (tf.PhimoeConfig, {}),
    ],
)
def test_windows_that_are_only_in_the_mask_are_kept(kind, special, tmp_path):
    """These families do not hand their window to attention; a short check would not see it missing."""
    model = tiny(kind, sliding_window=64, **MOE, **special)
    prompt = Prompt([text(9, 1), chunk(120, 2), chunk(100, 3), text(6, 4)])
    want = greedy(model, ids(prompt), 6)
    rag = RagCache(model, cache_dir=tmp_path, cold="now", policy="lego:1000", encoder="standalone")
    rag.generate(prompt, max_new_tokens=1)
    answer = rag.generate(prompt, max_new_tokens=6, do_sample=False)
    assert answer.report.link.recomputed_tokens == 220
    assert answer.token_ids == want


class TestPrompts:
    def test_ids_that_are_none_of_the_models(self):
        for wrong in (-1, 9999):
            with pytest.raises(ValueError, match="token ids that the model lacks"):
                rag_for("llama").generate(Prompt([Text(token_ids=[5, wrong])]))
        with pytest.raises(TypeError):
            Text(token_ids=[5, 1.7])

    def test_a_wrong_cancel_fails_before_it_is_queued(self):
        with pytest.raises(TypeError, match=r"cancel must be a threading\.Event"):
            rag_for("llama").submit(PROMPT, cancel=True)

    @pytest.mark.parametrize("prompt", [Prompt([]), Prompt([Text(token_ids=())])])
    def test_empty(self, prompt):
        rag = rag_for("llama")
        for call in (rag.generate, rag.link):
            with pytest.raises(ValueError, match="prompt is empty"):
                call(prompt)

    @pytest.mark.parametrize("count", [512, 600])
    def test_too_long(self, count):
        rag = rag_for("llama")
        with pytest.raises(PromptTooLong, match=f"{count} tokens, the model's context is 512"):
            rag.generate(Prompt([text(9, 1), chunk(count - 9, 2)]))
        with pytest.raises(PromptTooLong):
            rag.generate_batch([PROMPT, Prompt([chunk(count, 2)])])
        assert rag.stats()[0].entries == 0

    def test_text_without_a_tokenizer(self):
        rag = rag_for("llama")
        for call in (
            lambda: rag.generate("Where?"),
            lambda: rag.encode(["Berlin is the capital of Germany."]),
            lambda: rag.generate([{"role": "user", "content": "Where?"}]),
            lambda: rag.count_tokens("x"),
        ):
            with pytest.raises(ValueError, match="tokenizer"):
                call()


class TestNames:
    def test_unknown_policy(self):
        with pytest.raises(
            ValueError, match=r"unknown policy 'legolink'.*full, reuse, prefix, lego0, lego:16"
        ):
            rag_for("llama", policy="legolink")

    def test_unknown_encoder(self):
        with pytest.raises(ValueError, match=r"unknown encoder 'alone'; known: standalone, sinks:4, system"):
            rag_for("llama", encoder="alone")

    def test_a_policy_over_another_encoder(self):
        with pytest.raises(ValueError, match="lego0 is defined over encoder sinks:4, not system"):
            rag_for("llama", encoder="system", policy="lego0")

    def test_a_policy_that_chooses_outside_the_chunks(self):
        class Wild:
            name, encoder, reads_cache = "wild", None, True

            def select(self, chunks):
                return [10_000]

        answer = warmed("llama", PROMPT, policy=Wild()).generate(PROMPT, **ASKED)
        assert "wild chose positions outside" in answer.report.link.fallback
        assert answer.token_ids == greedy(plain("llama"), ids(PROMPT), 4)


class TestModelChangedUnderOurFeet:
    def change_weights(self, model):
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.mul_(1.5)

    def switch_adapter(self, model):
        layer = nn.Linear(64, 32, bias=False)
        with torch.no_grad():
            layer.weight.copy_(model.model.layers[1].self_attn.v_proj.weight * 0.5)
        layer._active_adapter = ["other"]
        model.model.layers[1].self_attn.v_proj = layer

    @pytest.mark.parametrize("change", [change_weights, switch_adapter])
    def test_plain_prefill_named_in_the_report_and_nothing_stored(self, change, tmp_path):
        model = build("llama")
        rag = RagCache(model, cache_dir=tmp_path, cold="now", policy="reuse")
        for _ in range(2):
            rag.generate(PROMPT, **ASKED)
        change(self, model)
        new = Prompt([text(9, 1), chunk(20, 50), text(3, 1)])
        for prompt in (PROMPT, new, new):
            answer = rag.generate(prompt, **ASKED)
            assert "model changed" in answer.report.link.fallback
            assert "model changed" in str(answer.report)
            assert answer.report.link.reused_tokens == 0
            assert answer.token_ids == greedy(model, ids(prompt), 4)
        assert rag.stats()[0].entries == 3
        other = RagCache(model, cache_dir=tmp_path, store=rag.components.store, policy="reuse", cold="never")
        assert other.generate(PROMPT, **ASKED).report.link.reused_tokens == 0, "another fingerprint"

    def test_work_that_waited_is_dropped(self, tmp_path, monkeypatch):
        model = build("llama")
        rag = RagCache(model, cache_dir=tmp_path, policy="lego:16", encoder="standalone", cold="now")
        encode = ChunkEncoder.encode

        def changed_meanwhile(*args):
            for item in encode(*args):
                self.change_weights(model)
                yield item

        monkeypatch.setattr(ChunkEncoder, "encode", changed_meanwhile)
        answer = rag.generate(PROMPT, **ASKED)
        assert answer.report.link.fallback is None
        assert [key.encoding for key in stored_in(rag)] == ["prefix"], "copied before the model changed"


@pytest.mark.parametrize(
    "content", ["", "{}", "null", "[]", '"versions"', '{"torch": "0.1"}', "no rope", "no module", "no layer"]
)
def test_an_old_or_damaged_record_costs_a_check(monkeypatch, tmp_path, content):
    checks, admit = [], grade.admit
    monkeypatch.setattr(grade, "admit", lambda *a: checks.append(1) or admit(*a))
    rag = RagCache(build("llama"), cache_dir=tmp_path)
    record = tmp_path / "admitted" / f"{rag.fingerprint}.json"
    if content.startswith("no "):
        noted = json.loads(record.read_text())
        wrong = {"no module": {"tables": [["gone", {}]]}, "no layer": {"layers": [[0, 1, 2, 3, 4, 5]]}}
        noted["rope"] = {**noted["rope"], **wrong[content]} if content in wrong else None
        content = json.dumps(noted)
    record.write_text(content)
    RagCache(build("llama"), cache_dir=tmp_path)
    assert len(checks) == 2


def test_a_model_that_decodes_alone_is_checked_again(monkeypatch, tmp_path):
    """The reason may have been a lack of memory: the record would keep it for ever."""
    monkeypatch.setattr(grade, "why_not_together", lambda _: "out of memory")
    with RagCache(build("llama"), cache_dir=tmp_path) as rag:
        assert "in a batch: out of memory" in str(rag.generate(PROMPT, **ASKED).report.link.notes)
    assert not list(tmp_path.rglob("admitted/*"))
    monkeypatch.undo()
    with RagCache(build("llama"), cache_dir=tmp_path) as rag:
        assert not rag.generate(PROMPT, **ASKED).report.link.notes
    assert len(list(tmp_path.rglob("admitted/*"))) == 1


class Document:
    page_content = "The river Spree flows in Berlin."


class TestArgumentsOfAWrongType:
    """Refused where they come in, by a message with the name, what was given and what to give."""

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"store": "/tmp/kv"}, r"store must be StoreConfig\(disk_path=.*got '/tmp/kv' \(str\)"),
            ({"policy": 16}, r"policy must be a name such as 'lego:16'.*got 16 \(int\)"),
            ({"shadow": True}, r"shadow must be a share.*got True"),
            ({"tree": True}, r"tree must be TreeConfig\(host_bytes=\.\.\.\).*got True"),
            ({"cache_dir": 3}, r"cache_dir must be a folder's path.*got 3"),
        ],
    )
    def test_of_the_engine(self, options, message, tmp_path):
        options = {"cache_dir": tmp_path, **options}
        with pytest.raises(TypeError, match=message):
            RagCache(build("llama"), **options)
        with pytest.raises(TypeError, match=message):
            RagCache.from_pretrained("/nowhere/at/all", **options)

    def test_a_model_by_its_name(self):
        with pytest.raises(TypeError, match=r"model must be a loaded model \(from_pretrained .*'gpt2'"):
            RagCache("gpt2")

    @pytest.mark.parametrize(
        ("config", "field", "value", "message"),
        [
            (StoreConfig, "host_bytes", "4GB", "a whole number, such as 4 << 30, got '4GB'"),
            (StoreConfig, "disk_bytes", 1.5, "a whole number, such as 4 << 30, or None, got 1.5"),
            (StoreConfig, "bulk_deadline", "2", "a number, got '2'"),
            (StoreConfig, "quantise", "int8", r"a mapping such as \{'disk': 'int8'\}, got 'int8'"),
            (StoreConfig, "pin_host", "yes", "True or False, got 'yes'"),
            (TreeConfig, "host_bytes", True, "a whole number, such as 4 << 30, got True"),
            (LoadConfig, "threads", "2", "a whole number, got '2'"),
            (ShadowConfig, "share", "x", "a number, got 'x'"),
        ],
    )
    def test_of_configurations(self, config, field, value, message):
        needed = {"share": 0.5} if config is ShadowConfig else {}
        with pytest.raises(TypeError, match=f"^{field} must be {message}"):
            config(**{**needed, field: value})

    def test_documents_instead_of_texts(self):
        rag = rag_for("llama")
        calls = (rag.encode, rag.register, rag.prefetch, lambda texts: rag.forget(texts=texts))
        for call in calls:
            with pytest.raises(TypeError, match=r"\[0\] must be a string; give the Document's page_content"):
                call([Document()])

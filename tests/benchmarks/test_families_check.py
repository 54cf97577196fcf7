"""The families table: ten families of each grade, and no check lets what is wrong pass."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.families import check as check_families
from benchmarks.families import second_check
from benchmarks.families.dialogues import Course, converse
from benchmarks.families.families import all_families, build
from ragcachekit.engine.grade import Grade, admit
from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.errors import ModelNotSupported
from ragcachekit.forward import attention
from ragcachekit.model.kv import KVLayout
from ragcachekit.model.rope import Rope, describe_rope
from ragcachekit.model.snapshots import SnapshotLayout
from soak_kit import soaked

STATES = "keys, values per token; conv states, recurrent states per"
# The first twelve have forgotten chunks and a new engine among them.
DIALOGUES = pytest.mark.parametrize("count", [12, pytest.param(20, marks=pytest.mark.soak)])
FAMILIES = {family.name: family for family in all_families()}
TEN = (
    "llama",
    "qwen2_moe",  # sliding windows that only the mask knows
    "gemma2",  # soft-capping
    "gemma4_text (shared KV)",
    "gpt_oss",  # attention sinks
    "glm4",  # interleaved, partial rotary
    "nanochat",  # rotates backwards
    "jetmoe",  # repeats keys between cache and attention
    "deepseek_v3",  # multi-head latent attention
    "phi3 (longrope)",
)


@pytest.fixture(autouse=True)
def silent():
    with check_families._quiet():
        yield


@pytest.mark.parametrize("name", soaked(TEN, "gemma4_text (shared KV)", "jetmoe", "deepseek_v3"))
def test_the_family_is_exact(name):
    checked = check_families.check_family(FAMILIES[name])
    assert (checked.status, checked.reason) == ("linked", "")
    assert checked.token_bytes
    assert checked.max_abs_diff is not None
    assert 0 < checked.max_abs_diff < second_check.KV


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("falcon", "does not go through the interface"),
        ("beam", "attention depends on positions"),
        ("hunyuan_v1_dense", "no rotation of its key"),
    ],
)
def test_not_linked_with_a_reason(name, reason, tmp_path):
    with RagCache(build(FAMILIES[name]), cache_dir=tmp_path) as rag:
        assert rag.grade == "prefix"
        assert reason in repr(rag)


@pytest.mark.parametrize(
    ("name", "reason", "stored", "state"),
    [
        ("qwen4_exp_text", "", "index", 1),  # caches integers, too
        pytest.param("qwen3_next", "linear_attention", STATES, 1, marks=pytest.mark.soak),
        pytest.param("bamba", "linear_attention", STATES, 1, marks=pytest.mark.soak),
        pytest.param(*("bert", "uses no rotary module", "keys, values per token", 0), marks=pytest.mark.soak),
        pytest.param(  # asked by generate what it lacks
            *("xlstm", "plain key/value cache", "rnn state per state", 1), marks=pytest.mark.soak
        ),
        ("deepseek_v32", "indexed_attention", "indexer keys, keys, values per token", 0),
    ],
)
@DIALOGUES
def test_dialogues_on_grade_prefix(name, reason, stored, state, count, monkeypatch):
    monkeypatch.setattr(check_families, "converse", partial(converse, count=count))
    checked = check_families.check_family(FAMILIES[name])
    assert checked.status == "prefix", checked.reason
    assert reason in checked.reason
    assert checked.stored.startswith(stored)
    assert bool(checked.state_bytes) == bool(state)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mamba", "going on from its own cache, logits after 17 tokens"),
        pytest.param("openai-gpt", "returns no cache", marks=pytest.mark.soak),
        pytest.param("recurrent_gemma", "returns no cache", marks=pytest.mark.soak),
        ("prophetnet", "cannot run several tokens after its cache"),
    ],
)
@pytest.mark.parametrize("count", soaked((2, 20), 2))
def test_nothing_to_reuse(name, reason, count, monkeypatch):
    monkeypatch.setattr(check_families, "converse", partial(converse, count=count))
    checked = check_families.check_family(FAMILIES[name])
    assert (checked.status, checked.stored) == ("prefix", "nothing")
    assert reason in checked.reason


def test_families_that_do_not_generate_are_apart():
    checked = check_families.check_family(FAMILIES["musicgen"])
    assert (checked.status, checked.reason) == (
        "not built here",
        "generates several audio codes per step, not text",
    )


def test_wrong_answers_and_missing_hits_are_told(monkeypatch):
    family = FAMILIES["gpt2"]
    monkeypatch.setattr(check_families, "converse", lambda *_: Course(5, 1, "dialogue 3: other tokens"))
    wrong = check_families.check_family(family)
    monkeypatch.setattr(check_families, "converse", lambda *_: Course(0, 1))
    unused = check_families.check_family(family)
    assert (wrong.status, wrong.reason) == ("wrong", "dialogue 3: other tokens")
    assert (unused.status, unused.reason) == ("wrong", "0 hits and 1 evictions")


@pytest.mark.soak
def test_dialogues_notice_a_stale_state(monkeypatch, tmp_path):
    """Every prompt goes on from the right rows, but with zeros for its states."""
    model, oracle = build(FAMILIES["qwen3_next"]), build(FAMILIES["qwen3_next"])
    restored = SnapshotLayout.restored

    def without_states(self, found):
        zeros = {name: value * 0 if "_states" in name else value for name, value in found[-1].sums.items()}
        return restored(self, [*found[:-1], replace(found[-1], sums=zeros)])

    def open_engine(**options):
        monkeypatch.setattr(SnapshotLayout, "restored", restored)  # the check must pass
        rag = RagCache(model, cache_dir=tmp_path, **options)
        monkeypatch.setattr(SnapshotLayout, "restored", without_states)
        return rag

    assert converse(open_engine, oracle, 200_000).wrong.startswith("dialogue")


@pytest.mark.parametrize("name", soaked(("llama", "glm4", "nanochat", "deepseek_v3"), "llama", "deepseek_v3"))
def test_a_rotation_that_does_nothing_is_caught_by_both(name, monkeypatch):
    model, oracle = build(FAMILIES[name]), build(FAMILIES[name], oracle=True)
    rope = describe_rope(model)
    monkeypatch.setattr(Rope, "rotations", lambda self, layer, turns: (None, None))
    with pytest.raises(ModelNotSupported, match="differ from the model's own"):
        admit(model, rope)
    assert _wrong(model, oracle, monkeypatch)


def _wrong(model, oracle, monkeypatch):
    """What the second check finds, the admission check switched off."""

    def unchecked(model, *_):
        attention.install(model)
        return Grade("linked", describe_rope(model), KVLayout.of(model))

    monkeypatch.setattr("ragcachekit.engine.components.grade_of", unchecked)
    return [found for found in second_check.compare(model, oracle) if found.wrong]


def test_the_oracle_is_another_model_with_the_same_weights():
    model, oracle = build(FAMILIES["llama"]), build(FAMILIES["llama"], oracle=True)
    assert model is not oracle
    pairs = list(zip(model.parameters(), oracle.parameters(), strict=True))
    assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in pairs)


def test_every_family_is_in_the_table_once():
    names = [family.name for family in all_families()]
    assert len(names) == len(set(names)) > 150
    assert {"llama (dynamic)", "deepseek_v2", "qwen3"} <= set(names)


def test_the_command_writes_table_and_page(tmp_path, monkeypatch):
    few = (FAMILIES["llama"], FAMILIES["gpt2"])
    monkeypatch.setattr(check_families, "all_families", lambda: few)
    monkeypatch.setattr(check_families, "converse", partial(converse, count=12))
    arguments = ["families", "--json", str(tmp_path / "f.json")]
    result = CliRunner().invoke(app, [*arguments, "--markdown", str(tmp_path / "models.md")])
    assert result.exit_code == 0
    assert "1 linked, 1 prefix, 0 refused, 0 wrong, 0 not built here" in result.stdout
    frame = json.loads((tmp_path / "f.json").read_text())
    assert [(row["family"], row["status"]) for row in frame["rows"]] == [
        ("llama", "linked"),
        ("gpt2", "prefix"),
    ]
    page = (tmp_path / "models.md").read_text()
    assert frame["versions"]["transformers"] in page
    assert "| 1,024 | llama |" in page
    assert "| keys, values per token | 2,048 | gpt2 |" in page


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_half_precision_routing_is_no_error_but_a_missing_rotation_is(name, monkeypatch):
    """An undecided router sends single tokens another way in bfloat16; that must not refuse the family."""
    model = build(FAMILIES[name]).to(torch.bfloat16)
    rope = describe_rope(model)
    assert admit(model, rope) < 6e-2
    monkeypatch.setattr(Rope, "rotations", lambda self, layer, turns: (None, None))
    with pytest.raises(ModelNotSupported, match="differ from the model's own"):
        admit(model, rope)

"""Whatever changes what KV would be, changes where it is looked for: one changed field, no hit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine_kit import checked
from ragcachekit import Chunk, Prompt, RagCache, StoreConfig, Text
from ragcachekit.reports import ChunkUse

SYSTEM, FIRST, SECOND, QUESTION = (3, 4, 5, 6), tuple(range(10, 30)), tuple(range(30, 45)), (7, 8)


def model(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, "bos_token_id": 1, **changes})).eval()


def prompt(system: tuple[int, ...] = SYSTEM, first: tuple[int, ...] = FIRST) -> Prompt:
    parts = [Text(token_ids=system), Chunk(token_ids=first), Chunk(token_ids=SECOND)]
    return Prompt([*parts, Text(token_ids=QUESTION)])


def used(folder: Path, asked: Prompt | None = None, **options: Any) -> tuple[ChunkUse, ...]:
    """What a fresh engine on this folder reuses, after which its own KV is there too."""
    changes = {"model": model(), "policy": "reuse", "encoder": "system", **options}
    store = StoreConfig(host_bytes=0, disk_path=folder / "kv", quantise=changes.pop("quantise", {}))
    with RagCache(changes.pop("model"), store=store, cold="now", cache_dir=checked(folder), **changes) as rag:
        return rag.generate(asked or prompt(), max_new_tokens=1).report.link.uses


def poked(name: str) -> LlamaForCausalLM:
    changed = model()
    with torch.no_grad():
        changed.get_parameter(name).view(-1)[5] += 1e-4
    return changed


MODELS: dict[str, Callable[[], LlamaForCausalLM]] = {
    "one weight of the last layer": lambda: poked("model.layers.1.self_attn.v_proj.weight"),
    "rotation base": lambda: model(rope_parameters={"rope_type": "default", "rope_theta": 20_000.0}),
    "norm epsilon": lambda: model(rms_norm_eps=1e-3),
    "dtype": lambda: model().to(torch.bfloat16),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "namespace": {"namespace": "somebody else"},
    "encoder": {"encoder": "standalone"},
    "number of sinks": {"encoder": "sinks:3"},
    "system text": {"asked": prompt(system=(3, 4, 5, 9))},
    "a token of the chunk": {"asked": prompt(first=(*FIRST[:-1], 60))},
    "rounding at rest": {"quantise": {"disk": "int8"}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert [use.source for use in used(tmp_path)] == ["computed"] * 3
    return tmp_path


@pytest.mark.parametrize("change", MODELS)
def test_another_model_finds_nothing(folder: Path, change: str) -> None:
    assert [use.source for use in used(folder, model=MODELS[change]())] == ["computed"] * 3
    assert [use.source for use in used(folder)] == ["disk"] * 3, "the same identity finds everything"


@pytest.mark.parametrize("change", OPTIONS)
def test_another_request_finds_no_chunk_that_is_not_its_own(folder: Path, change: str) -> None:
    if change == "number of sinks":
        used(folder, encoder="sinks:4")
    _, first, second = used(folder, **OPTIONS[change])
    assert first.source == "computed"
    assert second.source == ("disk" if change == "a token of the chunk" else "computed")
    assert [use.source for use in used(folder)] == ["disk"] * 3


def test_the_identity_is_checked_in_the_entry_not_only_in_its_name(folder: Path) -> None:
    """Every file under every other file's name: nobody reads somebody else's."""
    files = sorted((folder / "kv").glob("*.safetensors"))
    contents = [file.read_bytes() for file in files]
    for file, other in zip(files, [*contents[1:], contents[0]], strict=True):
        file.write_bytes(other)
    assert [use.source for use in used(folder)] == ["computed"] * 3

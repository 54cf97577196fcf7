"""A tiny random model of every causal LM family that the installed transformers knows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from benchmarks.families.sizes import SIZES, SPECIAL, TOKENS_FROM, VARIANTS, VOCAB

MAX_PARAMETERS = 80_000_000
"""A larger model has sizes that are missing in the tables."""

ATTENTION = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class Family:
    """One row of the table: the ``model_type`` (a variant in brackets) and its tiny configuration.

    ``special`` is what that has beside the common sizes; ``oracle`` what differs in the copy that the library
    is compared with: frequencies that depend on the prompt's length cannot be had from the same model one row
    at a time.
    """

    name: str
    config: type[PreTrainedConfig]
    special: Mapping[str, Any] = field(default_factory=dict)
    oracle: Mapping[str, Any] = field(default_factory=dict)


def all_families() -> tuple[Family, ...]:
    """Every configuration class of ``MODEL_FOR_CAUSAL_LM_MAPPING``, sorted by name, variants after it."""
    kinds = {config.model_type: config for config in MODEL_FOR_CAUSAL_LM_MAPPING}
    found = []
    for name in sorted(kinds):
        found.append(Family(name, kinds[name], SPECIAL.get(name, {})))
        for what, (special, oracle) in VARIANTS.get(name, {}).items():
            changed = {**SPECIAL.get(name, {}), **special}
            found.append(Family(f"{name} ({what})", kinds[name], changed, {**changed, **oracle}))
    return tuple(found)


def build(family: Family, *, oracle: bool = False) -> Any:
    """The family's model, the same weights at every call; raises what the family's code raises."""
    special = family.oracle if oracle and family.oracle else family.special
    config = tiny(family.config, special)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[family.config]
    if not isinstance(config, model_class.config_class):
        config = config.get_text_config(decoder=True)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in model_class(config).parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(
            f"{count / 1e6:.0f} million parameters: some of its sizes are not known to the tables"
        )
    torch.manual_seed(0)
    model = model_class(config).eval()
    enliven(model)
    # Every generated token counts, also after an end token.
    model.generation_config.eos_token_id = None
    return model


def tiny(kind: type[PreTrainedConfig], special: Mapping[str, Any]) -> PreTrainedConfig:
    """A configuration with the common sizes, of whatever names the class has for them."""
    known = {f.name: f.default for f in dataclasses.fields(kind)}
    usual = _usual(kind)
    given = {name: value for name, value in SIZES.items() if name in known or name in kind.attribute_map}
    given |= _token_ids(known, usual)
    given |= _layers(known, usual)
    for name in kind.sub_configs:
        part = getattr(usual, name, None)
        if isinstance(part, PreTrainedConfig):
            given[name] = tiny(type(part), special.get(name, SPECIAL.get(part.model_type, {})))
    return kind(**{**given, **{k: v for k, v in special.items() if k not in kind.sub_configs}})


def _usual(kind: type[PreTrainedConfig]) -> PreTrainedConfig | None:
    try:
        return kind()
    except ValueError:  # some have no defaults that pass their own checks
        return None


def _token_ids(known: Mapping[str, Any], usual: PreTrainedConfig | None) -> dict[str, int]:
    """Ids of image tokens and the like, which lie beyond the tiny vocabulary."""
    large = [
        name
        for name in known
        if "token_id" in name and name not in SIZES and _int(getattr(usual, name, None)) >= VOCAB
    ]
    return {name: TOKENS_FROM + number for number, name in enumerate(large)}


def _int(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _layers(known: Mapping[str, Any], usual: PreTrainedConfig | None) -> dict[str, Any]:
    """Every kind of layer that the family has, in turn; sliding windows wherever it knows them."""
    given: dict[str, Any] = {}
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        kinds = list(dict.fromkeys(getattr(usual, name, None) or ()))
        if name not in known or not all(isinstance(kind, str) for kind in kinds):
            continue
        if name == "layer_types" and set(kinds) <= ATTENTION and "sliding_window" in known:
            kinds = ["sliding_attention", "full_attention"]
        if kinds:
            given[name] = list(islice(cycle(kinds), SIZES["num_hidden_layers"]))
    if "layer_types" in given and "use_sliding_window" in known:
        given["use_sliding_window"] = True
    return given


@torch.no_grad()
def enliven(model: Any) -> None:
    """Weights that hide nothing: matrices keep the size of what they multiply, vectors vary.

    Initial weights of some families are so small, or zero, that attention adds nothing to the
    hidden states, and any wrong attention would pass.
    """
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=draw)
        if parameter.dim() > 1:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(noise * 0.2)

"""A second look at an admitted model, by other code: what linking gives against plain transformers.

The admission check uses the library's own helpers. Here the oracle is a copy of the model that
the library never touches, and every row that the library computes in one forward is computed alone,
as an ordinary decoding step after exactly the keys and values that should stand before it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.types import Chunk, Prompt, Text

LENGTHS = (7, 22, 31, 3, 19, 15)
"""System text, two chunks, text between, a chunk, question: longer than the admission check, chunks
at odd places, beyond the windows of the tiny models."""

CHUNKS = (1, 2, 4)
FIRST = 4
"""Tokens recomputed of each chunk in the partly recomputed prompt."""

NEW_TOKENS = 12
LOGITS, KV = 1e-5, 1e-4
"""Allowed relative differences in float32: of logits with everything recomputed, and of chunk KV and
partly recomputed prompts, whose keys are rotated twice and pass through all layers."""


@dataclass(frozen=True)
class Difference:
    """One comparison, relative to the largest value of the oracle's tensor; for tokens, 1 if any differs."""

    what: str
    found: float
    allowed: float

    @property
    def wrong(self) -> bool:
        """Also where it is not a number."""
        return not self.found <= self.allowed


@dataclass(frozen=True, eq=False)
class _Run:
    """KV per layer ``[kv_heads, tokens, head_dim]`` and the last token's logits."""

    kv: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    logits: torch.Tensor | None = None


@torch.no_grad()
def compare(model: Any, oracle: Any, seed: int = 3) -> tuple[Difference, ...]:
    """Compare ``model`` under the library with ``oracle``, its untouched copy; raises ModelNotSupported."""
    vocab = model.config.get_text_config().vocab_size
    drawn = torch.randint(3, vocab, (sum(LENGTHS),), generator=torch.Generator().manual_seed(seed))
    parts = [tuple(part.tolist()) for part in torch.split(drawn, list(LENGTHS))]
    prompt = Prompt([(Chunk if i in CHUNKS else Text)(token_ids=part) for i, part in enumerate(parts)])
    with (
        tempfile.TemporaryDirectory(prefix="ragcachekit-") as scratch,
        RagCache(model, policy="reuse", encoder="standalone", cold="now", cache_dir=scratch) as rag,
    ):
        rag.generate(prompt, **_options(1))
        # Whoever turns keys wrongly may do so in place or in a module's state: compare after use.
        return (
            *_recomputed(rag, oracle, prompt, drawn.tolist()),
            *_reused(rag, oracle, prompt, parts),
            *_partly(rag, oracle, prompt, parts),
        )


def _recomputed(rag: RagCache, oracle: Any, prompt: Prompt, ids: list[int]) -> list[Difference]:
    """Invariant 1: with every row recomputed, nothing but the ordinary prefill comes out."""
    everything = f"lego:{len(ids)}"
    own = DynamicCache()
    ordinary = oracle(input_ids=torch.tensor([ids]), past_key_values=own, use_cache=True).logits[0, -1]
    linked = _linked(rag, prompt, everything)
    assert linked.logits is not None
    answer = rag.generate(prompt, policy=everything, **_options(NEW_TOKENS)).token_ids
    expected = oracle.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), **_options(NEW_TOKENS)
    )[0, len(ids) :]
    return [
        Difference("logits with everything recomputed", _off(linked.logits, ordinary), LOGITS),
        *_kv_differences(linked, _kv(own), "everything recomputed"),
        Difference(
            "greedy tokens with everything recomputed", float(answer != tuple(expected.tolist())), 0.0
        ),
    ]


def _reused(rag: RagCache, oracle: Any, prompt: Prompt, parts: Sequence[tuple[int, ...]]) -> list[Difference]:
    """Invariant 3: a chunk linked at an offset is the chunk run there."""
    linked = _linked(rag, prompt, "reuse")
    found = []
    for index in CHUNKS:
        start = sum(LENGTHS[:index])
        there = _alone(oracle, parts[index], start)
        here = _Run(
            tuple(
                (k[:, start:][:, : LENGTHS[index]], v[:, start:][:, : LENGTHS[index]]) for k, v in linked.kv
            )
        )
        found += _kv_differences(here, there, f"a chunk linked at {start}")
    return found


def _partly(rag: RagCache, oracle: Any, prompt: Prompt, parts: Sequence[tuple[int, ...]]) -> list[Difference]:
    """Some rows recomputed, others reused: against one decoding step per computed row."""
    policy = f"lego:{FIRST}"
    linked = _linked(rag, prompt, policy)
    assert linked.logits is not None
    cache, logits = _stepwise(oracle, parts)
    expected = []
    after = logits
    for position in range(sum(LENGTHS), sum(LENGTHS) + NEW_TOKENS):
        expected.append(int(after.argmax()))
        if position == sum(LENGTHS):
            before = _kv(cache)
        after = _step(oracle, expected[-1], position, cache)
    answer = rag.generate(prompt, policy=policy, **_options(NEW_TOKENS)).token_ids
    return [
        Difference("logits partly recomputed", _off(linked.logits, logits), KV),
        *_kv_differences(linked, before, "partly recomputed"),
        Difference("greedy tokens partly recomputed", float(answer != tuple(expected)), 0.0),
    ]


def _linked(rag: RagCache, prompt: Prompt, policy: str) -> _Run:
    inputs = rag.link(prompt, policy=policy).inputs
    cache = inputs["past_key_values"]
    out = rag.model.generate(**inputs, **_options(1), output_logits=True, return_dict_in_generate=True)
    return _Run(_kv(cache).kv, out.logits[0][0])


def _stepwise(oracle: Any, parts: Sequence[tuple[int, ...]]) -> tuple[DynamicCache, torch.Tensor]:
    cache = DynamicCache()
    position, logits = 0, torch.empty(0)
    for index, part in enumerate(parts):
        computed = FIRST if index in CHUNKS else len(part)
        alone = _alone(oracle, part, position) if computed < len(part) else None
        for token in part[:computed]:
            logits = _step(oracle, token, position, cache)
            position += 1
        if alone is not None:
            for layer, (keys, values) in enumerate(alone.kv):
                cache.update(keys[None, :, computed:], values[None, :, computed:], layer)
            position += len(part) - computed
    return cache, logits


def _step(oracle: Any, token: int, position: int, cache: DynamicCache) -> torch.Tensor:
    out = oracle(
        input_ids=torch.tensor([[token]]),
        position_ids=torch.tensor([[position]]),
        past_key_values=cache,
        use_cache=True,
    )
    logits: torch.Tensor = out.logits[0, -1]
    return logits


def _alone(oracle: Any, ids: Sequence[int], start: int) -> _Run:
    cache = DynamicCache()
    oracle(
        input_ids=torch.tensor([list(ids)]),
        position_ids=torch.arange(start, start + len(ids))[None],
        past_key_values=cache,
        use_cache=True,
    )
    return _kv(cache)


def _kv(cache: Any) -> _Run:
    return _Run(tuple((layer.keys[0], layer.values[0]) for layer in cache.layers))


def _kv_differences(ours: _Run, theirs: _Run, what: str) -> list[Difference]:
    if len(ours.kv) != len(theirs.kv):
        return [Difference(f"layers, {what}", float("inf"), 0.0)]
    return [
        Difference(f"{name} of layer {index}, {what}", _off(our[:, : their.shape[1]], their), KV)
        for index, pair in enumerate(zip(ours.kv, theirs.kv, strict=True))
        for name, our, their in zip(("keys", "values"), *pair, strict=True)
    ]


def _off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    size = float(theirs.abs().max()) or 1.0
    return float((ours.float() - theirs.float()).abs().max()) / size


def _options(new: int) -> dict[str, Any]:
    return {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}

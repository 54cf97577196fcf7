"""A context and many questions about it in one forward pass.

The context is computed once. Every question-answer pair has the positions it would have alone after the
context; it attends to the context and to itself, not to the other pairs. So one pass gives what `generate`
would give for each question.

The same forward simulates reuse of cached KV: the first `recompute` tokens of a chunk attend to everything
before them, the others to their own chunk only, as cached KV would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizer import split
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.world.world import INSTRUCTION, SEPARATOR

IGNORE = -100


class Coder:
    """Turns the pieces of a prompt into token ids, in the form of the chat template."""

    def __init__(self, vocabulary: dict[str, int]) -> None:
        self._ids = vocabulary
        self._seen: dict[str, list[int]] = {}

    def text(self, text: str) -> list[int]:
        if len(self._seen) > 50_000:
            self._seen.clear()
        if text not in self._seen:
            self._seen[text] = [self._ids[word] for word in split(text)]
        return self._seen[text]

    def last(self, title: str) -> int:
        """Return the id of the last word of a name."""
        return self.text(title)[-1]

    def context(self, chunks: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return the ids up to the end of the last chunk, and each one's chunk number (0: no chunk)."""
        ids = [self._ids["<s>"], self._ids["<|system|>"], *self.text(INSTRUCTION)]
        owner = [0] * len(ids)
        for number, chunk in enumerate(chunks, 1):
            between, inside = self.text(SEPARATOR), self.text(chunk)
            ids += between + inside
            owner += [0] * len(between) + [number] * len(inside)
        return ids, owner

    def pair(self, question: str, answer: str) -> tuple[list[int], int]:
        """Return the ids of a question with its answer, and the index at which the answer starts."""
        end = self._ids["</s>"]
        asked = [end, self._ids["<|user|>"], *self.text(question), end, self._ids["<|assistant|>"]]
        return [*asked, *self.text(answer), end], len(asked)


@dataclass(frozen=True)
class Packed:
    """A batch of B contexts with P pairs each, padded on the right.

    `context`, `owner` [B, C]; `length` [B]; `pairs`, `labels` [B, P, Q], labels shifted, -100 elsewhere.
    """

    context: Tensor
    owner: Tensor
    length: Tensor
    pairs: Tensor
    labels: Tensor


def pack(coder: Coder, items: Sequence[tuple[Sequence[str], Sequence[tuple[str, str]]]]) -> Packed:
    """Pack contexts (lists of chunks) and their (question, answer) pairs; missing pairs are padded."""
    contexts = [coder.context(chunks) for chunks, _ in items]
    pairs = [[coder.pair(*pair) for pair in asked] for _, asked in items]
    longest = max(len(ids) for ids, _ in contexts)
    most = max(len(asked) for asked in pairs)
    widest = max(len(ids) for asked in pairs for ids, _ in asked)
    context = torch.zeros(len(items), longest, dtype=torch.long)
    owner = torch.zeros_like(context)
    pair_ids = torch.zeros(len(items), most, widest, dtype=torch.long)
    labels = torch.full_like(pair_ids, IGNORE)
    for b, (ids, number) in enumerate(contexts):
        context[b, : len(ids)] = torch.tensor(ids)
        owner[b, : len(ids)] = torch.tensor(number)
        for p, (pair, start) in enumerate(pairs[b]):
            pair_ids[b, p, : len(pair)] = torch.tensor(pair)
            labels[b, p, start - 1 : len(pair) - 1] = torch.tensor(pair[start:])
    length = torch.tensor([len(ids) for ids, _ in contexts])
    return Packed(context, owner, length, pair_ids, labels)


def forward(
    model: LlamaForCausalLM,
    batch: Packed,
    recompute: int | None = None,
    taps: dict[int, Tensor] | None = None,
    blind: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the final hidden states of the context [B, C, D] and of the pairs [B, P, Q, D].

    Parameters
    ----------
    recompute
        None for an ordinary prefill; else the number of tokens at each chunk's start that are computed in the
        prompt, the rest of the chunk coming from a prefill of the chunk alone (0: the whole chunk).
    blind
        In so many of the first layers the pairs do not see the context.
    taps
        If given, every layer's output [B, C + P * Q, D] is put there under the layer's number.
    """
    b, c = batch.context.shape
    _, p, q = batch.pairs.shape
    end = batch.length[:, None]
    positions = torch.cat([torch.arange(c).expand(b, c), (end + torch.arange(q)).repeat(1, p)], 1)
    outside = torch.arange(c) >= end  # [B, C]
    embed = model.model.embed_tokens
    x = embed(torch.cat([batch.context, batch.pairs.reshape(b, p * q)], 1))
    rope = _rope(model, positions)
    causal = torch.ones(c, c, dtype=torch.bool).tril()
    alone, keep = None, None
    if recompute is not None:
        alone, alone_rope, alone_mask = embed(batch.context), _cut(rope, c), _same_chunk(batch.owner)
        keep = (_place(batch.owner) >= recompute) & (batch.owner > 0)
    for number, layer in enumerate(model.model.layers):
        query, key, value = _project(layer, x, rope)
        if alone is not None and keep is not None:
            alone_qkv = _project(layer, alone, alone_rope)
            rows = keep[:, None, :, None]
            key = torch.cat([torch.where(rows, alone_qkv[1], key[:, :, :c]), key[:, :, c:]], 2)
            value = torch.cat([torch.where(rows, alone_qkv[2], value[:, :, :c]), value[:, :, c:]], 2)
            alone = _finish(layer, alone, _attend(*alone_qkv, alone_mask[:, None]))
        read = _attend(query[:, :, :c], key[:, :, :c], value[:, :, :c], causal)
        asked = _pairs_attend(query[:, :, c:], key, value, c, p, q, outside | (number < blind))
        x = _finish(layer, x, torch.cat([read, asked], 2))
        if taps is not None:
            taps[number] = x
    x = norm(model.model.norm, x)
    return x[:, :c], x[:, c:].unflatten(1, (p, q))


def logits(model: LlamaForCausalLM, hidden: Tensor) -> Tensor:
    """Return the logits of hidden states that `forward` gave."""
    return F.linear(hidden, model.lm_head.weight)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    # not F.scaled_dot_product_attention: its backward in bfloat16 takes three times as long on a CPU
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(2, 3)
    return scores.masked_fill(~mask, -1e9).float().softmax(3).to(value.dtype) @ value


def _pairs_attend(
    query: Tensor, key: Tensor, value: Tensor, c: int, p: int, q: int, outside: Tensor
) -> Tensor:
    b, h, _, d = query.shape
    query = query * d**-0.5
    to_context = query @ key[:, :, :c].transpose(2, 3)
    to_context = to_context.masked_fill(outside[:, None, None], -1e9)
    own = (b, h, p, q, d)
    to_own = query.reshape(own) @ key[:, :, c:].reshape(own).transpose(3, 4)
    future = torch.ones(q, q, dtype=torch.bool).triu(1)
    to_own = to_own.masked_fill(future, -1e9).reshape(b, h, p * q, q)
    weights = torch.cat([to_context, to_own], 3).float().softmax(3).to(value.dtype)
    from_own = weights[..., c:].reshape(b, h, p, q, q) @ value[:, :, c:].reshape(own)
    return weights[..., :c] @ value[:, :, :c] + from_own.reshape(b, h, p * q, d)


def _project(layer: torch.nn.Module, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    attention = layer.self_attn
    x = norm(layer.input_layernorm, x)
    query, key, value = (
        F.linear(x, part.weight).unflatten(2, (-1, attention.head_dim)).transpose(1, 2)
        for part in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    group = query.shape[1] // key.shape[1]
    key, value = _rotate(key, rope).repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    return _rotate(query, rope).to(value.dtype), key.to(value.dtype), value


def _finish(layer: torch.nn.Module, x: Tensor, seen: Tensor) -> Tensor:
    x = x + F.linear(seen.transpose(1, 2).flatten(2), layer.self_attn.o_proj.weight)
    inner = norm(layer.post_attention_layernorm, x)
    mlp = layer.mlp
    inner = F.silu(F.linear(inner, mlp.gate_proj.weight)) * F.linear(inner, mlp.up_proj.weight)
    return x + F.linear(inner, mlp.down_proj.weight)


def norm(layer: torch.nn.Module, x: Tensor) -> Tensor:
    """Apply one of the model's norms, in float32."""
    return F.rms_norm(x.float(), (x.shape[-1],), layer.weight, layer.variance_epsilon)


def _rope(model: LlamaForCausalLM, positions: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = model.model.rotary_emb(torch.zeros(1), positions)
    return cos[:, None], sin[:, None]


def _cut(rope: tuple[Tensor, Tensor], c: int) -> tuple[Tensor, Tensor]:
    return rope[0][:, :, :c], rope[1][:, :, :c]


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * rope[0] + torch.cat([-second, first], -1) * rope[1]


def _same_chunk(owner: Tensor) -> Tensor:
    """Mask [B, C, C] under which every token of a chunk sees its own chunk only."""
    c = owner.shape[1]
    causal = torch.ones(c, c, dtype=torch.bool).tril()
    return causal & (owner[:, :, None] == owner[:, None])


def _place(owner: Tensor) -> Tensor:
    """Index of each token within its chunk."""
    here = torch.arange(owner.shape[1]).expand_as(owner)
    start = torch.ones_like(owner, dtype=torch.bool)
    start[:, 1:] = owner[:, 1:] != owner[:, :-1]
    return here - torch.where(start, here, 0).cummax(1).values

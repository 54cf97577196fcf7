"""Give the middle layers heads that look at the tokens which are about the same subject.

Left alone, the reader finds facts by their relation ("was born in") and never learns to ask whose fact it is:
with two people in the context it is right half of the time, although the subject of every token can be read
off its middle layers. So that comparison is put in its heads once, and training goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from packed import IGNORE, Coder, forward, norm, pack
from tasks import Task, topics
from torch import Tensor
from transformers import LlamaForCausalLM

STRENGTH = 4.0  # by how much, before the softmax, a token about the same subject is preferred to another


@torch.no_grad()
def bind(
    model: LlamaForCausalLM, coder: Coder, source: Iterator[Task], layers: tuple[int, int], blind: int
) -> None:
    """Overwrite part of the queries and keys of `layers`.

    The part is the one whose rotation is slow enough not to matter over a context. It gets the directions in
    which the mean state of question tokens and that of context tokens about the same name vary together.
    """
    tasks = list(islice(source, 60))
    for index in layers:
        layer = model.model.layers[index]
        states, names, asking = [], [], []
        for task in tasks:
            batch = pack(coder, [(task.chunks, [(q.text, q.answer) for q in task.questions])])
            taps: dict[int, Tensor] = {}
            forward(model, batch, taps=taps, blind=blind)
            about = topics(coder, [task], batch)[0]
            starts = (batch.labels[0] != IGNORE) & ((batch.labels[0] != IGNORE).cumsum(1) == 1)
            in_context = torch.zeros_like(about, dtype=torch.bool)
            in_context[: batch.context.shape[1]] = True
            ask = torch.cat([torch.zeros(batch.context.shape[1], dtype=torch.bool), starts.flatten()])
            used = (about != IGNORE) & (in_context | ask)
            states.append(norm(layer.input_layernorm, taps[index - 1])[0][used])
            names.append(about[used])
            asking.append(ask[used])
        _overwrite(model, layer.self_attn, *(torch.cat(part) for part in (states, names, asking)))


def _overwrite(
    model: LlamaForCausalLM, attention: torch.nn.Module, states: Tensor, names: Tensor, asking: Tensor
) -> None:
    both = sorted(set(names[asking].tolist()) & set(names[~asking].tolist()))
    asked = torch.stack([states[asking & (names == name)].mean(0) for name in both])
    told = torch.stack([states[~asking & (names == name)].mean(0) for name in both])
    asked, told = asked - asked.mean(0), told - told.mean(0)
    half = attention.head_dim // 2
    slow = (model.model.rotary_emb.inv_freq < 0.004).nonzero()[:, 0].tolist()
    slow = [*slow, *(half + i for i in slow)]
    left, _, right = torch.linalg.svd(asked.T @ told)
    left, right = left[:, : len(slow)].T, right[: len(slow)]
    alike = (asked @ left.T) @ (told @ right.T).T
    same = alike.diag().mean()
    other = (alike.sum() - alike.diag().sum()) / (alike.numel() - len(both))
    gain = (STRENGTH * attention.head_dim**0.5 / (same - other)).sqrt()
    for part, directions in ((attention.q_proj, left), (attention.k_proj, right)):
        for head in range(part.out_features // attention.head_dim):
            part.weight[[head * attention.head_dim + i for i in slow]] = gain * directions

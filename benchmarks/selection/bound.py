"""What bounds the choice of rows: exact KV put in place of stored KV, and nothing computed.

Chunks encoded with ``average:3`` are linked as they are; then as many tokens as ``impact:r`` recomputes get
the KV of an ordinary prefill. These tokens are

- ``impact``: those that the policy recomputes (and, for comparison, the rows as it recomputes them);
- ``next token``: those with the highest expected square of (gradient of the log probability of the next
  token, times the true deviation of K and of V, by norms). The expectation is over the model's own likeliest
  next tokens, so only the deviation is known beyond what a policy can know;
- ``answer``: those that gain most by the gradient of KL(full || linked) along full's answer, in steps;

and ``pairs`` are as many pairs of a token and a layer. ``kl`` is KL(full || way) per token of full's answer
in nats, ``rouge_l`` and ``same`` compare the greedy answer with full's.

    OMP_NUM_THREADS=1 python benchmarks/selection/bound.py --dataset squad:dev-v2.0.json
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import DynamicCache

from ragcachekit import RagCache
from ragcachekit.cli.console import quiet_loading, show
from ragcachekit.commands.bench.fidelity import metrics
from ragcachekit.commands.bench.fidelity.datasets.base import Sampling
from ragcachekit.commands.bench.fidelity.prompts import FEW_SHOT, FidelityPrompt, PromptMaker
from ragcachekit.commands.bench.report import BenchReport
from ragcachekit.commands.own_questions import Asking
from ragcachekit.commands.workspace import load_checked
from ragcachekit.errors import RagCacheError
from ragcachekit.generate.streams import cut_at_stop

ENCODER, STEPS, LIKELIEST, NEW_TOKENS = "average:3", 8, 6, 16
_NAMES = ("keys", "values")
_ROUNDING = 1e-4

Row = dict[str, Any]
Side = list[torch.Tensor]
"""``[1, kv_heads, tokens, head_dim]`` per layer, keys rotated."""


@dataclass(frozen=True)
class LinkedKV:
    """KV of everything before the question."""

    keys: Side
    values: Side

    @classmethod
    def of(cls, cache: Any, tokens: int) -> LinkedKV:
        """Copies of the first ``tokens`` rows."""
        sides = ([getattr(layer, name)[:, :, :tokens].clone() for layer in cache.layers] for name in _NAMES)
        return cls(*sides)

    def towards(self, exact: LinkedKV, share: torch.Tensor) -> LinkedKV:
        """This KV plus a ``share`` of the deviation, per token or per layer and token."""
        shares = share.expand(len(self.keys), -1)[:, None, None, :, None]
        return LinkedKV(
            [one + w * (other - one) for one, other, w in zip(self.keys, exact.keys, shares, strict=True)],
            [
                one + w * (other - one)
                for one, other, w in zip(self.values, exact.values, shares, strict=True)
            ],
        )

    def cache(self) -> DynamicCache:
        """As the model takes it."""
        cache = DynamicCache()
        for layer, pair in enumerate(zip(self.keys, self.values, strict=True)):
            cache.update(*pair, layer)
        return cache


class Continued:
    """The rows behind the chunks of one prompt, over KV that is put in front of them."""

    def __init__(self, model: Any, question: Sequence[int], start: int, answer: Sequence[int]) -> None:
        self._model, self._question, self._start, self._answer = model, list(question), start, list(answer)

    def log_probs(self, kv: LinkedKV) -> torch.Tensor:
        """``[tokens of the answer, vocabulary]`` along the answer."""
        logits = self._run(kv.cache(), [*self._question, *self._answer], self._start)
        first = len(self._question) - 1
        return logits[first : first + len(self._answer)].log_softmax(-1)

    @torch.no_grad()
    def greedy(self, kv: LinkedKV, end: int) -> list[int]:
        """Tokens that follow, up to and with ``end``."""
        cache, given, at, out = kv.cache(), self._question, self._start, list[int]()
        while len(out) < NEW_TOKENS and end not in out:
            logits = self._run(cache, given, at)
            at, given = at + len(given), [int(logits[-1].argmax())]
            out += given
        return out

    def _run(self, cache: DynamicCache, ids: list[int], start: int) -> torch.Tensor:
        positions = torch.arange(start, start + len(ids))[None]
        out = self._model(input_ids=torch.tensor([ids]), past_key_values=cache, position_ids=positions)
        logits: torch.Tensor = out.logits[0]
        return logits


def by_answer(
    run: Continued, linked: LinkedKV, exact: LinkedKV, full: torch.Tensor, shape: Sequence[int], count: int
) -> torch.Tensor:
    """Mask of the ``count`` elements of ``shape`` that gain most, chosen in steps."""
    mask = torch.zeros(*shape)
    for step in range(STEPS):
        share = mask.clone().requires_grad_(True)
        other = run.log_probs(linked.towards(exact, share))
        (slope,) = torch.autograd.grad((full.exp() * (full - other)).sum(-1).mean(), share)
        slope[mask > 0] = torch.inf  # chosen already
        more = count * (step + 1) // STEPS - count * step // STEPS
        mask.view(-1)[slope.flatten().topk(more, largest=False).indices] = 1
    return mask


def by_next_token(run: Continued, linked: LinkedKV, exact: LinkedKV) -> torch.Tensor:
    """``[layers, tokens]``: expected squares of gradient times deviation, by norms, of K and of V."""
    own = LinkedKV(*([t.clone().requires_grad_(True) for t in side] for side in (linked.keys, linked.values)))
    log_probs = run.log_probs(own)[0]
    likely = log_probs.detach().topk(LIKELIEST)
    total = torch.zeros(len(own.keys), own.keys[0].shape[2])
    for weight, token in zip(likely.values.exp(), likely.indices, strict=True):
        slopes = torch.autograd.grad(log_probs[token], own.keys + own.values, retain_graph=True)
        known, true = linked.keys + linked.values, exact.keys + exact.values
        effects = torch.stack(
            [
                (slope.norm(dim=-1) * (one - other).norm(dim=-1)).sum((0, 1)) ** 2
                for slope, one, other in zip(slopes, known, true, strict=True)
            ]
        )
        total += weight * effects.view(2, len(own.keys), -1).sum(0)
    return total


def measured(
    rag: RagCache, model: Any, maker: PromptMaker, prompt: FidelityPrompt, policy: str
) -> Iterator[Row]:
    """Rows of a prompt whose chunks are encoded; RagCacheError if KV that is exact everywhere differs."""
    ids, end = prompt.token_ids, prompt.spans[-1].stop
    right = rag.generate(
        prompt.prompt, policy="full", stop=list(maker.stop), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    run = Continued(model, ids[end:], end, right.token_ids)
    linked, mended = (
        LinkedKV.of(rag.link(prompt.prompt, policy=name).cache, end) for name in ("reuse", policy)
    )
    with torch.no_grad():
        exact = LinkedKV.of(model(input_ids=torch.tensor([ids])).past_key_values, end)
        full = run.log_probs(exact)
        check = model(input_ids=torch.tensor([[*ids, *right.token_ids]])).logits[0, len(ids) - 1 : -1]
    if (off := metrics.divergence(check.log_softmax(-1), full)) > 1e-6:
        raise RagCacheError(f"exact KV is {off:.2g} nats from an ordinary prefill; do not trust any figure")

    def row(way: str, kv: LinkedKV) -> Row:
        with torch.no_grad():
            kl = metrics.divergence(full, run.log_probs(kv))
        found = rag.tokenizer.decode(run.greedy(kv, rag.tokenizer.eos_token_id), skip_special_tokens=True)
        text, other = cut_at_stop(found, list(maker.stop))[0].strip(), right.text.strip()
        return {"way": way, "kl": kl, "rouge_l": metrics.rouge_l(text, other), "same": float(text == other)}

    pairs = zip(linked.values, mended.values, strict=True)
    chosen = torch.stack([(a - b).abs().amax((0, 1, 3)) for a, b in pairs]).amax(0) > _ROUNDING
    layers, count = len(linked.keys), int(chosen.sum())
    scores = by_next_token(run, linked, exact)
    yield row("none", linked)
    yield row(f"{policy}, as recomputed", mended)
    yield row(policy, linked.towards(exact, chosen.float()))
    yield row("next token", linked.towards(exact, _highest(scores.sum(0), count)))
    yield row("next token, pairs", linked.towards(exact, _highest(scores, count * layers)))
    for way, shape, size in (("answer", (end,), count), ("answer, pairs", (layers, end), count * layers)):
        yield row(way, linked.towards(exact, by_answer(run, linked, exact, full, shape, size)))


def _highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    mask = torch.zeros_like(scores)
    mask.view(-1)[scores.flatten().topk(count).indices] = 1
    return mask


def run(given: argparse.Namespace) -> BenchReport:
    """Means over questions, per way of choosing."""
    asking = Asking(given.model, dataset=given.dataset, sampling=Sampling(given.count, half="develop"))
    questions = asking.sample().questions[:: given.every]
    model, tokenizer = load_checked(given.model, "cpu", "float32")
    plain, _ = load_checked(given.model, "cpu", "float32")
    plain.requires_grad_(False)
    maker = PromptMaker(tokenizer, FEW_SHOT)
    rows: dict[str, list[Row]] = {}
    with RagCache(model, tokenizer, policy="reuse", encoder=ENCODER, cold="now") as rag:
        for question in tqdm(questions, unit="question"):
            prompt = maker.prompt(question)
            rag.encode(list(question.document or question.chunks), system=prompt.before)
            for row in measured(rag, plain, maker, prompt, given.policy):
                rows.setdefault(row.pop("way"), []).append(row)
    return BenchReport(
        "selection-bound", given.model, 0, tuple(_means(way, own) for way, own in rows.items())
    )


def _means(way: str, rows: Sequence[Row]) -> Row:
    means = {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}
    spread = statistics.stdev(row["kl"] for row in rows) if len(rows) > 1 else 0.0
    return {"way": way, "n": len(rows), **means, "kl_stdev": spread}


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="sample")
    parser.add_argument("--dataset", required=True, help="squad:FILE, ...")
    parser.add_argument("--policy", default="impact:0.1", help="says how many tokens")
    parser.add_argument("--count", type=int, default=150, help="questions of the developing half")
    parser.add_argument("--every", type=int, default=12, help="of which each so many-th is measured")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    quiet_loading()
    report = run(given)
    show(report.table(f"Exact KV in place of stored KV: {report.model}"))
    if given.json:
        report.write_json(given.json)


if __name__ == "__main__":
    main()

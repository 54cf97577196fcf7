"""Which tokens each policy picks, and what comes of it, against slow derivations in plain transformers."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from families import ALWAYS, FAMILIES, build, off, plain, prefill, tokens, wrapped
from link_kit import BOS, Overriding, described, ids_of, linked_columns, plan_from, segments
from ragcachekit.encode.encoders import ChunkEncoder
from ragcachekit.forward import prefill as narrow
from ragcachekit.forward.attention import install
from ragcachekit.forward.prefill import choose, link_ahead
from ragcachekit.plan.encodings import Encodings
from ragcachekit.policies.base import Look
from ragcachekit.policies.registry import open_policy
from ragcachekit.store.memory import HostStore
from soak_kit import soaked

NAMES = soaked([name for name in FAMILIES if name != "phi3-longrope"], *ALWAYS)
FEW = [name for name in ALWAYS if name != "phi3-longrope"]
SYSTEM, QUESTION = tokens(5, 1), tokens(6, 9)
CHUNKS = [tokens(19, 2), tokens(7, 3), tokens(26, 4)]
SEPARATOR = (7,)


def parts():
    body = [("text", SYSTEM)]
    for chunk in CHUNKS:
        body += [("chunk", chunk), ("text", SEPARATOR)]
    return segments(*body, ("text", QUESTION))


def plan_for(name, policy, encoder="standalone", sums=lambda kv: {}):
    model, rope = wrapped(name), described(name)
    install(model)
    store, chosen = HostStore(1 << 26), open_policy(policy)
    arguments = (parts(), chosen, Encodings(encoder, rope, BOS), store, "fingerprint", "space")
    for item in plan_from(*arguments).missing:
        for _, kv in ChunkEncoder(model, rope).encode([item.token_ids], item.encoding):
            assert store.put(item.key, replace(kv, sums=sums(kv)))
    return plan_from(*arguments)


def picked(plan):
    cached = {p for c in plan.placed for p in range(c.start, c.stop)}
    return sorted(cached & set(plan.rows))


def spans(plan):
    return [(c.start, c.stop) for c in plan.placed if not c.is_exact]


@torch.no_grad()
def slow(name, ids, columns):
    """A full forward in which rows see the given columns; logits of computed rows are right, K/V all."""
    cache = Overriding(columns)
    out = plain(name)(input_ids=torch.tensor([list(ids)]), past_key_values=cache, use_cache=True)
    return out.logits[0], [(x.keys[0], x.values[0]) for x in cache.layers]


@torch.no_grad()
def weights_of(name, plan, rows):
    """Eager attention weights of single rows, per layer ``{row: [heads, row + 1]}``."""
    model = build(name)
    model.set_attn_implementation("eager")
    ids = plan.token_ids
    _, layers = slow(name, ids, linked_columns(described(name), plan))
    out = [{} for _ in layers]
    for row in rows:
        cache = DynamicCache()
        for index, (keys, values) in enumerate(layers):
            cache.update(keys[None, :, :row], values[None, :, :row], index)
        got = model(
            input_ids=torch.tensor([[ids[row]]]),
            position_ids=torch.tensor([[row]]),
            past_key_values=cache,
            output_attentions=True,
        ).attentions
        for index, layer in enumerate(got):
            out[index][row] = layer[0, :, -1].double().numpy()
    return out


def highest(scores, count):
    order = sorted(scores, key=lambda p: (-scores[p], p))
    return sorted(order[:count])


class TestQuery:
    @pytest.mark.parametrize(("name", "ratio"), [("llama", 0.1), *((name, 0.33) for name in FEW)])
    def test_picks_what_eager_attention_says(self, name, ratio):
        plan = plan_for(name, f"query:{ratio}")
        ids = plan.token_ids
        question = range(len(ids) - len(SEPARATOR + QUESTION), len(ids))
        weights = weights_of(name, plan, question)[-1]
        scores = {}
        for start, stop in spans(plan):
            for p in range(start, stop):
                scores[p] = 0.0
            for row in question:
                inside = weights[row][:, start:stop]
                total = inside.sum(1, keepdims=True)
                inside = np.divide(inside, total, out=np.zeros_like(inside), where=total > 0)
                for i, p in enumerate(range(start, stop)):
                    scores[p] += inside[:, i].sum()
        count = math.ceil(ratio * sum(map(len, CHUNKS)) - 1e-9)
        chosen, _ = choose(wrapped(name), described(name), plan)
        assert picked(chosen) == highest(scores, count)
        assert chosen.report.recompute_ratio == pytest.approx(count / (len(SYSTEM) + sum(map(len, CHUNKS))))

    @pytest.mark.parametrize("name", NAMES)
    def test_deep_adds_all_layers_and_takes_first_tokens_first(self, name):
        plan = plan_for(name, "deep:0.2")
        ids = plan.token_ids
        question = range(len(ids) - len(SEPARATOR + QUESTION), len(ids))
        total = {p: 0.0 for start, stop in spans(plan) for p in range(start, stop)}
        for weights in weights_of(name, plan, question):
            layer = dict.fromkeys(total, 0.0)
            for start, stop in spans(plan):
                for row in question:
                    inside = weights[row][:, start:stop]
                    share = inside / np.maximum(inside.sum(1, keepdims=True), 1e-300)
                    for i, p in enumerate(range(start, stop)):
                        layer[p] += share[:, i].sum()
            whole = sum(layer.values()) or 1.0
            for p in total:
                total[p] += math.sqrt(layer[p] / whole)
        count = math.ceil(0.2 * len(total) - 1e-9)
        first = [start for start, _ in spans(plan)]
        rest = highest({p: s for p, s in total.items() if p not in first}, count - len(first))
        chosen, _ = choose(wrapped(name), described(name), plan)
        assert picked(chosen) == sorted(first + rest)

    @pytest.mark.parametrize(
        ("name", "known"), [("llama", "all"), ("llama", "none"), *((name, "some") for name in FEW)]
    )
    def test_impact_is_attention_of_the_last_rows_times_sensitivity(self, name, known):
        def moved(kv):
            drawn = torch.Generator().manual_seed(kv.tokens)
            has = known == "all" or (known == "some" and kv.tokens % 2 == 0)
            return {"sensitivity": torch.rand(kv.layers, kv.tokens, generator=drawn) ** 4} if has else {}

        plan = plan_for(name, "impact:0.2", sums=moved)
        object.__setattr__(plan.policy, "look", Look(layers=None, per_chunk=False, last=3))
        ids = plan.token_ids
        question = range(len(ids) - 3, len(ids))
        total = {p: 0.0 for start, stop in spans(plan) for p in range(start, stop)}
        sensitivity = {}
        for chunk in plan.placed:
            for at in range(chunk.tokens if "sensitivity" in chunk.sums else 0):
                sensitivity[chunk.start + at] = chunk.sums["sensitivity"][:, at].tolist()
        if known == "some":
            assert 0 < len(sensitivity) < len(total)
        means = np.array(list(sensitivity.values())).mean(0) if sensitivity else np.ones(99)
        for layer, weights in enumerate(weights_of(name, plan, question)):
            for p in total:
                seen = sum(weights[row][:, p].sum() for row in question)
                total[p] += seen * sensitivity.get(p, means)[layer]
        count = math.ceil(0.2 * len(total) - 1e-9)
        first = [start for start, _ in spans(plan)]
        rest = highest({p: s for p, s in total.items() if p not in first}, count - len(first))
        chosen, _ = choose(wrapped(name), described(name), plan)
        assert picked(chosen) == sorted(first + rest)

    def test_nothing_to_choose_from_is_decided_at_once(self):
        parts = segments(("text", SYSTEM), ("text", QUESTION))
        encodings = Encodings("standalone", described("llama"), BOS)
        plan = plan_from(parts, open_policy("query:0.5"), encodings, HostStore(1 << 20), "f", "s")
        assert plan.policy is None
        assert plan.rows == tuple(range(len(plan.token_ids)))

    def test_a_policy_that_watches_a_layer_too_many_says_so(self):
        plan = plan_for("llama", "query:0.1")
        object.__setattr__(plan.policy, "look", Look(layers=(7,)))
        with pytest.raises(ValueError, match="watches layers"):
            choose(wrapped("llama"), described("llama"), plan)


class TestRandom:
    def test_the_share_the_chunk_and_nothing_else_decides(self):
        first, again = plan_for("llama", "random:0.3"), plan_for("llama", "random:0.3")
        assert first.rows == again.rows
        for (start, stop), chunk in zip(spans(first), CHUNKS, strict=True):
            inside = [p for p in picked(first) if start <= p < stop]
            assert len(inside) == math.ceil(0.3 * len(chunk) - 1e-9)
        drawn = random.Random(first.placed[1].chunk_id).sample(range(*spans(first)[0]), 6)
        assert [p for p in picked(first) if p < spans(first)[0][1]] == sorted(drawn)


class TestPrefixAndSums:
    def test_prefix_recomputes_all_that_is_not_exact(self):
        plan = plan_for("llama", "prefix")
        assert plan.kept == plan.report.exact_tokens == len(SYSTEM)
        assert plan.report.approximate_tokens == 0


def blend(name, ratio, gradual):
    """Survivors per layer, and the columns of the slow forward, from full forwards only."""
    plan = plan_for(name, "reuse")
    ids, linked = plan.token_ids, linked_columns(described(name), plan)
    prompt = {p for start, stop in spans(plan) for p in range(start, stop)}
    is_exact = {p for c in plan.placed if c.is_exact for p in range(c.start, c.stop)}
    going, columns, survivors = sorted(prompt), [{p: linked[0][p] for p in is_exact}], [sorted(prompt)]
    for layer in range(1, len(linked)):
        if layer == 1 or gradual:
            columns.append({p: linked[layer][p] for p in is_exact | (prompt - set(going))})
            empty = [{} for _ in linked[layer + 1 :]]
            _, layers = slow(name, ids, [*columns, *empty])
            scores = {
                p: float((layers[layer][1][:, p] - linked[layer][p][1]).double().square().sum())
                for p in going
            }
            share = ratio * (1.5 - (layer - 1) / (len(linked) - 2)) if gradual else ratio
            going = highest(scores, min(len(going), math.ceil(share * len(prompt) - 1e-9)))
        else:
            columns.append({p: linked[layer][p] for p in is_exact | (prompt - set(going))})
        survivors.append(going)
    return ids, survivors, columns


class TestCacheBlend:
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("gradual", [False, True])
    def test_logits_and_kv_are_those_of_the_slow_forward(self, name, gradual):
        kind = "cacheblend-gradual" if gradual else "cacheblend"
        ids, survivors, columns = blend(name, 0.25, gradual)
        logits, layers = slow(name, ids, columns)
        linked, plan = link_ahead(wrapped(name), described(name), plan_for(name, f"{kind}:0.25"))
        inputs = linked.inputs
        cache = inputs["past_key_values"]
        for ours, (keys, values) in zip(cache.layers, layers, strict=True):
            assert off(ours.keys[0], keys[:, :-1]) < 2e-5
            assert off(ours.values[0], values[:, :-1]) < 2e-5
        with torch.no_grad():
            out = wrapped(name)(
                input_ids=inputs["input_ids"][:, -1:],
                attention_mask=inputs["attention_mask"],
                past_key_values=cache,
            )
        assert off(out.logits[0, -1], logits[-1]) < 2e-5
        cached = len(SYSTEM) + sum(map(len, CHUNKS))
        spent = sum(map(len, survivors)) / (len(survivors) * cached)
        assert plan.report.recompute_ratio == pytest.approx(spent)
        assert plan.report.recomputed_tokens == len(survivors[-1])

    def test_ratio_one_is_an_ordinary_prefill(self):
        linked, plan = link_ahead(wrapped("llama"), described("llama"), plan_for("llama", "cacheblend:1"))
        run = prefill(plain("llama"), ids_of(parts()))
        for ours, keys in zip(linked.cache.layers, run.keys, strict=True):
            assert off(ours.keys[0], keys[:, :-1]) < 1e-5
        assert plan.report.approximate_tokens == 0

    def test_a_forward_while_torch_registers_the_hook_is_left_alone(self):
        # Another thread's: torch calls the hook without keyword arguments until it is registered.
        assert narrow._before(1, wrapped("llama").model.layers[1], (torch.zeros(1, 2, 64),)) is None

    def test_other_forwards_of_the_model_are_left_alone(self):
        model = wrapped("llama")
        link_ahead(model, described("llama"), plan_for("llama", "cacheblend:0.1"))
        hooks = [len(layer._forward_pre_hooks) for layer in model.model.layers]
        link_ahead(model, described("llama"), plan_for("llama", "cacheblend:0.1"))
        assert hooks == [len(layer._forward_pre_hooks) for layer in model.model.layers] == [0, 1, 1]
        ids = tokens(40, 5)
        assert off(prefill(model, ids).logits, prefill(plain("llama"), ids).logits) < 1e-6


@pytest.mark.parametrize("ratio", ["0", "-0.1", "1.5", "nan", "x", ""])
@pytest.mark.parametrize("kind", ["query", "random", "cacheblend", "cacheblend-gradual"])
def test_ratios_that_make_no_sense(kind, ratio):
    with pytest.raises(ValueError, match=kind):
        open_policy(f"{kind}:{ratio}")

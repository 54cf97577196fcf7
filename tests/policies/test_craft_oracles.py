"""``in-prompt`` entries and what Cache-Craft makes of them, against eager attention and numpy."""

import functools
import math
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
import torch

from engine_kit import checked
from families import ALWAYS, EACH, FAMILIES, build, off, plain, prefill, tokens, wrapped
from link_kit import BOS, Overriding, described, ids_of, linked_columns, plan_from, segments
from ragcachekit import Chunk, Prompt, RagCache, Text
from ragcachekit.encode.background import BackgroundEncoder
from ragcachekit.encode.encoders import ChunkEncoder, NeighbourEncoder
from ragcachekit.encode.in_prompt import InPromptEncoder, runs
from ragcachekit.forward.attention import install
from ragcachekit.forward.prefill import link_ahead
from ragcachekit.model.rope import describe_rope
from ragcachekit.plan.encodings import Encodings
from ragcachekit.plan.variants import VariantPool
from ragcachekit.policies.craft import CraftFocused
from ragcachekit.policies.registry import open_policy
from ragcachekit.store.forgets import ForgetEpochs
from ragcachekit.store.memory import HostStore
from soak_kit import soaked

NAMES = soaked([name for name in FAMILIES if name != "phi3-longrope"], *ALWAYS)
S, Q, SEP = tokens(9, 1), tokens(6, 9), (7,)
A, B, C, D = tokens(19, 2), tokens(7, 3), tokens(26, 4), tokens(13, 5)


def prompt(*chunks, system=S, question=Q):
    body = [("text", system)]
    for chunk in chunks:
        body += [("chunk", chunk), ("text", SEP)]
    return segments(*body, ("text", question))


class Cached:
    """A store and its variants, filled by the prompts that were answered."""

    def __init__(self, name, model=None, rope=None, encoder="in-prompt"):
        self.model, self.rope = model or wrapped(name), rope or described(name)
        install(self.model)
        self.store, self.pool = HostStore(1 << 26), VariantPool()
        self.encodings = Encodings(encoder, self.rope, BOS)
        chunks = ChunkEncoder(self.model, self.rope)
        self.background_encoder = BackgroundEncoder(
            chunks,
            self.store,
            lambda: True,
            NeighbourEncoder(self.model, self.rope, chunks, self.store),
            InPromptEncoder(self.model, self.rope),
            lambda key, kv: self.pool.add(key, kv) if key.encoding.startswith("in-prompt") else None,
            ForgetEpochs(),
        )

    def plan(self, parts, policy="reuse"):
        return plan_from(parts, open_policy(policy), self.encodings, self.store, "model", "space", self.pool)

    def answered(self, parts):
        plan = self.plan(parts)
        self.background_encoder.now(plan.missing)
        return plan


@functools.cache
def after_abc(name):
    cached = Cached(name)
    cached.answered(prompt(A, B, C))
    return cached


def eager(name, ids):
    """Per layer ``[heads, rows, keys]`` of an ordinary forward."""
    model = build(name)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        got = model(input_ids=torch.tensor([ids]), output_attentions=True, use_cache=False).attentions
    return [layer[0].double().numpy() for layer in got]


def sums_of(weights, bounds, number):
    """inter ``[layers, segments]``, intra ``[layers]``, outward ``[rows]`` of one segment, by loops."""
    start, stop = bounds[number]
    inter = np.zeros((len(weights), number))
    intra, outward = np.zeros(len(weights)), np.zeros(stop - start)
    for layer, all_heads in enumerate(weights):
        for head in all_heads:
            for row in range(start, stop):
                intra[layer] += head[row, start : row + 1].sum()
                for earlier, (left, right) in enumerate(bounds[:number]):
                    inter[layer, earlier] += head[row, left:right].sum()
                outward[row - start] += head[row, :start].sum() / len(weights)
    return inter, intra, outward


def bounds_of(parts):
    ends = np.cumsum([len(part.token_ids) for part in parts])
    return [(int(e) - len(p.token_ids), int(e)) for e, p in zip(ends, parts, strict=True)]


def entry(plan, number):
    return plan.pieces[number].kv, plan.placed[number]


@pytest.mark.parametrize("name", NAMES)
def test_sums_are_those_of_eager_attention(name):
    parts = prompt(A, B, C)
    plan = after_abc(name).plan(parts)
    weights, bounds = eager(name, ids_of(parts)), bounds_of(parts)
    for number, at in ((1, 1), (2, 3), (3, 5)):
        kv, _ = entry(plan, number)
        inter, intra, outward = sums_of(weights, bounds, at)
        for ours, theirs in (("inter", inter), ("intra", intra), ("outward", outward)):
            assert kv.sums[ours].shape == theirs.shape
            assert off(kv.sums[ours].double(), torch.from_numpy(theirs)) < 1e-5
        assert kv.sums["behind"].tolist() == [b - a for a, b in bounds[:at]]


@pytest.mark.parametrize("name", EACH)
def test_the_kv_is_that_of_the_prompt_and_exact_behind_it(name):
    cached, parts = after_abc(name), prompt(A, B, C)
    plan = cached.plan(parts, "craft:2")
    run, length = prefill(plain(name), ids_of(parts)), len(plan.token_ids)
    for piece in plan.pieces[1:]:
        where = torch.arange(piece.start, piece.start + piece.kv.tokens)
        angles = cached.rope.angles(where, length)
        for layer, (keys, values) in enumerate(zip(piece.kv.keys, piece.kv.values, strict=True)):
            assert off(cached.rope.place(layer, keys, values, angles)[0], run.keys[layer][:, where]) < 1e-5
            assert off(values, run.values[layer][:, where]) < 1e-5
    assert all(chunk.is_exact for chunk in plan.placed)
    assert plan.missing == ()
    assert plan.report.recompute_ratio == 0
    assert plan.report.exact_tokens == len(S) + len(A) + len(B) + len(C)


def derived(name, old, number, before):
    """Cost, and tokens by inter-attention, of segment ``number`` of ``old`` behind ``before``, in numpy."""
    weights, bounds = eager(name, ids_of(old)), bounds_of(old)
    inter, intra, outward = sums_of(weights, bounds, number)
    sizes, own = np.array([b - a for a, b in bounds[:number]]), bounds[number][1] - bounds[number][0]
    ratio = np.mean((inter / (sizes * own)).sum(1)) / np.mean(intra / own**2)
    then = labels([p.token_ids for p in old[:number]])
    now = labels(before)
    mean = inter.mean(0)
    beta = sum(m for label, m in zip(then, mean, strict=True) if label in now) / mean.sum()
    both = [label for label in then if label in now]
    pairs = list(combinations(both, 2))
    gamma = sum(now.index(x) > now.index(y) for x, y in pairs) / len(pairs) if pairs else 0.0
    return (1 - beta * (1 - gamma)) / (1 + math.exp(-ratio)), outward


def labels(ids):
    seen, out = Counter(), []
    for one in ids:
        out.append((one, seen[one]))
        seen[one] += 1
    return out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("alpha", [0.4, 1.0])
def test_the_tokens_that_are_picked(name, alpha):
    old, new = prompt(A, B, C), prompt(C, D, A)
    plan = after_abc(name).plan(new, f"craft:{alpha}")
    bounds = bounds_of(new)
    want = []
    for at, was in ((1, 5), (5, 1)):  # C and A; D is not cached
        cost, outward = derived(name, old, was, [p.token_ids for p in new[:at]])
        count = math.ceil(min(1.0, alpha * cost) * len(outward) - 1e-9)
        order = sorted(range(len(outward)), key=lambda i: (-outward[i], i))
        want += sorted(bounds[at][0] + i for i in order[:count])
    cached = {p for c in plan.placed for p in range(c.start, c.stop)}
    assert sorted(cached & set(plan.rows)) == want
    assert 0 < len(want) < len(A) + len(C)
    assert [use.source for use in plan.report.uses] == ["host", "host", "computed", "host"]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_cheapest_variant_is_taken(name):
    cached = Cached(name)
    for chunks in ((A, C), (B, C), (D, A, C)):
        cached.background_encoder.now(cached.plan(prompt(*chunks)).missing)
    new = prompt(B, D, C)
    costs = {}
    for chunks in ((A, C), (B, C), (D, A, C)):
        old = prompt(*chunks)
        costs[chunks] = derived(name, old, 2 * len(chunks) - 1, [p.token_ids for p in new[:5]])[0]
    best = min(costs, key=costs.get)
    plan = cached.plan(new)
    used = plan.placed[-1]
    assert used.tokens == len(C)
    assert len(used.context) == 2 * len(best) - 1
    assert used.context == cached.plan(prompt(*best)).placed[-1].context


class TestRuns:
    def test_one_forward_makes_all_chunks_of_a_prompt(self):
        cached = Cached("llama")
        missing = [*cached.plan(prompt(A, B, C)).missing[1:], *cached.plan(prompt(A, D)).missing[1:]]
        forwards = [0]
        hook = cached.model.base_model.register_forward_pre_hook(
            lambda *_: forwards.__setitem__(0, forwards[0] + 1)
        )
        found = dict(InPromptEncoder(cached.model, cached.rope).encode(missing))
        hook.remove()
        assert forwards == [2]  # A B C, and D behind A; A itself is in both prompts
        assert {item.key for item in found} == {item.key for item in missing}
        assert sorted(map(len, runs(missing))) == [2, 3] or sorted(map(len, runs(missing))) == [1, 4]


@torch.no_grad()
def over(model, ids, columns):
    """Eager weights per layer, logits, and K, V of a full forward over the given columns."""
    cache = Overriding(columns)
    out = model(input_ids=torch.tensor([ids]), past_key_values=cache, output_attentions=True)
    return [w[0].double().numpy() for w in out.attentions], out.logits[0], cache.layers


def focus(scores):
    """The paper's algorithm 1, as it is written."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    ranked = [scores[i] for i in order]
    diff = np.array([ranked[i] - ranked[i + 1] for i in range(len(ranked) - 1)])
    p = diff / diff.sum()
    h = [-sum(x * np.log(x) for x in p[: i + 1] if x > 0) for i in range(len(p))]
    rises = [h[i + 1] - h[i] for i in range(len(h) - 1)]
    return frozenset(order[: int(np.argmax(rises)) + 1])


LAYERS = 6


@functools.cache
def deep(name):
    changes = {"num_hidden_layers": LAYERS}
    ours, theirs = build(name, **changes), build(name, **changes)
    theirs.set_attn_implementation("eager")
    return ours, theirs, describe_rope(ours)


FOCUSED = [(name, w, seed) for name in ("llama", "qwen3", "glm4") for w in (1, 2, 3) for seed in (0, 1)]


def focused_case(name, window, seed, *known):
    """Our run, and the slow one: the layer where it stops, the columns that each layer keeps."""
    ours, theirs, rope = deep(name)
    cached = Cached(name, ours, rope, encoder="standalone")
    parts = prompt(A, B, C, D, question=tokens(6, 40 + seed))
    cached.answered(prompt(*known) if known else parts)
    plan = cached.plan(parts, CraftFocused(1.0, window=window))
    ids, linked = list(plan.token_ids), linked_columns(cached.rope, plan)
    rows = set(plan.rows)
    going = [{p: c for p, c in layer.items() if p not in rows} for layer in linked]
    weights, _, _ = over(theirs, ids, going)
    ends = np.cumsum([len(part.token_ids) for part in parts]).tolist()
    chunks = [(e - len(p.token_ids), e) for p, e in zip(parts, ends, strict=True) if p.is_chunk]
    question = range(chunks[-1][1], len(ids))
    scores, found, stop = np.zeros(len(chunks)), [], LAYERS
    for layer, heads in enumerate(weights):
        if len(found) > window and len(set(found[-window:])) == 1:
            stop = layer
            break
        scores += [sum(heads[:, q, a:b].sum() for q in question) for a, b in chunks]
        found.append(focus(scores))
    out = {p for i, (a, b) in enumerate(chunks) if i not in found[-1] for p in range(a, b)}
    columns = [
        layer if number < stop else {p: c for p, c in linked[number].items() if p not in rows - out}
        for number, layer in enumerate(going)
    ]
    return cached, plan, theirs, columns, stop


@pytest.mark.parametrize(("name", "window", "seed"), soaked(FOCUSED, *FOCUSED[::2]))
def test_focused_chunks_against_the_slow_forward(name, window, seed):
    cached, plan, theirs, columns, stop = focused_case(name, window, seed)
    _, _, layers = over(theirs, list(plan.token_ids), columns)
    linked, done = link_ahead(cached.model, cached.rope, plan)
    for ours, slow in zip(linked.cache.layers, layers, strict=True):
        assert off(ours.keys[0], slow.keys[0, :, :-1]) < 2e-5
        assert off(ours.values[0], slow.values[0, :, :-1]) < 2e-5
    tokens_cached = sum(c.tokens for c in plan.placed)
    spent = sum(tokens_cached - len(layer) for layer in columns) / (LAYERS * tokens_cached)
    assert done.report.recompute_ratio == pytest.approx(spent)
    assert stop > window


def test_the_cases_stop_early_late_and_never():
    stops = {(w, focused_case(name, w, seed)[-1]) for name, w, seed in FOCUSED}
    assert {stop for w, stop in stops if w == 1} == {2}
    assert len({stop for _, stop in stops}) >= 3


PARTLY = [(name, w, seed) for name in ("llama", "qwen3") for w in (1, 2) for seed in (0, 1)]


@pytest.mark.parametrize(("name", "window", "seed"), soaked(PARTLY, *PARTLY[::3]))
def test_a_chunk_that_is_not_cached_competes_for_focus(name, window, seed, tmp_path):
    """Through the facade: what is spent is what the slow forward spends that looks at all four chunks."""
    _, plan, _, columns, _ = focused_case(name, window, seed, A, B, C)
    cached = sum(c.tokens for c in plan.placed)
    spent = sum(cached - len(layer) for layer in columns) / (LAYERS * cached)

    def asked(*chunks):
        between = [part for ids in chunks for part in (Chunk(token_ids=ids), Text(token_ids=SEP))]
        return Prompt([Text(token_ids=S), *between, Text(token_ids=tokens(6, 40 + seed))])

    options = {"encoder": "standalone", "cold": "now", "cache_dir": checked(tmp_path)}
    with RagCache(deep(name)[0], policy=CraftFocused(1.0, window=window), **options) as rag:
        rag.generate(asked(A, B, C), max_new_tokens=1)
        report = rag.generate(asked(A, B, C, D), max_new_tokens=1).report.link
    assert [use.source for use in report.chunks] == ["host", "host", "host", "computed"]
    assert report.recompute_ratio == pytest.approx(spent)

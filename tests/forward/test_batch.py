"""Requests decoded together: their buffers and attention, and the tags that keys carry to it."""

import pytest
import torch
from transformers import DynamicCache

from families import build, off, plain, prefill, tokens
from ragcachekit.errors import ModelNotSupported
from ragcachekit.forward import decode as module
from ragcachekit.forward.attention import TaggedKeys, install, tagged
from ragcachekit.forward.decode import BatchCache, BatchRows, RequestKV, decode
from ragcachekit_kernels.dispatch import AttentionOptions

HEADS, KV_HEADS, DIM = 6, 2, 8


def request_of(rows, new=3, seed=0):
    draw, cache = torch.Generator().manual_seed(seed + rows), DynamicCache()
    sides = torch.randn(2, 1, KV_HEADS, rows + 5, DIM, generator=draw)  # more than belongs to the prompt
    cache.update(sides[0], sides[1], 0)
    return RequestKV(cache, rows, new), sides[:, 0, :, :rows]


def dense(query, keys, values, window, softcap, sinks):
    """One row over all keys, one head at a time."""
    out = []
    for head in range(HEADS):
        k, v = keys[head // (HEADS // KV_HEADS)], values[head // (HEADS // KV_HEADS)]
        scores = (k.double() @ query[head].double()) * 0.3
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        hidden = torch.arange(len(k)) <= len(k) - 1 - (window or len(k))
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[head : head + 1].double()))
        out.append(scores.softmax(0)[: len(k)] @ v.double())
    return torch.stack(out)


def sharing(monkeypatch):
    """Three requests that begin alike: all for six rows, the first two for nine; and one that does not."""
    monkeypatch.setattr(module, "MIN_SHARED", 2)
    whole, out = torch.randn(2, KV_HEADS, 14, DIM), []
    for rows, common in ((14, 14), (12, 9), (8, 6), (5, 1)):
        sides, cache = torch.randn(2, KV_HEADS, rows, DIM), DynamicCache()
        sides[:, :, :common] = whole[:, :, :common]
        cache.update(sides[:1], sides[1:], 0)
        request = RequestKV(cache, rows, 3)
        if out:
            request.share(out[0][0], min(rows, 11), [one for one, _ in out])
        out.append((request, sides))
    assert [request.start for request, _ in out] == [9, 9, 6, 0]
    return out


@pytest.mark.parametrize("window", [None, 1, 4, 7, 50])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_each_request_attends_to_its_rows(window, softcap, has_sinks, shared, monkeypatch):
    sinks = torch.linspace(-1, 2, HEADS) if has_sinks else None
    pairs = sharing(monkeypatch) if shared else [request_of(rows) for rows in (1, 3, 17)]
    requests = [request for request, _ in pairs]
    query, new = torch.randn(len(pairs), HEADS, 1, DIM), torch.randn(2, len(pairs), KV_HEADS, 1, DIM)
    BatchCache(requests).update(new[0], new[1], 0)
    options = AttentionOptions(scale=0.3, window=window, softcap=softcap, sinks=sinks)
    out = BatchRows(requests, 0).attend(0, query, new[0], new[1], options)
    assert out.shape == (len(pairs), 1, HEADS, DIM)
    for item, (_, before) in enumerate(pairs):
        keys, values = torch.cat((before, new[:, item]), 2)
        expected = dense(query[item, :, 0], keys, values, window, softcap, sinks)
        assert torch.allclose(out[item, 0].double(), expected, atol=1e-5)
        assert torch.equal(requests[item].as_cache().layers[0].keys[0], before[0])


def test_keys_that_are_not_those_of_the_cache_are_refused():
    """As multi-head latent attention has them, or JetMoe, which repeats them."""
    request, _ = request_of(3)
    repeated = torch.randn(1, 2 * KV_HEADS, 1, DIM)
    query = torch.randn(1, HEADS, 1, DIM)
    with pytest.raises(ValueError, match="in the cache"):
        BatchRows([request], 0).attend(0, query, repeated, repeated, AttentionOptions(1.0))


def test_rows_survive_the_growth_of_a_buffer(monkeypatch):
    monkeypatch.setattr(module, "GROWTH", 2)
    request, before = request_of(3, new=1)
    rows = [before]
    for _ in range(6):
        request.make_room()
        new = torch.randn(2, KV_HEADS, 1, DIM)
        request.write(0, new[0], new[1])
        request.rows += 1
        rows.append(new)
    (layer,) = request.as_cache().layers
    expected = torch.cat(rows, 2)
    assert torch.equal(layer.keys[0], expected[0])
    assert torch.equal(layer.values[0], expected[1])
    assert request.own.rows <= 3 + 6 + 2


def test_the_prompts_cache_is_emptied():
    cache = DynamicCache()
    cache.update(torch.randn(1, KV_HEADS, 4, DIM), torch.randn(1, KV_HEADS, 4, DIM), 0)
    RequestKV(cache, 4, 1)
    assert cache.layers[0].keys is None
    assert cache.layers[0].values is None


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral-sliding", "gpt-oss", "smollm3"])
def test_keys_and_logits_are_those_of_one_forward(name):
    model = build(name)
    install(model)
    prompts, steps = [tokens(count, seed=count) for count in (31, 5, 12)], 3
    requests = []
    for ids in prompts:
        cache = DynamicCache()
        with torch.no_grad():
            model(input_ids=torch.tensor([ids[:-steps]]), past_key_values=cache, use_cache=True)
        requests.append(RequestKV(cache, len(ids) - steps, steps))
    logits = [decode(model, requests, [ids[at] for ids in prompts]) for at in range(-steps, 0)]
    for item, ids in enumerate(prompts):
        whole = prefill(plain(name), ids)
        assert off(torch.stack([step[item] for step in logits]), whole.logits[-steps:]) < 1e-5
        for layer, keys, values in zip(
            requests[item].as_cache().layers, whole.keys, whole.values, strict=True
        ):
            assert off(layer.keys[0], keys) < 1e-5
            assert off(layer.values[0], values) < 1e-5


def test_a_forward_that_fails_changes_nothing(monkeypatch):
    model = build("llama")
    install(model)
    ids, cache = tokens(9), DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.tensor([ids[:-1]]), past_key_values=cache, use_cache=True)
    request = RequestKV(cache, 8, 2)
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[2], "forward", _fails)
        with pytest.raises(ModelNotSupported):
            decode(model, [request], ids[-1:])
    assert request.rows == 8
    assert off(decode(model, [request], ids[-1:])[0], prefill(plain("llama"), ids).logits[-1]) < 1e-5


def _fails(*_, **__):
    raise ModelNotSupported("as if")


def tag_of(tensor):
    return getattr(tensor, "tag", None)


def test_tags_survive_what_models_do_to_keys():
    note = object()
    keys = tagged(torch.arange(24.0).view(1, 2, 3, 4), note)
    expanded = torch.nn.Linear(4, 6, bias=False)(keys).view(1, 2, 3, 6).transpose(1, 2)
    first, second = torch.split(expanded, [2, 4], -1)
    joined = torch.cat((torch.ones(1, 3, 2, 1), second), -1)
    fresh = keys.new_empty(2, 2)
    fresh[:, :1].copy_(torch.ones(2, 1))
    for made in (expanded, first, joined, fresh, keys.repeat(1, 2, 1, 1), keys.to(torch.float64)):
        assert tag_of(made) is note


def test_the_original_and_plain_tensors_stay_untagged():
    plain = torch.ones(2, 3)
    keys = tagged(plain, "note")
    assert tag_of(plain) is None
    assert keys.data_ptr() == plain.data_ptr()
    assert tag_of(torch.ones(3) + 1) is None


def test_two_tags_do_not_mix():
    one, other = tagged(torch.ones(2), "one"), tagged(torch.ones(2), "other")
    assert tag_of(one * 2) == "one"
    assert tag_of(other * 2) == "other"
    assert TaggedKeys.tag is None

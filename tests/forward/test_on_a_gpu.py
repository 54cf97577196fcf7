"""A small model on a real GPU: kernels, copies, tiers, threads. What tests on CPUs can only simulate."""

import threading

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ragcachekit import RagCache, StoreConfig
from ragcachekit.commands.ttft import random_prompt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

FEW = {"max_new_tokens": 6, "do_sample": False}
VOCAB = 1000


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def model(request):
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=None,
        bos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).to("cuda", request.param).eval()


def prompt(seed=0, question=40):
    return random_prompt(VOCAB, 1200, 300, question, seed)


def filled(model, store, **options):
    options = {"policy": "lego:16", "encoder": "standalone", "cold": "now", **options}
    rag = RagCache(model, None, store=store, namespace="test", **options)
    for seed in range(3):
        rag.generate(prompt(seed), policy="reuse", **FEW)
    return rag


@pytest.mark.parametrize("policy", ["reuse", "lego:16", "random:0.15", "query:0.15", "cacheblend:0.15"])
@pytest.mark.parametrize("tier", ["gpu", "host"])
def test_a_gpu_answers_as_without_kernels(model, tier, policy, monkeypatch):
    if model.dtype != torch.float32:
        pytest.skip("tokens are compared in float32, where rounding does not change them")
    store = StoreConfig(**{f"{tier}_bytes": 1 << 30} | ({"host_bytes": 0} if tier == "gpu" else {}))
    with filled(model, store) as rag:
        found = [rag.generate(prompt(seed), policy=policy, **FEW) for seed in (0, 1, 2, 0)]
        assert all(answer.report.link.kernels == "triton" for answer in found)
    monkeypatch.setenv("RAGCACHEKIT_KERNELS", "torch")
    with filled(model, store) as rag:
        plain = [rag.generate(prompt(seed), policy=policy, **FEW) for seed in (0, 1, 2, 0)]
    assert [a.token_ids for a in found] == [a.token_ids for a in plain]


def test_a_gpu_serves_threads_and_sampling(model):
    errors, tokens = [], [set() for _ in range(3)]
    with filled(model, StoreConfig(gpu_bytes=1 << 30, host_bytes=0)) as rag:
        ids = torch.randint(VOCAB, (1, 20), device="cuda")

        def ask(seed):
            try:
                for _ in range(8):
                    tokens[seed].add(rag.generate(prompt(seed), policy="lego:16", **FEW).token_ids)
            except Exception as error:
                errors.append(error)

        def sample():
            try:
                for _ in range(8):
                    model.generate(ids, do_sample=True, max_new_tokens=4, pad_token_id=0)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(3)]
        threads.append(threading.Thread(target=sample))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    if model.dtype == torch.float32:
        assert [len(seen) for seen in tokens] == [1, 1, 1]


def test_a_gpu_keeps_no_memory_of_requests(model):
    with filled(model, StoreConfig(gpu_bytes=1 << 30, host_bytes=0)) as rag:
        for _ in range(5):
            rag.generate(prompt(0), policy="lego:16", **FEW)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(20):
            rag.generate(prompt(0), policy="lego:16", **FEW)
        torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)

"""Policies through the Triton kernels choose the tokens, and give the answers, of the CPU path."""

import pytest

pytest.importorskip("triton")

import torch

from engine_kit import RecordingStore, chunk, rag_for, text
from ragcachekit import Prompt
from ragcachekit.forward import prefill
from ragcachekit.plan import link_plan
from ragcachekit_kernels import scores
from soak_kit import soaked

BODY = [chunk(13, 2), chunk(9, 3), chunk(11, 5)]
FIRST = Prompt([text(7, 1), *BODY, text(6, 4)])
SECOND = Prompt([text(5, 9), *BODY[::-1], text(6, 14)])
ASKED = {"max_new_tokens": 2, "do_sample": False}
KERNELS = {
    "query:0.15": "column_scores",
    "deep:0.15": "column_scores",
    "craft:0.3": "context_mass",
}
"""Which function of the Triton kernels each policy cannot do without."""


def outcome(monkeypatch, name, policy, kernels):
    """What was chosen in the end, the answer, and what was summed while chunks were encoded."""
    chosen, calls = [], []
    with monkeypatch.context() as patch:
        patch.setenv("RAGCACHEKIT_KERNELS", kernels)
        function = KERNELS[policy]
        real, apply = getattr(scores, function), link_plan.apply_selection
        patch.setattr(scores, function, lambda *a, **k: calls.append(1) or real(*a, **k))
        for user in (prefill, link_plan):
            patch.setattr(
                user, "apply_selection", lambda p, c, *a: chosen.append(set(c := list(c))) or apply(p, c, *a)
            )
        store = RecordingStore()
        encoder = {"encoder": "in-prompt"} if policy.startswith("craft") else {}
        rag = rag_for(name, store=store, cold="now", **encoder)
        rag.generate(FIRST, policy=policy, max_new_tokens=1)
        answer = rag.generate(SECOND, policy=policy, **ASKED)
    report = answer.report.link
    assert bool(calls) == (kernels == "triton")
    sums = {str(key): kv.sums for key, (kv, _) in store.originals.items()}
    return (chosen, answer.token_ids, report.recompute_ratio), sums, report


@pytest.mark.parametrize("name", soaked(("llama", "gpt-oss"), "llama"))
@pytest.mark.parametrize("policy", soaked(KERNELS, "query:0.15"))
def test_the_same_tokens_and_the_same_answer(monkeypatch, name, policy):
    want, want_sums, report = outcome(monkeypatch, name, policy, "torch")
    assert report.recomputed_tokens > 0
    ours, our_sums, _ = outcome(monkeypatch, name, policy, "triton")
    assert ours == want
    assert our_sums.keys() == want_sums.keys()
    for key, sums in want_sums.items():
        for kind, tensor in sums.items():
            torch.testing.assert_close(our_sums[key][kind], tensor, rtol=2e-4, atol=2e-5)

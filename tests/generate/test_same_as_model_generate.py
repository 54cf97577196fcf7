"""Where nothing is approximate, ``rag.generate`` gives what ``model.generate`` gives on the same ids."""

import functools

import pytest
import torch
import transformers as tf

from engine_kit import EXACT, PROMPT, ids, rag_for, warmed
from families import EACH, greedy, plain

COUNT = 8
ANY_FAMILY = pytest.mark.parametrize("name", EACH)
FEW = ("llama", "gemma3", "phi3-longrope")


@functools.cache
def exact(name):
    """A warm RagCache of a family in which EXACT is reused exactly."""
    return warmed(name, EXACT, encoder="system", policy="reuse")


def assert_reused(answer):
    assert answer.report.link.exact_tokens == 49
    assert answer.report.link.approximate_tokens == 0
    assert answer.report.link.computed_tokens == 6


@ANY_FAMILY
class TestGreedy:
    def test_full(self, name):
        rag = rag_for(name, policy="full")
        for _ in range(2):
            answer = rag.generate(PROMPT, max_new_tokens=COUNT, do_sample=False)
            assert answer.token_ids == greedy(plain(name), ids(PROMPT), COUNT)
        assert answer.report.link.reused_tokens == 0
        assert answer.report.link.recompute_ratio == 1.0

    def test_cold(self, name):
        answer = rag_for(name).generate(PROMPT, max_new_tokens=COUNT, do_sample=False)
        assert answer.token_ids == greedy(plain(name), ids(PROMPT), COUNT)
        assert answer.report.link.computed_tokens == len(ids(PROMPT))

    def test_everything_recomputed(self, name):
        rag = warmed(name, PROMPT, policy="lego:1000")
        answer = rag.generate(PROMPT, max_new_tokens=COUNT, do_sample=False)
        assert answer.token_ids == greedy(plain(name), ids(PROMPT), COUNT)
        assert answer.report.link.recomputed_tokens == 58

    def test_exact_reuse(self, name):
        answer = exact(name).generate(EXACT, max_new_tokens=COUNT, do_sample=False)
        assert_reused(answer)
        assert answer.token_ids == greedy(plain(name), ids(EXACT), COUNT)

    def test_decoding_across_the_longrope_threshold_and_windows(self, name):
        answer = exact(name).generate(EXACT, max_new_tokens=20, do_sample=False, eos_token_id=-1)
        assert answer.token_ids == greedy(plain(name), ids(EXACT), 20, eos_token_id=-1)


OPTIONS = {
    "beams": {"num_beams": 3},
    "beams-with-length-penalty": {"num_beams": 4, "length_penalty": -1.0, "early_stopping": True},
    "ngrams": {"no_repeat_ngram_size": 2},
    "bad-words": {"bad_words_ids": [[97], [93, 81], [9], [79, 42]]},
    "repetition": {"repetition_penalty": 1.7},
    "repetition-and-beams": {"repetition_penalty": 1.7, "num_beams": 2},
    "min-new-tokens": {"min_new_tokens": 7, "eos_token_id": [2, 97, 93, 81, 79]},
    "max-length": {"max_length": 60},
    "suppress": {"suppress_tokens": [81, 93, 97]},
    "begin-suppress": {"begin_suppress_tokens": [81, 93, 97]},
    "bias": {"sequence_bias": [[[93], 3.0], [[12, 13], 9.0]]},
    "forced-eos": {"forced_eos_token_id": 2},
    "decay": {"exponential_decay_length_penalty": (2, 3.0), "eos_token_id": 9},
    "prefix-allowed": {"prefix_allowed_tokens_fn": lambda _, given: [5, len(given) % 9]},
    "stopping": {"stopping_criteria": [lambda given, *_, **__: torch.tensor([given.shape[1] >= 58])]},
    "config": {"generation_config": tf.GenerationConfig(max_new_tokens=7, no_repeat_ngram_size=3)},
}


@pytest.mark.parametrize(
    ("name", "label"),
    [("llama", label) for label in OPTIONS]
    + [
        (name, label) for name in FEW[1:] for label in ("beams", "repetition-and-beams", "ngrams", "stopping")
    ],
)
def test_options(name, label):
    asked = dict(OPTIONS[label])
    if "max_length" not in asked and "generation_config" not in asked:
        asked["max_new_tokens"] = COUNT
    answer = exact(name).generate(EXACT, **asked)
    assert_reused(answer)
    batch = torch.tensor([ids(EXACT)])
    with torch.no_grad():
        out = plain(name).generate(batch, attention_mask=torch.ones_like(batch), **asked)
    assert answer.token_ids == tuple(out[0, len(ids(EXACT)) :].tolist())


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("seed", [0, 1])
def test_sampling_with_a_seed(name, seed):
    rag = exact(name)
    asked = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "max_new_tokens": COUNT}
    torch.manual_seed(seed)
    answer = rag.generate(EXACT, **asked)
    torch.manual_seed(seed)
    assert answer.token_ids == greedy(plain(name), ids(EXACT), COUNT, **asked)
    torch.manual_seed(seed + 100)
    other = rag.generate(EXACT, **asked)
    assert other.token_ids != answer.token_ids


def test_a_processor_of_the_users_own_sees_the_ids_in_order():
    seen = []

    def note(input_ids, scores):
        seen.append(input_ids.clone())
        return scores

    answer = exact("llama").generate(EXACT, max_new_tokens=3, do_sample=False, logits_processor=[note])
    assert tuple(seen[0][0].tolist()) == ids(EXACT)
    assert tuple(seen[2][0].tolist()) == ids(EXACT) + answer.token_ids[:2]


def test_a_stopping_criterion_of_the_users_own_sees_the_ids_in_order():
    seen = []

    def stop(input_ids, scores, **_):
        seen.append(tuple(input_ids[0].tolist()))
        return torch.tensor([len(seen) == 4])

    answer = exact("llama").generate(EXACT, max_new_tokens=30, do_sample=False, stopping_criteria=[stop])
    assert len(answer.token_ids) == 4
    assert seen[-1] == ids(EXACT) + answer.token_ids


def test_the_users_lists_and_configuration_are_not_written_to():
    criteria, processors = [lambda input_ids, scores, **_: torch.tensor([False])], []
    config = tf.GenerationConfig(max_new_tokens=2)
    before = config.to_dict()
    rag = exact("llama")
    rag.generate(EXACT, max_new_tokens=2, stopping_criteria=criteria, logits_processor=processors)
    rag.generate(EXACT, generation_config=config)
    assert len(criteria) == 1
    assert processors == []
    assert config.to_dict() == before


def test_an_end_token_ends_and_is_reported(monkeypatch):
    rag = exact("llama")
    first = rag.generate(EXACT, max_new_tokens=COUNT, do_sample=False)
    assert first.report.finish_reason == "length"
    assert first.report.output_tokens == len(first.token_ids) == COUNT
    end = first.token_ids[4]
    cut = rag.generate(EXACT, max_new_tokens=COUNT, do_sample=False, eos_token_id=end)
    at = first.token_ids.index(end)
    assert cut.token_ids == first.token_ids[: at + 1]
    assert cut.report.finish_reason == "stop"
    # What a configuration leaves out is the model's own, as for transformers.
    monkeypatch.setattr(rag.model.generation_config, "eos_token_id", end)
    monkeypatch.setattr(rag.model.generation_config, "cache_implementation", "static")
    config = tf.GenerationConfig(max_new_tokens=COUNT, do_sample=False)
    assert rag.generate(EXACT, generation_config=config).token_ids == cut.token_ids
    short = rag.generate(EXACT, generation_config=tf.GenerationConfig(max_new_tokens=at, do_sample=False))
    assert (short.token_ids, short.report.finish_reason) == (first.token_ids[:at], "length")

"""One link per way: answers are those of the engine's generate, log probabilities those of single steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from benchmarks.world.questions import world_questions
from benchmarks.world.reader_folder import READER
from ragcachekit import RagCache

NAMES = ("reuse", "lego:4", "random:0.2", "query:0.2", "deep:0.2", "cacheblend:0.2", "craft:0.3")
WAYS = (REUSE, *(Way(name, "standalone") for name in NAMES))
ASKED = world_questions(0, 1)
TOKENIZER: Any = AutoTokenizer.from_pretrained(READER)
MAKER = PromptMaker(TOKENIZER)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def reader() -> Any:
    return AutoModelForCausalLM.from_pretrained(READER).eval()


def random_model() -> Any:
    """The reader's shape with random weights: its answers change with the least difference in the cache."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(reader().config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(1.5)
    return model


@contextmanager
def opened(model: Any, folder: Path, **options: Any) -> Iterator[Engines]:
    with closing(Engines(model, TOKENIZER, ["system", "standalone"], cache_dir=folder, **options)) as engines:
        yield engines


@pytest.mark.parametrize(
    ("make", "ends", "options"),
    [
        (reader, None, {"max_new_tokens": 16}),
        (reader, None, {"max_new_tokens": 1}),
        (random_model, None, {"max_new_tokens": 9}),
        (random_model, list(range(5, 1099, 11)), {"max_new_tokens": 24}),
        (random_model, None, {"max_new_tokens": 24, "stop": ("e", "an")}),
    ],
)
def test_answers_are_those_of_generate(
    folder: Path, make: Any, ends: list[int] | None, options: dict[str, Any]
) -> None:
    model = make()
    if ends is not None:
        model.generation_config.eos_token_id = ends
    same, reasons = set(), set()
    with opened(model, folder, **options) as engines:
        for question in ASKED:
            prompt, gold = MAKER.prompt(question), MAKER.answer_ids(question.answer)
            full = Reference.of(engines, prompt, gold)
            for way in WAYS:
                found = measure(engines, question, prompt, way, full)
                compared = engines.compared(prompt, way, full.answer.token_ids, gold)
                expected = engines.answer(prompt, way)
                assert compared.token_ids == expected.token_ids
                assert compared.text == expected.text
                assert (found.text, found.answer_tokens) == (expected.text.strip(), len(expected.token_ids))
                link = expected.report.link
                assert found.ratio_spent == link.recompute_ratio
                assert (found.prompt_tokens, found.recomputed_tokens, found.reused_tokens) == (
                    link.prompt_tokens,
                    link.recomputed_tokens,
                    link.reused_tokens,
                )
                same.add(found.text == full.answer.text.strip())
                reasons.add(expected.report.finish_reason)
    if make is random_model:
        assert False in same  # answers that differ from full's were decoded further
        assert reasons >= {"stop" if ends or "stop" in options else "length"}
    else:
        assert True in same
        assert reasons == {"stop" if options["max_new_tokens"] > 1 else "length"}


@torch.no_grad()
@pytest.mark.parametrize("make", [reader, random_model])
def test_figures_are_those_of_one_step_per_token(folder: Path, make: Any) -> None:
    """Oracle: each continuation over a link of its own, one token a forward, scored by hand."""
    model, question = make(), ASKED[1]
    prompt, gold = MAKER.prompt(question), MAKER.answer_ids(question.answer)
    with opened(model, folder, max_new_tokens=6) as engines:
        full = Reference.of(engines, prompt, gold)
        answer = full.answer.token_ids
        found = {way: measure(engines, question, prompt, way, full) for way in WAYS}
    right = stepped(model, None, prompt.token_ids, answer)
    for way, one in found.items():
        with RagCache(model, TOKENIZER, encoder=way.encoder, cold="now", cache_dir=folder) as rag:
            rag.encode(question.chunks, system=prompt.before)
            rag.link(prompt.prompt, policy=way.policy)  # the text before the chunks
            along, rightly = (
                stepped(model, rag.link(prompt.prompt, policy=way.policy).cache, prompt.token_ids, tokens)
                for tokens in (answer, gold)
            )
        kl = [(p.exp() * (p - q)).sum().item() for p, q in zip(right, along, strict=True)]
        assert one.kl == pytest.approx(kl[0], rel=1e-3, abs=1e-7)
        assert one.answer_kl == pytest.approx(sum(kl) / len(kl), rel=1e-3, abs=1e-7)
        losses = [-row[token].item() for row, token in zip(along, answer, strict=False)]
        assert one.answer_loss == pytest.approx(sum(losses) / len(answer), rel=1e-4, abs=1e-6)
        losses = [-row[token].item() for row, token in zip(rightly, gold, strict=False)]
        assert one.gold_loss == pytest.approx(sum(losses) / len(gold), rel=1e-4, abs=1e-6)
    assert max(one.answer_kl for one in found.values()) > 1e-5


def stepped(model: Any, cache: Any, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> list[torch.Tensor]:
    """Log probabilities ``[vocab]`` after the prompt and after each token."""
    if cache is None:
        cache = model(torch.tensor([prompt[:-1]]), use_cache=True).past_key_values
    out = []
    for place, token in enumerate((prompt[-1], *tokens), len(prompt) - 1):
        at = torch.tensor([[place]])
        logits = model(torch.tensor([[token]]), position_ids=at, past_key_values=cache).logits
        out.append(logits[0, -1].double().log_softmax(-1))
    return out


def test_processors_of_the_model_are_those_of_generate(folder: Path) -> None:
    model = random_model()
    question, prompt = ASKED[0], MAKER.prompt(ASKED[0])
    texts = []
    for penalty in (1.0, 1.8):
        model.generation_config.repetition_penalty = penalty
        with opened(model, folder, max_new_tokens=20) as engines:
            engines.encode(question, prompt, WAYS[1])
            given = engines.token_ids(prompt)
            found = engines.compared(prompt, WAYS[1], given, (5,))
            assert found.token_ids == engines.answer(prompt, WAYS[1]).token_ids
            texts.append(found.text)
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({}, True),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 2]}, True),
        ({"repetition_penalty": 1.0, "num_beams": 1, "no_repeat_ngram_size": 0}, True),
        ({"repetition_penalty": 1.1}, False),
        ({"min_new_tokens": 1}, False),
        ({"num_beams": 2}, False),
        ({"suppress_tokens": [3]}, False),
    ],
)
def test_only_known_options_leave_greedy_generation_plain(options: dict[str, Any], plain: bool) -> None:
    assert is_plainly_greedy(GenerationConfig(**options)) is plain


@torch.no_grad()
def test_value_deviation_weighs_rows_by_the_attention_of_full(folder: Path) -> None:
    """Oracle: eager attention weights of a model of its own, added up in loops."""
    question = ASKED[0]
    prompt, way = MAKER.prompt(question), Way("query:0.2", "standalone")
    length, gold = len(prompt.token_ids), MAKER.answer_ids(question.answer)
    with opened(reader(), folder, max_new_tokens=4) as engines:
        full = Reference.of(engines, prompt, gold)
        one = measure(engines, question, prompt, way, full)
        found = engines.compared(prompt, way, full.answer.token_ids, gold).prefilled.values
    model = reader()
    model.set_attn_implementation("eager")
    out = model(torch.tensor([prompt.token_ids]), output_attentions=True, use_cache=True)
    asking = range(max(prompt.spans[-1].stop, length - 32), length)
    layers = []
    for number, weights in enumerate(out.attentions):
        right, moved, whole = out.past_key_values.layers[number].values[0].double(), 0.0, 0.0
        for p in (p for span in prompt.spans for p in span):
            attention = sum(float(head[row, p]) for head in weights[0].double() for row in asking)
            moved += attention * float((found[number][:, p].double() - right[:, p]).norm())
            whole += attention * float(right[:, p].norm())
        layers.append(moved / whole)
    assert one.attention_deviation == pytest.approx(sum(layers) / len(layers), rel=1e-4)
    assert one.attention_deviation > 0.01
    assert one.attention_deviation != pytest.approx(sum(one.value_deviation) / len(layers), rel=0.01)
    assert measure_of_full(folder).attention_deviation == 0.0


def test_full_is_compared_with_itself(folder: Path) -> None:
    found = measure_of_full(folder)
    assert (found.agreement, found.kl, found.answer_kl, found.ratio_spent) == (1.0, 0.0, 0.0, 1.0)


def measure_of_full(folder: Path) -> Measurement:
    with opened(reader(), folder) as engines:
        prompt, gold = MAKER.prompt(ASKED[0]), MAKER.answer_ids(ASKED[0].answer)
        return measure(engines, ASKED[0], prompt, FULL, Reference.of(engines, prompt, gold))

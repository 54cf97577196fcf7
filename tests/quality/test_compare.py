"""``compare``: log probabilities and greedy answers are those of single steps of the model."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.world.questions import world_questions
from benchmarks.world.reader_folder import READER
from engine_kit import checked
from ragcachekit import RagCache
from ragcachekit.commands.engines import FULL, Engines
from ragcachekit.commands.questions import OtherPrompts, PromptMaker, Sample
from ragcachekit.plan.companions import SimilarChunks
from ragcachekit.policies.base import PolicyAndEncoder
from ragcachekit.quality.compare import Continuation, compare
from soak_kit import soaked

NAMES = ("reuse", "lego:4", "query:0.2", "cacheblend:0.2", "random:0.2", "deep:0.2", "craft:0.3")
WAYS = (PolicyAndEncoder("reuse", "system"), *(PolicyAndEncoder(name, "standalone") for name in NAMES))
QUESTION = world_questions(0, 1)[1]
TOKENIZER: Any = AutoTokenizer.from_pretrained(READER)
MAKER = PromptMaker(TOKENIZER)


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


@torch.no_grad()
@pytest.mark.parametrize("number", soaked((3, 5, 8), 5))
def test_figures_are_those_of_one_step_per_token(tmp_path: Path, number: int) -> None:
    """Oracle: each continuation over a link of its own, one token a forward, scored by hand."""
    model, ways = reader() if number == 3 else random_model(), WAYS[:number]
    prompt, gold = MAKER.prompt(QUESTION), MAKER.answer_ids(QUESTION.answers[0])
    options: dict[str, Any] = {"max_new_tokens": 4, "cache_dir": checked(tmp_path)}
    with closing(
        Engines(model, TOKENIZER, ["system", "standalone"], Sample((QUESTION,)), **options)
    ) as engines:
        full, reference = engines.full(prompt, gold)
        found = {way: engines.compare(QUESTION, prompt, way, reference)[0] for way in (FULL, *ways)}
    assert found[FULL].kl == found[FULL].first_kl == 0.0
    assert found[FULL].agreement == 1.0
    right, answer = stepped(model, None, prompt.token_ids, full.token_ids), full.token_ids
    for way in ways:
        with RagCache(model, TOKENIZER, encoder=way.encoder, cold="now", cache_dir=tmp_path) as rag:
            rag.encode(QUESTION.chunks, system=prompt.before)
            rag.link(prompt.prompt, policy=way.policy)  # the text before the chunks
            along, rightly = (
                stepped(model, rag.link(prompt.prompt, policy=way.policy).cache, prompt.token_ids, tokens)
                for tokens in (answer, gold)
            )
        kl = [(p.exp() * (p - q)).sum().item() for p, q in zip(right, along, strict=True)]
        one = found[way]
        assert one.first_kl == pytest.approx(kl[0], rel=1e-3, abs=1e-7)
        assert one.kl == pytest.approx(sum(kl) / len(kl), rel=1e-3, abs=1e-7)
        for rows, tokens, loss in ((along, answer, one.losses[0]), (rightly, gold, one.losses[1])):
            own = [-row[token].item() for row, token in zip(rows, tokens, strict=False)]
            assert loss == pytest.approx(sum(own) / len(tokens), rel=1e-4, abs=1e-6)
        same = [p.argmax() == q.argmax() for p, q in zip(right, along, strict=True)]
        assert one.agreement == sum(same) / (len(answer) + 1), "the token after the answer counts as well"
    assert max(one.kl for one in found.values()) > 1e-5


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


@torch.no_grad()
def test_greedy_answers_are_those_of_generate_up_to_an_end_token() -> None:
    model, ids = random_model(), torch.tensor([MAKER.prompt(QUESTION).token_ids])
    expected = model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)
    tokens = tuple(expected[0, ids.shape[1] :].tolist())
    calls: list[int] = []
    full = Continuation(model, {"input_ids": ids}, lambda: calls.append(1))
    answer, rows = full.greedy(9, ())
    assert answer == tokens
    assert len(calls) == 10, "before the prefill and before each token"
    assert torch.equal(rows.argmax(-1), torch.tensor(answer))
    end = tokens.index(tokens[4])
    assert full.greedy(9, {tokens[4]})[0] == tokens[: end + 1]
    torch.testing.assert_close(full.log_probs(answer[:-1]), rows, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("encoder", ["similar:1", "average:2"])
def test_no_chunk_is_encoded_after_one_that_the_measured_prompt_has_beside_it(
    tmp_path: Path, encoder: str
) -> None:
    """Contexts of the prompt itself would flatter; those of ``similar:n`` are what the sample names."""
    questions = world_questions(0, 1)[:3]
    others, near = OtherPrompts(questions), SimilarChunks(QUESTION.chunks, torch.eye(len(QUESTION.chunks)))
    for question in questions:
        for text in question.chunks:
            apart = set(others.of(text))
            assert apart
            assert apart.isdisjoint(question.chunks)
            assert others.of(text) == OtherPrompts(questions).of(text)
    model, prompt, way = reader(), MAKER.prompt(QUESTION), PolicyAndEncoder("reuse", encoder)
    sample = Sample(tuple(questions), neighbours=near)
    with closing(
        Engines(model, TOKENIZER, [encoder], sample, max_new_tokens=2, cache_dir=checked(tmp_path))
    ) as engines:
        _, reference = engines.full(prompt)
        found, _ = engines.compare(QUESTION, prompt, way, reference)
    given = others if encoder == "average:2" else near
    options: dict[str, Any] = {"encoder": encoder, "neighbours": given, "cold": "now", "cache_dir": tmp_path}
    with RagCache(model, TOKENIZER, policy="reuse", **options) as rag:
        for text in QUESTION.chunks:
            rag.encode([text], system=prompt.before)
        linked = rag.link(prompt.prompt)
        assert compare(Continuation(model, linked.inputs), reference).kl == pytest.approx(found.kl, abs=1e-6)

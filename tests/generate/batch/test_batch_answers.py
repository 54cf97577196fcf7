"""Requests decoded together get the tokens that each of them gets alone."""

import random
from itertools import product

import pytest

from batch_kit import Asked, begin, decoder_for, finish, held, serve
from engine_kit import EXACT, PROMPT, chunk, ids, rag_for, text, warmed
from families import ALWAYS, FAMILIES, VOCAB, greedy, plain
from ragcachekit import Prompt, QueueConfig
from soak_kit import soaked

SHORT = Prompt([text(9, 1), chunk(25, 3), text(3, 7)])
OTHER = Prompt([text(14, 8), chunk(33, 2), text(2, 9), chunk(7, 10), text(11, 11)])
NO_CHUNK = Prompt([text(30, 12)])
BARE = Prompt([chunk(25, 3), text(1, 13)])
ONE_TOKEN = Prompt([text(1, 14)])
LONG = Prompt([text(9, 1), chunk(33, 2), chunk(25, 3), chunk(120, 16), text(4, 17)])
NOT_CACHED = Prompt([text(5, 14), chunk(50, 15), text(4, 16)])
PROMPTS = [PROMPT, EXACT, SHORT, OTHER, NO_CHUNK, BARE, ONE_TOKEN, LONG]

NEVER = VOCAB + 1
ALONE = "phi3-longrope", "llama4"  # of these, prompts that are too long do not go into a batch
BATCHED = soaked([name for name in FAMILIES if name not in ALONE], *ALWAYS)
POLICIES = ["prefix", "lego:4", "query:0.2", "cacheblend:0.2"]


def requests(alone, seed, count=12):
    """Random prompts and lengths; a quarter is dropped. ``alone`` gives the tokens of one request.

    With a penalty, without which the models repeat a token.
    """
    draw, out = random.Random(seed), []
    for _ in range(count):
        prompt, length = draw.choice([*PROMPTS, NOT_CACHED]), draw.randrange(1, 13)
        options = {"max_new_tokens": length, "eos_token_id": NEVER, "repetition_penalty": 1.5}
        expected = alone(prompt, do_sample=False, **options)
        dropped = draw.randrange(1, 10) if draw.random() < 0.25 else None
        out.append(Asked(prompt, options, expected, dropped))
    return out


def assert_answered(decoder, rag, asked, seed):
    largest = serve(decoder, rag, asked, seed)
    assert [one.is_answered for one in asked] == [True] * len(asked)
    return largest


@pytest.mark.parametrize("name", BATCHED)
def test_full_is_the_models_own_generate(name):
    rag = rag_for(name, policy="full", cold="never")
    asked = requests(lambda prompt, **o: greedy(plain(name), ids(prompt), o["max_new_tokens"], **o), 1, 9)
    assert assert_answered(decoder_for(rag), rag, asked, 1) > 4


@pytest.mark.parametrize(
    ("name", "policy"),
    soaked([*product(("llama", "gemma3"), POLICIES)], ("llama", "query:0.2"), ("gemma3", "cacheblend:0.2")),
)
def test_policies(name, policy):
    rag = warmed(name, *PROMPTS, policy=policy)
    rag.after_answer.cold = "never"
    asked = requests(lambda prompt, **o: rag.generate(prompt, **o).token_ids, 2)
    assert assert_answered(decoder_for(rag), rag, asked, 2) > 4


@pytest.mark.parametrize(("size", "seed"), soaked([(1, 4), (3, 6), (16, 9)], (3, 6)))
def test_sizes(size, seed):
    rag = rag_for("gemma3", policy="full", cold="never")
    model = plain("gemma3")
    asked = requests(lambda prompt, **o: greedy(model, ids(prompt), o["max_new_tokens"], **o), seed, 24)
    assert assert_answered(decoder_for(rag, max_batch=size), rag, asked, seed) <= size


@pytest.mark.parametrize(
    ("name", "policy"),
    soaked(
        product(
            ("llama", "qwen2-sliding", "gemma2", "gemma3", "gpt-oss", "smollm3"),
            ("lego:4", "sensitive:0.2", "cacheblend:0.2"),
        ),
        *(("llama", "sensitive:0.2"), ("llama", "cacheblend:0.2"), ("gemma3", "lego:4")),
        *(("gpt-oss", "lego:4"), ("smollm3", "sensitive:0.2")),
    ),
)
def test_requests_over_the_same_chunks_share_memory(name, policy):
    """Each has the tokens that it gets alone; one that ends frees its own rows, the last one all."""
    common = [text(9, 1), chunk(33, 2), chunk(40, 3), chunk(35, 5)]
    prompts = [Prompt([*common, text(4 + 3 * n, 20 + n)]) for n in range(3)]
    prompts += [Prompt([*common[:3], chunk(25, 6), text(4, 23)]), Prompt([chunk(33, 2), text(9, 24)])]
    rag = warmed(name, *prompts, policy=policy)
    rag.after_answer.cold = "never"
    asked = {"max_new_tokens": 7, "eos_token_id": NEVER, "repetition_penalty": 1.5}
    alone = [rag.generate(prompt, do_sample=False, **asked).token_ids for prompt in prompts]
    decoder = decoder_for(rag)
    running = [begin(decoder, rag, prompt, **asked) for prompt in prompts]
    if name != "gpt-oss" and policy != "cacheblend:0.2":  # whose rows round as those beside them do
        assert min(one.kv.start for one in running[:3]) >= 117
        assert running[3].kv.start >= 82
    assert running[4].kv.start == 0
    own = [sum(side.nbytes for side in (*one.kv.own.keys, *one.kv.own.values)) for one in running]
    decoder.step()
    before = held(decoder)
    for number in (0, 4):
        decoder.drop(running[number])
        assert held(decoder) == (before := before - own[number])
    finish(decoder)
    assert [one.generated().token_ids for one in running[1:4]] == alone[1:4]
    assert held(decoder) == 0


@pytest.mark.parametrize(("same", "together"), [(True, 4), (False, 2)])
def test_in_the_memory_of_two_requests_four_run_that_begin_with_the_same_chunks(same, together):
    common = [text(9, 1), chunk(33, 2), chunk(40, 3), chunk(35, 5)]
    prompts = [Prompt([*(common if same else [text(117, n)]), text(4, 20 + n)]) for n in range(4)]
    asked = {"max_new_tokens": 30, "eos_token_id": NEVER, "do_sample": False}
    config = plain("llama").config
    row = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    with rag_for("llama", policy="sensitive:0.2", queue=QueueConfig(batch_bytes=400 * row)) as rag:
        expected = [rag.generate(prompt, **asked).token_ids for prompt in [*prompts, *prompts]][4:]
        answers = rag.generate_batch(prompts, **asked)
    assert [answer.token_ids for answer in answers] == expected
    assert max(answer.report.batch for answer in answers) == together

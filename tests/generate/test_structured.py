"""Answers that follow a JSON schema, alone and together, whatever the tokenizer."""

import json
import sys

import pytest

from ragcachekit.errors import GenerationNotSupported
from server_kit import Town, engine
from speaking import sentencepiece
from tokenizer_kit import tokenizer_of

TOWN = Town.model_json_schema()
FLAGS = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}
PROMPT = "Where does the river flow?"


@pytest.fixture(scope="module")
def rag():
    with engine() as rag:
        yield rag


def test_each_answer_of_a_batch_follows_its_own_schema(rag):
    plain = rag.generate(PROMPT, max_new_tokens=40).text
    schemas = [TOWN, None, FLAGS]
    requests = [rag.submit(PROMPT, json_schema=one, max_new_tokens=90) for one in schemas]
    town, other, flags = (request.result().text for request in requests)
    Town.model_validate_json(town)
    assert {*json.loads(flags)} <= {True, False}
    assert other.startswith(plain), "the other prompt of the batch is not changed"
    assert rag.generate(PROMPT, json_schema=TOWN, max_new_tokens=200).text == town


def test_sampled_answers_and_streams_follow_it_too(rag):
    options = {"do_sample": True, "temperature": 3.0, "top_k": 5, "json_schema": TOWN, "max_new_tokens": 200}
    answers = rag.generate_batch([PROMPT] * 4, **options)
    for text in [answer.text for answer in answers] + ["".join(rag.stream(PROMPT, **options))]:
        Town.model_validate_json(text)


def test_no_other_option_breaks_it(rag):
    """Where another processor leaves nothing that fits, what fits is chosen."""
    bans = [[token] for token in range(5, 300)]
    answer = rag.generate(PROMPT, json_schema=FLAGS, min_new_tokens=60, bad_words_ids=bans, max_new_tokens=90)
    assert {*json.loads(answer.text)} <= {True, False}


@pytest.mark.parametrize("kind", ["gpt2", "llama2", "gemma"])
def test_tokenizers(kind):
    with engine(tokenizer_of(kind), vocab_size=2503) as rag:
        Town.model_validate_json(rag.generate(PROMPT, json_schema=TOWN, max_new_tokens=200).text)


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ({"type": "nope"}, "json_schema cannot be followed: Invalid type: nope"),
        ({"not": {"type": "string"}}, 'Unimplemented keys: ."not"'),
        ({"enum": [{1}]}, "is not a JSON schema: Object of type set"),
    ],
)
def test_a_bad_schema_is_an_error_before_any_model_work(rag, schema, error):
    with (
        rag.model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran")),
        pytest.raises((ValueError, TypeError), match=error),
    ):
        rag.submit(PROMPT, json_schema=schema)


def test_what_cannot_go_with_it(rag, monkeypatch):
    with pytest.raises(GenerationNotSupported, match="not several beams"):
        rag.submit(PROMPT, json_schema=TOWN, num_beams=2)
    with pytest.raises(ValueError, match="from calling tools"):
        rag.submit([{"role": "user", "content": "a"}], json_schema=TOWN, tools=[{"type": "function"}])
    with pytest.raises(ValueError, match="needs an end token"):
        rag.submit(PROMPT, json_schema=TOWN, eos_token_id=[])
    for tokenizer in (tokenizer_of("wordpiece"), tokenizer_of("slow"), sentencepiece()):
        with engine(tokenizer, vocab_size=2500) as one, pytest.raises(ValueError, match="another tokenizer"):
            one.submit(PROMPT, json_schema=TOWN)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with (
        engine() as without,
        pytest.raises(ImportError, match="the extra 'structured'"),
    ):
        without.submit(PROMPT, json_schema=TOWN)

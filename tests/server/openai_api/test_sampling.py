"""What chooses the tokens: penalties, limits and formats of requests, honoured as their APIs say."""

from collections import Counter

import openai
import pytest
import torch
from langchain_openai import ChatOpenAI

from server_kit import MODEL, QUESTION, Town

ASKED = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}


@pytest.fixture
def answer(client):
    """The tokens of an answer to the same question."""

    def ask(extra=None, **changes):
        asked = {**ASKED, "max_tokens": 24, "logprobs": True, **changes}
        response = client.chat.completions.create(**asked, extra_body={"policy": "full", **(extra or {})})
        return [entry.token for entry in response.choices[0].logprobs.content]

    return ask


@pytest.mark.parametrize(
    ("frequency", "presence", "bias"),
    [(1.5, 0.0, {}), (0.0, 2.0, {}), (-0.5, -1.0, {}), (0.5, 0.5, {99: 3.0})],
)
def test_penalties_are_those_of_generated_tokens(answer, rag, frequency, presence, bias):
    """Against a loop of our own over the whole prompt, which counts what it has chosen."""
    ids = rag.tokenizer.apply_chat_template(ASKED["messages"], add_generation_prompt=True)["input_ids"]
    chosen = []
    for _ in range(24):
        with torch.no_grad():
            scores = rag.model(torch.tensor([[*ids, *chosen]])).logits[0, -1]
        for token, count in Counter(chosen).items():
            scores[token] -= frequency * count + presence
        for token, value in bias.items():
            scores[token] += value
        chosen.append(int(scores.argmax()))
    penalties = {"frequency_penalty": frequency, "presence_penalty": presence}
    given = answer(**penalties, logit_bias={str(token): value for token, value in bias.items()})
    shown = [rag.tokenizer.decode([token]) for token in chosen]
    assert given == shown[: len(given)], "all but the bytes of an unfinished character"
    assert len(given) > 20
    assert given != answer()[: len(given)]


def test_what_is_as_in_transformers(answer, client, rag):
    greedy = answer()
    assert answer({"top_k": 1}, temperature=2.0) == greedy
    assert answer({"top_k": -1}, temperature=2.0, seed=1) != greedy
    options = {"do_sample": False, "max_new_tokens": 24, "repetition_penalty": 1.7, "policy": "full"}
    want = rag.generate(ASKED["messages"], **options).token_ids
    assert answer({"repetition_penalty": 1.7}) == [rag.tokenizer.decode([token]) for token in want] != greedy
    asked = {**ASKED, "logit_bias": {str(rag.tokenizer.eos_token_id): 100}}
    for fewest, count in ((None, 1), (7, 8)):
        response = client.chat.completions.create(**asked, extra_body={"min_tokens": fewest})
        assert (response.usage.completion_tokens, response.choices[0].finish_reason) == (count, "stop")


def test_json_alone_and_together(client, url):
    schema = {"type": "json_schema", "json_schema": {"name": "t", "schema": Town.model_json_schema()}}
    whole = client.chat.completions.create(**ASKED, response_format=schema, max_tokens=60, n=2)
    for choice in whole.choices:
        Town.model_validate_json(choice.message.content)
    events = client.chat.completions.create(**ASKED, response_format=schema, max_tokens=60, stream=True)
    text = "".join(event.choices[0].delta.content or "" for event in events)
    assert text == whole.choices[0].message.content
    some = client.chat.completions.create(**ASKED, response_format={"type": "json_object"}, max_tokens=4)
    assert some.choices[0].message.content.lstrip()[0] == "{"
    parsed = client.chat.completions.parse(**ASKED, response_format=Town, max_tokens=60)
    assert isinstance(parsed.choices[0].message.parsed, Town)
    model = ChatOpenAI(base_url=f"{url}/v1", api_key="any", model=MODEL, temperature=0, max_tokens=60)
    assert isinstance(model.with_structured_output(Town, strict=True).invoke(QUESTION), Town)


WRONG = {"type": "json_schema", "json_schema": {"name": "t", "schema": {"type": "x"}}}
BAD = {
    "schema": ({"response_format": WRONG}, "Invalid type: x"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "needs its 'schema'"),
    "bias": ({"logit_bias": {"340": 1}}, "token ids below 340"),
    "too strong": ({"logit_bias": {"3": 101}}, "Invalid value for 'logit_bias"),
    "more than all": ({"max_tokens": 4, "extra_body": {"min_tokens": 5}}, "at most 4 tokens"),
}


@pytest.mark.parametrize(("changes", "said"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_refused_before_any_model_work(client, rag, changes, said, stream):
    with (
        rag.model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran")),
        pytest.raises(openai.BadRequestError, match=said),
    ):
        client.chat.completions.create(**{**ASKED, **changes, "stream": stream})

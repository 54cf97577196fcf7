"""Unchanged clients against a running server: openai, LangChain, LlamaIndex."""

import time
from contextlib import nullcontext

import openai
import pytest
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion import Completion

from queue_kit import held
from server_kit import DOCUMENTS, MODEL, QUESTION, until

GREEDY = {"temperature": 0, "max_tokens": 8}
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], **GREEDY}
WITH_DOCUMENTS = {**ASKED, "extra_body": {"documents": list(DOCUMENTS)}}


def strict(model, response):
    """The response once more through the package's own type, which the client itself does not check."""
    return model.model_validate(response.model_dump(), strict=True)


def expected(rag, messages=None, **options):
    messages = messages or ASKED["messages"]
    return rag.generate(messages, policy="full", do_sample=False, max_new_tokens=8, **options)


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "ragcachekit"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("org/other")


def test_an_answer_is_the_engines(client, rag):
    given = client.chat.completions.create(**ASKED)
    response, want = strict(ChatCompletion, given), expected(rag)
    assert given._request_id.startswith("req_")
    choice = response.choices[0]
    assert (choice.message.content, choice.finish_reason) == (want.text, want.report.finish_reason)
    usage = response.usage
    assert usage.prompt_tokens == want.report.link.prompt_tokens
    assert usage.completion_tokens == len(want.token_ids)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_documents_are_reused_in_any_order(client, rag):
    salted = {**WITH_DOCUMENTS["extra_body"], "cache_salt": "order"}
    first = client.chat.completions.create(**ASKED, extra_body=salted)
    again = client.chat.completions.create(**ASKED, extra_body={**salted, "documents": list(DOCUMENTS[::-1])})
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert cached >= sum(rag.count_tokens(text) for text in DOCUMENTS) - 3
    ours = again.usage.ragcachekit
    assert ours["exact_tokens"] + ours["approximate_tokens"] == cached
    counted = ("exact_tokens", "approximate_tokens", "recomputed_tokens", "computed_tokens")
    assert sum(ours[name] for name in counted) == again.usage.prompt_tokens
    assert 0 <= ours["queue_ms"] <= ours["ttft_ms"]


def test_a_stream_has_the_same_text_and_usage_at_its_end(client):
    client.chat.completions.create(**WITH_DOCUMENTS)  # the documents are encoded behind it
    whole = client.chat.completions.create(**WITH_DOCUMENTS)
    options = {**WITH_DOCUMENTS, "stream": True, "stream_options": {"include_usage": True}}
    events = [strict(ChatCompletionChunk, event) for event in client.chat.completions.create(**options)]
    *pieces, last = events
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert (
        "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
    )
    assert pieces[0].choices[0].delta.role == "assistant"
    reasons = [piece.choices[0].finish_reason for piece in pieces]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert not any(reasons[:-1])
    assert len({event.id for event in events}) == 1


def test_n_streams_come_together_and_seeds_repeat_them(client):
    asked = {**ASKED, "temperature": 1.5, "n": 3, "seed": 11}
    one, two = (client.chat.completions.create(**asked) for _ in range(2))
    texts = [choice.message.content for choice in one.choices]
    assert texts == [choice.message.content for choice in two.choices]
    assert len(set(texts)) > 1
    streamed = [""] * 3
    for event in client.chat.completions.create(**asked, stream=True):
        streamed[event.choices[0].index] += event.choices[0].delta.content or ""
    assert streamed == texts
    assert one.usage.completion_tokens == 24


def test_stop_ends_the_text_before_it(client):
    whole = client.chat.completions.create(**ASKED).choices[0].message.content
    stop = whole[3:5]
    response = client.chat.completions.create(**ASKED, stop=[stop, "never"])
    assert response.choices[0].message.content == whole[: whole.index(stop)]
    assert response.choices[0].finish_reason == "stop"
    streamed = client.chat.completions.create(**ASKED, stop=stop, stream=True)
    assert "".join(e.choices[0].delta.content or "" for e in streamed) == whole[: whole.index(stop)]


def test_logprobs_are_those_of_the_tokens(client, rag):
    asked = {**ASKED, "logprobs": True, "top_logprobs": 3}
    response = strict(ChatCompletion, client.chat.completions.create(**asked))
    content, want = response.choices[0].logprobs.content, expected(rag)
    assert len(content) == len(want.token_ids)
    for entry in content:  # greedy: the likeliest token is the chosen one
        assert entry.top_logprobs[0].logprob == entry.logprob < 0
        assert [one.logprob for one in entry.top_logprobs] == sorted(
            (one.logprob for one in entry.top_logprobs), reverse=True
        )
    streamed = []
    for event in client.chat.completions.create(**asked, stream=True):
        if event.choices[0].logprobs:
            streamed += event.choices[0].logprobs.content
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


def test_text_completions(client, rag):
    asked = {"model": MODEL, "prompt": [QUESTION, "the river"], "n": 2, **GREEDY}
    response = strict(Completion, client.completions.create(**asked))
    want = [rag.generate(p, policy="full", do_sample=False, max_new_tokens=8) for p in asked["prompt"]]
    assert [choice.text for choice in response.choices] == [want[0].text] * 2 + [want[1].text] * 2
    assert response.usage.prompt_tokens == sum(answer.report.link.prompt_tokens for answer in want)
    assert response.usage.completion_tokens == 2 * sum(len(answer.token_ids) for answer in want)
    ids = rag.tokenizer(QUESTION).input_ids
    by_ids = client.completions.create(**{**asked, "prompt": list(ids), "n": 1})
    assert by_ids.choices[0].text == want[0].text
    pieces = list(client.completions.create(model=MODEL, prompt=QUESTION, stream=True, **GREEDY))
    assert "".join(piece.choices[0].text for piece in pieces) == want[0].text
    assert strict(Completion, pieces[-1]).choices[0].finish_reason == "length"


def test_langchain(url, client):
    model = ChatOpenAI(base_url=f"{url}/v1", api_key="any", model=MODEL, temperature=0, max_tokens=8)
    want = client.chat.completions.create(**ASKED)
    message = model.invoke(QUESTION)
    assert message.content == want.choices[0].message.content
    assert message.usage_metadata["input_tokens"] == want.usage.prompt_tokens
    assert "".join(chunk.content for chunk in model.stream(QUESTION)) == message.content


async def test_llama_index(url, client):
    model = OpenAILike(
        api_base=f"{url}/v1", api_key="any", model=MODEL, is_chat_model=True, temperature=0, max_tokens=8
    )
    want = client.chat.completions.create(**ASKED).choices[0].message.content
    messages = [ChatMessage(role="user", content=QUESTION)]
    assert model.chat(messages).message.content == want
    assert [r.message.content for r in model.stream_chat(messages)][-1] == want
    assert (await model.achat(messages)).message.content == want
    await model._get_aclient().close()
    plain = OpenAILike(api_base=f"{url}/v1", api_key="any", model=MODEL, temperature=0, max_tokens=8)
    assert plain.complete(QUESTION).text == client.completions.create(
        model=MODEL, prompt=QUESTION, **GREEDY
    ).choices[0].text.rstrip("\x00")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waiting", [False, True])
def test_a_client_that_goes_away_cancels_its_request(url, rag, request, stream, waiting):
    before = rag.queue.stats().cancelled
    hook = rag.model.register_forward_pre_hook(lambda *_: time.sleep(0.02))
    request.addfinalizer(hook.remove)
    asked = {**ASKED, "max_tokens": 200, "stop": ["never"], "stream": stream}
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=0.3) as client,
        held(rag) if waiting else nullcontext(),
    ):
        if stream:
            with client.chat.completions.create(**asked) as events:
                next(iter(events))
        else:
            with pytest.raises(openai.APITimeoutError):
                client.chat.completions.create(**asked)
        until(lambda: rag.queue.stats().cancelled == before + 1)
    until(lambda: not rag.queue.running)

"""``full`` and ``prefix`` answer as the bare model does: ``generate`` on the tokenizer's own ids."""

import random

import openai
import pytest
import torch
from langchain_core.messages import HumanMessage, SystemMessage
from llama_index.core.llms import ChatMessage
from texts import DOCUMENTS

from langchain_ragcachekit import ChatRagCache
from llama_index_ragcachekit import RagCacheLLM
from ragcachekit import RagCache, TreeConfig
from ragcachekit.server import ServerConfig, create_app
from server_kit import LONG, served
from soak_kit import soaked
from tokenizer_kit import paragraphs

TOKENS = 4
POLICIES = ("full", "prefix")
CHUNKS = (*DOCUMENTS, *(text for text in paragraphs(200) if len(text) < 400))
JOINTS = ("\n\n", "\n\n", "\n", " ", "\n---\n", "\n\nSource: a.md\n")
QUESTIONS = ("When was it finished?", "What is stored, and where?", "Who may read it? ", "¿Qué es café 😀?")


def some(count, full, seed):
    """A few in every run, which all ask the same, and many in the soak."""
    many = pytest.param(full, seed, marks=pytest.mark.soak)
    return pytest.mark.parametrize(("count", "seed"), [(count, 5), many])


def texts(count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        lead = rng.choice(("Passages:\n\n", "Context: ", "Read this.\n", ""))
        chunks = rng.choice(JOINTS).join(rng.sample(CHUNKS, rng.randint(1, 3)))
        yield f"{lead}{chunks}\n\nQuestion: {rng.choice(QUESTIONS)}"


def chats(count, seed):
    for number, text in enumerate(texts(count, seed)):
        system = [{"role": "system", "content": "Answer in one sentence."}] * (number % 2 == 0)
        yield [*system, {"role": "user", "content": text}]


@pytest.fixture(scope="module")
def bare(loaded):
    """Tokens and text of the model's own answer."""
    model, tokenizer = loaded

    known = {}  # each prompt is asked under several policies

    def answer(prompt):
        name = repr(prompt)
        if name not in known:
            known[name] = generated(prompt)
        return known[name]

    @torch.no_grad()
    def generated(prompt):
        if isinstance(prompt, str):
            found = tokenizer(prompt, return_tensors="pt")
        else:
            found = tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        output = model.generate(**found, max_new_tokens=TOKENS, do_sample=False)
        new = output[0, found["input_ids"].shape[1] :].tolist()
        return new, tokenizer.decode(new, skip_special_tokens=True)

    return answer


@pytest.fixture(scope="module", params=soaked(POLICIES, "prefix"))
def exact(request, loaded, digests):
    """An engine with chunks and a knowledge tree that serves exact rows alone."""
    options = {"encoder": "standalone", "cold": "now", "tree": TreeConfig(host_bytes=1 << 28)}
    with RagCache(*loaded, policy=request.param, cache_dir=digests, **options) as rag:
        rag.register(CHUNKS)
        yield rag


@some(1, 100, 3)
def test_requests_and_streams(exact, bare, count, seed):
    prompts = [*texts(count, seed), *chats(count, seed)]
    requests = [exact.submit(prompt, max_new_tokens=TOKENS, do_sample=False) for prompt in prompts]
    for prompt, request in zip(prompts, requests, strict=True):
        tokens, text = bare(prompt)
        assert list(request.result().token_ids) == tokens
        assert "".join(exact.stream(prompt, max_new_tokens=TOKENS, do_sample=False)) == text


@some(1, 50, 4)
def test_langchain(exact, bare, count, seed):
    roles = {"system": SystemMessage, "user": HumanMessage}
    model = ChatRagCache(rag=exact, max_tokens=TOKENS, temperature=0)
    for messages in chats(count, seed):
        found = model.invoke([roles[m["role"]](m["content"]) for m in messages])
        assert found.content == bare(messages)[1]


@some(1, 50, 1)
def test_llama_index(exact, bare, count, seed):
    model = RagCacheLLM(rag=exact, max_tokens=TOKENS, temperature=0)
    for messages in chats(count, seed):
        found = model.chat([ChatMessage(role=m["role"], content=m["content"]) for m in messages])
        assert found.message.content == bare(messages)[1]


@some(1, 50, 6)
def test_the_server(exact, bare, count, seed):
    with (
        served(create_app(exact, ServerConfig(model_name="sample"))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", timeout=LONG) as client,
    ):
        for messages in chats(count, seed):
            found = client.chat.completions.create(
                model="sample", temperature=0, max_tokens=TOKENS, messages=messages
            )
            assert found.choices[0].message.content == bare(messages)[1]

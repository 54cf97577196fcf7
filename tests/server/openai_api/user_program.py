"""A user's program with other releases of the clients: what a server answers them, as JSON."""

import asyncio
import json
import sys
from typing import Any

import litellm
import openai
from google import genai

litellm.suppress_debug_info = True  # which it prints
URL, MODEL, QUESTION, DOCUMENT = sys.argv[1:]
MESSAGES = [{"role": "user", "content": QUESTION}]
CHAT: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": 8}
TEXT: dict[str, Any] = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 8}
MARKED = [
    {"type": "text", "text": DOCUMENT, "cache_control": {"type": "ephemeral"}},
    {"type": "text", "text": f"\n\n{QUESTION}"},
]


def joined(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def by_litellm(provider, base):
    asked = {**CHAT, "model": f"{provider}/{MODEL}", "api_base": base, "api_key": "any"}
    whole = litellm.completion(**asked)
    yield f"litellm {provider}", whole.choices[0].message.content
    yield f"litellm {provider} streamed", joined(litellm.completion(**asked, stream=True))
    marked = {**asked, "messages": [{"role": "user", "content": MARKED}]}
    usage = [litellm.completion(**marked).usage for _ in range(2)][-1]
    yield f"cached by litellm {provider}", usage.prompt_tokens_details.cached_tokens


def by_openai(client):
    yield "openai", client.chat.completions.create(**CHAT, model=MODEL).choices[0].message.content
    yield "openai streamed", joined(client.chat.completions.create(**CHAT, model=MODEL, stream=True))
    yield "responses", client.responses.create(**TEXT).output_text
    with client.responses.stream(**TEXT) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    yield "responses streamed", "".join(deltas)


async def by_async_openai():
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="any") as client:
        whole = await client.chat.completions.create(**CHAT, model=MODEL)
        chunks = await client.chat.completions.create(**CHAT, model=MODEL, stream=True)
        streamed = joined([chunk async for chunk in chunks])
    return {"async": whole.choices[0].message.content, "async streamed": streamed}


def context_by_genai():
    options = {"base_url": URL, "api_version": "v1beta"}
    with genai.Client(api_key="any", http_options=options) as client:
        config = {"contents": [DOCUMENT], "system_instruction": "Be short.", "ttl": "300s"}
        made = client.caches.create(model=MODEL, config=config)
        later = client.caches.update(name=made.name, config={"ttl": "600s"})
        listed = [one.name for one in client.caches.list()]
        client.caches.delete(name=made.name)
        try:
            client.caches.get(name=made.name)
        except genai.errors.ClientError as error:
            return [listed == [made.name], later.expire_time > made.expire_time, error.code]


answers = dict(by_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="any")))
answers |= asyncio.run(by_async_openai())
answers |= dict([*by_litellm("openai", f"{URL}/v1"), *by_litellm("anthropic", URL)])
given = {"openai": openai.__version__, "genai": context_by_genai(), "answers": answers}
sys.stdout.write(json.dumps(given))

"""The prompts and options of one request, and its answers from the engine's queue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ragcachekit import Answer
from ragcachekit.engine.asyncio_api import AsyncAnswerStream, answered, submitted
from ragcachekit.engine.queue.request import Request
from ragcachekit.errors import PromptTooLong
from ragcachekit.server.contexts.context import Context
from ragcachekit.server.errors import ApiError, unsupported
from ragcachekit.server.openai.answers import Choice, Form
from ragcachekit.server.openai.logprobs import Logprobs
from ragcachekit.server.openai.prompts import chat_prompt, document_text, size_of, text_prompt
from ragcachekit.server.openai.schemas import ChatRequest, Completion, TextRequest
from ragcachekit.server.services import Services
from ragcachekit.server.tenants import Tenant

MOST_CHUNKS = 1024
"""Documents and marked parts of one prompt."""

COLDEST = 1e-3
"""Temperatures below this decode greedily: logits divided by them would overflow."""


def named_context(body: Completion) -> str | None:
    """Name of the stored context that a request uses; ApiError 400 for what cannot stand beside it."""
    if body.cached_content is None and body.chunk_ids:
        raise unsupported("chunk_ids", "'chunk_ids' name chunks of a 'cached_content'; give both.")
    for param in ("cache_salt", "prompt_cache_key"):
        if body.cached_content is not None and getattr(body, param):
            message = f"'{param}' partitions the cache, and 'cached_content' has no such partition."
            raise unsupported(param, message)
    return body.cached_content


class Work:
    """A checked request: what is submitted for each of its choices; ApiError where it cannot be.

    ``context`` is the one that the body names.
    """

    def __init__(self, services: Services, tenant: Tenant, body: Completion, context: Context | None) -> None:
        if body.model != services.model_name:
            raise ApiError(
                404, f"The model `{body.model}` does not exist.", param="model", code="model_not_found"
            )
        self._rag, self._services = services.rag, services
        self._turns = services.turns[tenant.name]
        self.copies, most = body.n or 1, services.config.max_choices
        given = _given_prompts(body.prompt) if isinstance(body, TextRequest) else [""]
        if self.copies * len(given) > most:
            raise ApiError(400, f"Invalid 'n': at most {most} answers.", param="n", code="invalid_value")
        documents, system = _documents(body, context)
        self.tools: list[dict[str, Any]] = []
        if isinstance(body, ChatRequest):
            self._prompts = [self._chat(body, documents, system)]
        else:
            assert isinstance(body, TextRequest)
            self._prompts = self._texts(body, [*([system] if system else []), *documents])
        self._options = self._shared_options(tenant, body)
        self._top = _top_logprobs(body)
        form = Form(isinstance(body, ChatRequest), body.model)
        parallel = not isinstance(body, ChatRequest) or body.parallel_tool_calls is not False
        count = len(self._prompts) * self.copies
        self.form, self.choices = form, [Choice(form, n, self.tools, parallel) for n in range(count)]
        inline = sum(map(len, map(document_text, body.documents)))
        self._repeated = len(self._prompts) * sum(map(len, documents)) - inline
        self._check_sizes()

    def expected_tokens(self, size: int) -> int:
        """An estimate of all prompts' tokens, before they are tokenised, with ``size`` for the body."""
        return self.copies * (size + self._repeated // 4)

    def _check_sizes(self) -> None:
        """Refuse what would cost much before the engine can see that it is too long."""
        for characters, chunks in map(size_of, self._prompts):
            if chunks > MOST_CHUNKS:
                message = f"A prompt has at most {MOST_CHUNKS} documents and marked parts, not {chunks}."
                raise ApiError(400, message, param="documents", code="invalid_value")
            if (most := self._services.most_characters) is not None and characters > most:
                raise PromptTooLong(
                    f"the model's context is shorter than the prompt's {characters} characters"
                )

    async def answers(self) -> list[Answer]:
        """All answers; the first error ends the others."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._answer(*asked)) for asked in self._submissions()]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def streams(self) -> list[AsyncAnswerStream]:
        """The answers as they are generated, by choice; entering one submits it."""
        return [
            AsyncAnswerStream(partial(self._streamed, prompt, options))
            for prompt, options in self._submissions()
        ]

    async def _answer(self, prompt: Any, options: dict[str, Any]) -> Answer:
        return await answered(await self._submit(prompt, options))

    async def _streamed(self, prompt: Any, options: dict[str, Any], streamer: object) -> Request:
        return await self._submit(prompt, {**options, "streamer": streamer})

    async def _submit(self, prompt: Any, options: dict[str, Any]) -> Request:
        """Submit in one of the tenant's turns, which lasts until the thread ends, also when cancelled."""
        end = time.monotonic() + options["deadline"]
        async with self._turns:
            options["deadline"] = max(0.0, end - time.monotonic())
            task = asyncio.ensure_future(submitted(self._rag, prompt, options))
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                with suppress(Exception):
                    (await task).cancel()
                raise

    def by_prompt(self, answers: Sequence[Answer]) -> list[Sequence[Answer]]:
        """The answers to each prompt."""
        return [answers[at : at + self.copies] for at in range(0, len(answers), self.copies)]

    def _submissions(self) -> list[tuple[Any, dict[str, Any]]]:
        submissions = []
        for choice in self.choices:
            options = dict(self._options)
            if (seed := options.get("seed")) is not None:
                options["seed"] = (seed + choice.index) % 2**63
            if self._top is not None:
                choice.logprobs = Logprobs(self._top, self._rag.tokenizer)
                options["logits_processor"] = [choice.logprobs]
            submissions.append((self._prompts[choice.index // self.copies], options))
        return submissions

    def _chat(self, body: ChatRequest, documents: Sequence[str], system: str | None) -> Any:
        rag = self._rag
        if body.tools and body.tool_choice != "none":
            if not rag.renders_tools:
                raise unsupported("tools", "The model's chat template does not render tools.")
            self.tools = [tool.model_dump(exclude_unset=True) for tool in body.tools]
        messages = chat_prompt(body.messages, documents, lambda: rag.renders_tools)
        if system is None:
            return messages
        if any(message["role"] == "system" for message in messages):
            message = "The cached content has a system instruction; the request cannot have a second one."
            raise ApiError(400, message, param="messages", code="invalid_value")
        return [{"role": "system", "content": system}, *messages]

    def _texts(self, body: TextRequest, documents: Sequence[str]) -> list[Any]:
        prompts = _given_prompts(body.prompt)
        vocab = self._rag.model.config.get_text_config().vocab_size
        if not prompts or not all(_is_prompt(prompt, vocab) for prompt in prompts):
            message = f"Invalid prompt: it needs text, or token ids below {vocab}."
            raise ApiError(400, message, param="prompt", code="invalid_value")
        return [text_prompt(prompt, documents) for prompt in prompts]

    def _shared_options(self, tenant: Tenant, body: Completion) -> dict[str, Any]:
        options: dict[str, Any] = {
            "namespace": tenant.partition(body.cache_salt, body.prompt_cache_key),
            "deadline": self._services.config.timeout,
            "wait": False,
            "stop": body.stop,
            **_sampling(body),
        }
        most = (isinstance(body, ChatRequest) and body.max_completion_tokens) or body.max_tokens
        options["max_new_tokens"] = most or self._services.config.default_tokens
        if self._services.context is not None:
            options["max_length"] = self._services.context
        if self.tools:
            options["tools"] = self.tools
        return options


def _documents(body: Completion, context: Context | None) -> tuple[list[str], str | None]:
    """Texts of the chunks that the request names or brings, and a context's system text."""
    given = list(map(document_text, body.documents))
    if context is None:
        return given, None
    named = context.texts_of(body.chunk_ids) if body.chunk_ids else context.chunks
    return [*named, *given], context.system


def _given_prompts(prompt: Any) -> list[Any]:
    return [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt


def _is_prompt(prompt: str | Sequence[int], vocab: int) -> bool:
    ids = () if isinstance(prompt, str) else prompt
    return bool(prompt) and all(0 <= token < vocab for token in ids)


def _sampling(body: Completion) -> Mapping[str, Any]:
    """Options of generate; the model's own where the request says nothing."""
    if body.temperature is None and body.top_p is None:
        return {} if body.seed is None else {"seed": body.seed}
    if body.temperature is not None and body.temperature < COLDEST:
        return {"do_sample": False}
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "seed": body.seed}
    options["temperature"] = 1.0 if body.temperature is None else body.temperature
    options["top_p"] = 1.0 if body.top_p is None else body.top_p
    return options


def _top_logprobs(body: Completion) -> int | None:
    """How many alternatives each token's log probability has; None without any."""
    if isinstance(body, TextRequest):
        return body.logprobs
    assert isinstance(body, ChatRequest)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(
            400, "'top_logprobs' needs 'logprobs': true.", param="top_logprobs", code="invalid_value"
        )
    return (body.top_logprobs or 0) if body.logprobs else None

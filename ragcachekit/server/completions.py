"""One request for completions: its prompts and options, and its answers from the engine's queue."""

from __future__ import annotations

import asyncio
import time
from asyncio import Semaphore
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from ragcachekit import Answer, RagCache
from ragcachekit.engine.request import AsyncAnswerStream, answered, submitted
from ragcachekit.errors import PromptTooLong
from ragcachekit.server.answers import Choice, Form, Logprobs
from ragcachekit.server.config import ServerConfig
from ragcachekit.server.contexts import Context, ContextStore
from ragcachekit.server.errors import ApiError, invalid, unsupported
from ragcachekit.server.keys import Tenant
from ragcachekit.server.prompts import chat_prompt, document_text, size_of, text_prompt
from ragcachekit.server.schemas import ChatRequest, Completion, TextRequest

MAX_CHUNKS = 1024
"""Documents and marked parts of one prompt."""

MIN_TEMPERATURE = 1e-3
"""Below this, decoding is greedy: logits divided by it would overflow."""


@dataclass(frozen=True)
class Services:
    """The parts of one application that its routes share."""

    rag: RagCache
    config: ServerConfig
    contexts: ContextStore
    turns: defaultdict[str, Semaphore] = field(default_factory=lambda: defaultdict(partial(Semaphore, 2)))
    """By tenant: how many prompts may be tokenised at once."""

    @cached_property
    def max_tokens(self) -> int | None:
        """Tokens that the model can read; None if its configuration does not say."""
        found: int | None = getattr(self.rag.model.config.get_text_config(), "max_position_embeddings", None)
        return found

    @cached_property
    def max_characters(self) -> int | None:
        """Characters beyond which no text fits into the context: that of the vocabulary's longest token."""
        longest = max(map(len, self.rag.tokenizer.get_vocab()))
        return None if self.max_tokens is None else self.max_tokens * longest

    @property
    def model_name(self) -> str:
        """The model that requests name."""
        if self.config.model_name:
            return self.config.model_name
        path = str(getattr(self.rag.model.config, "_name_or_path", "") or "").rstrip("/")
        return path.rpartition("/")[2] or "ragcachekit"


def context_name(body: Completion) -> str | None:
    """Name of the stored context that a request uses; ApiError 400 for what cannot go with it."""
    if body.cached_content is None and body.chunk_ids:
        raise unsupported("chunk_ids", "'chunk_ids' name chunks of a 'cached_content'; give both.")
    for param in ("cache_salt", "prompt_cache_key"):
        if body.cached_content is not None and getattr(body, param):
            message = f"'{param}' partitions the cache, and 'cached_content' has no such partition."
            raise unsupported(param, message)
    return body.cached_content


class CompletionJob:
    """A checked request: what is submitted for each of its choices; ApiError where it cannot be.

    ``context`` is the one that the body names.
    """

    def __init__(self, services: Services, tenant: Tenant, body: Completion, context: Context | None) -> None:
        if body.model != services.model_name:
            message = f"The model `{body.model}` does not exist."
            raise ApiError(404, message, param="model", code="model_not_found")
        self._rag, self._services = services.rag, services
        self._turns = services.turns[tenant.name]
        self.copies, most = body.n or 1, services.config.max_choices
        given = _given_prompts(body.prompt) if isinstance(body, TextRequest) else [""]
        if self.copies * len(given) > most:
            raise invalid(f"Invalid 'n': at most {most} answers.", "n")
        documents, system = _documents(body, context)
        self._tools: list[dict[str, Any]] = []
        if isinstance(body, ChatRequest):
            self._prompts = [self._chat(body, documents, system)]
        else:
            self._prompts = self._texts(given, [*([system] if system else []), *documents])
        self._options = self._shared_options(tenant, body)
        self._logprobs = _top_logprobs(body)
        parallel = not isinstance(body, ChatRequest) or body.parallel_tool_calls is not False
        count = len(self._prompts) * self.copies
        self.form = form = Form(isinstance(body, ChatRequest), body.model)
        self.choices = [Choice(form, n, self._tools, parallel) for n in range(count)]
        self.expected_tokens = self.copies * sum(map(self._size, self._prompts))

    async def answers(self) -> list[Answer]:
        """All answers; the first error ends the others."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._answer(*given)) for given in self._submissions()]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def streams(self) -> list[AsyncAnswerStream]:
        """The answers as they are generated, by choice; entering one submits it."""

        async def submit(prompt: Any, options: dict[str, Any], streamer: object) -> Any:
            return await self._submit(prompt, {**options, "streamer": streamer})

        return [AsyncAnswerStream(partial(submit, *given)) for given in self._submissions()]

    def by_prompt(self, answers: Sequence[Answer]) -> list[Sequence[Answer]]:
        """The answers to each prompt."""
        return [answers[at : at + self.copies] for at in range(0, len(answers), self.copies)]

    async def _answer(self, prompt: Any, options: dict[str, Any]) -> Answer:
        return await answered(await self._submit(prompt, options))

    async def _submit(self, prompt: Any, options: dict[str, Any]) -> Any:
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

    def _submissions(self) -> list[tuple[Any, dict[str, Any]]]:
        submissions = []
        for choice in self.choices:
            options = dict(self._options)
            if (seed := options.get("seed")) is not None:
                options["seed"] = (seed + choice.index) % 2**63
            if self._logprobs is not None:
                choice.logprobs = Logprobs(self._logprobs, self._rag.tokenizer)
                options["logits_processor"] = [choice.logprobs]
            submissions.append((self._prompts[choice.index // self.copies], options))
        return submissions

    def _size(self, prompt: Any) -> int:
        """About how many tokens a prompt has; ApiError for what would be found too long at a high cost."""
        characters, ids, chunks = size_of(prompt)
        if chunks > MAX_CHUNKS:
            message = f"A prompt has at most {MAX_CHUNKS} documents and marked parts, not {chunks}."
            raise invalid(message, "documents")
        if (most := self._services.max_characters) is not None and characters > most:
            raise PromptTooLong(f"the model's context is shorter than the prompt's {characters} characters")
        return characters // 4 + ids  # as OpenAI estimates

    def _chat(self, body: ChatRequest, documents: Sequence[str], system: str | None) -> Any:
        rag = self._rag
        if body.tools and body.tool_choice != "none":
            if not rag.renders_tools:
                raise unsupported("tools", "The model's chat template does not render tools.")
            self._tools = [tool.model_dump(exclude_unset=True) for tool in body.tools]
        messages = chat_prompt(body.messages, documents, lambda: rag.renders_tools)
        if system is None:
            return messages
        if any(message["role"] == "system" for message in messages):
            message = "The cached content has a system instruction; the request cannot have a second one."
            raise invalid(message, "messages")
        return [{"role": "system", "content": system}, *messages]

    def _texts(self, prompts: list[Any], documents: Sequence[str]) -> list[Any]:
        vocab = self._rag.model.config.get_text_config().vocab_size
        for prompt in prompts or [""]:
            ids = () if isinstance(prompt, str) else prompt
            if not prompt or not all(0 <= token < vocab for token in ids):
                raise invalid(f"Invalid prompt: it needs text, or token ids below {vocab}.", "prompt")
        return [text_prompt(prompt, documents) for prompt in prompts]

    def _shared_options(self, tenant: Tenant, body: Completion) -> dict[str, Any]:
        most = (isinstance(body, ChatRequest) and body.max_completion_tokens) or body.max_tokens
        options: dict[str, Any] = {
            "namespace": tenant.partition(body.cache_salt, body.prompt_cache_key),
            "deadline": self._services.config.timeout,
            "wait": False,
            "stop": body.stop,
            "max_new_tokens": most or self._services.config.default_tokens,
            **_sampling(body),
        }
        if self._services.max_tokens is not None:
            options["max_length"] = self._services.max_tokens
        if self._tools:
            options["tools"] = self._tools
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


def _sampling(body: Completion) -> Mapping[str, Any]:
    """Options of generate; the model's own where the request says nothing."""
    if body.temperature is None and body.top_p is None:
        return {} if body.seed is None else {"seed": body.seed}
    if body.temperature is not None and body.temperature < MIN_TEMPERATURE:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "top_k": 0,
        "seed": body.seed,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
    }


def _top_logprobs(body: Completion) -> int | None:
    """How many alternatives each token's log probability has; None without any."""
    if not isinstance(body, ChatRequest):
        return body.logprobs if isinstance(body, TextRequest) else None
    if body.top_logprobs and not body.logprobs:
        raise invalid("'top_logprobs' needs 'logprobs': true.", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None

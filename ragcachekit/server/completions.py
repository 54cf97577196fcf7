"""The routes of the model: OpenAI's and Anthropic's requests are answered, whole or streamed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cached_property
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ragcachekit import Answer, RagCache, agenerate, astream
from ragcachekit.engine.request import AsyncAnswerStream
from ragcachekit.errors import PromptTooLong
from ragcachekit.prompt.segments import token_count
from ragcachekit.server.answers import Choice, Form, Logprobs, Penalties, ResponseForm, cache_header
from ragcachekit.server.config import ServerConfig
from ragcachekit.server.contexts import Context, ContextStore, texts_of
from ragcachekit.server.errors import ApiError, api_error, body_of, invalid, parsed, unsupported
from ragcachekit.server.keys import Grant, Tenant
from ragcachekit.server.messages import CountRequest, MessageForm, MessagesRequest
from ragcachekit.server.middleware import CLIENT_GONE, while_connected
from ragcachekit.server.schemas import (
    ChatRequest,
    Completion,
    ResponsesRequest,
    TextRequest,
    chat_prompt,
    document_text,
    size_of,
    text_prompt,
)

MAX_CHUNKS = 1024
"""Documents and marked parts of one prompt."""

MIN_TEMPERATURE = 1e-3
"""Below this, decoding is greedy: logits divided by it would overflow."""


class ServedModel:
    """The model that requests name, and how long its prompts may be."""

    def __init__(self, rag: RagCache, config: ServerConfig) -> None:
        self.rag, self.config, self._model = rag, config, rag.model.config.get_text_config()
        path = str(getattr(rag.model.config, "_name_or_path", "") or "").rstrip("/")
        self.name = config.model_name or path.rpartition("/")[2] or "ragcachekit"
        self.vocab_size: int = self._model.vocab_size
        self.max_tokens: int | None = getattr(self._model, "max_position_embeddings", None)

    @cached_property
    def max_characters(self) -> int | None:
        """Characters beyond which no text fits into the context: that of the vocabulary's longest token."""
        longest = max(map(len, self.rag.tokenizer.get_vocab()))
        return None if self.max_tokens is None else self.max_tokens * longest

    def check(self, name: str) -> None:
        """ApiError 404 for another model's name."""
        if name != self.name:
            message = f"The model `{name}` does not exist."
            raise ApiError(404, message, param="model", code="model_not_found")


def router(model: ServedModel, contexts: ContextStore) -> APIRouter:
    """The routes of one model."""
    routes = APIRouter(prefix="/v1")
    shown = {"id": model.name, "object": "model", "created": int(time.time()), "owned_by": "ragcachekit"}

    @routes.get("/models")
    async def models() -> Mapping[str, Any]:
        return {"object": "list", "data": [shown]}

    @routes.get("/models/{name:path}")
    async def one_model(name: str) -> Mapping[str, Any]:
        model.check(name)
        return shown

    @routes.post("/chat/completions")
    async def chat(request: Request) -> Response:
        body = await parsed(request, ChatRequest)
        return await complete(model, contexts, request, body, Form(body.model))

    @routes.post("/completions")
    async def text(request: Request) -> Response:
        body = await parsed(request, TextRequest)
        return await complete(model, contexts, request, body, Form(body.model, chat=False))

    @routes.post("/responses")
    async def responses(request: Request) -> Response:
        body = await parsed(request, ResponsesRequest)
        return await complete(model, contexts, request, body, ResponseForm(body.model))

    @routes.post("/messages")
    async def messages(request: Request) -> Response:
        asked = await parsed(request, MessagesRequest)
        form = MessageForm(asked, model.rag.components.parser.decode)
        return await complete(model, contexts, request, asked.as_chat(), form)

    @routes.post("/messages/count_tokens")
    async def count_tokens(request: Request) -> Mapping[str, int]:
        asked = await parsed(request, CountRequest)
        model.check(asked.model)
        job = CompletionJob(model, request.state.tenant, asked.as_chat())
        return {"input_tokens": await asyncio.to_thread(job.count_tokens)}

    return routes


async def complete(
    model: ServedModel, contexts: ContextStore, request: Request, body: Completion, form: Form
) -> Response:
    """The response to a request, in the form of its API."""
    tenant, grant = request.state.tenant, request.state.grant
    model.check(body.model)
    async with AsyncExitStack() as stack:
        _check_partition(body)
        names = [] if body.cached_content is None else [body.cached_content]
        if body.chunk_ids and not names:
            names = await asyncio.to_thread(contexts.holding, tenant, body.chunk_ids)
        used = [await stack.enter_async_context(contexts.using(tenant, name)) for name in names]
        job = CompletionJob(model, tenant, body, used)
        grant.expect(job.expected_tokens)
        if body.stream:
            streams = [await stack.enter_async_context(stream) for stream in job.streams()]
            return EventStream(job, form, streams, stack.pop_all(), grant, model.config.heartbeat)
        answers = await while_connected(request.receive, job.answers())
        if answers is None:
            return Response(status_code=CLIENT_GONE)
        grant.charge(sum(a.report.link.prompt_tokens + a.report.output_tokens for a in answers))
        prompts = job.by_prompt(answers)
        return JSONResponse(form.whole(job.choices, prompts), headers=cache_header(prompts))


def _check_partition(body: Completion) -> None:
    """ApiError 400 for what cannot go with stored contexts."""
    for param in ("cache_salt", "prompt_cache_key"):
        if (body.cached_content is not None or body.chunk_ids) and getattr(body, param):
            message = f"'{param}' partitions the cache, and cached contents have no such partition."
            raise unsupported(param, message)


class CompletionJob:
    """A checked request: what is submitted for each of its choices; ApiError where it cannot be."""

    def __init__(
        self, model: ServedModel, tenant: Tenant, body: Completion, contexts: Sequence[Context] = ()
    ) -> None:
        self._model, self.body, self.copies = model, body, body.n or 1
        self._tools: list[dict[str, Any]] = []
        documents, system = list(map(document_text, body.documents)), None
        if body.chunk_ids:
            where = body.cached_content or "the key's cached contents; store its text in one"
            documents[:0] = texts_of(body.chunk_ids, contexts, where)
        elif contexts:
            documents[:0] = contexts[0].chunks
        if body.cached_content is not None:
            system = contexts[0].system
        if isinstance(body, ChatRequest):
            self._prompts = [self._chat(body, documents, system)]
        else:
            assert isinstance(body, TextRequest)
            self._prompts = self._texts(body.prompt, [*([system] if system else []), *documents])
        count, most = len(self._prompts) * self.copies, model.config.max_choices
        if count > most:
            raise invalid(f"Invalid 'n': at most {most} answers.", "n")
        self._options = self._shared_options(tenant)
        parallel = not isinstance(body, ChatRequest) or body.parallel_tool_calls is not False
        self.choices = [Choice(n, self._tools, parallel) for n in range(count)]
        self.expected_tokens = self.copies * sum(map(self._size, self._prompts))

    async def answers(self) -> list[Answer]:
        """All answers; the first error ends the others."""
        try:
            async with asyncio.TaskGroup() as group:
                work = [agenerate(self._model.rag, prompt, **own) for prompt, own in self._submissions()]
                tasks = list(map(group.create_task, work))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def streams(self) -> list[AsyncAnswerStream]:
        """The answers as they are generated, by choice; entering one submits it."""
        return [astream(self._model.rag, prompt, **own) for prompt, own in self._submissions()]

    def count_tokens(self) -> int:
        """Tokens of the prompts."""
        parse, options = self._model.rag.components.parser.parse, self._options
        parsed = [parse(one, options["namespace"], options["tools"]) for one in self._prompts]
        return sum(token_count(prompt.segments) for prompt in parsed)

    def by_prompt(self, answers: Sequence[Answer]) -> list[Sequence[Answer]]:
        """The answers to each prompt."""
        return [answers[at : at + self.copies] for at in range(0, len(answers), self.copies)]

    def _submissions(self) -> list[tuple[Any, dict[str, Any]]]:
        submissions, top = [], _top_logprobs(self.body)
        for choice in self.choices:
            options = dict(self._options)
            if (seed := options.get("seed")) is not None:
                options["seed"] = (seed + choice.index) % 2**63
            penalties = self.body.frequency_penalty or 0.0, self.body.presence_penalty or 0.0
            processors: list[Any] = [Penalties(*penalties)] if any(penalties) else []
            if top is not None:
                choice.logprobs = Logprobs(top, self._model.rag.tokenizer)
                processors.insert(0, choice.logprobs)
            options["logits_processor"] = processors
            submissions.append((self._prompts[choice.index // self.copies], options))
        return submissions

    def _size(self, prompt: Any) -> int:
        """About how many tokens a prompt has; ApiError for what would be found too long at a high cost."""
        characters, ids, chunks = size_of(prompt)
        if chunks > MAX_CHUNKS:
            message = f"A prompt has at most {MAX_CHUNKS} documents and marked parts, not {chunks}."
            raise invalid(message, "documents")
        if (most := self._model.max_characters) is not None and characters > most:
            raise PromptTooLong(f"the model's context is shorter than the prompt's {characters} characters")
        return characters // 4 + ids  # as OpenAI estimates

    def _chat(self, body: ChatRequest, documents: Sequence[str], system: str | None) -> Any:
        uses_tools = any(message.tool_calls or message.role == "tool" for message in body.messages)
        if body.tools and body.tool_choice != "none":
            uses_tools, self._tools = True, [tool.model_dump(exclude_unset=True) for tool in body.tools]
        if uses_tools and not self._model.rag.renders_tools:
            raise unsupported("tools", "The model's chat template does not render tools.")
        messages = chat_prompt(body.messages, documents)
        if not system:
            return messages
        if any(message["role"] == "system" for message in messages):
            message = "The cached content has a system instruction; the request cannot have a second one."
            raise invalid(message, "messages")
        return [{"role": "system", "content": system}, *messages]

    def _texts(self, given: Any, documents: Sequence[str]) -> list[Any]:
        vocab = self._model.vocab_size
        single = isinstance(given, str) or (given and isinstance(given[0], int))
        prompts: list[Any] = [given] if single else given
        for prompt in prompts or [""]:
            if not prompt or (not isinstance(prompt, str) and not 0 <= min(prompt) <= max(prompt) < vocab):
                raise invalid(f"Invalid prompt: it needs text, or token ids below {vocab}.", "prompt")
        return [text_prompt(prompt, documents) for prompt in prompts]

    def _shared_options(self, tenant: Tenant) -> dict[str, Any]:
        """Options of generate; the model's own where the request says nothing."""
        body, config = self.body, self._model.config
        most = (isinstance(body, ChatRequest) and body.max_completion_tokens) or body.max_tokens
        options: dict[str, Any] = {
            "namespace": tenant.partition(body.cache_salt, body.prompt_cache_key),
            "deadline": config.timeout,
            "wait": False,
            "stop": body.stop,
            "tools": self._tools or None,
            "policy": body.policy,
            "max_new_tokens": most or config.default_tokens,
        }
        if self._model.max_tokens is not None:
            options["max_length"] = self._model.max_tokens
        if isinstance(body, ChatRequest) and (cache := body.prompt_cache_options):
            options |= {"keep": "marked" if cache.mode == "explicit" else "all", "retain": cache.seconds}
        if isinstance(body, ChatRequest) and body.response_format is not None:
            options["json_schema"] = body.response_format.wanted
        options |= {"repetition_penalty": body.repetition_penalty, "min_new_tokens": body.min_tokens}
        if (body.min_tokens or 0) > (most := options["max_new_tokens"]):
            raise invalid(f"Invalid 'min_tokens': an answer has at most {most} tokens.", "min_tokens")
        if body.logit_bias:
            if not all(0 <= token < self._model.vocab_size for token in body.logit_bias):
                message = f"Invalid 'logit_bias': its keys are token ids below {self._model.vocab_size}."
                raise invalid(message, "logit_bias")
            options["sequence_bias"] = {(token,): float(bias) for token, bias in body.logit_bias.items()}
        if body.temperature is not None and body.temperature < MIN_TEMPERATURE:
            return {**options, "do_sample": False}
        if body.seed is not None:
            options["seed"] = body.seed
        given = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
        if given := {name: value for name, value in given.items() if value is not None}:
            options |= {"do_sample": True, "top_k": 0, "temperature": 1.0, "top_p": 1.0, **given}
            options["top_k"] = max(options["top_k"], 0)  # -1 is none, too
        return options


def _top_logprobs(body: Completion) -> int | None:
    """How many alternatives each token's log probability has; None without any."""
    if not isinstance(body, ChatRequest):
        return None
    if body.top_logprobs and not body.logprobs:
        raise invalid("'top_logprobs' needs 'logprobs': true.", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


_Pieces = asyncio.Queue[tuple[int, str | Exception | None]]  # of the answer with that number; None: its end


class EventStream(StreamingResponse):
    """The answers of ``streams``, which were entered, as server-sent events.

    However the stream ends, ``stack`` is left, and the computed tokens are charged to ``grant``.
    """

    def __init__(
        self,
        job: CompletionJob,
        form: Form,
        streams: list[AsyncAnswerStream],
        stack: AsyncExitStack,
        grant: Grant,
        heartbeat: float,
    ) -> None:
        self._job, self._form, self._streams, self._stack, self._grant = job, form, streams, stack, grant
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(self._lines(heartbeat), headers=headers, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        async with self._stack:
            try:
                await super().__call__(scope, receive, send)
            finally:
                self._grant.charge(sum(stream.tokens for stream in self._streams))

    async def _lines(self, heartbeat: float) -> AsyncIterator[bytes]:
        job, form, streams, queue = self._job, self._form, self._streams, _Pieces()
        pumps = [asyncio.create_task(_pump(n, stream, queue)) for n, stream in enumerate(streams)]
        try:
            for choice, stream in zip(job.choices, streams, strict=True):
                for event in form.start(choice, stream.tokens):
                    yield form.line(event)
            going = len(pumps)
            while going:
                try:
                    async with asyncio.timeout(heartbeat):
                        number, piece = await queue.get()
                except TimeoutError:
                    yield form.heartbeat
                    continue
                if isinstance(piece, Exception):
                    raise piece
                going -= piece is None
                choice = job.choices[number]
                if piece is not None:
                    events = form.push(choice, *choice.push(piece))
                else:
                    text, calls, reason = choice.end(answer := streams[number].answer)
                    events = [*form.push(choice, text, calls), *form.end(choice, answer, reason)]
                for event in events:
                    yield form.line(event)
            if form.done and (job.body.stream_options or {}).get("include_usage"):
                yield form.line(form.usage(job.by_prompt([stream.answer for stream in streams])))
            yield form.done
        except Exception as error:
            yield form.line(body_of(api_error(error, self._scope), self._scope))
        finally:
            for pump in pumps:
                pump.cancel()


async def _pump(number: int, stream: AsyncAnswerStream, queue: _Pieces) -> None:
    end: Exception | None = None
    try:
        async for piece in stream:
            queue.put_nowait((number, piece))
    except Exception as error:
        end = error
    queue.put_nowait((number, end))

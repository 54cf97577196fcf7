"""The methods of RagCache that answer prompts through its queue."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from threading import Event
from typing import Any

from ragcachekit.cancellation import CancelScope, raise_if_cancelled
from ragcachekit.config import QueueConfig, check_deadline, check_number
from ragcachekit.engine.auto.methods import TuneMethods
from ragcachekit.engine.chunk_methods import several
from ragcachekit.engine.components import EngineComponents
from ragcachekit.engine.inspect.diagnosis import NO_TEMPLATE, without_template
from ragcachekit.engine.queue.request import Request, TokenCounter, Work
from ragcachekit.engine.queue.request_queue import RequestQueue
from ragcachekit.engine.queue.runner import Runner
from ragcachekit.engine.request_path import Asked, RequestPath
from ragcachekit.generate.detokenizer import Detokenizer, TokenQueue, stop_strings
from ragcachekit.generate.options import effective
from ragcachekit.observers import Watch
from ragcachekit.plan.request import PromptRequest
from ragcachekit.policies.base import SelectionPolicy
from ragcachekit.prompt.parser import PromptLike
from ragcachekit.reports import Answer


class QueueMethods(TuneMethods):
    """Adds :meth:`submit` and :meth:`generate_batch`; a base of :class:`ragcachekit.RagCache`."""

    def __init__(self, components: EngineComponents, namespace: str, cold: str, queue: QueueConfig) -> None:
        super().__init__(components, namespace)
        self._path = RequestPath(components, cold, self._registering)
        self._told_of_template = False
        self.queue = RequestQueue(queue, Runner(queue, components, self._path), components.active)

    def submit(
        self,
        prompt: PromptLike,
        *,
        namespace: str | None = None,
        policy: str | SelectionPolicy | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        stop: str | Sequence[str] | None = None,
        deadline: float | None = None,
        wait: bool | float = False,
        streamer: Any = None,
        **options: Any,
    ) -> Request:
        """Queue one prompt; it is answered together with others, token by token.

        Of waiting requests those with more of their prompt cached come first, and namespaces get equal shares
        of the computed tokens (:class:`ragcachekit.QueueConfig`). Other arguments are those of
        :meth:`generate`. Options that a batch cannot decode are generated alone, and the report says why.

        Parameters
        ----------
        deadline : float, optional
            Seconds from now. A request without an answer by then fails with ``DeadlineExceeded``; a running
            one ends after its token.
        wait : bool or float
            Whether, or for how many seconds, to wait for room in a full queue.

        Raises
        ------
        QueueFull
            If ``max_waiting`` requests wait already.
        PromptTooLong, GenerationNotSupported, Closed
        """
        begun = time.perf_counter()
        if streamer is not None:
            options["streamer"] = streamer
        self._components.generator.check_options(options, "deadline", "wait")
        with self._watch(begun, prompt, namespace, options) as watch:
            stop = stop_strings(stop)
            request = self._asked(prompt, namespace, policy, tools)
            filled = self._components.generator.options(options, len(request.token_ids), stop)
            return self._queued(request, filled, stop, begun, wait, watch, deadline=deadline)

    def generate_batch(
        self,
        prompts: Sequence[PromptLike],
        *,
        namespace: str | None = None,
        policy: str | SelectionPolicy | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        stop: str | Sequence[str] | None = None,
        cancel: Event | None = None,
        deadline: float | None = None,
        wait: bool | float = True,
        **options: Any,
    ) -> list[Answer]:
        """As :meth:`generate`, for several prompts that are decoded together.

        ``deadline`` and ``wait`` are those of :meth:`submit`. ``max_length`` counts from the longest prompt.
        An interrupt cancels them all.
        """
        self.queue.refuse_own_thread()
        self._components.generator.check_options(options, "cancel", "deadline", "wait")
        begun, prompts, stop = time.perf_counter(), several(prompts, "prompts"), stop_strings(stop)
        if options.get("streamer") is not None and len(prompts) > 1:
            raise ValueError("one streamer cannot tell several prompts apart; submit them one by one")
        namespace = self._checked(namespace)
        asked = [self._asked(prompt, namespace, policy, tools) for prompt in prompts]
        longest = max((len(request.token_ids) for request in asked), default=0)
        requests: list[Request] = []
        try:
            for given_prompt, prompt in zip(prompts, asked, strict=True):
                filled = self._components.generator.options(options, longest, stop)
                with self._watch(begun, given_prompt, namespace, options) as watch:
                    queued = self._queued(prompt, filled, stop, begun, wait, watch, cancel, deadline)
                requests.append(queued)
            return [request.result() for request in requests]
        except BaseException:
            for request in requests:
                request.cancel()
            raise

    def _watch(
        self, begun: float, prompt: object, namespace: str | None, options: Mapping[str, Any]
    ) -> Watch:
        return self._observers.begin(begun, prompt, namespace or self.namespace, options)

    def _request(
        self,
        prompt: PromptLike,
        namespace: str | None,
        policy: str | SelectionPolicy | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> PromptRequest:
        namespace = self._checked(namespace)
        return self._path.request(prompt, namespace, self._components.choose_policy(policy, namespace), tools)

    def _asked(
        self,
        prompt: PromptLike,
        namespace: str | None,
        policy: str | SelectionPolicy | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> PromptRequest:
        """As :meth:`_request`; the first plain text of a chat model has a note."""
        request = self._request(prompt, namespace, policy, tools)
        if self._told_of_template or not without_template(self._parser, prompt):
            return request
        self._told_of_template = True
        return replace(request, notes=(*request.notes, NO_TEMPLATE))

    def _queued(
        self,
        prompt: PromptRequest,
        options: dict[str, Any],
        stop: Sequence[str],
        begun: float,
        wait: bool | float,
        watch: Watch,
        cancel: Event | None = None,
        deadline: float | None = None,
    ) -> Request:
        raise_if_cancelled()
        check_deadline(deadline)
        if not isinstance(wait, bool):
            check_number("wait", wait, "True, False or seconds")
        defaults = self._components.generator.model.generation_config
        streamer, tokens = options.get("streamer"), None
        if streamer is None and (effective(options, defaults, "num_beams") or 1) == 1:
            streamer = tokens = TokenQueue()
        cancelled = Event()
        counted = None if streamer is None else TokenCounter(streamer, prompt.token_ids)
        estimator, context = self._planner.estimator(prompt), self._planner.context
        room = context - estimator.tokens
        work = Work(
            prompt,
            Asked({**options, "streamer": counted}, stop, cancelled),
            estimator,
            min(effective(options, defaults, "max_new_tokens") or room, room),
            begun,
            inf if deadline is None else time.monotonic() + deadline - (time.perf_counter() - begun),
            CancelScope(cancel),
            cancelled,
            counted,
            watch,
        )
        queue, detokenizer = self.queue, Detokenizer(self._parser.decode, stop)
        request = Request(work, tokens, detokenizer, queue.cancel, queue.refuse_own_thread)
        try:
            queue.submit(request, wait)
        except KeyboardInterrupt:  # which may come when it waits already
            request.cancel()
            raise
        return request

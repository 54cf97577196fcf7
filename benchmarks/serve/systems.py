"""What the serving benchmark compares: each system takes requests at any time and answers them in full."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers.generation.streamers import BaseStreamer

from benchmarks.serve.workload import Ids, ServeRequest
from ragcachekit import QueueFull, RagCache
from ragcachekit.errors import RagCacheError

PAGE = 32  # tokens per block of transformers' paged cache
STEP_TOKENS = 512  # of transformers' forwards: the quickest of 256, 512 and 1,024 on a CPU
NO_END = -1  # an end token that no model writes


@dataclass
class Served:
    """One request of a replay: times in seconds by ``time.perf_counter``, one per token that it was given."""

    request: ServeRequest
    due: float
    times: list[float] = field(default_factory=list)
    token_ids: Ids = ()
    reused: int | None = None
    refused: bool = False


class System(Protocol):
    """``serve`` returns at once, ``drain`` when all are answered; ``warm_up`` comes before the first."""

    def warm_up(self, requests: Sequence[ServeRequest]) -> None: ...

    def serve(self, served: Served) -> None: ...

    def drain(self) -> None: ...

    def close(self) -> None: ...


class TokenTimes(BaseStreamer):  # type: ignore[misc] # transformers is untyped
    """Notes when each token of an answer came; the first call carries the prompt."""

    def __init__(self, times: list[float]) -> None:
        self._times, self._started = times, False

    def put(self, value: torch.Tensor) -> None:
        """Note one time per token id."""
        if self._started:
            self._times.extend([time.perf_counter()] * value.numel())
        self._started = True

    def end(self) -> None: ...


class Sequential:
    """The model's own ``generate``, one request after the other."""

    def __init__(self, model: Any, new_tokens: int) -> None:
        self._model, self._new_tokens = model, new_tokens
        self._pool = ThreadPoolExecutor(1)
        self._jobs: list[Future[None]] = []

    def warm_up(self, requests: Sequence[ServeRequest]) -> None:
        """Answer one request."""
        self._generate(Served(requests[0], 0.0))

    def serve(self, served: Served) -> None:
        self._jobs.append(self._pool.submit(self._generate, served))

    def drain(self) -> None:
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()

    def close(self) -> None:
        self._pool.shutdown()

    def _generate(self, served: Served) -> None:
        ids = torch.tensor([served.request.token_ids], device=self._model.device)
        output = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            streamer=TokenTimes(served.times),
            pad_token_id=0,
            max_new_tokens=self._new_tokens,
            do_sample=False,
        )
        served.token_ids = tuple(output[0, ids.shape[1] :].tolist())


class ContinuousBatching:
    """transformers' own continuous batching, with its block sharing (exact prefixes) or without.

    Its pages hold ``max_batch`` requests of ``request_tokens`` and, to be shared, ``shared_tokens`` more.
    """

    def __init__(
        self, model: Any, new_tokens: int, *, max_batch: int, request_tokens: int, shared_tokens: int = 0
    ) -> None:
        try:
            from transformers import ContinuousBatchingConfig, GenerationConfig
        except ImportError as error:
            raise RagCacheError(
                "this version of transformers has no ContinuousBatchingConfig; leave the systems "
                "batching and sharing out"
            ) from error
        self._new_tokens, self._open = new_tokens, dict[str, Served]()
        config = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=-(-request_tokens // PAGE) * max_batch + shared_tokens // PAGE,
            max_batch_tokens=STEP_TOKENS,
            max_requests_per_batch=max_batch,
            allow_block_sharing=bool(shared_tokens),
        )
        options = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=NO_END)
        self._opened = ExitStack()
        self._manager = self._opened.enter_context(
            model.continuous_batching_context_manager(
                generation_config=options, continuous_batching_config=config
            )
        )

    def warm_up(self, requests: Sequence[ServeRequest]) -> None:
        """Answer all, so that what can be shared is there."""
        _answer_all(self, requests)

    def serve(self, served: Served) -> None:
        options = {"max_new_tokens": self._new_tokens, "eos_token_id": NO_END, "record_timestamps": True}
        name = self._manager.add_request(list(served.request.token_ids), **options)
        if name is None:
            raise RagCacheError("transformers' continuous batching took no request; its error was logged")
        self._open[name] = served

    def drain(self) -> None:
        while self._open:
            result = self._manager.get_result(timeout=1.0)
            if result is None and not self._manager.is_running():
                raise RagCacheError("transformers' continuous batching ended; its error was logged")
            if result is None or not result.is_finished():
                continue
            if result.error:
                raise RagCacheError(f"transformers' continuous batching failed: {result.error}")
            served = self._open.pop(result.request_id)
            served.token_ids, served.times[:] = tuple(result.generated_tokens), result.timestamps

    def close(self) -> None:
        self._opened.close()


class Engine:
    """Requests through ``rag.submit``, under the engine's own policy."""

    def __init__(self, rag: RagCache, new_tokens: int, prompts: Sequence[Any]) -> None:
        self._rag, self._prompts = rag, prompts
        self._options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
        self._open: list[tuple[Served, Any]] = []

    def warm_up(self, requests: Sequence[ServeRequest]) -> None:
        """Choose the policy of ``auto``, encode all documents, then answer the requests."""
        if self._rag.policy.startswith("auto"):
            self._rag.tune(prompts=[request.prompt for request in requests])
        for prompt in self._prompts:
            self._rag.generate(prompt, max_new_tokens=1, do_sample=False)
        self._rag.flush()
        _answer_all(self, requests)

    def serve(self, served: Served) -> None:
        times = TokenTimes(served.times)
        try:
            self._open.append(
                (served, self._rag.submit(served.request.prompt, streamer=times, **self._options))
            )
        except QueueFull:
            served.refused = True

    def drain(self) -> None:
        opened, self._open = self._open, []
        for served, request in opened:
            answer = request.result()
            served.token_ids, served.reused = answer.token_ids, answer.report.link.reused_tokens

    def close(self) -> None:
        self._rag.close()


def _answer_all(system: System, requests: Sequence[ServeRequest]) -> None:
    for request in requests:
        system.serve(Served(request, 0.0))
        system.drain()

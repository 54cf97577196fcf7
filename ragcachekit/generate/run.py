"""Run transformers' ``model.generate`` on a linked prompt: our decoding loop, its hooks, the answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import MaxLengthCriteria, StopStringCriteria

from ragcachekit.cancellation import CancelScope
from ragcachekit.errors import Cancelled
from ragcachekit.forward.prefill import Replan, check_finite, prepare, prepare_ahead, replanned
from ragcachekit.forward.rows import OwnRows
from ragcachekit.generate.options import (
    cut_at_stop,
    effective,
    end_tokens,
    links_ahead,
    uses_beams,
    without_refused_defaults,
)
from ragcachekit.model.kv import ChunkKV
from ragcachekit.model.rope import Rope
from ragcachekit.plan.link_plan import LinkPlan
from ragcachekit.reports import Answer, GenerateReport, LinkReport
from ragcachekit.store.loader import LoadFailed

# -- hooks into one call of generate -------------------------------------------------------------------


class FirstTokenTimer(StoppingCriteria):  # type: ignore[misc]
    """A stopping criterion that records when the first token came and stops cancelled requests.

    From the first token on it replaces cancellation between layers, so that no token is lost.
    """

    def __init__(self, scope: CancelScope) -> None:
        self.first_token: float | None = None
        self.cancelled = False
        self._scope = scope

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if self.first_token is None:
            input_ids[:, -1].tolist()  # waits for the device: the token is not there before that
            self.first_token = time.perf_counter()
            self._scope.between_layers = False
        self.cancelled = self._scope.requested
        return torch.full((input_ids.shape[0],), self.cancelled, dtype=torch.bool, device=input_ids.device)


class StopStrings(StoppingCriteria):  # type: ignore[misc]
    """Ends a sequence whose new text, after ``prompt`` columns, contains a stop string.

    Not transformers' own ``stop_strings``, which fails on word-level tokenizers and reads the prompt, too.
    """

    def __init__(self, stop: Sequence[str], decode: Callable[[Sequence[int]], str], prompt: int) -> None:
        self._stop, self._decode, self._prompt = tuple(stop), decode, prompt
        # A character is at most four byte tokens; the rest is slack for tokens without text.
        self._window = 4 * max(map(len, self._stop), default=0) + 8

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        start = max(self._prompt, input_ids.shape[1] - self._window)
        done = [self.end(row) for row in input_ids[:, start:].tolist()]
        return torch.tensor(done, device=input_ids.device)

    def end(self, ids: Sequence[int]) -> bool:
        """Whether the last of these new ids complete a stop string."""
        return cut_at_stop(self._decode(ids[-self._window :]), self._stop)[1]


class DecodingLoop:
    """transformers' own decoding loop, with the prompt's ids in order; generate's ``custom_generate``.

    A linked prefill gets the ids permuted. Logits processors, stopping criteria and the streamer get them as
    they are in the prompt, so every option of transformers that reads ids works. ``one_token`` ends the loop
    after the first token, for a batch that goes on: with ``processors``, ``criteria`` and ``config`` as
    generate prepared them, and a ``generator`` that goes on where the first draw ended (None: torch's own).
    """

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    generator: torch.Generator | None = None

    def __init__(self, prompt: Sequence[int], timer: FirstTokenTimer, streamer: Any, one_token: bool) -> None:
        self.known = 0  # first tokens that the model is not given
        self.plan: LinkPlan | None = None  # whose first scores are to be checked
        self._prompt, self._timer, self._streamer = prompt, timer, streamer
        self._one_token, self._prompt_given = one_token, False

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        self.processors, self.criteria, self.config = logits_processor, stopping_criteria, generation_config
        prompt = torch.tensor([list(self._prompt)])
        if self._streamer is not None and not self._prompt_given:  # once, also where generate begins again
            self._prompt_given = True
            self._streamer.put(prompt)
        input_ids = input_ids[:, self.known :]
        in_order, columns = prompt.to(input_ids.device), input_ids.shape[1]

        def ordered(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return lambda ids, scores: call(torch.cat([in_order, ids[:, columns:]], -1), scores)

        def processed(ids: Tensor, scores: Tensor) -> Tensor:
            plan, self.plan = self.plan, None
            if plan is not None:  # before anybody else sees them
                check_finite(plan, scores)
            return logits_processor(ids, scores)  # type: ignore[no-any-return]

        end: Any = MaxLengthCriteria(columns + 1) if self._one_token else ordered(stopping_criteria)
        streamer = self._streamer
        if streamer is not None and self._one_token:  # the batch ends it
            streamer = SimpleNamespace(put=streamer.put, end=lambda: None)
        return model._sample(
            input_ids,
            LogitsProcessorList([ordered(processed)]),
            StoppingCriteriaList([self._timer, end]),
            generation_config,
            streamer=streamer,
            **model_kwargs,
        )


# -- the call ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generated:
    """What generating the answer to a prompt returned.

    - ``token_ids``, ``ended``: New token ids, and whether they end with an end token; empty for a request
      that was cancelled before its first token.
    - ``first_token``, ``linked``: When the first token came, and when the cache would have been assembled,
      had it been before the forward; in seconds of :func:`time.perf_counter`.
    - ``plan``, ``report``: The plan that ran in the end, and its report.
    - ``cache``: The prompt's cache, unless there are several beams.
    - ``own``: What was observed of entries that this prefill computed.
    - ``loop``: How to choose further tokens; None after several beams or a cancelled prefill.
    - ``snapshots``: Those of the prompt's steps, of models that are not linked.
    """

    token_ids: tuple[int, ...]
    ended: bool
    first_token: float
    linked: float
    cancelled: bool
    plan: LinkPlan
    report: LinkReport
    cache: Any = None
    own: OwnRows | None = None
    loop: DecodingLoop | None = None
    snapshots: tuple[ChunkKV, ...] = ()


def run_generate(
    model: Any,
    rope: Rope,
    plan: LinkPlan,
    options: Mapping[str, Any],
    *,
    decode: Callable[[Sequence[int]], str],
    cancel: threading.Event | None = None,
    stop: Sequence[str] = (),
    capture_missing_rows: bool = False,
    replan: Replan | None = None,
    one_token: bool = False,
) -> Generated:
    """Generate after a linked prompt.

    ``options`` go to generate, ``seed`` to its sampling. ``decode`` is needed for ``stop`` strings.
    ``replan`` plans the prompt again if entries could not be loaded. ``capture_missing_rows`` observes rows
    of missing chunks, as they are to be stored. ``one_token`` returns after the first token, for a batch that
    goes on, with a cache of all rows, whatever the model drops outside its windows. ``cancel``, or a scope
    around the call, ends the prefill between two layers and the answer between two tokens.
    """
    defaults = model.generation_config
    # Phi-3's generate drops the cache and runs all ids again where its frequencies change: in order.
    ahead = rope.depends_on_length or links_ahead(options, defaults)
    beams = (effective(options, defaults, "num_beams") or 1) if uses_beams(options, defaults) else 1
    options = _with_stop_strings(without_refused_defaults(options, defaults), defaults)
    seed, streamer = options.pop("seed", None), options.pop("streamer", None)
    with CancelScope(cancel) as scope:
        timer = FirstTokenTimer(scope)
        loop = None if beams > 1 else DecodingLoop(plan.token_ids, timer, streamer, one_token)
        options["custom_generate"] = loop
        own_criteria = [*(options.get("stopping_criteria") or ())]
        own_criteria += [timer] if loop is None else []
        while True:
            # Where the knowledge tree captures an ordinary prefill, it needs all rows, too.
            whole = beams == 1 and (one_token or plan.prefix_match is not None)
            try:
                if ahead:
                    prefill = prepare_ahead(model, rope, plan, repeats=beams, whole=whole)
                else:
                    prefill = prepare(model, rope, plan, capture=capture_missing_rows, whole=whole)
                cache, prompt = prefill.inputs.get("past_key_values"), prefill.inputs["input_ids"].shape[1]
                if loop is not None:
                    loop.known, loop.plan = prefill.known, plan
                stops = [StopStrings(stop, decode, prompt)] if stop else []
                options["stopping_criteria"] = StoppingCriteriaList([*own_criteria, *stops])
                started_at, before = time.perf_counter(), getattr(cache, "settling", 0.0)
                with _seeded(model, seed) as random, torch.no_grad():
                    output = model.generate(**prefill.inputs, **options)
                    if loop is not None:
                        loop.generator = random()
                break
            except Cancelled:
                if streamer is not None and not one_token:  # else the batch ends it
                    streamer.end()
                now = time.perf_counter()
                return Generated((), False, now, now, True, plan, plan.report)
            except LoadFailed as failed:  # before the first token: nobody has seen anything of this attempt
                plan = replanned(plan, failed, replan)
    ends = end_tokens(options, defaults)
    ids = _trim(output[0, prompt - prefill.known :].tolist(), ends)
    settling = getattr(cache, "settling", 0.0) - before
    return Generated(
        ids,
        bool(ids) and ids[-1] in ends,
        timer.first_token if timer.first_token is not None else time.perf_counter(),
        started_at + settling,
        timer.cancelled,
        prefill.plan,
        prefill.report(),
        cache if loop is not None else None,
        prefill.own,
        loop,
        prefill.snapshots,
    )


def _with_stop_strings(options: dict[str, Any], defaults: Any) -> dict[str, Any]:
    """``stop_strings`` as the criterion that generate makes of them: it gives our loop no tokenizer."""
    strings, tokenizer = effective(options, defaults, "stop_strings"), options.get("tokenizer")
    if not strings or tokenizer is None:
        return options
    criterion = StopStringCriteria(stop_strings=strings, tokenizer=tokenizer)
    if (config := options.get("generation_config")) is not None:
        config.stop_strings = None  # a copy: of filled_options
    return {
        **{name: value for name, value in options.items() if name not in ("stop_strings", "tokenizer")},
        "stopping_criteria": [*(options.get("stopping_criteria") or ()), criterion],
    }


@contextmanager
def _seeded(model: Any, seed: int | None) -> Iterator[Callable[[], torch.Generator | None]]:
    """Draw from random numbers of their own, where a seed is given; yields what gives a copy of them."""
    if seed is None:
        yield lambda: None
        return
    device = model.device if model.device.type == "cuda" else torch.device("cpu")

    def copied() -> torch.Generator:
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        return torch.Generator(device).set_state(state)

    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield copied


def _trim(ids: list[int], ends: frozenset[int]) -> tuple[int, ...]:
    """Cut the padding after a finished beam; the end token itself stays."""
    end = next((at + 1 for at, token in enumerate(ids) if token in ends), len(ids))
    return tuple(ids[:end])


def answer_of(
    generated: Generated,
    started_at: float,
    stop: Sequence[str],
    options: Mapping[str, Any],
    decode: Callable[[Sequence[int]], str],
) -> Answer:
    """The answer to a prompt; ``started_at`` in seconds of :func:`time.perf_counter`."""
    ids = generated.token_ids
    text, stopped = cut_at_stop(decode(ids), stop)
    limit = effective(options, None, "max_new_tokens") or len(ids) + 1
    ended = stopped or len(ids) < limit or generated.ended
    report = GenerateReport(
        replace(generated.report, link_ms=(generated.linked - started_at) * 1e3),
        len(ids),
        ttft_ms=(generated.first_token - started_at) * 1e3,
        total_ms=(time.perf_counter() - started_at) * 1e3,
        finish_reason="cancelled" if generated.cancelled else "stop" if ended else "length",
    )
    return Answer(text, ids, report)

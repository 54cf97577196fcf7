"""The check of ``auto``: what reuse under each candidate does to the model's next tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import DynamicCache

from ragcachekit.encode.background import BackgroundEncoder
from ragcachekit.engine.auto.probes import Probe
from ragcachekit.engine.auto.prompts import PROMPTS, CheckPrompt
from ragcachekit.engine.auto.record import TuneRow
from ragcachekit.engine.auto.selection import Measured, contenders, means
from ragcachekit.engine.shadow import divergence
from ragcachekit.errors import ModelChanged, RagCacheError
from ragcachekit.forward.linker import link
from ragcachekit.forward.scoring_pass import choose
from ragcachekit.model.rope.rotation import Rope
from ragcachekit.plan.link_plan import LinkPlan, Missing
from ragcachekit.plan.plan import make_plan
from ragcachekit.plan.planner import MODEL_CHANGED, Planner
from ragcachekit.plan.variants import VariantPool
from ragcachekit.policies.auto import Pair
from ragcachekit.policies.base import SelectionPolicy
from ragcachekit.prompt.parser import PromptParser
from ragcachekit.prompt.segments import TokenSegment
from ragcachekit.store.base import KVStore
from ragcachekit.store.memory import HostStore
from ragcachekit.types import Ids

SECONDS = 60.0
"""Time budget of one check; a prompt that would not end within it is dropped."""

ANSWER_TOKENS = 8
"""Tokens that the full prefill generates, and every candidate is measured on."""

_NO_LIMIT = 1 << 60  # bytes of the private store, which holds one prompt's chunks
_SEPARATOR = "\n\n"


class _OutOfTime(Exception):
    """Ends the prompt that runs."""


class PolicyCheck:
    """Measures candidates on one model; nothing of it is stored.

    ``encoder_over`` makes an encoder of chunks that stores them where it is told. ``clock`` returns seconds.
    """

    def __init__(
        self,
        model: Any,
        rope: Rope,
        parser: PromptParser,
        planner: Planner,
        encoder_over: Callable[[KVStore], BackgroundEncoder],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._rope, self._parser, self._planner = model, rope, parser, planner
        self._encoder_over, self._clock = encoder_over, clock

    def run(
        self,
        prompts: Iterable[CheckPrompt],
        policies: dict[Pair, SelectionPolicy],
        namespace: str,
        *,
        wait: Callable[[], object] = lambda: None,
        progress: bool = False,
    ) -> tuple[list[TuneRow], dict[Pair, list[Measured]], float]:
        """Rows of all ``policies``, their results by prompt, and the seconds it took without ``wait``.

        The first :data:`PROMPTS` that fit the context are measured. ``wait`` is called before every forward
        and may block. All results are empty if not even one prompt
        was measured within :data:`SECONDS`.

        Raises
        ------
        ModelChanged
            If the model changed since its fingerprint was taken.
        Cancelled
            In a cancelled scope.
        """
        steps = _Steps(self._clock, wait)
        results: dict[Pair, list[Measured]] = {pair: [] for pair in policies}
        most = self._planner.context - ANSWER_TOKENS
        fitting = (prompt for prompt in prompts if len(prompt.token_ids) <= most)
        for prompt in tqdm(islice(fitting, PROMPTS), total=PROMPTS, unit="prompt", disable=not progress):
            if not self._planner.unchanged():
                raise ModelChanged(MODEL_CHANGED)
            try:
                left = {pair: policies[pair] for pair in contenders(results)}
                measured = self._measured(prompt, left, namespace, steps)
            except _OutOfTime:
                break
            for pair, found in measured.items():
                results[pair].append(found)
        rows = [TuneRow(*pair, *means(found), len(found)) for pair, found in results.items() if found]
        return rows, results, steps.seconds

    def prompt(self, probe: Probe, system: Ids) -> CheckPrompt:
        """A probe as a prompt behind ``system``."""
        tokens = self._parser.tokens
        separator = tokens.blank_line()
        texts = {self._parser.chunk_ids(text): text for text in probe.texts}
        segments = [TokenSegment(system, False)] if system else []
        for number, ids in enumerate(texts):
            between = [TokenSegment(separator, False)] if number else []
            segments += [*between, TokenSegment(ids, True)]
        question = TokenSegment(separator + tokens.plain(probe.beginning), False)
        return CheckPrompt((*segments, question), texts)

    def _measured(
        self,
        prompt: CheckPrompt,
        policies: dict[Pair, SelectionPolicy],
        namespace: str,
        steps: _Steps,
    ) -> dict[Pair, Measured]:
        """All ``policies`` on one prompt, over encodings in a private store."""
        answer, full = self._full(prompt.token_ids, steps)
        store, out = HostStore(_NO_LIMIT), {}
        try:
            encoder = self._encoder_over(store)
            for pair, policy in policies.items():
                request = self._planner.request_over(store, prompt.segments, prompt.texts, policy, namespace)
                # Not as a plan has them missing: its own rows would be exact here.
                wanted = [
                    Missing(item.key, item.token_ids, item.encoding)
                    for item in (want.to_encode for want in request.wanted)
                ]
                if missing := [item for item in wanted if item.key not in store]:
                    steps.take()
                    encoder.now(missing, lambda _: steps.take())
                plan = self._plan(prompt, policy, namespace, store)
                if plan.missing or not plan.pieces:
                    raise RagCacheError(f"chunks of a check could not be encoded for {' '.join(pair)}")
                found, ratio = self._linked(plan, answer, steps)
                kl = [divergence(one, other) for one, other in zip(full, found, strict=True)]
                out[pair] = Measured(sum(kl) / len(kl), ratio)
        finally:
            store.close()
        return out

    def _plan(
        self,
        prompt: CheckPrompt,
        policy: SelectionPolicy,
        namespace: str,
        store: KVStore,
    ) -> LinkPlan:
        request = self._planner.request_over(store, prompt.segments, prompt.texts, policy, namespace)
        return make_plan(request, VariantPool())

    @torch.no_grad()
    def _full(self, ids: Ids, steps: _Steps) -> tuple[list[int], list[torch.Tensor]]:
        """A greedy answer of the full prompt, up to an end token, and each token's log probabilities."""
        ends = self._model.generation_config.eos_token_id
        ends = {ends} if isinstance(ends, int) else set(ends or ())
        # Not the model's own kind of cache, which drops keys of sliding layers.
        cache, rows = DynamicCache(), list(ids)
        answer, out = list[int](), list[torch.Tensor]()
        while len(answer) < ANSWER_TOKENS and not ends.intersection(answer):
            steps.take()
            row = torch.tensor([rows], device=self._model.device)
            output = self._model(input_ids=row, past_key_values=cache, use_cache=True, logits_to_keep=1)
            out.append(output.logits[0, -1].double().log_softmax(-1))
            rows = [int(out[-1].argmax())]
            answer += rows
        return answer, out

    @torch.no_grad()
    def _linked(self, plan: LinkPlan, answer: Sequence[int], steps: _Steps) -> tuple[torch.Tensor, float]:
        """Log probabilities ``[answer, vocab]`` after a linked prompt, in one forward over the answer too."""
        steps.take()
        plan, _ = choose(self._model, self._rope, plan)  # before it sees the answer
        steps.take()
        length, given = len(plan.token_ids), answer[:-1]
        rows = (*plan.rows, *range(length, length + len(given)))
        whole = replace(plan, token_ids=(*plan.token_ids, *given), rows=rows)
        inputs = link(whole, self._rope, self._model.device)
        output = self._model(
            input_ids=inputs.input_ids[:, -len(rows) :],
            position_ids=inputs.position_ids[:, -len(rows) :],
            attention_mask=inputs.attention_mask,
            past_key_values=inputs.cache,
            use_cache=True,
            logits_to_keep=len(answer),
        )
        return output.logits[0].double().log_softmax(-1), plan.report.recompute_ratio


class _Steps:
    """Counts the seconds of forwards against the budget, and waits between them.

    A forward may take as long as the longest one so far: none begins that would not end in time.
    """

    def __init__(self, clock: Callable[[], float], wait: Callable[[], object]) -> None:
        self._clock, self._wait, self._waited = clock, wait, 0.0
        self._begun = clock()
        self._last, self._longest = 0.0, 0.0

    @property
    def seconds(self) -> float:
        """Since the beginning, without waiting."""
        return self._clock() - self._begun - self._waited

    def take(self) -> None:
        """Before a forward; raises _OutOfTime if it would end after the budget."""
        now = self.seconds
        self._longest, self._last = max(self._longest, now - self._last), now
        if now + self._longest > SECONDS:
            raise _OutOfTime
        before = self._clock()
        self._wait()
        self._waited += self._clock() - before

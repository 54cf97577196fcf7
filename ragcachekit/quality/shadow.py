"""Shadow mode: some requests are answered a second time in full, to see what reuse does to answers."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ragcachekit.cancellation import raise_if_cancelled
from ragcachekit.config import ShadowConfig
from ragcachekit.errors import Cancelled
from ragcachekit.generate.options import effective
from ragcachekit.generate.run import FirstScores, answer_of, run_generate
from ragcachekit.model.rope import Rope
from ragcachekit.plan.link_plan import LinkPlan, PromptRequest, plain_plan
from ragcachekit.policies.registry import open_policy
from ragcachekit.prompt.segments import TokenSegment
from ragcachekit.quality.compare import bag_f1, divergence
from ragcachekit.reports import Answer, ShadowReport
from ragcachekit.threads import BackgroundWorker, Pause

log = logging.getLogger(__name__)

MAX_WAITING = 32  # shadow prefills that may wait; further ones are dropped, and counted

_FIRST_TOKEN = dict.fromkeys(("temperature", "top_k", "top_p", "max_time", "seed"))
_FIRST_TOKEN |= {"max_new_tokens": 1, "do_sample": False}
_USER_CODE = ("stopping_criteria", "logits_processor", "prefix_allowed_tokens_fn")


class _Tally:
    """The comparisons of one namespace; ``recent``: whether each of the last ones differed."""

    def __init__(self, window: int) -> None:
        self.recent: deque[bool] = deque(maxlen=window)
        self.counts: Counter[str] = Counter()
        self.kl_sum = self.kl_max = self.f1_sum = 0.0
        self.warned = False
        self.fallback: str | None = None

    def add(self, kl: float, agreed: bool | None, f1: float) -> None:
        self.counts["shadowed"] += 1
        self.kl_sum += kl
        self.kl_max = max(self.kl_max, kl)
        if agreed is not None:
            self.counts["compared"] += 1
            self.counts["agreed"] += agreed
            self.f1_sum += f1
            self.recent.append(not agreed)


@dataclass(frozen=True, eq=False)
class _Job:
    """A request to answer again; without ``answer`` only the first token's distribution is compared."""

    namespace: str
    tally: _Tally
    token_ids: tuple[int, ...]
    log_probs: torch.Tensor
    answer: Answer | None
    options: Mapping[str, Any]
    stop: tuple[str, ...]


class Shadow:
    """Draws requests, runs them in full after their answers, and measures the difference.

    Errors are logged and counted; they never reach an answer. Nothing is compared once the model has changed
    (``unchanged``). ``decode`` turns token ids into text. ``pause`` slows the thread down.
    """

    def __init__(
        self,
        config: ShadowConfig,
        model: Any,
        rope: Rope,
        decode: Callable[[Sequence[int]], str],
        unchanged: Callable[[], bool],
        worker: BackgroundWorker,
        pause: Pause | None = None,
    ) -> None:
        self.config = config
        self._model, self._rope, self._decode, self._unchanged = model, rope, decode, unchanged
        self._lock = threading.Lock()
        self._random = random.Random(config.seed)
        self._tallies: dict[str, _Tally] = {}
        self._jobs = worker.queue(self._work, MAX_WAITING, pause)

    def fallback(self, namespace: str) -> str | None:
        """Why prompts of this namespace have to be computed in full, or None."""
        tally = self._tallies.get(namespace)
        return tally.fallback if tally is not None else None

    def draw(self, options: Mapping[str, Any]) -> FirstScores | None:
        """Decide whether the next request is shadowed; None if it is not.

        Requests with the user's own code (logits processors) are not: a second run could change its state.
        """
        if self.config.share == 0:
            return None
        with self._lock:
            drawn = self._random.random() < self.config.share
        config = options.get("generation_config")
        own = any(options.get(name) or getattr(config, name, None) for name in _USER_CODE)
        return FirstScores() if drawn and not own else None

    def follow(
        self,
        plan: LinkPlan,
        answer: Answer,
        first: FirstScores | None,
        options: Mapping[str, Any],
        stop: Sequence[str],
    ) -> None:
        """Shadow a drawn request whose reuse was approximate: now or in the background."""
        if self.config.share == 0:
            return
        tally = self._tally(plan.report.namespace)
        self._count(tally, "requests")
        if first is None or first.log_probs is None or not answer.report.link.approximate_tokens:
            return
        try:
            asked = {name: value for name, value in options.items() if name != "streamer"}
            changing = [effective(asked, self._model.generation_config, o) for o in ("max_time", "do_sample")]
            whole = answer.report.finish_reason != "cancelled" and not any(changing)
            if not whole:  # one token, without chance: other requests draw from the same random numbers
                asked, stop = asked | _FIRST_TOKEN, ()
            namespace, ids, compared = plan.report.namespace, plan.token_ids, answer if whole else None
            job = _Job(namespace, tally, ids, first.log_probs, compared, asked, tuple(stop))
            if self.config.when == "after":
                self._work(job)
            elif not self._jobs.add(job):
                self._count(tally, "dropped")
        except Exception:
            log.warning("a request could not be shadowed", exc_info=True)
            self._count(tally, "failed")

    def report(self, namespace: str | None = None) -> ShadowReport:
        """Results since the last :meth:`reset`, in one namespace or (None) in all together."""
        with self._lock:
            tallies = [t for name, t in self._tallies.items() if namespace in (None, name)]
            counts = sum((t.counts for t in tallies), Counter[str]())
            shadowed, compared = counts["shadowed"], counts["compared"]
            return ShadowReport(
                requests=counts["requests"],
                shadowed=shadowed,
                compared=compared,
                agreement=counts["agreed"] / compared if compared else None,
                f1=sum(t.f1_sum for t in tallies) / compared if compared else None,
                mean_kl=sum(t.kl_sum for t in tallies) / shadowed if shadowed else None,
                max_kl=max(t.kl_max for t in tallies) if shadowed else None,
                recent_disagreement=max((sum(t.recent) for t in tallies), default=0) / self.config.window,
                waiting=self._jobs.waiting,
                dropped=counts["dropped"],
                failed=counts["failed"],
                falling_back=any(t.fallback for t in tallies),
            )

    def reset(self, namespace: str | None = None) -> None:
        """Drop all results, of one namespace or of all, and those of jobs under way."""
        with self._lock:
            for name in list(self._tallies) if namespace is None else [namespace]:
                self._tallies.pop(name, None)

    def _work(self, job: _Job) -> None:
        if not self._unchanged():
            return
        try:
            kl, agreed, f1 = self._compare(job)
        except Cancelled:
            self._count(job.tally, "dropped")
        except Exception:
            log.warning("a shadow prefill failed", exc_info=True)
            self._count(job.tally, "failed")  # not the namespace's present one: it may have been reset
        else:
            self._add(job, kl, agreed, f1)

    def _compare(self, job: _Job) -> tuple[float, bool | None, float]:
        """KL of the first token, whether the answers agree (None if not compared), and their F1."""
        segments = (TokenSegment(job.token_ids, False),)
        plan = plain_plan(PromptRequest(segments, open_policy("full"), "none", job.namespace))
        first, started_at = FirstScores(), time.perf_counter()
        generated = run_generate(
            self._model, self._rope, plan, job.options, decode=self._decode, stop=job.stop, first=first
        )
        raise_if_cancelled()
        assert first.log_probs is not None, "not cancelled"
        kl = divergence(first.log_probs, job.log_probs)
        if job.answer is None:
            return kl, None, 0.0
        full = answer_of(generated, started_at, job.stop, job.options, self._decode)
        same = full.text == job.answer.text
        if not full.text and not job.answer.text:  # no tokenizer, or no text
            same = full.token_ids == job.answer.token_ids
        return kl, same, bag_f1(job.answer.token_ids, full.token_ids)

    def _add(self, job: _Job, kl: float, agreed: bool | None, f1: float) -> None:
        with self._lock:
            tally = job.tally
            tally.add(kl, agreed, f1)
            wrong, bound = sum(tally.recent), self.config.bound * self.config.window
            if wrong <= bound or tally.warned:
                return
            tally.warned = True
            reason = (
                f"{wrong} of the last {len(tally.recent)} shadowed requests were answered differently by a "
                f"full prefill; the bound is {bound:g} of {self.config.window}"
            )
            tally.fallback = f"shadow mode: {reason}" if self.config.fall_back else None
        then = "prompts are computed in full from now on" if self.config.fall_back else "reuse goes on"
        log.warning("namespace %r: %s; %s", job.namespace, reason, then)

    def _count(self, tally: _Tally, what: str) -> None:
        with self._lock:
            tally.counts[what] += 1

    def _tally(self, namespace: str) -> _Tally:
        with self._lock:
            return self._tallies.setdefault(namespace, _Tally(self.config.window))

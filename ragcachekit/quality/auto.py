"""What ``policy="auto"`` stands for in each namespace, and when it is checked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from threading import Event, RLock
from typing import Any

from ragcachekit.cancellation import raise_if_cancelled
from ragcachekit.errors import ModelChanged, RagCacheError
from ragcachekit.plan.link_plan import PromptRequest
from ragcachekit.plan.planner import MODEL_CHANGED, Planner
from ragcachekit.plan.variants import IN_PROMPT
from ragcachekit.policies.base import PolicyAndEncoder, SelectionPolicy
from ragcachekit.policies.registry import open_policy
from ragcachekit.prompt.segments import token_count
from ragcachekit.quality.check import (
    MAX_PROMPTS,
    MAX_SECONDS,
    MIN_PROMPTS,
    CheckPrompt,
    PolicyCheck,
    candidates,
    choice,
    means,
)
from ragcachekit.quality.records import (
    ResolvedPolicy,
    TuneReport,
    TuneRow,
    choice_path,
    read_choice,
    write_record,
)
from ragcachekit.store.forgets import ForgottenTexts
from ragcachekit.threads import BackgroundWorker
from ragcachekit.types import Ids

log = logging.getLogger(__name__)

MAX_WAITING = 64  # namespaces whose check may wait
MAX_TOKENS = 1 << 20  # of all kept prompts; beyond, those of the namespace that was idle longest go

CHECK_PREFILLS = 10
"""Prefills of each of its prompts that a check takes about: in full, of encodings, and of candidates."""

MIN_SAVED = 4
"""Multiple of a check's time that must have been saved: it takes a quarter of what reuse gained, at most."""


class Savings:
    """Seconds by which the first tokens of a namespace's prompts came sooner than by full prefills.

    A full prefill is estimated by the quickest so far, per row, of those that computed half a prompt or more.
    Prompts before the first such prefill do not count.
    """

    def __init__(self) -> None:
        self.seconds, self._per_row = 0.0, inf

    def add(self, tokens: int, rows: int, seconds: float) -> None:
        """Count a prompt of ``tokens`` whose first token took ``seconds``, with ``rows`` of them computed."""
        if 2 * rows >= tokens:
            self._per_row = min(self._per_row, seconds / rows)
        if self._per_row < inf:
            self.seconds += max(0.0, self._per_row * tokens - seconds)

    def pay_for_check(self, tokens: int) -> bool:
        """Whether they are :data:`MIN_SAVED` times what a check of prompts with ``tokens`` in all would take.

        True where no prompt was computed: its chunks were encoded ahead, so its user wants them used well.
        """
        if self._per_row == inf:
            return True
        return self.seconds >= MIN_SAVED * min(MAX_SECONDS, CHECK_PREFILLS * self._per_row * tokens)


@dataclass
class _Namespace:
    report: TuneReport | None
    checked: bool = False  # or being checked, or it was found not to be needed
    savings: Savings = field(default_factory=Savings)


class AutoPolicies:
    """Encoder and policy of ``auto`` per namespace: the default, then the choice of a check. Thread safe.

    The resolved policy carries its encoder, so that a request has one pair throughout. ``folder`` has the
    records. ``encoder`` is the one that the user gave, if any: then only the policy is chosen, within
    ``bound`` times the least KL. ``wait_until_idle`` blocks a background check until no request runs or the
    event, which it is given, is set.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        encoder: str | None,
        bound: float,
        planner: Planner,
        check: PolicyCheck,
        worker: BackgroundWorker,
        wait_until_idle: Callable[[Event], object],
    ) -> None:
        self._folder, self._fingerprint, self._encoder = folder, fingerprint, encoder
        self._bound = bound
        self._planner, self.check = planner, check
        self._worker, self._wait_until_idle = worker, wait_until_idle
        self._policies = self._open(candidates(encoder, bool(planner.companions)))
        self._lock = RLock()
        self._namespaces: dict[str, _Namespace] = {}
        self.used = set[str]()  # namespaces that it was resolved for: only their prompts are followed
        self._seen: dict[str, list[CheckPrompt]] = {}
        self._jobs = worker.queue(self._check_in_background, MAX_WAITING)

    def _open(self, pairs: Iterable[PolicyAndEncoder]) -> dict[PolicyAndEncoder, SelectionPolicy]:
        """The policies of the pairs that this model and tokenizer can have, each with its encoder."""
        out: dict[PolicyAndEncoder, SelectionPolicy] = {}
        for pair in pairs:
            policy: Any = open_policy(pair.policy)
            with suppress(ValueError):
                if self._encoder is None:
                    policy = replace(policy, encoder=pair.encoder)
                    self._planner.encodings(policy)
                out[pair] = policy
        return out

    def resolve(self, namespace: str) -> ResolvedPolicy:
        """The policy of a namespace with its encoder; its label is ``auto -> sensitive:0.1 on system``."""
        with self._lock:
            known = self._of(namespace)
            self.used.add(namespace)
            if known.report is not None:  # the text may be forgotten after many other namespaces
                self._planner.last_prompts.suggest(namespace, known.report.system)
            pair, changing = next(iter(self._policies)), self._planner.last_prompts.changing(namespace)
            if known.report is not None and (self._encoder is not None or not changing):
                pair = known.report.pair  # over means where the text before the chunks changes
        return ResolvedPolicy(self._policies[pair], f"auto -> {pair}")

    def record(self, namespace: str) -> TuneReport | None:
        """What was measured for the namespace, if anything was."""
        with self._lock:
            return self._of(namespace).report

    def follow(self, request: PromptRequest, background: bool, rows: int, seconds: float | None) -> None:
        """After a request whose first token took ``seconds`` (None: there is none): keep its prompt.

        ``background``: start the check once there are enough prompts and reuse has saved what it costs.
        """
        namespace = request.namespace
        with self._lock:
            known = self._of(namespace)
            if seconds is not None:
                known.savings.add(token_count(request.segments), rows, seconds)
            prompt = CheckPrompt(request.segments, request.texts)
            if self._encoder == IN_PROMPT or not _can_differ(prompt):
                return
            others = [other for other in self._seen.pop(namespace, []) if other != prompt]
            self._seen[namespace] = seen = [prompt, *others][:MAX_PROMPTS]
            while (
                sum(token_count(one.segments) for prompts in self._seen.values() for one in prompts)
                > MAX_TOKENS
            ):
                del self._seen[next(iter(self._seen))]
            if not background or known.checked or len(seen) < MAX_PROMPTS:
                return
            if known.savings.pay_for_check(sum(token_count(one.segments) for one in seen)):
                known.checked = self._jobs.add(namespace)

    def seen(self, namespace: str) -> tuple[CheckPrompt, ...]:
        """The last different prompts that tell something, the last one first; in memory only."""
        with self._lock:
            return tuple(self._seen.get(namespace, ()))

    def tune(self, prompts: Sequence[CheckPrompt] | None, namespace: str, progress: bool) -> TuneReport:
        """Check now and use the result; errors as :meth:`ragcachekit.RagCache.tune`."""
        if self._encoder == IN_PROMPT:
            raise ValueError("the encoder in-prompt has nothing to check: its chunks are exact at first")
        found = self.seen(namespace) if prompts is None else [p for p in prompts if _can_differ(p)]
        if not found:
            raise ValueError("tune needs prompts with two chunks and text after them: give prompts=[...]")
        with self._lock:
            known = self._of(namespace)
            known.checked = True
        system = self._planner.last_prompts.last(namespace) or ()
        return self._run_check(found, system, namespace, known, progress=progress)

    def forget(self, namespace: str, everything: bool, within: ForgottenTexts | None = None) -> None:
        """Drop the prompts of a namespace, and (``everything``) what was measured on it.

        The latter also where it was measured after a text that ``within`` finds.
        """
        with self._lock:
            self._seen.pop(namespace, None)
            report = self._of(namespace).report if within is not None else None
            if report is not None and within is not None and within.within(report.system):
                self._planner.last_prompts.forget(namespace)  # which may have it from the record
                everything = True
            if everything:
                self._namespaces.pop(namespace, None)
                with suppress(OSError):
                    self._path(namespace).unlink(missing_ok=True)

    def _of(self, namespace: str) -> _Namespace:
        if namespace not in self._namespaces:
            path = self._path(namespace)
            report = read_choice(path, self._fingerprint, namespace, self._policies.keys())
            self._namespaces[namespace] = _Namespace(report, checked=report is not None)
        return self._namespaces[namespace]

    def _path(self, namespace: str) -> Path:
        scope = self._encoder or ("neighbours" if self._planner.companions else "")
        return choice_path(self._folder, self._fingerprint, namespace, scope)

    def _check_in_background(self, namespace: str) -> None:
        with self._lock:
            known, prompts = self._of(namespace), self.seen(namespace)
            system = self._planner.last_prompts.last(namespace)
            if system is None or not prompts:  # forgotten meanwhile
                known.checked = False
                return
        report = self._run_check(prompts, system, namespace, known, background=True)
        log.info("namespace %r: auto -> %s", namespace, report.pair)

    def _run_check(
        self,
        prompts: Sequence[CheckPrompt],
        system: Ids,
        namespace: str,
        known: _Namespace,
        *,
        background: bool = False,
        progress: bool = False,
    ) -> TuneReport:
        def wait() -> None:
            if not self._planner.unchanged():
                raise ModelChanged(MODEL_CHANGED)
            raise_if_cancelled()
            if background:
                self._wait_until_idle(self._worker.closed)

        results, seconds = self.check.run(prompts, self._policies, namespace, wait=wait, progress=progress)
        measured, needed = max(map(len, results.values())), max(1, min(MIN_PROMPTS, len(prompts)))
        if measured < needed:
            raise RagCacheError(
                f"the check of policy='auto' decided nothing: within a minute it measured {measured} prompts "
                f"that fit the model's context, and needs {needed}"
            )
        rows = (
            TuneRow(p.encoder, p.policy, mean.kl, mean.ratio, round(mean.seconds * 1e3, 1), len(found))
            for p, found in results.items()
            if found and (mean := means(found))
        )
        chosen = choice(results, self._bound)
        report = TuneReport(
            fingerprint=self._fingerprint,
            namespace=namespace,
            encoder=chosen.encoder,
            policy=chosen.policy,
            rows=tuple(rows),
            seconds=round(seconds, 1),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            system=system,
        )
        with self._lock:
            known.report = report
            if self._namespaces.get(namespace) is known:  # else forgotten meanwhile
                try:
                    write_record(self._path(namespace), report)
                except OSError as error:
                    log.warning("the record of policy='auto' could not be stored: %s", error)
        return report


def _can_differ(prompt: CheckPrompt) -> bool:
    return sum(segment.is_chunk for segment in prompt.segments) > 1 and not prompt.segments[-1].is_chunk

"""What ``policy="auto"`` stands for in each namespace, and when it is checked."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from threading import RLock
from typing import Any

from ragcachekit.background import Background
from ragcachekit.cancellation import raise_if_cancelled
from ragcachekit.engine.active_requests import ActiveRequests
from ragcachekit.engine.auto.check import PolicyCheck
from ragcachekit.engine.auto.probes import probes
from ragcachekit.engine.auto.prompts import PROMPTS, CheckPrompt, SeenPrompts
from ragcachekit.engine.auto.record import TuneReport, read_report, record_path, write_report
from ragcachekit.engine.auto.selection import LEAST_PROMPTS, choice
from ragcachekit.errors import RagCacheError
from ragcachekit.plan.encodings import IN_PROMPT
from ragcachekit.plan.planner import Planner
from ragcachekit.plan.request import PromptRequest
from ragcachekit.policies.auto import ALONE, Pair, candidates
from ragcachekit.policies.base import SelectionPolicy
from ragcachekit.policies.budgets.calibration import Chosen
from ragcachekit.policies.registry import open_policy
from ragcachekit.prompt.parser import PromptParser
from ragcachekit.store.forgets import ForgottenTexts
from ragcachekit.types import Ids

log = logging.getLogger(__name__)

MAX_WAITING = 64  # namespaces whose check may wait
MOST_TEXTS = 2048  # chunks that a check draws from: those registered or found last

CHANGING = "auto: the text before the first chunk changes with the prompts, so chunks are encoded alone"
UNKNOWN = (
    "auto: chunks were encoded before any prompt, so alone, and are used so until its check; "
    "encode(texts, prompt=...) encodes them behind what stands before them there"
)


@dataclass
class _Namespace:
    report: TuneReport | None
    used: bool = False
    begun: bool = False  # a check, or it was found not to be needed
    alone: bool = False  # chunks were encoded while no system text was known


class AutoPolicies:
    """Encoder and policy of ``auto`` per namespace: the default pair, then the one that a check chose.

    The resolved policy carries its encoder, so that a request has one pair throughout. Thread safe.

    Parameters
    ----------
    folder : pathlib.Path
        The cache folder, where records are.
    fingerprint : str
    encoder : str or None
        The one that the user gave: then only the policy is chosen.
    parser : PromptParser
    planner : Planner
    check : PolicyCheck
    active : ActiveRequests
        Background checks wait while one runs.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        encoder: str | None,
        parser: PromptParser,
        planner: Planner,
        check: PolicyCheck,
        active: ActiveRequests,
    ) -> None:
        self._folder, self._fingerprint, self._encoder = folder, fingerprint, encoder
        self._parser, self._planner, self._check, self._active = parser, planner, check, active
        self._policies = self._opened(candidates(encoder, bool(planner.neighbours)))
        self._lock = RLock()
        self._namespaces: dict[str, _Namespace] = {}
        self._seen = SeenPrompts()
        self._background = Background[str](self._check_quietly, MAX_WAITING, "ragcachekit-auto")
        self.flush = self._background.flush

    def _opened(self, pairs: Iterable[Pair]) -> dict[Pair, SelectionPolicy]:
        """The policies of the pairs that this model and tokenizer can have, each with its encoder."""
        out: dict[Pair, SelectionPolicy] = {}
        for pair in pairs:
            policy: Any = open_policy(pair[1])
            if self._encoder is None:
                policy = replace(policy, encoder=pair[0])
                with suppress(ValueError):
                    self._planner.encodings(policy)
                    out[pair] = policy
            else:
                out[pair] = policy
        return out

    def resolve(self, namespace: str) -> Chosen:
        """The pair of a namespace as a policy; its label is ``auto -> impact:0.1 on system``."""
        with self._lock:
            known = self._of(namespace)
            known.used = True
            pair, notes = self._pair(namespace, known)
        return Chosen(self._policies[pair], f"auto -> {pair[1]} on {pair[0]}", notes)

    def record(self, namespace: str) -> TuneReport | None:
        """What was measured for the namespace, if anything was."""
        with self._lock:
            return self._of(namespace).report

    def to_encode(self, namespace: str, given: bool) -> SelectionPolicy:
        """The policy that chunks are encoded for; ``given``: with a system text.

        Without one they are encoded alone, and used so until a check: its record has the text.
        """
        with self._lock:
            known = self._of(namespace)
            if known.report is not None:  # by tune, or before many other namespaces
                self._planner.last_prompts.suggest(namespace, known.report.system)
            unknown = known.alone or self._planner.last_prompts.last(namespace) is None
            known.alone = self._encoder is None and unknown and not given
        return self.resolve(namespace).policy

    def follow(self, request: PromptRequest, background: bool) -> None:
        """After a request: keep its prompt, and (``background``) begin the check once there are enough."""
        namespace = request.namespace
        with self._lock:
            known = self._of(namespace)
            if not known.used or self._encoder == IN_PROMPT:
                return
            self._seen.observe(namespace, CheckPrompt(request.segments, request.texts))
            if background and not known.begun and len(self._seen.of(namespace)) >= PROMPTS:
                known.begun = self._background.submit(namespace)

    def tune(
        self,
        texts: Sequence[str] | None,
        prompts: Iterable[CheckPrompt] | None,
        system: Ids | None,
        namespace: str,
        progress: bool,
    ) -> TuneReport:
        """Check now and use the result; errors as :meth:`ragcachekit.RagCache.tune`."""
        if self._encoder == IN_PROMPT:
            raise ValueError("the encoder in-prompt has nothing to check: its chunks are exact at first")
        with self._lock:
            known = self._of(namespace)
            known.begun = True
        seen = self._seen.of(namespace) if texts is None else ()
        found = [prompt for prompt in (seen if prompts is None else prompts) if prompt.tells]
        if prompts is not None and not found:
            raise ValueError("none of the prompts has two chunks and text behind them")
        system = self._planner.last_prompts.last(namespace) if system is None else system
        found = found or self._made(texts, system, namespace)
        return self._checked(found, system or (), namespace, known, progress=progress)

    def forget(self, namespace: str, everything: bool, within: ForgottenTexts | None = None) -> None:
        """Drop the prompts of a namespace, and (``everything``) what was measured on it.

        The latter also where it was measured behind a text that ``within`` finds.
        """
        self._seen.forget(namespace)
        with self._lock:
            report = self._of(namespace).report if within is not None else None
            if report is not None and within is not None and within.within(report.system):
                self._planner.last_prompts.forget(namespace)  # which may have it from the record
                everything = True
            if not everything:
                return
            self._namespaces.pop(namespace, None)
            with suppress(OSError):
                self._path(namespace).unlink(missing_ok=True)

    def close(self) -> None:
        """End a running check before its next layer."""
        self._background.close()

    # -- steps -------------------------------------------------------------------------------------

    def _of(self, namespace: str) -> _Namespace:
        if namespace not in self._namespaces:
            pairs = self._policies
            report = read_report(self._path(namespace), self._fingerprint, namespace, pairs)
            self._namespaces[namespace] = _Namespace(report, begun=report is not None)
            if report is not None:
                self._planner.last_prompts.suggest(namespace, report.system)
        return self._namespaces[namespace]

    def _path(self, namespace: str) -> Path:
        scope = self._encoder or ("neighbours" if self._planner.neighbours else "")
        return record_path(self._folder, self._fingerprint, namespace, scope)

    def _pair(self, namespace: str, known: _Namespace) -> tuple[Pair, tuple[str, ...]]:
        first = next(iter(self._policies))
        changing = self._encoder is None and self._planner.last_prompts.changing(namespace)
        if known.report is not None and not changing:
            return known.report.pair, ()
        if not changing and not known.alone:
            return first, ()
        best = known.report.alone if known.report is not None else None
        best = best or next((pair for pair in self._policies if pair[0] == ALONE), first)
        return best, (CHANGING if changing else UNKNOWN,)

    def _made(self, texts: Sequence[str] | None, system: Ids | None, namespace: str) -> list[CheckPrompt]:
        """Prompts made of chunk texts, by default the registered ones."""
        if system is None:
            raise ValueError("tune needs system=, the text before the first chunk: no prompt had one yet")
        if texts is None:
            texts = self._parser.registry.texts(namespace)[-MOST_TEXTS:]
        return [self._check.prompt(probe, system) for probe in probes(texts, PROMPTS)]

    def _check_quietly(self, namespace: str) -> None:
        with self._lock:
            known, prompts = self._of(namespace), self._seen.of(namespace)
            system = self._planner.last_prompts.last(namespace)
            if system is None or not prompts:  # forgotten meanwhile
                known.begun = False
                return
        report = self._checked(prompts, system, namespace, known, background=True)
        log.info("namespace %r: auto -> %s on %s", namespace, report.policy, report.encoder)

    def _checked(
        self,
        prompts: Sequence[CheckPrompt],
        system: Ids,
        namespace: str,
        known: _Namespace,
        *,
        background: bool = False,
        progress: bool = False,
    ) -> TuneReport:
        rows, results, seconds = self._check.run(
            prompts,
            self._policies,
            namespace,
            wait=self._wait if background else raise_if_cancelled,
            progress=progress,
        )
        done, least = max((row.prompts for row in rows), default=0), min(LEAST_PROMPTS, len(prompts))
        if done < max(least, 1):
            raise RagCacheError(
                f"the check of policy='auto' decided nothing: within a minute it measured {done} prompts "
                f"that fit the model's context, and needs {least}"
            )
        now = datetime.now(UTC).isoformat(timespec="seconds")
        report = TuneReport(
            self._fingerprint, namespace, *choice(results), tuple(rows), round(seconds, 1), now, system
        )
        with self._lock:
            known.report = report
            if self._namespaces.get(namespace) is not known:  # forgotten meanwhile
                return report
            try:
                write_report(self._path(namespace), report)
            except OSError as error:
                log.warning("the record of policy='auto' could not be stored: %s", error)
        return report

    def _wait(self) -> None:
        self._active.wait_for_none(self._background.closed)

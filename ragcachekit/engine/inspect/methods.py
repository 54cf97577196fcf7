"""The methods of RagCache that show what it does: in text, in notebooks and in pictures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NoReturn

from ragcachekit.engine.inspect.diagnosis import Diagnosis, diagnose
from ragcachekit.engine.inspect.view import PromptView, prompt_view
from ragcachekit.engine.queue.methods import QueueMethods
from ragcachekit.observers import Observer
from ragcachekit.plots import MeasuredPolicy, Plots
from ragcachekit.policies.base import SelectionPolicy
from ragcachekit.prompt.parser import PromptLike
from ragcachekit.reports import GenerateReport, Records
from ragcachekit.reports.base import pairs_html
from ragcachekit.store.base import StoreStats
from ragcachekit.types import whole_id


class InspectMethods(QueueMethods):
    """Adds :meth:`inspect`, :meth:`diagnose` and ``plot``; a base of :class:`ragcachekit.RagCache`."""

    @property
    def policy(self) -> str:
        """Name of the default policy; for a measured one ``auto -> impact:0.1 on system``, for example."""
        return self._components.resolve(self._policy, self.namespace).label

    @property
    def encoder(self) -> str:
        """Name of the encoder of the default policy."""
        chosen = self._components.resolve(self._policy, self.namespace).policy
        return self._planner.encodings(chosen).name

    @property
    def reports(self) -> tuple[GenerateReport, ...]:
        """Reports of the last 256 answered requests, the latest last."""
        return tuple(self._path.reports)

    @property
    def plot(self) -> Plots:
        """Pictures: ``time``, ``tokens`` and ``tiers`` of the last requests, ``quality`` of a calibration."""
        return Plots(lambda: self.reports, self._measured)

    def stats(self) -> Records[StoreStats]:
        """One record per storage tier, those of the knowledge tree (``tree:host``, ...) last."""
        return Records(self._components.stats())

    def add_observer(self, observer: Observer) -> None:
        """Call an observer at every request and at every lookup of this engine's query caches.

        Requests are those of :meth:`generate`, :meth:`stream`, :meth:`submit` and :meth:`generate_batch`, and
        of what is built on them. An observer that was added before is not added again. TypeError for another
        type.
        """
        self._observers.add(observer)

    def remove_observer(self, observer: Observer) -> None:
        """Call an observer at no further request; no error if it was not added."""
        self._observers.remove(observer)

    def inspect(
        self, prompt: PromptLike, *, namespace: str | None = None, policy: str | SelectionPolicy | None = None
    ) -> PromptView:
        """Show what a prompt reuses now, token by token: exact, approximate, recomputed or computed.

        Costs one linked prefill; nothing is generated or stored. ValueError without a tokenizer.

        >>> print(rag.inspect(prompt).ansi())                      # doctest: +SKIP
        """
        decode = partial(self._parser.tokens.decode, special=True)
        with self._components.active:
            plan = self._path.begin(self._request(prompt, namespace, policy))
            plan = self._components.generator.link(plan, self._path.plan).plan
        return prompt_view(plan, decode)

    def diagnose(
        self, prompt: PromptLike, documents: Iterable[object], *, namespace: str | None = None
    ) -> Diagnosis:
        """Say which documents of a prompt are found as chunks, why others are not, and what to change.

        Costs no model work and registers nothing.

        Parameters
        ----------
        documents : iterable
            What the retriever returned: strings, LangChain documents or LlamaIndex nodes.

        Raises
        ------
        TypeError
            For a document of another type.
        """
        return diagnose(self._parser, prompt, documents, self._checked(namespace))

    def chunks_in_memory(self) -> frozenset[str]:
        """Ids of the chunks of all namespaces whose KV is in GPU or host memory; costs no I/O."""
        return frozenset(whole_id(key.chunk_id) for key in self._components.store.memory_keys())

    def __repr__(self) -> str:
        return f"RagCache({', '.join(f'{name}: {value}' for name, value in self._about())})"

    def _repr_html_(self) -> str:
        return pairs_html(self._about()) + ("" if self._closed else self.stats()._repr_html_())

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a RagCache holds a model, threads and open files, and cannot be pickled or copied: make one in "
            "each process, with a StoreConfig(disk_path=...) that they share"
        )

    def _about(self) -> list[tuple[str, object]]:
        model = (
            f"{type(self._components.generator.model).__name__} on {self._components.generator.model.device}"
        )
        if self._closed:
            return [("model", model), ("state", "closed")]
        tiers = [
            f"{tier.tier} {tier.entries} entries, {tier.nbytes / 1e6:.1f} of {tier.budget / 1e6:.0f} MB"
            for tier in self.stats()
        ]
        named = {"policy": self.policy, "encoder": self.encoder, "namespace": self.namespace}
        return [("model", model), *named.items(), ("tiers", "; ".join(tiers) or "none")]

    def _measured(self, namespace: str | None) -> tuple[Sequence[MeasuredPolicy], str]:
        namespace = self._checked(namespace)
        record, tuned = self._components.budgets.record(namespace), self._components.auto.record(namespace)
        if record is not None:
            points = [MeasuredPolicy(p.policy, p.ratio, p.loss) for p in record.curve]
            return points, f"{record.quality}, on {record.encoder}"
        if tuned is not None:
            rows = [MeasuredPolicy(f"{r.policy} on {r.encoder}", r.ratio, r.kl) for r in tuned.rows]
            return rows, "KL to full, nats per token"
        raise ValueError(
            f"nothing was measured for namespace {namespace!r}: call rag.tune(), or run ragcachekit calibrate"
        )

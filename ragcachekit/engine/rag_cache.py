"""RagCache: what users call. Every prompt that is answered takes one path:

1. :meth:`RagCache.submit` has it rendered, tokenised and searched for chunks (``prompt/parser.py``), and its
   entries named (``plan/planner.py``), and puts it in the queue (``engine/scheduler.py``).
2. At its turn, in the scheduler's thread, ``engine/runner.py`` makes the plan (:meth:`RagCache.plan`: what
   of it is cached), and has transformers' generate run it, linked (``generate/run.py``,
   ``forward/linker.py``), up to the first token. The policy chooses the rows to recompute in the plan, after
   a scoring pass, or between layers. What cannot be linked is computed again in full.
3. It then gets one token per step, together with the other running requests (``generate/batch.py``), or
   alone, as with beams.
4. After its last token, ``AfterAnswer`` (``engine/runner.py``) keeps exact rows and has missing chunks
   encoded in the background, and the waiting caller gets the answer with its report.

``generate``, ``stream``, ``generate_batch``, ``agenerate``, ``astream``, the frameworks and the server all
submit. Only :meth:`RagCache.link` and :meth:`RagCache.inspect` plan and link in the caller's thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from math import inf
from threading import Event
from typing import Any, Literal, NoReturn, Self, Unpack, get_args

from ragcachekit.cancellation import CancelScope, raise_if_cancelled
from ragcachekit.config import QueueConfig
from ragcachekit.engine.chunks import NOT_KEPT, Chunks, EncodedIds
from ragcachekit.engine.components import EngineComponents, EngineOptions, EngineSettings, checked_namespace
from ragcachekit.engine.inspection import Diagnosis, PromptView, diagnose, measured_policies, prompt_view
from ragcachekit.engine.request import AnswerStream, Request
from ragcachekit.engine.runner import AfterAnswer, Runner
from ragcachekit.engine.scheduler import Scheduler
from ragcachekit.errors import Closed, GenerationNotSupported
from ragcachekit.forward.prefill import LinkedPrompt, link_ahead
from ragcachekit.generate.options import (
    Detokenizer,
    RequestStreamer,
    TokenQueue,
    check_options,
    effective,
    end_tokens,
    filled_options,
    stop_strings,
    uses_beams,
)
from ragcachekit.generate.structured import JsonProcessor, token_bytes
from ragcachekit.model.loading import load_model
from ragcachekit.observers import Observer, Observers
from ragcachekit.plan.link_plan import LinkPlan, PromptRequest
from ragcachekit.plots import Plots
from ragcachekit.policies.base import SelectionPolicy
from ragcachekit.policies.registry import open_policy
from ragcachekit.prompt.parser import NO_TEMPLATE, PromptLike, Tools
from ragcachekit.quality.records import ResolvedPolicy, TuneReport
from ragcachekit.reports import Answer, EncodingStats, GenerateReport, ShadowReport, pairs_html
from ragcachekit.retrieval.cached_retrieval import CachedRetrieval
from ragcachekit.store.base import NullStore, StoreStats
from ragcachekit.store.remote import waits_of
from ragcachekit.threads import OPENED_BEFORE_FORK
from ragcachekit.types import (
    SECONDS_OR_NONE,
    Chunk,
    KVKey,
    Prompt,
    Text,
    check_deadline,
    check_number,
    check_type,
    several,
    strings,
    whole_id,
)

Keep = Literal["all", "marked"]
"""What of a prompt is kept for later ones."""

MIN_REPORTED_WAIT_S = 0.01  # for rows of an earlier prompt; shorter waits have no note in the report


class RagCache:
    """Generation on your own Hugging Face model that reuses the KV of retrieved chunks.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal LM with rotary attention, in eval mode, on one device. It stays an ordinary model.
    tokenizer : transformers.PreTrainedTokenizerBase, optional
        Needed for everything but prompts of token ids.
    policy : str or SelectionPolicy
        Which cached tokens are recomputed: ``full``, ``reuse``, ``lego:16``, ``sensitive:0.1``,
        ... (an unknown name lists all). ``auto``, the default, chooses it and the
        encoder by a check of at most a minute on the model and a namespace's prompts: :meth:`tune`, or in the
        background while no request runs, after 16 prompts, once reuse has saved four times its cost
        (not with ``cold="now"`` or ``"never"``). ``budget:0.1`` instead says how much may be lost; the last
        ``ragcachekit calibrate`` then decides the policy.
    encoder : str, optional
        What chunks are encoded after: ``standalone``, ``sinks:4``, ``system``, ``similar:10``, ``in-prompt``,
        ``average:2``, the default (``system`` where RoPE frequencies depend on the length, longrope). With
        it, ``auto`` chooses the policy alone.
    neighbours : Neighbours or mapping of str to Neighbours, optional
        Which chunks are similar, for the encoder ``similar:n`` and for ``auto``: :class:`SimilarChunks`,
        :class:`PrecedingChunks` or your own; a mapping gives one per namespace. Without, ``similar:n`` takes
        the nearest chunks in the stores of this engine's retrievers.
    companions : {"any", "same-source"}
        Which chunks a chunk may be encoded after. "same-source": only those of its own document, by the
        ``sources`` of :meth:`register` and :meth:`encode` or through a retriever. For corpora to which
        strangers add documents.
    store : StoreConfig or KVStore, optional
        Storage of chunk KV; default 4 GiB of host memory. A store that was passed in is not closed.
    namespace : str
        Tenant and corpus, a hard partition. Every call can name another one.
    cold : {"background", "now", "never"}
        When missed chunks are encoded: in a thread after the answer, before the answer is returned, or only
        by :meth:`encode`. What a request computed exactly as its encoding is stored without (not by "never").
    encode_after : int
        At which miss "background" encodes a chunk: with 2, chunks that are retrieved only once are never
        encoded; with 1, every chunk is ready at its second use.
    deterministic : bool
        The same prompt gives the same tokens whatever is cached. What a prompt lacks is encoded before it is
        linked, each chunk by itself; see docs/tuning.md.
    shadow : float or ShadowConfig, optional
        Share of the prompts that is prefilled again in full, for :meth:`shadow_report`.
    load : {"auto", "always"} or LoadConfig
        ``auto`` loads chunks from slow tiers only if that is quicker than computing them.
    tree : TreeConfig or KnowledgeTree, optional
        Exact KV of the beginnings of past prompts (RAGCache's knowledge tree), reused by prompts that begin
        with the same chunks in the same order. A tree that was passed in is not closed.
    queue : QueueConfig, optional
        Size of the batch in which requests are decoded, and how many may wait for it.
    cache_dir : path, optional
        Folder of checks, calibrations, choices of ``auto`` and timings; default the user's cache folder.

    Raises
    ------
    ModelNotSupported
        If linking on this model would not give what the model computes; names the layer.
    ValueError, TypeError
        For unknown policies or encoders, a model in training mode, arguments of another type.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        settings = EngineSettings(**options)
        self.model, self.tokenizer = model, tokenizer
        self.namespace, queue = checked_namespace(settings.namespace), settings.queue or QueueConfig()
        self.components = parts = EngineComponents(model, tokenizer, settings)
        self.fingerprint, self.shadow = parts.fingerprint, parts.shadow
        self.chunks, self._observers = Chunks(parts), Observers()
        self.after_answer = AfterAnswer(parts, settings.cold, self.chunks.registering)
        runner = Runner(queue, parts, self.after_answer, self.plan, self.replan)
        self.queue = Scheduler(queue, runner, parts.active)
        self._template_noted = self._closed = False
        self._process = os.getpid()

    @classmethod
    def from_pretrained(
        cls, model_id: str | os.PathLike[str], *, device: str | None = None, **options: Any
    ) -> Self:
        """Load a local folder, a hub id or ``sample`` with ``AutoModelForCausalLM`` and wrap it.

        ``options`` are those of :class:`RagCache`; all others go to transformers' ``from_pretrained``
        (``dtype=torch.bfloat16``, ``revision=...``).
        """
        own = {name: options.pop(name) for name in EngineOptions.__annotations__ if name in options}
        open_policy(EngineSettings(**own).policy)  # a typo should not cost the loading time
        model, tokenizer = load_model(model_id, device, **options)
        return cls(model, tokenizer, **own)

    # -- prompts -----------------------------------------------------------------------------------

    def generate(self, prompt: PromptLike, **options: Any) -> Answer:
        """Answer one prompt: ``submit(prompt, wait=True, **options).result()``.

        RuntimeError in the engine's own thread, as in a streamer or a callback; other errors are those of
        :meth:`submit` and :meth:`Request.result`.
        """
        self.queue.refuse_own_thread()
        return self.submit(prompt, **{"wait": True, **options}).result()

    def stream(self, prompt: PromptLike, **options: Any) -> AnswerStream:
        """As :meth:`generate`, as an iterator over text; ``.answer`` has the rest at the end."""
        if "streamer" in options:
            raise ValueError("stream() reads the tokens itself; give streamer= to generate or submit")
        _ = self.components.parser.tokens  # text needs a tokenizer
        return AnswerStream(self.submit(prompt, **{"wait": True, **options, "streamer": TokenQueue()}))

    def generate_batch(self, prompts: Sequence[PromptLike], **options: Any) -> list[Answer]:
        """As :meth:`generate`, for several prompts, decoded together; an interrupt cancels them all."""
        self.queue.refuse_own_thread()
        prompts, requests = several(prompts, "prompts"), list[Request]()
        if options.get("streamer") is not None and len(prompts) > 1:
            raise ValueError("one streamer cannot tell several prompts apart; submit them one by one")
        self._checked(options.get("namespace"))
        try:
            requests += (self.submit(prompt, **{"wait": True, **options}) for prompt in prompts)
            return [request.result() for request in requests]
        except BaseException:
            for request in requests:
                request.cancel()
            raise

    def submit(
        self,
        prompt: PromptLike,
        *,
        namespace: str | None = None,
        policy: str | SelectionPolicy | None = None,
        tools: Tools | None = None,
        retain: float | None = None,
        json_schema: Mapping[str, Any] | None = None,
        stop: str | Sequence[str] | None = None,
        cancel: Event | None = None,
        deadline: float | None = None,
        wait: bool | float = False,
        keep: Keep = "all",
        streamer: Any = None,
        **options: Any,
    ) -> Request:
        """Queue one prompt; it is answered together with others, token by token.

        Waiting requests with more of their prompt cached come first, and namespaces get equal shares of the
        computed tokens (:class:`ragcachekit.QueueConfig`). Beam search runs alone; the report has a note.

        Parameters
        ----------
        prompt : str, messages or Prompt
            Messages are those of chat templates, as dicts.
        namespace, policy : optional
            Instead of the engine's own.
        tools : sequence of mapping, optional
            JSON schemas of functions, for the chat template; see :attr:`renders_tools`.
        retain : float, optional
            For so many seconds after each use of the prompt's entries, memory tiers rather evict others.
        json_schema : mapping, optional
            The answer is JSON of this schema, or the beginning of it where the tokens do not suffice. The
            prompt stays as it is: say there what is wanted. Needs the extra ``structured``.
        stop : str or sequence of str, optional
            Text ends before the first of these.
        cancel : threading.Event, optional
            Ends the prefill before its next layer, and generation after its token; the answer has the tokens
            up to then. See also :class:`ragcachekit.CancelScope`.
        deadline : float, optional
            Seconds from now. A request without an answer by then fails with ``DeadlineExceeded``; a running
            one ends after its token.
        wait : bool or float
            Whether, or for how many seconds, to wait for room in a full queue.
        keep : {"all", "marked"}
            Whether only KV up to the last chunk that the prompt marks is kept for later prompts: of content
            blocks with ``"chunk": True``, of every chunk of a :class:`Prompt`. What is cached is used.
        **options
            For ``model.generate``: ``max_new_tokens`` (or ``max_tokens``; default 256), ``do_sample``, ...
            ``seed`` makes sampled answers repeatable.

        Raises
        ------
        ValueError
            For an option that neither generate nor the model takes; it names the nearest one. For a
            ``json_schema`` that cannot be followed.
        QueueFull
            If ``max_waiting`` requests wait already.
        PromptTooLong, GenerationNotSupported, Closed
        """
        started_at, parser = time.perf_counter(), self.components.parser
        if streamer is not None:
            options["streamer"] = streamer
        check_options(options, self.model, "cancel", "deadline", "wait", "keep")
        if keep not in get_args(Keep):
            raise ValueError(f"keep must be one of {', '.join(get_args(Keep))}, got {keep!r}")
        if json_schema is not None:
            options = self._constrained(options, json_schema, tools)
        check_type("cancel", cancel, (Event, type(None)), "a threading.Event")
        if deadline is not None:
            check_deadline(deadline)
        if not isinstance(wait, bool):
            check_number("wait", wait, "True, False or seconds")
        observed = None
        if self._observers.all:
            observed = self._observers.begin(started_at, prompt, namespace or self.namespace, options)
        with observed or nullcontext():
            stop = stop_strings(stop)
            asked: dict[str, Any] = {"namespace": namespace, "policy": policy, "tools": tools}
            prepared = self.prepare(prompt, **asked, keep=keep, retain=retain)
            if not self._template_noted and parser.lacks_template(prompt):
                self._template_noted = True
                prepared = prepared.with_note(NO_TEMPLATE)
            raise_if_cancelled()
            left = inf if deadline is None else deadline - (time.perf_counter() - started_at)
            request = self._request(
                prepared,
                options,
                stop,
                submitted_at=started_at,
                deadline=time.monotonic() + left,
                scope=CancelScope(cancel),
                observed=observed,
            )
            try:
                self.queue.submit(request, wait)
            except KeyboardInterrupt:  # which may come when it waits already
                request.cancel()
                raise
            return request

    def link(self, prompt: PromptLike, **options: Any) -> LinkedPrompt:
        """Link a prompt for a generate call or a loop of your own; it is used once.

        Options are ``namespace``, ``policy`` and ``tools``, as for :meth:`submit`.

        >>> linked = rag.link(prompt)                              # doctest: +SKIP
        >>> output = model.generate(**linked.inputs)               # doctest: +SKIP
        """
        with waits_of([]):
            linked, plan = self._linked(self.prepare(prompt, **options))
            if (loads := self.components.loads) is not None:
                loads.follow(plan.skipped, plan.report.loaded_bytes)
            self.after_answer.encode_missing(plan.missing)
        return linked

    def inspect(
        self, prompt: PromptLike, *, namespace: str | None = None, policy: str | SelectionPolicy | None = None
    ) -> PromptView:
        """Show what a prompt reuses now, token by token: exact, approximate, recomputed or computed.

        Costs one linked prefill; nothing is generated or stored. ValueError without a tokenizer.

        >>> rich.print(rag.inspect(prompt))                        # doctest: +SKIP
        """
        decode = partial(self.components.parser.tokens.decode, special=True)
        _, plan = self._linked(self.prepare(prompt, namespace=namespace, policy=policy))
        return prompt_view(plan, decode)

    def diagnose(
        self, prompt: PromptLike, documents: Iterable[object], *, namespace: str | None = None
    ) -> Diagnosis:
        """Report which documents of a prompt are found as chunks, why others are not, and what to change.

        Costs no model work and registers nothing. ``documents`` are what the retriever returned: strings,
        LangChain documents or LlamaIndex nodes; TypeError for others.
        """
        return diagnose(self.components.parser, prompt, documents, self._checked(namespace))

    def prepare(
        self,
        prompt: PromptLike,
        *,
        namespace: str | None = None,
        policy: str | SelectionPolicy | None = None,
        tools: Tools | None = None,
        keep: Keep = "all",
        retain: float | None = None,
    ) -> PromptRequest:
        """The prompt, tokenised, with its policy and the keys of its chunks; nothing is looked up yet."""
        check_number("retain", retain, kinds=SECONDS_OR_NONE)
        namespace, parts = self._checked(namespace), self.components
        chosen, epoch = self._choose(policy, namespace), parts.forgets.epoch
        parsed = parts.parser.parse(prompt, namespace, tools)
        request = parts.planner.prepare(parsed, chosen.policy, epoch, retain or 0.0)
        notes, fallback = (*request.notes, *chosen.notes), request.fallback or chosen.fallback
        kept = None if keep == "all" else parts.parser.marked_rows(prompt, parsed)
        return replace(request, label=chosen.label, notes=notes, fallback=fallback, kept_rows=kept)

    def plan(self, request: PromptRequest) -> LinkPlan:
        """The plan by what is cached now, once an earlier prompt's rows are stored."""
        waited = self.after_answer.wait(request)
        if waited >= MIN_REPORTED_WAIT_S:
            request = request.with_note(f"waited {waited:.2f} s until rows of an earlier prompt were stored")
        begun = time.perf_counter()
        return self.replan(self.components.planner.look_up(request), begun=begun)

    def replan(
        self, request: PromptRequest, without: frozenset[KVKey] = frozenset(), *, begun: float | None = None
    ) -> LinkPlan:
        """The plan of a request whose look-ups have begun, without entries that could not be loaded."""
        begun, parts = begun or time.perf_counter(), self.components
        if parts.deterministic:
            encode = partial(parts.background_encoder.now, store=self.after_answer.captures)
            without = parts.planner.encode_first(request, without, encode)
        plan = parts.planner.plan(request, without)
        if plan.missing and not isinstance(parts.store, NullStore):
            lost = parts.background_encoder.refused(item.key for item in plan.missing)
            if lost:
                plan = plan.with_note(f"{lost} missing entr{'ies' if lost > 1 else 'y'} {NOT_KEPT}")
        ms = (time.perf_counter() - begun) * 1e3
        return replace(plan, report=replace(plan.report, plan_ms=ms, grade=self.grade))

    # -- chunks ------------------------------------------------------------------------------------

    def register(
        self,
        texts: Iterable[str],
        *,
        namespace: str | None = None,
        sources: Sequence[str | None] | None = None,
    ) -> int:
        """Search prompts for these texts as chunks; costs no model work.

        ``sources`` names the document of each text, for ``companions="same-source"``; None where it is not
        known. Returns how many can be found (very short texts are left out).
        """
        return self.chunks.register(texts, self._checked(namespace), sources)

    def prefetch(
        self, chunks: Iterable[str], *, namespace: str | None = None, system: str | None = None
    ) -> None:
        """Begin to load chunks from slow tiers for a later prompt; returns at once. Called by retrievers.

        Parameters
        ----------
        chunks : iterable of str
            Chunk texts.
        system : str, optional
            Text before the prompt's first chunk, for encoders that need it; default is the namespace's last.
        """
        namespace = self._checked(namespace)
        self.chunks.prefetch(chunks, namespace, system, self._choose(None, namespace).policy)

    def cached_first(self, texts: Iterable[str], *, namespace: str | None = None) -> list[int]:
        """An order of retrieved texts in which more of their prompt is an exact cached beginning.

        Returns indices: first those of the texts that form the longest chain in the knowledge tree's memory
        after the namespace's last system text, then the others in the given order; without a tree, all in the
        given order. Loads and computes nothing, and counts no access. Called by retrievers with
        ``order="cached"``.
        """
        return self.chunks.cached_first(texts, self._checked(namespace))

    def encode(
        self,
        texts: Iterable[str],
        *,
        namespace: str | None = None,
        system: str | None = None,
        prompt: PromptLike | None = None,
        sources: Sequence[str | None] | None = None,
        retain: float | None = None,
        progress: bool = False,
    ) -> EncodedIds:
        """Register chunks and compute their KV now, except what is stored already; returns their ids.

        In prompts of the namespace, an id stands for its text: ``Chunk(id=...)``. The result's attribute
        ``kept`` has the ids whose KV is stored. If not all fit into the store, a warning is logged.

        Where the :attr:`grade` is ``prefix``, chunks have no KV of their own: they are registered, and the
        beginning of ``prompt`` is computed, or ``system`` with the first chunk.

        A text that :meth:`forget` drops meanwhile is neither stored nor registered, nor is KV that depends on
        it. What was encoded before a cancellation is kept.

        Parameters
        ----------
        system : str, optional
            Text before a prompt's first chunk, as the model sees it, for encoders that need it; default is
            the last one used in the namespace. Before any, ``average:n`` encodes chunks without it, and
            prompts reuse them so until their own rows replace them.
        prompt : str, messages or Prompt, optional
            A prompt like those to come, with at least one of the texts: instead of ``system``, the text
            before its first chunk. Nothing is generated.
        sources, retain, progress : optional
            As for :meth:`register`; as for :meth:`submit`; a progress bar over the tokens of all entries.

        ValueError for an empty chunk, one longer than the model's context, a missing ``system``, or a
        ``prompt`` without chunks or beside a ``system``.
        """
        check_number("retain", retain, kinds=SECONDS_OR_NONE)
        namespace = self._checked(namespace)
        since = self.components.forgets.epoch  # before the texts are read: what gives them may forget
        texts = strings(texts, "texts")
        ids = self.chunks.encode(texts, namespace, system, prompt, sources, progress, since, retain or 0.0)
        if self.grade == "prefix":
            if prompt is None and system is not None and texts:
                prompt = Prompt([Text(system), Chunk(texts[0]), Text("\n\n")])
            if prompt is not None:
                self.queue.refuse_own_thread()
                running = self._request(
                    replace(self.prepare(prompt, namespace=namespace), epoch=since),
                    {"max_new_tokens": 1},
                    (),
                    submitted_at=time.perf_counter(),
                    deadline=inf,
                    scope=CancelScope(pause=lambda: None),  # else it would give way to itself
                    observed=None,
                )
                self.queue.submit(running, True)
                running.result()
                self.flush()  # its beginning is stored
        return ids

    def forget(
        self,
        ids: Iterable[str] | None = None,
        *,
        texts: Iterable[str] | None = None,
        namespace: str | None = None,
    ) -> int:
        """Drop the KV of chunks and texts, and KV that was computed after them; returns the entries dropped.

        A text is forgotten wherever it was: as a chunk, as a part of one, in a question, in the text before
        the first chunk, in an earlier turn. Whitespace is ignored. KV that may hold the text is dropped as
        well, and so are cached search results that contain a forgotten chunk. Chunks that only contain the
        text stay registered.

        Delete the document from its index first: what a search finds is registered again. Work that began
        before this returns stores no forgotten chunk. Another process on the same disk folder keeps its own
        host memory; its knowledge tree follows at its next request in the namespace.

        Chunks among ``texts`` are unregistered as well, in every form a chain may give them. Those of
        ``ids``, as :meth:`encode` returned them, stay registered: a later prompt encodes them again. With
        neither, the whole namespace is dropped.

        StoreError if a tier cannot confirm the deletion; all others have forgotten. Forget again.
        """
        return self.chunks.forget(self._checked(namespace), ids, texts)

    def tune(
        self,
        prompts: Iterable[PromptLike] | None = None,
        *,
        namespace: str | None = None,
        progress: bool = False,
    ) -> TuneReport:
        """Choose encoder and policy for ``policy="auto"`` now; measures for at most a minute.

        Prompts are continued by a full prefill and under every candidate. The one whose next tokens differ
        least is chosen and recorded in the cache folder, for this model and namespace.

        Give ``prompts`` that are like those to come, each with two chunks or more; default are the last 16
        answered. ``progress`` shows a bar over them.

        ValueError without a prompt of two chunks and text after them, or for the encoder ``in-prompt``;
        RagCacheError if not even one prompt could be measured in a minute.
        """
        return self.chunks.tune(prompts, self._checked(namespace), progress)

    def add_query_cache(self, cache: CachedRetrieval[Any]) -> None:
        """Let :meth:`forget` drop results of this query cache, and observers see it; called by retrievers."""
        self.chunks.query_caches.add(cache)
        self.components.planner.companions.follow(cache)
        cache.observers = self._observers

    # -- state -------------------------------------------------------------------------------------

    @property
    def policy(self) -> str:
        """Name of the default policy; a measured one shows its choice: ``auto -> impact:0.1 on system``."""
        return self.components.resolve(self.components.policy, self.namespace).label

    @property
    def grade(self) -> str:
        """``linked``: chunks are reused at any place of a prompt. ``prefix``: exact beginnings alone."""
        return self.components.grade.name

    @property
    def encoder(self) -> str:
        """Name of the encoder of the default policy."""
        chosen = self.components.resolve(self.components.policy, self.namespace).policy
        return self.components.planner.encodings(chosen).name

    @property
    def reports(self) -> tuple[GenerateReport, ...]:
        """Reports of the last 256 answered requests, the latest last."""
        return tuple(self.after_answer.reports)

    @property
    def plot(self) -> Plots:
        """Pictures: ``time``, ``tokens`` and ``tiers`` of the last requests, ``quality`` of a calibration."""
        parts = self.components
        measured = partial(measured_policies, parts.budgets, parts.auto, self._checked)
        return Plots(lambda: self.reports, measured)

    @property
    def renders_tools(self) -> bool:
        """Whether the chat template shows the ``tools`` that :meth:`generate` is given."""
        return self.components.parser.tokens.renders_tools

    def count_tokens(self, text: str) -> int:
        """Tokens of ``text`` alone, without BOS."""
        return len(self.components.parser.tokens.text(text, first=True))

    def stats(self) -> tuple[StoreStats, ...]:
        """One record per storage tier, those of the knowledge tree (``tree:host``, ...) last."""
        return self.components.stats()

    def encoding_stats(self) -> EncodingStats:
        """Tokens that requests missed, kept and encoded since this object was made."""
        return self.components.background_encoder.stats

    def shadow_report(self, namespace: str | None = None) -> ShadowReport:
        """Results of shadow mode, in one namespace or (None) in all; ``shadow.reset()`` begins anew."""
        return ShadowReport() if self.shadow is None else self.shadow.report(namespace)

    def chunks_in_memory(self) -> frozenset[str]:
        """Ids of the chunks of all namespaces whose KV is in GPU or host memory; costs no I/O."""
        return frozenset(whole_id(key.chunk_id) for key in self.components.store.keys(in_memory=True))

    def add_observer(self, observer: Observer) -> None:
        """Call an observer at every request and every lookup of this engine's query caches, once."""
        self._observers.add(observer)

    def remove_observer(self, observer: Observer) -> None:
        """Stop calling an observer; does nothing if it was never added."""
        self._observers.remove(observer)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait for all background work; False if ``timeout`` seconds did not suffice."""
        check_number("timeout", timeout, kinds=SECONDS_OR_NONE)
        self.queue.refuse_own_thread()  # some of it waits until no request runs
        return self.components.flush(timeout)

    def close(self) -> None:
        """End background work and close the store that this object opened; idempotent.

        Running answers are finished, but nothing of them is stored; waiting requests fail. Later calls raise
        :class:`~ragcachekit.errors.Closed`; reports can still be read.
        """
        if self._process != os.getpid():  # the parent closes it
            return
        self._closed = True
        self.queue.close()
        self.components.close()

    def __enter__(self) -> Self:
        self._checked(None)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RagCache({', '.join(f'{name}: {value}' for name, value in self._about())})"

    def _repr_html_(self) -> str:
        return pairs_html(self._about())

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a RagCache holds a model, threads and open files, and cannot be pickled or copied: make one in "
            "each process, with a StoreConfig(disk_path=...) that they share"
        )

    def _checked(self, namespace: str | None) -> str:
        """The namespace of a call; every public method checks it first."""
        if self._closed:
            raise Closed("this RagCache is closed; make a new one, or close it after its last use")
        if self._process != os.getpid():
            raise Closed(OPENED_BEFORE_FORK)
        return self.namespace if namespace is None else checked_namespace(namespace)

    def _linked(self, request: PromptRequest) -> tuple[LinkedPrompt, LinkPlan]:
        """Link a request in this thread; what cannot be linked is computed in full."""
        link = partial(link_ahead, self.model, self.components.rope)
        with self.components.active:
            try:
                return link(self.plan(request), self.replan)
            except Exception as error:
                if not request.reads_cache:
                    raise
                return link(self.plan(request.after_failure(error)))

    def _request(
        self, prompt: PromptRequest, options: dict[str, Any], stop: Sequence[str], **call: Any
    ) -> Request:
        """A request with complete options of generate; ``call`` are further fields of it."""
        parts, defaults, tokens = self.components, self.model.generation_config, len(prompt.token_ids)
        _ = parts.parser.tokens if stop else None  # stop strings are text
        options = filled_options(options, tokens, pad=parts.parser.pad, context=parts.rope.context)
        streamer, room = options.get("streamer"), parts.planner.context - tokens
        if streamer is None and not uses_beams(options, defaults):
            streamer = TokenQueue()
        counted = None if streamer is None else RequestStreamer(streamer)
        return Request(
            self.queue,
            prompt,
            {**options, "streamer": counted},
            stop,
            estimator=parts.planner.estimator(prompt),
            new_tokens=min(effective(options, defaults, "max_new_tokens") or room, room),
            streamer=counted,
            tokens=streamer if isinstance(streamer, TokenQueue) else None,
            detokenizer=Detokenizer(parts.parser.decode, stop),
            **call,
        )

    def _constrained(
        self, options: dict[str, Any], schema: Mapping[str, Any], tools: Tools | None
    ) -> dict[str, Any]:
        """Options with a logits processor that keeps the answer to a JSON schema."""
        if uses_beams(options, self.model.generation_config):
            raise GenerationNotSupported("json_schema= follows one answer, not several beams; leave one out")
        if tools:
            raise ValueError("json_schema= would keep the model from calling tools; leave one out")
        ends = end_tokens(options, self.model.generation_config)
        own = JsonProcessor(self._token_bytes, schema, ends)
        return {**options, "logits_processor": [*(options.get("logits_processor") or ()), own]}

    @cached_property
    def _token_bytes(self) -> Any:
        return token_bytes(self.components.parser.tokens.tokenizer)

    def _choose(self, policy: str | SelectionPolicy | None, namespace: str) -> ResolvedPolicy:
        """A concrete policy for a prompt; ``full`` while shadow mode advises against reuse."""
        asked = self.components.policy if policy is None else open_policy(policy)
        chosen = self.components.resolve(asked, namespace)
        if self.shadow is None or not chosen.policy.reads_cache:
            return chosen
        why = self.shadow.fallback(namespace)
        return chosen if why is None else ResolvedPolicy(open_policy("full"), "full", fallback=why)

    def _about(self) -> list[tuple[str, object]]:
        model = f"{type(self.model).__name__} on {self.model.device}"
        if self._closed:
            return [("model", model), ("state", "closed")]
        tiers = "; ".join(f"{tier.tier} {tier.entries} entries" for tier in self.stats()) or "none"
        why = self.components.grade.why
        graded = {"grade": f"prefix ({why})"} if why else {}
        named = {**graded, "policy": self.policy, "encoder": self.encoder, "namespace": self.namespace}
        return [("model", model), *named.items(), ("tiers", tiers)]

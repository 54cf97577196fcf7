"""RagCache: prompt, plan, forward, generation, report, background encoding."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, Unpack

from ragcachekit.cancellation import raise_if_cancelled
from ragcachekit.config import SECONDS_OR_NONE, QueueConfig, check_number
from ragcachekit.engine.components import EngineComponents
from ragcachekit.engine.inspect.methods import InspectMethods
from ragcachekit.engine.options import EngineOptions, EngineSettings, checked_namespace
from ragcachekit.engine.request_path import Asked
from ragcachekit.forward.linked_prompt import LinkedPrompt
from ragcachekit.generate.answer_stream import AnswerStream
from ragcachekit.generate.detokenizer import Detokenizer, stop_strings
from ragcachekit.model.pretrained import load_model, weights_folder
from ragcachekit.policies.base import SelectionPolicy
from ragcachekit.policies.registry import open_policy
from ragcachekit.prompt.parser import PromptLike
from ragcachekit.reports import Answer, EncodingStats, ShadowReport
from ragcachekit.threads import refuse_after_fork


class RagCache(InspectMethods):
    """Generation on your own Hugging Face model that reuses the KV of retrieved chunks.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal LM with rotary attention, in eval mode, on one device. It stays an ordinary model.
    tokenizer : transformers.PreTrainedTokenizerBase, optional
        Needed for everything but prompts of token ids.
    policy : str or SelectionPolicy
        Which cached tokens are recomputed: ``full``, ``reuse``, ``lego:16``, ``impact:0.1``, ``query:0.15``,
        ``lego:4+query:0.1``, ... (an unknown name lists all). ``auto``, the default, chooses it and the
        encoder by a check of at most a minute on the model and a namespace's prompts: :meth:`tune`, or in the
        background while no request runs, once 16 prompts with chunks were answered (not with ``cold="now"``
        or ``"never"``). Or what may be lost, ``budget:0.1``, by the last ``ragcachekit calibrate``.
    encoder : str, optional
        What chunks are encoded behind: ``standalone``, ``sinks:4``, ``system``, ``similar:10``,
        ``in-prompt``; default is the policy's own, else ``standalone``. With it, ``auto`` chooses the policy
        alone.
    neighbours : Neighbours or mapping of str to Neighbours, optional
        Which chunks are similar, for the encoder ``similar:n`` and for ``auto``: :class:`SimilarChunks`,
        :class:`PrecedingChunks`, :class:`CoRetrieved` or your own; a mapping gives one per namespace.
    companions : {"any", "same-source"}
        Which chunks a chunk may be encoded behind. "same-source": only those that are known to be of its own
        document, by :meth:`order`, by the ``sources`` of :meth:`register` and :meth:`encode`, or through a
        retriever; else the text before the chunks alone. For corpora to which strangers add documents.
    store : StoreConfig or KVStore, optional
        Storage of chunk KV; default 4 GiB of host memory. A store that was passed in is not closed.
    namespace : str
        Tenant and corpus, a hard partition. Every call can name another one.
    cold : {"background", "now", "never"}
        When missed chunks are encoded: in a thread behind the answer, before the answer is returned, or only
        by :meth:`encode`. What a request computed exactly as its encoding is stored without (not by "never").
    encode_after : int
        Misses of a chunk before "background" encodes it: 2 spares chunks that are retrieved only once; 1 has
        every chunk warm at its second use.
    shadow : float or ShadowConfig, optional
        Share of the requests that is answered again in full, for :meth:`shadow_report`.
    load : {"auto", "always"} or LoadConfig
        Whether chunks in slow tiers are loaded only where that is quicker than computing them.
    tree : TreeConfig or KnowledgeTree, optional
        Exact KV of the beginnings of past prompts (RAGCache's knowledge tree), reused by prompts that begin
        with the same chunks in the same order. A tree that was passed in is not closed.
    queue : QueueConfig, optional
        Size of the batch of :meth:`submit`, and how many requests may wait for it.
    cache_dir : path, optional
        Folder of file digests, passed checks, calibrations, choices of ``auto`` and timings; default the
        user's cache folder.

    Raises
    ------
    ModelNotSupported
        If linking on this model would not give what the model computes; names the layer.
    ValueError
        For unknown policies or encoders, a model in training mode.
    TypeError
        For an argument of another type.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        _weights: Path | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        settings = EngineSettings(**options)
        self.model, self.tokenizer = model, tokenizer
        namespace, queue = checked_namespace(settings.namespace), settings.queue or QueueConfig()
        components = EngineComponents(model, tokenizer, settings, _weights)
        super().__init__(components, namespace, settings.cold, queue)
        self.fingerprint, self.shadow = self._components.fingerprint, self._components.shadow
        refuse_after_fork(self)

    @classmethod
    def from_pretrained(
        cls, model_id: str | os.PathLike[str], *, device: str | None = None, **options: Any
    ) -> Self:
        """Load a local folder or hub id with ``AutoModelForCausalLM`` and wrap it.

        ``options`` are those of :class:`RagCache`; all others go to transformers' ``from_pretrained``
        (``dtype=torch.bfloat16``, ``revision=...``).
        """
        own = {name: options.pop(name) for name in EngineOptions.__annotations__ if name in options}
        open_policy(EngineSettings(**own).policy)  # a typo should not cost the loading time
        model, tokenizer = load_model(model_id, device, **options)
        return cls(model, tokenizer, _weights=weights_folder(model_id, **options), **own)

    def encoding_stats(self) -> EncodingStats:
        """Tokens that requests missed, kept and encoded since this object was made."""
        return self._components.background_encoder.stats

    def shadow_report(self, namespace: str | None = None) -> ShadowReport:
        """Results of shadow mode, in one namespace or (None) in all; ``shadow.reset()`` begins anew."""
        return self.shadow.report(namespace)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait for all background work; False if ``timeout`` seconds did not suffice."""
        check_number("timeout", timeout, kinds=SECONDS_OR_NONE)
        self.queue.refuse_own_thread()  # some of it waits until no request runs
        return self._components.flush(timeout)

    # -- prompts -----------------------------------------------------------------------------------

    def generate(
        self,
        prompt: PromptLike,
        *,
        namespace: str | None = None,
        policy: str | SelectionPolicy | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        stop: str | Sequence[str] | None = None,
        cancel: threading.Event | None = None,
        **options: Any,
    ) -> Answer:
        """Answer one prompt.

        Parameters
        ----------
        tools : sequence of mapping, optional
            JSON schemas of functions, for the chat template; see :attr:`renders_tools`.
        stop : str or sequence of str, optional
            Text ends before the first of these.
        cancel : threading.Event, optional
            Ends the prefill before its next layer, and generation after its token; the answer has the tokens
            up to then. See also :class:`ragcachekit.CancelScope`.
        **options
            For ``model.generate``: ``max_new_tokens`` (or ``max_tokens``; default 256), ``do_sample``, ...
            ``seed`` makes sampled answers repeatable.

        Raises
        ------
        ValueError
            For an option that neither generate nor the model takes; it names the nearest one.
        PromptTooLong, GenerationNotSupported
        """
        begun, parts, path = time.perf_counter(), self._components, self._path
        parts.generator.check_options(options, "cancel")
        with self._watch(begun, prompt, namespace, options) as watch, parts.active:
            raise_if_cancelled()
            stop, request = stop_strings(stop), self._asked(prompt, namespace, policy, tools)
            asked = Asked(parts.generator.options(options, len(request.token_ids), stop), stop, cancel)
            plan = path.begin(request)
            first = parts.shadow.draw(asked.options)
            generated = parts.generator.run(
                plan, asked.options, stop=stop, cancel=cancel, first=first, own=path.own, replan=path.plan
            )
            answer = path.finish(generated, asked, first, begun)
            path.reports.append(answer.report)
            watch.end(answer.report)
        path.check_auto(generated.plan)
        raise_if_cancelled()
        return answer

    def stream(
        self,
        prompt: PromptLike,
        *,
        namespace: str | None = None,
        policy: str | SelectionPolicy | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        stop: str | Sequence[str] | None = None,
        **options: Any,
    ) -> AnswerStream:
        """As :meth:`generate`, as an iterator over text; ``.answer`` has the rest at the end."""
        if "streamer" in options:
            raise ValueError("stream() reads the tokens itself; give streamer= to generate or submit")
        self._components.generator.check_options({**options, "streamer": True})
        stop, namespace = stop_strings(stop), self._checked(namespace)
        asked = {"namespace": namespace, "policy": policy, "tools": tools, "stop": stop, **options}
        return AnswerStream(
            lambda streamer, cancel: self.generate(prompt, cancel=cancel, streamer=streamer, **asked),
            Detokenizer(self._parser.tokens.decode, stop),
        )

    def link(
        self,
        prompt: PromptLike,
        *,
        namespace: str | None = None,
        policy: str | SelectionPolicy | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> LinkedPrompt:
        """Link a prompt for a generate call or a loop of your own; it is used once.

        >>> linked = rag.link(prompt)                              # doctest: +SKIP
        >>> output = model.generate(**linked.inputs)               # doctest: +SKIP
        """
        self._checked(namespace)
        with self._components.active:
            plan = self._path.begin(self._request(prompt, namespace, policy, tools))
            linked = self._components.generator.link(plan, self._path.plan)
        self._components.loads.follow(linked.plan)
        self._path.encode_missing(linked.plan.missing)
        return linked.prompt

    @property
    def renders_tools(self) -> bool:
        """Whether the chat template shows the ``tools`` that :meth:`generate` is given."""
        return self._parser.tokens.renders_tools

    def count_tokens(self, text: str) -> int:
        """Tokens of ``text`` alone, without BOS."""
        return len(self._parser.tokens.text(text, first=True))

    def close(self) -> None:
        """End background work and close the store that this object opened; idempotent.

        Running answers are finished, but nothing of them is stored; waiting requests fail. Later calls raise
        :class:`~ragcachekit.errors.Closed`; reports can still be read.
        """
        self._closed = True
        self.queue.close()
        self._components.close()

    def __enter__(self) -> Self:
        self._checked(None)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""RagCache: the facade. What is promised to users: chunks go to ``stock``, prompts to ``answering``."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from torch import nn

from ragcachekit.answering import Answerer
from ragcachekit.config import GraphConfig, LoadConfig, ShadowConfig, StoreConfig, TreeConfig, check_type
from ragcachekit.errors import Closed, ModelNotSupported
from ragcachekit.forks import refuse_after_fork
from ragcachekit.generate.background import flush_all
from ragcachekit.generate.stream import AnswerStream
from ragcachekit.generate.streaming import Detokenizer, stop_strings
from ragcachekit.link.admission import admit_once
from ragcachekit.link.base import SelectionPolicy
from ragcachekit.link.graphs import use_graphs
from ragcachekit.link.linked import LinkedPrompt
from ragcachekit.link.neighbours import Neighbours, by_namespace
from ragcachekit.link.policies import open_policy
from ragcachekit.model.fingerprint import fingerprint
from ragcachekit.model.loading import default_cache_dir, load_model, weights_folder
from ragcachekit.model.rope_probe import describe_rope
from ragcachekit.model.rotary_guard import guard_rotary
from ragcachekit.prepare import PromptLike
from ragcachekit.query.retrieval import CachedRetrieval
from ragcachekit.reports import Answer, ShadowReport
from ragcachekit.stock import Stock, checked_namespace, several
from ragcachekit.store.base import KVStore, StoreStats
from ragcachekit.tree.knowledge import KnowledgeTree


class RagCache:
    """Generation on your own Hugging Face model that reuses the KV of chunks it has seen before.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal LM with rotary attention, in eval mode, on one device. It stays an ordinary model:
        its own ``generate`` keeps giving what it gave.
    tokenizer : transformers.PreTrainedTokenizerBase, optional
        Needed for everything but prompts of token ids.
    policy : str or SelectionPolicy
        Which cached tokens are recomputed: ``full``, ``reuse``, ``lego:16``, ``deep:0.1``,
        ``query:0.15``, ``lego:4+query:0.1``, ... (an unknown name lists all); or how much F1 may be
        lost at most, ``budget:0.01``, by the last ``ragcachekit calibrate``.
    encoder : str, optional
        What chunks are encoded behind: ``standalone``, ``sinks:4``, ``system``, ``similar:10``,
        ``in-prompt``; default is what the policy asks for, else ``standalone``.
    neighbours : Neighbours or mapping of str to Neighbours, optional
        Which chunks are similar to a chunk, for the encoder ``similar:n``: :class:`SimilarChunks`,
        :class:`PrecedingChunks`, :class:`CoRetrieved` or your own. A mapping gives one per namespace;
        one alone is that of ``namespace``, and in other namespaces no chunk has neighbours.
    store : StoreConfig or KVStore, optional
        Where chunk KV is kept; default 4 GiB of host memory. A store that was handed in is not closed.
    namespace : str
        Tenant and corpus; a hard partition. Every call can name another one.
    cold : {"background", "now", "never"}
        When chunks that a prompt missed are encoded: behind the answer in a thread, behind the
        answer before it is returned, or only by :meth:`encode`.
    shadow : float or ShadowConfig, optional
        Share of the requests that is answered again in full, to see what reuse does to answers; what
        comes of it is in :meth:`shadow_report` and, where it goes wrong, in the log.
    load : {"auto", "always"} or LoadConfig
        Whether chunks in slow tiers are loaded only where that is quicker than computing them, or always.
    tree : TreeConfig or KnowledgeTree, optional
        Keep exact KV of the beginnings of past prompts (RAGCache's knowledge tree), so that a prompt that
        begins with the same chunks in the same order reuses them without any approximation; what stands
        behind comes from the store. Default: no tree. One that was handed in is not closed.
    graphs : {"auto", "off"} or GraphConfig
        Whether linked forwards run as CUDA graphs (on a GPU); of all who share the model, the last counts.
    cache_dir : path, optional
        For file digests, passed checks, calibrations and timings; default the user's cache folder.

    Raises
    ------
    ModelNotSupported
        If linking on this model would not give what the model computes; names the layer.
    ValueError
        For unknown policies or encoders, or a model in training mode; for ``similar:n`` without
        neighbours, or neighbours without it.
    TypeError
        For an argument of another type; names it and says what to give.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        policy: str | SelectionPolicy = "lego:16",
        encoder: str | None = None,
        neighbours: Neighbours | Mapping[str, Neighbours] | None = None,
        store: StoreConfig | KVStore | None = None,
        namespace: str = "default",
        cold: Literal["background", "now", "never"] = "background",
        shadow: float | ShadowConfig | None = None,
        load: Literal["auto", "always"] | LoadConfig = "auto",
        tree: TreeConfig | KnowledgeTree | None = None,
        graphs: Literal["auto", "off"] | GraphConfig = "auto",
        cache_dir: str | os.PathLike[str] | None = None,
        _weights: Path | None = None,
    ) -> None:
        _check_arguments(encoder, store, cold, shadow, tree, cache_dir)
        check_type("model", model, nn.Module, "a loaded model (from_pretrained takes a folder or id)")
        if model.training:
            raise ValueError("the model is in training mode; call model.eval() first")
        if hasattr(model, "_orig_mod"):
            raise ModelNotSupported("the model is compiled; give the model itself, before torch.compile")
        opened_policy = open_policy(policy)
        self.model = model
        self.tokenizer = tokenizer
        self.namespace = checked_namespace(namespace)
        rope = describe_rope(model)
        if rope.depends_on_length:
            guard_rotary(model)
        folder = Path(cache_dir) if cache_dir is not None else default_cache_dir()
        self.fingerprint = fingerprint(
            model, tokenizer, source=_weights, cache=folder / "digests.json"
        ).digest
        admit_once(model, rope, self.fingerprint, folder)
        use_graphs(model, graphs)
        self._stock = Stock(
            model,
            tokenizer,
            opened_policy,
            rope=rope,
            fingerprint=self.fingerprint,
            folder=folder,
            encoder=encoder,
            neighbours=by_namespace(neighbours, self.namespace),
            store=store,
            cold=cold,
            load=load,
            tree=tree,
        )
        with ExitStack() as opened:  # closed again if a later step raises
            opened.callback(self._stock.close)
            self._answerer = Answerer(
                model,
                opened_policy,
                self._stock,
                rope=rope,
                fingerprint=self.fingerprint,
                folder=folder,
                shadow=shadow,
            )
            self._answerer.policy(self.namespace)  # what there is to warn of, warn of now
            opened.pop_all()
        self._prompts, self.shadow = self._stock.prompts, self._answerer.shadow
        self._closed = False
        refuse_after_fork(self)

    @classmethod
    def from_pretrained(
        cls,
        model_id: str | os.PathLike[str],
        *,
        device: str | None = None,
        policy: str | SelectionPolicy = "lego:16",
        encoder: str | None = None,
        neighbours: Neighbours | Mapping[str, Neighbours] | None = None,
        store: StoreConfig | KVStore | None = None,
        namespace: str = "default",
        cold: Literal["background", "now", "never"] = "background",
        shadow: float | ShadowConfig | None = None,
        load: Literal["auto", "always"] | LoadConfig = "auto",
        tree: TreeConfig | KnowledgeTree | None = None,
        graphs: Literal["auto", "off"] | GraphConfig = "auto",
        cache_dir: str | os.PathLike[str] | None = None,
        **model_options: Any,
    ) -> Self:
        """Load a local folder or hub id with ``AutoModelForCausalLM`` and wrap it.

        ``model_options`` go to ``from_pretrained`` (``dtype=torch.bfloat16``, ``revision=...``).
        """
        open_policy(policy)  # a typo should not cost the loading time
        _check_arguments(encoder, store, cold, shadow, tree, cache_dir)
        model, tokenizer = load_model(model_id, device, **model_options)
        return cls(
            model,
            tokenizer,
            policy=policy,
            encoder=encoder,
            neighbours=neighbours,
            store=store,
            namespace=namespace,
            cold=cold,
            shadow=shadow,
            load=load,
            tree=tree,
            graphs=graphs,
            cache_dir=cache_dir,
            _weights=weights_folder(model_id),
        )

    @property
    def policy(self) -> str:
        """Name of the default policy; ``budget:0.01 -> lego:4`` for one that was calibrated."""
        return self._answerer.policy(self.namespace)

    # -- chunks ------------------------------------------------------------------------------------

    def register(self, texts: Iterable[str], *, namespace: str | None = None) -> int:
        """Make texts known as chunks, so that prompts are searched for them. Costs no model work.

        Returns how many can be found (texts too short to be told apart are left out).
        """
        return self._stock.register(texts, self._space(namespace))

    def add_query_cache(self, cache: CachedRetrieval[Any]) -> None:
        """Let :meth:`forget` reach cached search results too. The cache is not kept alive.

        Retrievers that were given this engine call it.
        """
        self._stock.add_query_cache(cache)

    def prefetch(
        self, chunks: Iterable[str], *, namespace: str | None = None, system: str | None = None
    ) -> None:
        """Begin to load chunks from slow tiers for a prompt that will come; returns at once.

        Whoever knows first what will be in a prompt (a retriever) calls it. Chunks that are not stored,
        or in memory already, cost next to nothing. Those that then stand in a prompt in altered form are
        named in its report.

        Parameters
        ----------
        chunks : iterable of str
            Chunk texts, or ids as :meth:`encode` returned them.
        system : str, optional
            The text before the prompt's first chunk, for encoders that need it; by default the last one
            that was seen in the namespace.
        """
        space = self._space(namespace)
        self._stock.prefetch(chunks, space, self._answerer.chosen(None, space).policy, system)

    def encode(
        self,
        texts: Iterable[str],
        *,
        namespace: str | None = None,
        system: str | None = None,
        progress: bool = False,
    ) -> list[str]:
        """Register chunks and compute their KV now; what is stored already is skipped.

        What :meth:`forget` drops while this runs is neither stored nor registered by it, and neither is
        what would be encoded behind that.

        Parameters
        ----------
        texts : iterable of str
        system : str, optional
            The text before a prompt's first chunk, as the model sees it; the encoders ``system`` and
            ``similar:n`` need it here.
        progress : bool
            Show a progress bar over tokens.

        Returns
        -------
        list of str
            Chunk ids, in order; of all texts, also those forgotten meanwhile.

        Raises
        ------
        Cancelled
            If a :class:`ragcachekit.CancelScope` around it was; what was encoded before is kept.
        ValueError
            For an empty chunk, one longer than the model's context, or a missing ``system``.
        ModelChanged
            If the model is no longer the one that this object was made for.
        """
        return self._stock.encode(texts, self._space(namespace), system, progress)

    def forget(
        self,
        ids: Iterable[str] | None = None,
        *,
        texts: Iterable[str] | None = None,
        namespace: str | None = None,
    ) -> int:
        """Drop stored KV of chunks, and KV that was encoded behind them, from all tiers.

        Cached search results that name such a chunk go too, in every retriever that was given this engine.
        Delete the document from its index first: what a search finds is registered again.
        Forgetting wins over all work begun before this returns, in any thread: nothing of it brings a
        forgotten chunk back. Until it is registered or encoded again, it is nobody's neighbour either.
        Another process that runs on the same disk folder keeps what its own host memory holds; its
        knowledge tree there, if it has one with a disk, follows at its next request in the namespace.

        Parameters
        ----------
        ids : iterable of str, optional
            Chunk ids, as :meth:`encode` returned them. Their texts stay known as chunks: a later prompt that
            has one encodes it again.
        texts : iterable of str, optional
            Chunk texts; also forgets them as chunks to look for, in every form a chain may give them.
        namespace : str, optional
            With neither ids nor texts, all of it is dropped.

        Returns
        -------
        int
            Entries dropped.

        Raises
        ------
        StoreError
            If a tier cannot say that nothing is left; all others have forgotten. Forget again.
        """
        return self._stock.forget(ids, texts, self._space(namespace))

    def stats(self) -> tuple[StoreStats, ...]:
        """One record per storage tier, those of the knowledge tree (``tree:host``, ...) last."""
        return self._stock.stats()

    def shadow_report(self, namespace: str | None = None) -> ShadowReport:
        """What shadow mode has seen, in one namespace or (None) in all; ``shadow.reset()`` begins anew."""
        return self.shadow.report(namespace)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait for background encoding, shadow prefills and what is being prefetched.

        False if ``timeout`` seconds did not suffice.
        """
        return flush_all([self._stock.flush, self.shadow.flush], timeout)

    # -- prompts -----------------------------------------------------------------------------------

    def generate(
        self,
        prompt: PromptLike,
        *,
        namespace: str | None = None,
        policy: str | SelectionPolicy | None = None,
        stop: str | Sequence[str] | None = None,
        cancel: threading.Event | None = None,
        **options: Any,
    ) -> Answer:
        """Answer one prompt.

        Parameters
        ----------
        prompt : str, list of messages, or Prompt
        stop : str or sequence of str, optional
            Text ends before the first of these.
        cancel : threading.Event, optional
            When set, the prefill stops before its next layer, and generation after the token in work; the
            answer has the tokens up to then. See also :class:`ragcachekit.CancelScope`.
        **options
            For ``model.generate``: ``max_new_tokens`` (default 256), ``do_sample``, ``streamer``, ...

        Raises
        ------
        PromptTooLong, GenerationNotSupported
        """
        space, stop = self._space(namespace), stop_strings(stop)
        return self._answerer.answer([prompt], space, policy, options, stop, cancel)[0]

    def generate_batch(
        self,
        prompts: Sequence[PromptLike],
        *,
        namespace: str | None = None,
        policy: str | SelectionPolicy | None = None,
        stop: str | Sequence[str] | None = None,
        cancel: threading.Event | None = None,
        **options: Any,
    ) -> list[Answer]:
        """Answer several prompts in one left-padded batch, one link each.

        ``stop``, ``cancel`` and ``options`` are those of :meth:`generate`.
        """
        prompts, stop, space = several(prompts, "prompts"), stop_strings(stop), self._space(namespace)
        if not prompts:
            return []
        if self._answerer.share_a_forward(space, policy, options):
            return self._answerer.answer(prompts, space, policy, options, stop, cancel)
        each = {"namespace": space, "policy": policy, "stop": stop, "cancel": cancel, **options}
        return [self.generate(prompt, **each) for prompt in prompts]

    def stream(
        self,
        prompt: PromptLike,
        *,
        namespace: str | None = None,
        policy: str | SelectionPolicy | None = None,
        stop: str | Sequence[str] | None = None,
        **options: Any,
    ) -> AnswerStream:
        """As :meth:`generate`, as an iterator over text; ``.answer`` has the rest at the end."""
        tokens, stop, space = self._prompts.tokens, stop_strings(stop), self._space(namespace)
        return AnswerStream(
            lambda streamer, cancel: self.generate(
                prompt,
                namespace=space,
                policy=policy,
                stop=stop,
                cancel=cancel,
                streamer=streamer,
                **options,
            ),
            Detokenizer(tokens.decode, stop),
        )

    def link(
        self, prompt: PromptLike, *, namespace: str | None = None, policy: str | SelectionPolicy | None = None
    ) -> LinkedPrompt:
        """Link a prompt for a generate call or a loop of your own; it is used once.

        >>> linked = rag.link(prompt)                              # doctest: +SKIP
        >>> output = model.generate(**linked.inputs)               # doctest: +SKIP
        """
        return self._answerer.link(prompt, self._space(namespace), policy)

    def count_tokens(self, text: str) -> int:
        """Tokens of ``text`` alone, without BOS."""
        return len(self._prompts.tokens.text(text, first=True))

    def close(self) -> None:
        """End background work and close the store that this object opened; a second time does nothing.

        What is being answered is answered to its end, though nothing of it is kept any more; what is
        asked afterwards raises :class:`~ragcachekit.errors.Closed`. Reports can still be read.
        """
        self._closed = True
        self.shadow.close()
        self._stock.close()

    def __enter__(self) -> Self:
        self._space(None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _space(self, namespace: str | None) -> str:
        """The namespace of a call: every use of chunks and prompts comes by here."""
        if self._closed:
            raise Closed("this RagCache is closed; make a new one, or close it after its last use")
        return self.namespace if namespace is None else checked_namespace(namespace)


def _check_arguments(
    encoder: object, store: object, cold: object, shadow: object, tree: object, cache_dir: object
) -> None:
    """What can be said of them before a model is loaded; the rest is checked where it is used."""
    if cold not in ("background", "now", "never"):
        raise ValueError(f"cold must be 'background', 'now' or 'never', got {cold!r}")
    none = type(None)
    check_type("encoder", encoder, (str, none), "a name such as 'system', or None")
    stores = "StoreConfig(disk_path='~/kv', ...), an open KVStore, or None for 4 GiB of host memory"
    check_type("store", store, (StoreConfig, KVStore, none), stores)
    check_type("shadow", shadow, (Real, ShadowConfig, none), "a share of the requests such as 0.02, or None")
    check_type("tree", tree, (TreeConfig, KnowledgeTree, none), "TreeConfig(host_bytes=...), or None")
    check_type("cache_dir", cache_dir, (str, os.PathLike, none), "a folder's path, or None")

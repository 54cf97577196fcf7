"""The options of an engine, and its components: opened in order, closed in the opposite one."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypedDict

from ragcachekit.cancellation import ActiveRequests, Backoff
from ragcachekit.config import (
    DEFAULT_DISK_BYTES,
    LoadConfig,
    QueueConfig,
    ShadowConfig,
    StoreConfig,
    TreeConfig,
)
from ragcachekit.encode.background import BackgroundEncoder
from ragcachekit.encode.encoders import ChunkEncoder, NeighbourEncoder
from ragcachekit.encode.in_prompt import InPromptEncoder
from ragcachekit.engine.grade import check_generates, grade_of
from ragcachekit.errors import ModelNotSupported
from ragcachekit.forward.prefill import LinkedPrompt, link_ahead
from ragcachekit.model.identity import default_cache_dir, fingerprint
from ragcachekit.model.kv import ChunkKV, KVLayout
from ragcachekit.model.prefill_profile import PrefillCost
from ragcachekit.model.rope import guard_rotary
from ragcachekit.model.snapshots import SnapshotLayout
from ragcachekit.plan.companions import Neighbours
from ragcachekit.plan.encodings import Fetch
from ragcachekit.plan.link_plan import LinkPlan, PromptRequest
from ragcachekit.plan.load_planner import open_loads
from ragcachekit.plan.planner import Planner
from ragcachekit.policies.base import SelectionPolicy
from ragcachekit.policies.measured import BOUND, Auto, Budget
from ragcachekit.policies.registry import open_policy
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree, open_tree
from ragcachekit.prompt.parser import PromptParser
from ragcachekit.quality.auto import AutoPolicies
from ragcachekit.quality.check import PolicyCheck
from ragcachekit.quality.records import Budgets, ResolvedPolicy
from ragcachekit.quality.shadow import Shadow
from ragcachekit.store.base import KVStore, NullStore, StoreStats
from ragcachekit.store.eviction import weighs_cost
from ragcachekit.store.forgets import ForgetEpochs
from ragcachekit.store.guarded import guarded
from ragcachekit.store.tiered import open_store
from ragcachekit.threads import BackgroundWorker, flush_all
from ragcachekit.types import DEFAULT_POLICY, check_type, encoder_name

log = logging.getLogger(__name__)


class EngineOptions(TypedDict, total=False):
    """Keyword arguments of :class:`ragcachekit.RagCache`, which describes them."""

    policy: str | SelectionPolicy
    encoder: str | None
    neighbours: Neighbours | Mapping[str, Neighbours] | None
    companions: Literal["any", "same-source"]
    store: StoreConfig | KVStore | None
    namespace: str
    cold: Literal["background", "now", "never"]
    encode_after: int
    deterministic: bool
    shadow: float | ShadowConfig | None
    load: Literal["auto", "always"] | LoadConfig
    tree: TreeConfig | KnowledgeTree | None
    queue: QueueConfig | None
    cache_dir: str | os.PathLike[str] | None


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The options with their defaults, checked as far as possible without a model."""

    policy: str | SelectionPolicy = "auto"
    encoder: str | None = None
    neighbours: Neighbours | Mapping[str, Neighbours] | None = None
    companions: Literal["any", "same-source"] = "any"
    store: StoreConfig | KVStore | None = None
    namespace: str = "default"
    cold: Literal["background", "now", "never"] = "background"
    encode_after: int = 2
    deterministic: bool = False
    shadow: float | ShadowConfig | None = None
    load: Literal["auto", "always"] | LoadConfig = "auto"
    tree: TreeConfig | KnowledgeTree | None = None
    queue: QueueConfig | None = None
    cache_dir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.cold not in ("background", "now", "never"):
            raise ValueError(f"cold must be 'background', 'now' or 'never', got {self.cold!r}")
        if self.companions not in ("any", "same-source"):
            raise ValueError(f"companions must be 'any' or 'same-source', got {self.companions!r}")
        check_type("encode_after", self.encode_after, int, "a number of misses such as 2")
        if self.encode_after < 1:
            raise ValueError(f"encode_after must be at least 1 miss, got {self.encode_after}")
        check_type("deterministic", self.deterministic, bool, "True or False")
        if self.deterministic:
            rounded = isinstance(self.store, StoreConfig) and self.store.quantise
            for name, given in (("tree", self.tree), ("shadow", self.shadow), ("quantise", rounded)):
                if given:
                    raise ValueError(
                        f"deterministic=True rules out {name}=, by which answers depend on earlier prompts"
                    )
        none = type(None)
        check_type("encoder", self.encoder, (str, none), "a name such as 'system', or None")
        if self.encoder is not None:
            encoder_name(self.encoder)
        checked_namespace(self.namespace)
        stores = "StoreConfig(disk_path='~/kv', ...), an open KVStore, or None for 4 GiB of host memory"
        check_type("store", self.store, (StoreConfig, KVStore, none), stores)
        share = "a share of the requests such as 0.02, or None"
        check_type("shadow", self.shadow, (Real, ShadowConfig, none), share)
        check_type(
            "tree", self.tree, (TreeConfig, KnowledgeTree, none), "TreeConfig(host_bytes=...), or None"
        )
        check_type("queue", self.queue, (QueueConfig, none), "QueueConfig(max_batch=16, ...), or None")
        check_type("cache_dir", self.cache_dir, (str, os.PathLike, none), "a folder's path, or None")


class EngineComponents:
    """Everything one engine is made of; ``policy`` is its default one.

    Making them checks the model. If that or one component fails, all are closed again.
    """

    def __init__(self, model: Any, tokenizer: Any, settings: EngineSettings) -> None:
        check_generates(model)
        self.model, self.policy = model, open_policy(settings.policy)
        folder = Path(settings.cache_dir) if settings.cache_dir is not None else default_cache_dir()
        self.fingerprint, self.deterministic = fingerprint(model, tokenizer).digest, settings.deterministic
        self.grade = grade_of(model, self.fingerprint, folder)
        if self.deterministic:
            if self.grade.name != "linked":
                raise ModelNotSupported(f"deterministic=True needs chunks that are linked: {self.grade.why}")
            self.fingerprint += "-deterministic"  # others encode several chunks at once, which rounds
        self.rope, self._layout = self.grade.rope, self.grade.layout
        if self.rope.depends_on_length:
            guard_rotary(model)
        self.forgets = ForgetEpochs()
        with ExitStack() as opened:
            self.background, self.active = BackgroundWorker(), ActiveRequests()
            self._open_caches(settings, opened)
            self._open_planner(tokenizer, settings)
            opened.callback(self.planner.variants.save)
            opened.callback(self.background.close)  # first of all: its jobs use the store
            self._open_quality(settings, folder)
            self._opened = opened.pop_all()

    def _open_caches(self, settings: EngineSettings, opened: ExitStack) -> None:
        snapshots = self._layout if isinstance(self._layout, SnapshotLayout) else None
        self.cost = PrefillCost(
            self.model, context=self.rope.context, background=self.background, snapshots=snapshots
        )
        is_linked = self.grade.name == "linked"
        load = settings.load if isinstance(settings.load, LoadConfig) else LoadConfig(settings.load)
        self.store = _store(settings, self.cost, load.deadline, opened) if is_linked else NullStore()
        load = replace(load, when="always") if settings.deterministic else load
        self.loads = open_loads(self.store, load, self.cost)
        if self.loads is not None:
            opened.callback(self.loads.close)
        if not is_linked:
            _warn_of_unused(settings, self.policy)
        only_tree = not is_linked or (getattr(self.policy, "exact_only", False) and not self.deterministic)
        if settings.tree is None and only_tree:
            settings = replace(settings, tree=_tree_of_store(settings.store, is_linked))
        self.tree = _tree(self.model, settings, self._layout, self.cost, opened) if self._layout else None

    def _open_planner(self, tokenizer: Any, settings: EngineSettings) -> None:
        loads, layout = self.loads, self._layout if isinstance(self._layout, KVLayout) else None
        self.parser = PromptParser(tokenizer)
        near = {} if settings.neighbours is None else settings.neighbours
        self.planner = Planner(
            self.model,
            self.parser,
            rope=self.rope,
            store=self.store,
            fingerprint=self.fingerprint,
            encoder=settings.encoder,
            neighbours=near if isinstance(near, Mapping) else {settings.namespace: near},
            same_source=settings.companions == "same-source",
            fetch=partial(Fetch, loads.loader, loads.planner, layout=layout)
            if loads is not None
            else partial(Fetch, self.store, layout=layout),
            tree=self.tree,
            layout=self._layout,
            is_linked=self.grade.name == "linked",
            deterministic=self.deterministic,
        )
        encodings = self.planner.encodings(self.policy)
        self.planner.recall(self.policy, getattr(settings.store, "disk_path", None))
        free = isinstance(self.policy, Auto) and settings.encoder is None
        if not encodings.neighbours and not free and self.planner.companions:
            raise ValueError("neighbours= are for the encoder 'similar:n'; give encoder='similar:10'")

    def _open_quality(self, settings: EngineSettings, folder: Path) -> None:
        """The encoder behind answers, shadow mode, and what measured policies stand for."""
        model, rope, planner = self.model, self.rope, self.planner
        layout = self._layout if isinstance(self._layout, KVLayout) else None
        question = self.parser.question
        encoder, backoff = ChunkEncoder(model, rope, self.deterministic), partial(Backoff, self.active)

        def encoder_over(store: KVStore, **how: Any) -> BackgroundEncoder:
            near = NeighbourEncoder(model, rope, encoder, store, layout)
            parts = encoder, store, planner.unchanged, near, InPromptEncoder(model, rope)
            return BackgroundEncoder(*parts, **how, pause=backoff, question=question)

        self.background_encoder = encoder_over(
            self.store,
            stored=planner.note_stored,
            forgets=self.forgets,
            after=settings.encode_after,
            worker=self.background,
            known_mean=planner.variants.average,
        )

        def link(request: PromptRequest) -> tuple[LinkedPrompt, LinkPlan]:
            return link_ahead(model, rope, planner.plan(planner.look_up(request)), planner.plan)

        shadow = settings.shadow
        config = shadow if isinstance(shadow, ShadowConfig) else ShadowConfig(shadow or 0.0)
        shown = config, model, link, planner.unchanged, self.background, backoff
        self.shadow = Shadow(*shown) if config.share else None
        self.budgets = Budgets(folder, self.fingerprint, planner.encodings(open_policy("full")).name)
        self.auto = AutoPolicies(
            folder,
            self.fingerprint,
            settings.encoder,
            self.policy.bound if isinstance(self.policy, Auto) else BOUND,
            planner,
            PolicyCheck(model, rope, planner, encoder_over),
            self.background,
            self.active.wait_for_none,
        )
        self.resolve(self.policy, settings.namespace)  # warns now of what there is to warn of

    def resolve(self, policy: SelectionPolicy, namespace: str) -> ResolvedPolicy:
        """The concrete policy of a budget or of ``auto``; any other one as it is.

        Where chunks cannot be linked, every policy that reuses anything stands for exact beginnings.
        """
        if self.deterministic and isinstance(policy, Auto):
            policy = open_policy(DEFAULT_POLICY)
        if self.deterministic and isinstance(policy, Budget):
            raise ValueError(f"deterministic=True rules out {policy.name!r}, which follows calibrations")
        if self.grade.name == "prefix":
            policy = open_policy("prefix") if policy.reads_cache else policy
        elif isinstance(policy, Auto):
            if policy not in (self.policy, Auto()):
                raise ValueError(
                    f"{policy.name} is for RagCache(policy={policy.name!r}), not for one request"
                )
            return self.auto.resolve(namespace)
        elif isinstance(policy, Budget):
            return self.budgets.resolve(policy, namespace)
        return ResolvedPolicy(policy, policy.name)

    def stats(self) -> tuple[StoreStats, ...]:
        """One record per tier of the store, then of the tree."""
        lost = {} if self.loads is None else self.loads.loader.failures
        records = (replace(one, failures=one.failures + lost.get(one.tier, 0)) for one in self.store.stats())
        return (*records, *(self.tree.stats() if self.tree is not None else ()))

    def flush(self, timeout: float | None = None) -> bool:
        """Wait for all background work; False if ``timeout`` seconds did not suffice."""
        loads = [] if self.loads is None else [self.loads.flush]
        return flush_all([self.background.flush, *loads], timeout)

    def close(self) -> None:
        self._opened.close()


def _store(settings: EngineSettings, prefill: PrefillCost, deadline: float, opened: ExitStack) -> KVStore:
    """The store that was passed in, or one that is closed with the engine, with profiled costs."""
    if settings.store is not None and not isinstance(settings.store, StoreConfig):
        return guarded(settings.store, deadline)
    config = settings.store or StoreConfig()
    budget = config.host_bytes or config.gpu_bytes

    def cost(kv: ChunkKV) -> float:
        return prefill.seconds(0, kv.tokens, kv.nbytes / budget)

    store = open_store(config, cost=cost if weighs_cost(config.eviction) else None)
    opened.callback(store.close)
    return store


def _warn_of_unused(settings: EngineSettings, policy: SelectionPolicy) -> None:
    """Log which options are for linked chunks, where there are none."""
    known = isinstance(policy, Auto) or policy.name in ("full", "prefix")
    unused = {
        f"policy {policy.name} (prefix is used)": not known,
        f"encoder {settings.encoder}": settings.encoder is not None,
        "an open KVStore (give StoreConfig or tree=)": isinstance(settings.store, KVStore),
    }
    if names := [name for name, given in unused.items() if given]:
        log.warning("not used, as this model's chunks cannot be linked: %s", ", ".join(names))


def _tree_of_store(store: StoreConfig | KVStore | None, is_linked: bool) -> TreeConfig:
    """The budgets of the store for a tree, where chunks are not linked."""
    config = store if isinstance(store, StoreConfig) else StoreConfig()
    if not is_linked and (config.quotas or config.quantise or config.redis_url or config.bulk_url):
        log.warning(
            "quotas, eight bits and remote tiers are for chunks, which this model cannot link: not used"
        )
    disk = 0 if config.disk_path is None else config.disk_bytes or DEFAULT_DISK_BYTES
    eviction = config.eviction if config.eviction.partition(":")[0] != "f_r" else "pgdsf"
    return TreeConfig(config.host_bytes, config.gpu_bytes, disk, eviction)


def _tree(
    model: Any,
    settings: EngineSettings,
    layout: KVLayout | SnapshotLayout,
    prefill: PrefillCost,
    opened: ExitStack,
) -> KnowledgeTree | None:
    """The tree that was passed in, or one that is closed with the engine, with profiled costs."""
    config = settings.tree
    if not isinstance(config, TreeConfig):
        return config
    disk = settings.store.disk_path if isinstance(settings.store, StoreConfig) else None
    budget = config.host_bytes or config.gpu_bytes

    def cost(cached: int, new: int) -> float:
        return prefill.seconds(cached, new, new * layout.token_bytes / budget if budget else 0.0)

    tree = open_tree(
        config,
        model.device,
        folder=None if disk is None else Path(disk),
        cost=cost if weighs_cost(config.eviction) else None,
    )
    opened.callback(tree.close)
    return tree


def checked_namespace(namespace: str) -> str:
    """The namespace; ValueError for an empty one, or one that is no text."""
    if not isinstance(namespace, str) or not namespace:
        raise ValueError(f"namespace must be a non-empty string, got {namespace!r}")
    namespace.encode()  # of a lone surrogate it raises UnicodeEncodeError, a ValueError
    return namespace

"""The components of one engine: opened in order, and closed in the opposite one."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ragcachekit.background import flush_all
from ragcachekit.config import StoreConfig, TreeConfig, check_type
from ragcachekit.encode.background import BackgroundEncoder
from ragcachekit.encode.behind_neighbours import NeighbourEncoder
from ragcachekit.encode.in_prompt import InPromptEncoder
from ragcachekit.encode.neighbours import by_namespace
from ragcachekit.encode.standalone import ChunkEncoder
from ragcachekit.engine.admission import admit_once
from ragcachekit.engine.generator import Generator
from ragcachekit.engine.load_path import LoadPath, load_config
from ragcachekit.engine.options import EngineSettings
from ragcachekit.engine.prompt_planner import PromptPlanner
from ragcachekit.engine.shadow import Shadow, shadow_config
from ragcachekit.engine.tree_capture import RowCapture
from ragcachekit.errors import ModelNotSupported
from ragcachekit.forward.attention_sums import ObservedCache
from ragcachekit.forward.cuda_graphs.graphed_forward import use_graphs
from ragcachekit.model.identity.fingerprint import fingerprint as fingerprint_of
from ragcachekit.model.kv import ChunkKV
from ragcachekit.model.layout import KVLayout
from ragcachekit.model.prefill_timing import PrefillCost
from ragcachekit.model.pretrained import default_cache_dir
from ragcachekit.model.rope.forward_lock import guard_rotary
from ragcachekit.model.rope.probe import describe_rope
from ragcachekit.plan.encodings import IN_PROMPT
from ragcachekit.plan.prefix_match import PrefixMatcher
from ragcachekit.plan.variants import recall
from ragcachekit.policies.base import SelectionPolicy
from ragcachekit.policies.budgets.calibrated import Budgets, Chosen
from ragcachekit.policies.registry import open_policy
from ragcachekit.prefix_tree.factory import open_tree
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from ragcachekit.store.base import KVStore, StoreStats
from ragcachekit.store.eviction.registry import weighs_cost
from ragcachekit.store.factory import open_store
from ragcachekit.store.forget_epochs import ForgetEpochs


@dataclass(frozen=True, eq=False)
class EngineComponents:
    """Everything one engine is made of; ``policy`` is its default one."""

    policy: SelectionPolicy
    fingerprint: str
    store: KVStore
    tree: KnowledgeTree | None
    forgets: ForgetEpochs
    loads: LoadPath
    prompts: PromptPlanner
    background_encoder: BackgroundEncoder
    capture: RowCapture
    shadow: Shadow
    generator: Generator
    budgets: Budgets
    opened: ExitStack

    def choose_policy(self, policy: str | SelectionPolicy | None, namespace: str) -> Chosen:
        """A concrete policy for a prompt; ``full`` while shadow mode advises against reuse."""
        asked = self.policy if policy is None else open_policy(policy)
        chosen = self.budgets.resolve(asked, namespace)
        why = self.shadow.fallback(namespace) if chosen.policy.reads_cache else None
        return chosen if why is None else Chosen(open_policy("full"), "full", fallback=why)

    def stats(self) -> tuple[StoreStats, ...]:
        """One record per tier of the store, then of the tree."""
        return (*self.store.stats(), *(self.tree.stats() if self.tree is not None else ()))

    def flush(self, timeout: float | None = None) -> bool:
        """Wait for all background work; False if ``timeout`` seconds did not suffice."""
        parts = (self.capture, self.background_encoder, self.loads, self.shadow)
        return flush_all([part.flush for part in parts], timeout)

    def close(self) -> None:
        """End background work, and close the store and the tree that were opened here."""
        self.opened.close()


def open_components(
    model: Any, tokenizer: Any, settings: EngineSettings, weights: Path | None = None
) -> EngineComponents:
    """Check the model and open every component for it; all are closed again if one raises.

    ``weights`` is the folder that the model was loaded from.
    """
    check_type("model", model, nn.Module, "a loaded model (from_pretrained takes a folder or id)")
    if model.training:
        raise ValueError("the model is in training mode; call model.eval() first")
    if hasattr(model, "_orig_mod"):
        raise ModelNotSupported("the model is compiled; give the model itself, before torch.compile")
    policy, rope = open_policy(settings.policy), describe_rope(model)
    if rope.depends_on_length:
        guard_rotary(model)
    folder = Path(settings.cache_dir) if settings.cache_dir is not None else default_cache_dir()
    fingerprint = fingerprint_of(model, tokenizer, source=weights, cache=folder / "digests.json").digest
    admit_once(model, rope, fingerprint, folder)
    use_graphs(model, settings.graphs)
    forgets, layout = ForgetEpochs(), KVLayout.of(model)
    with ExitStack() as opened:
        cost = PrefillCost(model, fingerprint=fingerprint, folder=folder, context=rope.context)
        store = _store(settings, cost, opened)
        loads = LoadPath(store, load_config(settings.load), cost=cost, layout=layout)
        opened.callback(loads.close)
        tree = _tree(model, settings, layout, cost, opened)
        prompts = PromptPlanner(
            model,
            tokenizer,
            rope=rope,
            store=store,
            fingerprint=fingerprint,
            encoder=settings.encoder,
            neighbours=by_namespace(settings.neighbours, settings.namespace),
            fetch=loads.fetch,
            tree=PrefixMatcher(tree, rope, layout) if tree is not None else None,
        )
        encodings = prompts.encodings(policy)
        if encodings.name == IN_PROMPT:
            recall(prompts.variants, store, fingerprint)
        if not encodings.similar and prompts.neighbours:
            raise ValueError("neighbours= are for the encoder 'similar:n'; give encoder='similar:10'")
        encoder = ChunkEncoder(model, rope, ObservedCache)
        background_encoder = BackgroundEncoder(
            encoder,
            store,
            prompts.unchanged,
            NeighbourEncoder(model, rope, encoder, store, layout),
            InPromptEncoder(model, rope),
            prompts.note_stored,
            forgets,
        )
        opened.callback(background_encoder.close)
        capture = RowCapture(
            tree,
            background_encoder,
            rope,
            prompts.unchanged,
            forgets,
            "now" if settings.cold == "now" else "background",
        )
        opened.callback(capture.close)
        shadow = Shadow(
            shadow_config(settings.shadow),
            model,
            rope,
            pad=prompts.pad,
            decode=prompts.decode,
            unchanged=prompts.unchanged,
        )
        opened.callback(shadow.close)
        budgets = Budgets(folder, fingerprint, prompts.encodings(open_policy("full")).name)
        budgets.resolve(policy, settings.namespace)  # warns now of what there is to warn of
        return EngineComponents(
            policy,
            fingerprint,
            store,
            tree,
            forgets,
            loads,
            prompts,
            background_encoder,
            capture,
            shadow,
            Generator(model, rope, prompts, shadow),
            budgets,
            opened.pop_all(),
        )


def _store(settings: EngineSettings, prefill: PrefillCost, opened: ExitStack) -> KVStore:
    """The store that was handed in, or one that is closed with the engine, with profiled costs."""
    if settings.store is not None and not isinstance(settings.store, StoreConfig):
        return settings.store
    config = settings.store or StoreConfig()
    budget = config.host_bytes or config.gpu_bytes

    def cost(kv: ChunkKV) -> float:
        return prefill.seconds(0, kv.tokens, kv.nbytes / budget)

    store = open_store(config, cost=cost if weighs_cost(config.eviction) else None)
    opened.callback(store.close)
    return store


def _tree(
    model: Any, settings: EngineSettings, layout: KVLayout, prefill: PrefillCost, opened: ExitStack
) -> KnowledgeTree | None:
    """The tree that was handed in, or one that is closed with the engine, with profiled costs."""
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

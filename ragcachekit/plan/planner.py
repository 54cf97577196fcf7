"""The planner: from a parsed prompt to a plan, and from chunks to the entries to encode."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ragcachekit.errors import PromptTooLong
from ragcachekit.model.encoding import InPromptEncoding
from ragcachekit.model.identity import ModelGuard
from ragcachekit.model.kv import PER_TOKEN, SENSITIVITY, ChunkKV, KVLayout
from ragcachekit.model.rope import Rope
from ragcachekit.plan.companions import Companions, LastPrompts, Neighbours
from ragcachekit.plan.encodings import IN_PROMPT, SHARE, Encodings, VariantPool, Wanted, is_variant
from ragcachekit.plan.link_plan import (
    COMPUTED,
    Estimator,
    LinkPlan,
    Missing,
    Piece,
    PromptRequest,
    apply_selection,
    miss_reason,
    plain_plan,
)
from ragcachekit.plan.load_planner import MEMORY_TIERS, RowCost, row_cost_of
from ragcachekit.plan.lookup import (
    TURN,
    Entry,
    Fetch,
    find_entry,
    keys_for,
    match_prefix,
    path_of,
)
from ragcachekit.policies.base import GuidedPolicy, LayerwisePolicy, PlacedChunk, SelectionPolicy
from ragcachekit.prefix_tree.knowledge_tree import KnowledgeTree
from ragcachekit.prefix_tree.nodes import Root
from ragcachekit.prompt.parser import ParsedPrompt, PromptParser
from ragcachekit.prompt.segments import TokenSegment
from ragcachekit.reports import ChunkUse, LinkReport
from ragcachekit.store.base import ForgottenTexts, KVStore
from ragcachekit.types import Ids, KVKey, whole_id

log = logging.getLogger(__name__)

MODEL_CHANGED = (
    "the model changed since this RagCache was made (weights, adapter, dtype or attention "
    "implementation); make a new RagCache around it"
)


class Planner:
    """Plans prompts, and names the entries of chunks, for one model and one store.

    ``encoder`` None is the policy's own. ``neighbours`` are sources by namespace; with ``same_source`` a
    chunk is encoded only after chunks of its own source. ``fetch`` makes the look-ups of one prompt; by
    default they read ``store``.
    """

    def __init__(
        self,
        model: Any,
        parser: PromptParser,
        *,
        rope: Rope,
        store: KVStore,
        fingerprint: str,
        encoder: str | None,
        neighbours: Mapping[str, Neighbours] | None = None,
        same_source: bool = False,
        fetch: Callable[[], Fetch] | None = None,
        tree: KnowledgeTree | None = None,
        layout: KVLayout | None = None,
    ) -> None:
        self.context, self.last_prompts = rope.context, LastPrompts()
        self.companions = Companions(neighbours or {}, parser.chunk_ids, same_source)
        budget = int(SHARE * max((record.budget for record in store.stats()), default=0))
        self.variants = VariantPool(
            budget=budget, free=lambda key: store.discard(key, damaged=False), allow=self.companions.allow
        )
        self._parser, self._rope, self._store, self._tree = parser, rope, store, tree
        self._fingerprint, self._encoder, self._layout = fingerprint, encoder, layout
        self._fetch = fetch or (lambda: Fetch(store))
        self._bos, self._joint = parser.bos(model), parser.blank_line
        self._guard = ModelGuard(model)
        self._identity = self._guard.state()

    def unchanged(self) -> bool:
        """Whether the model is still the one whose fingerprint was taken."""
        return self._guard.state() == self._identity

    def encodings(
        self, policy: SelectionPolicy, near: Callable[[Ids], Sequence[Ids]] = lambda _: ()
    ) -> Encodings:
        """Encodings for ``policy``; ``near`` returns a chunk's neighbours as token ids."""
        if policy.encoder and self._encoder not in (None, policy.encoder):
            raise ValueError(
                f"policy {policy.name} is defined over encoder {policy.encoder}, not {self._encoder}"
            )
        name = policy.encoder or self._encoder or "standalone"
        if name == IN_PROMPT and self.companions.same_source:
            raise ValueError(
                "the encoder 'in-prompt' keeps chunks as they were after any other chunks, which "
                "companions='same-source' rules out; use 'average:3' or 'system' with it"
            )
        return Encodings(name, self._rope, self._bos, near, self._joint)

    # -- prompts -----------------------------------------------------------------------------------

    def observe(self, parsed: ParsedPrompt) -> None:
        """Note the text before the first chunk as the namespace's last; ValueError without chunks."""
        if not parsed.has_chunks:
            raise ValueError(f"prompt= has no chunk: {parsed.fallback or parsed.no_chunks or 'mark them'}")
        self.last_prompts.observe(parsed.namespace, Encodings.system_of(parsed.segments))

    def prepare(self, parsed: ParsedPrompt, policy: SelectionPolicy, epoch: int = 0) -> PromptRequest:
        """Name the keys of a prompt's chunks; nothing is looked up before :meth:`look_up`.

        ``epoch`` is that of the forgets when the prompt came. Raises PromptTooLong.
        """
        namespace, segments, count = parsed.namespace, parsed.segments, len(parsed.token_ids)
        if count >= self.context:
            raise PromptTooLong(
                f"the prompt has {count} tokens, the model's context is {self.context}; "
                "retrieve fewer or shorter chunks"
            )
        if parsed.has_chunks:
            self.last_prompts.observe(namespace, Encodings.system_of(segments))
        self.companions.observe(namespace, list(parsed.texts.values()))
        notes, wanted, place = list[str](), tuple[Wanted, ...](), None
        encodings = self.encodings(policy, lambda ids: self._near(parsed.texts.get(ids), namespace, notes))
        if parsed.fallback is None and policy.reads_cache:
            wanted = tuple(encodings.wanted(segments, self._fingerprint, namespace))
            if self.companions.same_source:  # a prompt's own rows come after any chunks
                wanted = tuple(replace(want, in_place=None) for want in wanted)
            if self._tree is not None:
                regime = str(self._rope.regime(count)) if self._rope.depends_on_length else ""
                place = Root(self._fingerprint, namespace, regime), path_of(segments, wanted, namespace)
            notes += [parsed.no_chunks] if parsed.no_chunks else []
        return PromptRequest(
            segments,
            policy,
            encodings.name,
            namespace,
            wanted,
            fetch=Fetch(self._store),
            place=place,
            notes=(*parsed.notes, *notes),
            fallback=parsed.fallback,
            epoch=epoch,
            texts=parsed.texts,
        )

    def look_up(self, request: PromptRequest) -> PromptRequest:
        """Begin the look-ups of a request that was prepared; without any if the model has changed.

        Only chunks after the match in the tree are looked up in the store (FusionRAG 4.1, alternative path).
        """
        if not self.unchanged():
            return replace(request, fallback=MODEL_CHANGED)
        if not request.reads_cache:
            return request
        request = replace(request, fetch=self._fetch())
        if self._tree is None or request.place is None:
            return request
        ids = frozenset(whole_id(i) for want in request.wanted for i in (*want.before, want.key.chunk_id))
        match = match_prefix(
            self._tree, request.place, request.token_ids, request.segments, ids, self._layout
        )
        wanted = tuple(want for want in request.wanted if want.start >= match.tokens)
        return replace(request, wanted=wanted, prefix_match=match)

    def plan(self, request: PromptRequest, without: frozenset[KVKey] = frozenset()) -> LinkPlan:
        """The complete plan of a request, without those entries that could not be loaded."""
        return make_plan(request, self.variants, without)

    def estimator(self, request: PromptRequest) -> Estimator:
        """Estimates of what a request that was prepared would reuse."""
        return Estimator(request, self._store, self.variants, self._tree)

    def request_over(
        self,
        store: KVStore,
        segments: Sequence[TokenSegment],
        texts: Mapping[Ids, str],
        policy: SelectionPolicy,
        namespace: str,
    ) -> PromptRequest:
        """A tokenised prompt whose entries are in ``store`` alone; ``texts`` are its chunks' by their ids.

        Chunks that this very prompt registered would be encoded after each other in its order, which makes
        their means nearly exact here: neighbours are taken in reverse.
        """

        def near(ids: Ids) -> Sequence[Ids]:
            found = self._near(texts.get(ids), namespace, [])
            return found[::-1] if encodings.averages else found

        encodings = self.encodings(policy, near)
        wanted = tuple(encodings.wanted(segments, self._fingerprint, namespace))
        return PromptRequest(tuple(segments), policy, encodings.name, namespace, wanted, fetch=Fetch(store))

    # -- chunks ------------------------------------------------------------------------------------

    def missing(
        self,
        texts: Sequence[str],
        namespace: str,
        policy: SelectionPolicy,
        system: str | None,
        epoch: int = 0,
    ) -> list[Missing]:
        """What to encode for each text, stored or not, for work that began at ``epoch``.

        ``system`` is by default the last one used in the namespace. ValueError for an empty chunk, one longer
        than the model's context, or a ``system`` that is needed and not known.
        """
        chunks = [self._parser.chunk_ids(text) for text in texts]
        known = dict(zip(chunks, texts, strict=True))
        encodings = self.encodings(policy, lambda ids: self.companions.of(known[ids], namespace))
        before: Ids | None = ()
        if encodings.needs_system:
            before = self.last_prompts.last(namespace) if system is None else self._parser.system_ids(system)
        if before is None:
            raise ValueError(
                f"the encoder {encodings.name!r} needs system=, the text before the prompt's first chunk"
            )
        out = []
        for number, ids in enumerate(chunks):
            if not ids:
                raise ValueError(f"chunk {number} is empty; drop it before encoding")
            encoding, context = encodings.encoding(ids, before)
            width = len(encoding.before) + len(ids)
            if width > self.context:
                raise ValueError(
                    f"chunk {number} has {len(ids)} tokens, more than the model's context ({self.context}); "
                    "cut it into smaller ones"
                )
            key = encodings.key(ids, encoding, context, self._fingerprint, namespace, width)
            out.append(Missing(key, ids, encoding, epoch))
        return out

    def prefetch_keys(
        self, texts: Sequence[str], namespace: str, policy: SelectionPolicy, system: str | None
    ) -> list[KVKey]:
        """Keys that a prompt of these chunks would look up first.

        The text before them is ``system``, or the last one used in the namespace.
        """
        known = self.last_prompts.last(namespace) if system is None else self._parser.system_ids(system)
        chunks = {self._parser.chunk_ids(text): text for text in texts}
        segments = [TokenSegment(known or (), False), *(TokenSegment(ids, True) for ids in chunks)]
        encodings = self.encodings(policy, lambda ids: self._near(chunks.get(ids), namespace, []))
        wanted = encodings.wanted(segments, self._fingerprint, namespace)
        return [key for want in wanted for key in keys_for(want, self.variants)[:2]]

    def note_stored(self, key: KVKey, kv: ChunkKV) -> None:
        """Record that an entry is in the store."""
        if is_variant(key):
            self.variants.add(key, kv)
        known = self.variants.average(key)
        if known not in (None, key) and SENSITIVITY not in kv.sums and known in self._store:
            self._store.discard(
                key, damaged=False
            )  # a prompt's own rows, that came after a mean or other rows
        elif (replaced := self.variants.add_average(key)) is not None:
            self._store.discard(replaced, damaged=False)

    def recall(self, policy: SelectionPolicy) -> None:
        """Note what the store holds for chunks in other contexts, as ``policy`` would use it."""
        variants = self.encodings(policy).name == IN_PROMPT
        self.variants.recall(self._store, self._fingerprint, variants=variants)

    def forget(
        self, namespace: str, ids: frozenset[str] | None, within: ForgottenTexts | None = None
    ) -> None:
        """Forget chunks as neighbours; with None all of the namespace, including its last system text.

        The system text is forgotten, too, where ``within`` finds a text in it.
        """
        self.companions.forget(namespace, ids)
        last = self.last_prompts.last(namespace) or ()
        if ids is None or (within is not None and within.within(last)):
            self.last_prompts.forget(namespace)

    def _near(self, text: str | None, namespace: str, notes: list[str]) -> Sequence[Ids]:
        """Neighbours of a prompt's chunk; an index that fails costs the better encoding, not the answer."""
        try:
            return () if text is None else self.companions.of(text, namespace)
        except Exception as error:
            log.warning("the neighbours of a chunk could not be looked up", exc_info=True)
            notes.append(f"a chunk's neighbours could not be looked up ({error!r}): taken to have none")
            return ()


def make_plan(request: PromptRequest, variants: VariantPool, without: Collection[KVKey] = ()) -> LinkPlan:
    """Look up every cacheable segment, decide what to load, and let the policy select among cached rows.

    ``variants`` are entries to use in other contexts. Entries in ``without`` count as not found, as an
    earlier plan waited for them in vain.
    """
    if not request.reads_cache:
        return plain_plan(request)
    started_at, wanted = time.perf_counter(), request.wanted
    lost, length = frozenset(without), len(request.token_ids)
    fetch = request.fetch.without(lost)
    found = [find_entry(want, fetch, variants) if request.may_reuse(want) else None for want in wanted]
    known = sum(len(want.token_ids) for want, entry in zip(wanted, found, strict=True) if entry)
    known += request.prefix_match.tokens if request.prefix_match is not None else 0

    def use(number: int) -> RowCost:
        want, entry = wanted[number], found[number]
        assert entry is not None, "only what was found is used"
        return row_cost_of(request.policy, _placed(want, entry), entry.found.kv.layers)

    skipped = fetch.decide(found, use, length, length - known)
    plan = _laid_out(request, found, skipped)
    ms = (time.perf_counter() - started_at) * 1e3 + plan.report.load_ms
    wait = request.waited_ms + (ms if plan.report.loaded_bytes else 0.0)
    report = replace(plan.report, load_ms=ms, wait_ms=wait)
    return _selected(replace(plan, report=report, without=lost, skipped=skipped), request)


def _laid_out(request: PromptRequest, found: Sequence[Entry | None], skipped: Collection[KVKey]) -> LinkPlan:
    """The plan before any selection; what was ``found`` and ``skipped`` is computed, and not missing."""
    match, ids = request.prefix_match, request.token_ids
    parts, uses = ([], []) if match is None else (match.parts, match.uses)
    pieces = [Piece(kv.start or 0, kv) for _, kv, _ in parts]
    placed, tiers, cold = (
        [chunk for chunk, _, _ in parts],
        [tier for _, _, tier in parts],
        list[PlacedChunk](),
    )
    missing: dict[KVKey, Missing] = {}
    for want, stored in zip(request.wanted, found, strict=True):
        entry = None if stored is None or stored.key in skipped else stored
        if request.may_reuse(want) and (stored is None or (entry is not None and entry.renew)):
            item = _missing(request, want, ids, is_renewed=entry is not None)
            missing[item.key] = item
        if entry is None:
            chunk, tier = PlacedChunk(want.key.chunk_id, want.start, len(want.token_ids), False), COMPUTED
            cold.append(chunk)
        else:
            chunk, tier = _placed(want, entry), entry.found.tier
            placed.append(chunk)
            tiers.append(tier)
            keep = None if entry.want is None else len(want.token_ids)
            pieces.append(Piece(want.start, entry.found.kv, keep, entry.first))
        uses.append(ChunkUse(whole_id(chunk.chunk_id), chunk.tokens, tier, exact=chunk.is_exact))
    slow = {
        id(piece.kv): piece.kv.nbytes
        for piece, tier in zip(pieces, tiers, strict=True)
        if tier.removeprefix("tree:") not in (*MEMORY_TIERS, TURN)
    }
    first = next((segment for segment in request.segments if segment.token_ids), None)
    begins_with_text = first is not None and not first.is_chunk and uses and uses[0].source != TURN
    report = LinkReport(
        request.label or request.policy.name,
        request.encoder,
        request.namespace,
        prompt_tokens=len(ids),
        chunks=tuple(uses[bool(begins_with_text) :]),
        prefix=uses[0] if begins_with_text else None,
        load_ms=match.ms if match is not None else 0.0,
        loaded_bytes=sum(slow.values()),
        tree_tokens=match.match.tokens if match is not None else 0,
        notes=request.notes,
        miss_reason=miss_reason(request),
    )
    todo = tuple(missing.values())
    return LinkPlan(ids, tuple(pieces), (), todo, report, tuple(placed), cold=tuple(cold), request=request)


def _missing(request: PromptRequest, want: Wanted, ids: Ids, *, is_renewed: bool) -> Missing:
    item, key = want.to_encode, want.in_place
    if key is None or is_renewed:  # rows made here of all chunks would take memory for nothing
        return Missing(item.key, item.token_ids, item.encoding, request.epoch)
    lengths = tuple(len(segment.token_ids) for segment in request.segments if segment.token_ids)
    encoding = InPromptEncoding(key.encoding, ids[: want.start], segments=lengths[: len(want.before)])
    return Missing(key, want.token_ids, encoding, request.epoch)


def _placed(want: Wanted, entry: Entry) -> PlacedChunk:
    kv, served, sums = entry.found.kv, want, entry.found.kv.sums
    if entry.want is not None:
        served, rows = entry.want, slice(entry.first, entry.first + len(want.token_ids))
        sums = {name: t[..., rows] if name in PER_TOKEN else t for name, t in sums.items()}
    return PlacedChunk(
        want.key.chunk_id,
        want.start,
        len(want.token_ids),
        served.exact and entry.key == served.key and not kv.quantised,
        attended=sums.get("attended"),
        before=want.before,
        context=entry.key.context,
        sums=sums,
    )


def _selected(plan: LinkPlan, request: PromptRequest) -> LinkPlan:
    """The plan with its rows, and with the policy if that selects during the forward."""
    length, policy, at, end = len(plan.token_ids), request.policy, 0, 0
    for segment in request.segments:
        at += len(segment.token_ids)
        end = at if segment.is_chunk else end
    # A past turn may hold the start of the question: those rows do not run again.
    question = tuple(range(max([end, *(piece.stop for piece in plan.pieces)]), length)) or (length - 1,)
    if isinstance(policy, GuidedPolicy) and any(not chunk.is_exact for chunk in plan.placed):
        return replace(apply_selection(plan, ()), policy=policy, question=question)
    chosen = policy.select(plan.placed)
    selected = apply_selection(plan, chosen)
    if not (isinstance(policy, LayerwisePolicy) and chosen):
        return selected
    return replace(selected, policy=policy, question=question)

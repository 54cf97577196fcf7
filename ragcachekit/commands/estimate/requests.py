"""What every question of a log retrieves, the prompt made of it, and the entries that the prompt uses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from langchain_core.messages import convert_to_openai_messages
from numpy.typing import NDArray

from ragcachekit.commands.ask import CAPACITY
from ragcachekit.commands.corpus import Corpus
from ragcachekit.commands.estimate.log import LoggedQuery
from ragcachekit.commands.reading_prompt import SEPARATOR, prompt_for
from ragcachekit.engine.prompt_planner import PromptPlanner
from ragcachekit.engine.prompt_segmenter import PromptLike
from ragcachekit.errors import PromptTooLong
from ragcachekit.model.rope.rotation import Rope
from ragcachekit.plan.link_plan import LinkPlan, Missing
from ragcachekit.policies.base import PlacedChunk, SelectionPolicy
from ragcachekit.query.proximity import ProximityCache
from ragcachekit.query.retrieval import CachedRetrieval
from ragcachekit.store.null import NullStore
from ragcachekit.types import ENCODING_PREFIX, KVKey

TOLERANCES = (0.0, 0.02, 0.05, 0.1)
"""Cosine distances at which query cache hits are counted."""

_NAMESPACE = "estimate"
_NAME = re.compile(r"\S+#\d+")

Texts = tuple[str, ...]


@dataclass(frozen=True)
class Retrievals:
    """Texts for every question, in the order of the prompt, and query cache hits by tolerance."""

    texts: tuple[Texts, ...]
    near: dict[float, int]


def retrieve(
    log: Sequence[LoggedQuery],
    corpus: Corpus,
    vectors: NDArray[Any],
    search: Callable[[NDArray[Any]], Texts],
    tolerance: float,
) -> Retrievals:
    """Search for every question through a query cache, unless its line names the documents.

    ``vectors`` are the questions' embeddings, in the order of the log.

    Raises ValueError for a ``file#number`` that the corpus does not have.
    """
    names = {f"{chunk.source}#{chunk.number}": chunk.text for chunk in corpus.chunks}
    caches = {t: CachedRetrieval[str](ProximityCache(CAPACITY, t)) for t in {*TOLERANCES, tolerance}}
    texts: list[Texts] = []
    known: dict[str, Texts] = {}
    for query, vector in zip(log, vectors, strict=True):
        if query.docs is not None:
            found = tuple(_text(query, doc, names) for doc in query.docs)
        else:
            if query.query not in known:
                known[query.query] = search(vector)
            found = known[query.query]
        pairs = [(text, text) for text in found]
        results = {t: cache.get(vector, _NAMESPACE, partial(list, pairs)) for t, cache in caches.items()}
        texts.append(results[tolerance].documents if query.docs is None else found)
    return Retrievals(tuple(texts), {t: caches[t].stats().hits for t in sorted(caches)})


def _text(query: LoggedQuery, doc: str, names: dict[str, str]) -> str:
    if doc in names:
        return names[doc]
    if _NAME.fullmatch(doc):
        raise ValueError(
            f"line {query.line} of the log: the corpus has no chunk {doc}; numbers count a file's chunks "
            "from 0, as `ask` names its sources, and depend on --chunk-tokens"
        )
    return doc


@dataclass(frozen=True, eq=False)
class Use:
    """One entry of one prompt, its place there, and the bytes of its KV."""

    key: KVKey
    chunk: PlacedChunk
    nbytes: int

    @property
    def is_prefix(self) -> bool:
        """Whether it is the text before the first chunk."""
        return self.key.encoding.partition("@")[0] == ENCODING_PREFIX


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt as the engine plans it; ``fallback`` is the reason for a full prefill."""

    tokens: int
    uses: tuple[Use, ...]
    fallback: str | None

    @property
    def chunks(self) -> list[Use]:
        """The uses that are chunks."""
        return [use for use in self.uses if not use.is_prefix]


class Requests:
    """Builds prompts as ``ask`` does and plans them as the engine does, over an empty store."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        rope: Rope,
        policy: SelectionPolicy,
        encoder: str | None,
        token_bytes: int,
    ) -> None:
        self._policy, self._token_bytes = policy, token_bytes
        self._prompt = prompt_for(tokenizer)
        self._planner = PromptPlanner(
            model, tokenizer, rope=rope, store=NullStore(), fingerprint=_NAMESPACE, encoder=encoder
        )
        self._planner.encodings(policy)  # refuses an encoder that does not fit the policy
        self._known: dict[tuple[str, Texts], Request] = {}

    def request(self, query: LoggedQuery, texts: Texts) -> Request:
        """The prompt of a question over retrieved texts; ValueError if it exceeds the model's context."""
        at = (query.query, texts)
        if at not in self._known:
            self._planner.registry.add(_NAMESPACE, texts)
            messages = self._messages(query.query, texts)
            try:
                plan = self._planner.plan(self._planner.request(messages, _NAMESPACE, self._policy))
            except PromptTooLong as error:
                raise ValueError(f"line {query.line} of the log: {error}") from error
            self._known[at] = Request(len(plan.token_ids), tuple(self._uses(plan)), plan.report.fallback)
        return self._known[at]

    def precomputed(self, texts: Sequence[str]) -> list[Missing]:
        """What ``precompute`` encodes of these texts."""
        return self._planner.missing(texts, _NAMESPACE, self._policy, self._prompt.before)

    def _messages(self, query: str, texts: Texts) -> PromptLike:
        value = self._prompt.template.format_prompt(context=SEPARATOR.join(texts), input=query)
        if not self._prompt.chat:
            return value.to_string()
        messages = convert_to_openai_messages(value.to_messages())
        return messages if isinstance(messages, list) else [messages]

    def _uses(self, plan: LinkPlan) -> Iterator[Use]:
        """What the plan misses: over an empty store, all that the prompt could use."""
        items = {item.key.chunk_id: item for item in plan.missing}
        at = 0
        for segment in plan.report.uses:
            if segment.chunk_id not in items:
                continue
            item = items[segment.chunk_id]
            tokens = len(item.token_ids)
            while plan.token_ids[at : at + tokens] != item.token_ids:
                at += 1
            is_exact = at == 0 or (item.encoding.name == "system" and len(item.encoding.behind) == at)
            chunk = PlacedChunk(segment.chunk_id, at, tokens, is_exact)
            yield Use(item.key, chunk, tokens * self._token_bytes)
            at += tokens

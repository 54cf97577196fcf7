"""From a log and a corpus to prompts: what was retrieved, and the entries that each prompt would use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import convert_to_openai_messages

from ragcachekit.bench.estimate_log import LoggedQuery
from ragcachekit.bench.estimate_phantom import PhantomEncoder
from ragcachekit.bench.reading_prompt import prompt_for
from ragcachekit.bench.world import SEPARATOR
from ragcachekit.errors import PromptTooLong
from ragcachekit.link.base import PlacedChunk, SelectionPolicy
from ragcachekit.link.planned import LinkPlan, Missing
from ragcachekit.model.kv import ChunkKV
from ragcachekit.model.rope import Rope
from ragcachekit.prepare import Preparer
from ragcachekit.segmenting import PromptLike
from ragcachekit.store.base import Found, LayerSource, StoreStats
from ragcachekit.types import ENCODING_PREFIX, KVKey

_SPACE = "estimate"


@dataclass(frozen=True, eq=False)
class Use:
    """One entry of one prompt.

    Attributes
    ----------
    item : Missing
        What would be encoded, and the key to keep it under.
    chunk : PlacedChunk
        Where it stands.
    kv : ChunkKV
        Without content.
    """

    item: Missing
    chunk: PlacedChunk
    kv: ChunkKV

    @property
    def prefix(self) -> bool:
        """Whether it is the text before the first chunk, not a chunk."""
        return self.item.key.encoding.partition("@")[0] == ENCODING_PREFIX


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt, as the engine would see it.

    Attributes
    ----------
    tokens : int
        Of the whole prompt.
    uses : tuple of Use
        In order.
    fallback : str or None
        Why the engine would prefill it in full, where it would.
    """

    tokens: int
    uses: tuple[Use, ...]
    fallback: str | None

    @property
    def chunks(self) -> tuple[Use, ...]:
        """The uses that are chunks."""
        return tuple(use for use in self.uses if not use.prefix)

    @property
    def nbytes(self) -> int:
        """KV of all that it uses."""
        return sum({use.item.key: use.kv.nbytes for use in self.uses}.values())


class Requests:
    """Builds prompts as ``ask`` does and plans them as the engine does, against KV without content.

    Parameters
    ----------
    model, tokenizer
    rope : Rope
    policy : SelectionPolicy
    encoder : str or None
    """

    def __init__(
        self, model: Any, tokenizer: Any, rope: Rope, policy: SelectionPolicy, encoder: str | None
    ) -> None:
        self.encoder = PhantomEncoder(model, rope)
        self._store = _Shelf()
        self._policy = policy
        self._prompt = prompt_for(tokenizer)
        self._preparer = Preparer(
            model, tokenizer, rope=rope, store=self._store, fingerprint=_SPACE, encoder=encoder
        )
        self._preparer.encodings(policy)  # refuses what does not fit together
        self._items: dict[KVKey, Missing] = {}
        self._known: dict[tuple[str, tuple[str, ...]], Request] = {}

    def request(self, query: str, texts: Sequence[str]) -> Request:
        """The prompt of a question over retrieved texts.

        Raises
        ------
        PromptTooLong
        """
        at = (query, tuple(texts))
        if at not in self._known:
            self._preparer.registry.add(_SPACE, texts)
            self._known[at] = self._planned(self._messages(query, texts))
        return self._known[at]

    def ahead(self, texts: Sequence[str]) -> list[Missing]:
        """What ``precompute`` would encode of these texts, stored already or not."""
        return self._preparer.missing(texts, _SPACE, self._policy, self._prompt.before)

    def _messages(self, query: str, texts: Sequence[str]) -> PromptLike:
        value = self._prompt.template.format_prompt(context=SEPARATOR.join(texts), input=query)
        if not self._prompt.chat:
            return value.to_string()
        messages = convert_to_openai_messages(value.to_messages())
        return messages if isinstance(messages, list) else [messages]

    def _planned(self, prompt: PromptLike) -> Request:
        """Planned twice: with what is missing, and once that is there, so that every chunk is placed."""
        for item in self._plan(prompt).missing:
            self._items[item.key] = item
            self._store.put(item.key, self.encoder.kv(item.encoding, len(item.token_ids)))
        self._store.asked.clear()
        plan = self._plan(prompt)
        return Request(len(plan.token_ids), tuple(self._uses(plan)), plan.report.fallback)

    def _plan(self, prompt: PromptLike) -> LinkPlan:
        return self._preparer.plan(self._preparer.request(prompt, _SPACE, self._policy))

    def _uses(self, plan: LinkPlan) -> Iterator[Use]:
        keys = {key.chunk_id: key for key in self._store.asked}
        for chunk in plan.placed:
            item = self._items[keys[chunk.chunk_id]]
            yield Use(item, chunk, self.encoder.kv(item.encoding, len(item.token_ids)))


class _Shelf:
    """Holds everything, and notes who was asked for."""

    def __init__(self) -> None:
        self.asked: list[KVKey] = []
        self._entries: dict[KVKey, ChunkKV] = {}

    def get(self, key: KVKey, worth: float = 1.0) -> Found | None:
        self.asked.append(key)
        kv = self._entries.get(key)
        return Found(kv, "host") if kv is not None else None

    def open(self, key: KVKey, worth: float = 1.0) -> Found | LayerSource | None:
        return self.get(key)

    def put(self, key: KVKey, kv: ChunkKV) -> bool:
        self._entries[key] = kv
        return True

    def __contains__(self, key: KVKey) -> bool:
        return key in self._entries

    def discard(self, key: KVKey) -> None:
        pass

    def forget(self, namespace: str, chunk_ids: frozenset[str] | None = None) -> int:
        return 0

    def stats(self) -> tuple[StoreStats, ...]:
        return ()

    def close(self) -> None:
        pass


def plan_all(
    requests: Requests,
    log: Sequence[LoggedQuery],
    texts: Sequence[Sequence[str]],
    done: Callable[[], object] = lambda: None,
) -> tuple[Request, ...]:
    """One prompt per line of the log.

    Raises
    ------
    ValueError
        Naming the line, if a prompt does not fit into the model's context.
    """
    out = []
    for query, documents in zip(log, texts, strict=True):
        try:
            out.append(requests.request(query.query, documents))
        except PromptTooLong as error:
            raise ValueError(f"line {query.line} of the log: {error}") from error
        done()
    return tuple(out)

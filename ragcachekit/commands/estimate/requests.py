"""The prompts of a log, and the entries that each of them would use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import convert_to_openai_messages

from ragcachekit.commands.estimate.log import LoggedQuery
from ragcachekit.commands.reading_prompt import SEPARATOR, prompt_for
from ragcachekit.engine.prompt_planner import PromptPlanner
from ragcachekit.engine.prompt_segmenter import PromptLike
from ragcachekit.errors import PromptTooLong
from ragcachekit.model.encoding import Encoding
from ragcachekit.model.rope.rotation import Rope
from ragcachekit.plan.link_plan import LinkPlan, Missing
from ragcachekit.policies.base import PlacedChunk, SelectionPolicy
from ragcachekit.store.null import NullStore
from ragcachekit.types import ENCODING_PREFIX, KVKey

_NAMESPACE = "estimate"


@dataclass(frozen=True, eq=False)
class Use:
    """One entry of one prompt: its key and encoding, its place, and the bytes of its KV."""

    key: KVKey
    encoding: Encoding
    chunk: PlacedChunk
    nbytes: int

    @property
    def prefix(self) -> bool:
        """Whether it is the text before the first chunk, not a chunk."""
        return self.encoding.name == ENCODING_PREFIX


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt, as the engine would see it; ``fallback`` says why it would prefill it in full."""

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
        return sum({use.key: use.nbytes for use in self.uses}.values())


class Requests:
    """Builds prompts as ``ask`` does and plans them as the engine does, over an empty store.

    Parameters
    ----------
    model, tokenizer
    rope : Rope
    policy : SelectionPolicy
    encoder : str or None
    token_bytes : int
        KV of one token.
    """

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
        self._preparer = PromptPlanner(
            model, tokenizer, rope=rope, store=NullStore(), fingerprint=_NAMESPACE, encoder=encoder
        )
        self._preparer.encodings(policy)  # refuses what does not fit together
        self._known: dict[tuple[str, tuple[str, ...]], Request] = {}

    def request(self, query: str, texts: Sequence[str]) -> Request:
        """The prompt of a question over retrieved texts; PromptTooLong as the engine."""
        at = (query, tuple(texts))
        if at not in self._known:
            self._preparer.registry.add(_NAMESPACE, texts)
            plan = self._preparer.plan(
                self._preparer.request(self._messages(query, texts), _NAMESPACE, self._policy)
            )
            self._known[at] = Request(len(plan.token_ids), tuple(self._uses(plan)), plan.report.fallback)
        return self._known[at]

    def ahead(self, texts: Sequence[str]) -> list[Missing]:
        """What ``precompute`` would encode of these texts."""
        return self._preparer.missing(texts, _NAMESPACE, self._policy, self._prompt.before)

    def _messages(self, query: str, texts: Sequence[str]) -> PromptLike:
        value = self._prompt.template.format_prompt(context=SEPARATOR.join(texts), input=query)
        if not self._prompt.chat:
            return value.to_string()
        messages = convert_to_openai_messages(value.to_messages())
        return messages if isinstance(messages, list) else [messages]

    def _uses(self, plan: LinkPlan) -> Iterator[Use]:
        """All that would be stored for the next prompt is what this one would have used."""
        items = {item.key.chunk_id: item for item in plan.missing}
        at = 0
        for segment in plan.report.uses:
            if segment.chunk_id not in items:
                continue
            item = items[segment.chunk_id]
            tokens, behind = len(item.token_ids), len(item.encoding.behind)
            while plan.token_ids[at : at + tokens] != item.token_ids:
                at += 1
            exact = at == 0 or (item.encoding.name == "system" and behind == at)
            chunk = PlacedChunk(segment.chunk_id, at, tokens, exact)
            yield Use(item.key, item.encoding, chunk, tokens * self._token_bytes)
            at += tokens


def plan_all(
    requests: Requests,
    log: Sequence[LoggedQuery],
    texts: Sequence[Sequence[str]],
    done: Callable[[], object] = lambda: None,
) -> tuple[Request, ...]:
    """One prompt per line of the log; ValueError naming the line if one is longer than the context."""
    out = []
    for query, documents in zip(log, texts, strict=True):
        try:
            out.append(requests.request(query.query, documents))
        except PromptTooLong as error:
            raise ValueError(f"line {query.line} of the log: {error}") from error
        done()
    return tuple(out)

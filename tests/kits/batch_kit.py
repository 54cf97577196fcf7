"""Requests of a RagCache in a BatchDecoder, with what the engine does around it left out."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ragcachekit import Prompt, RagCache
from ragcachekit.generate.batch import BatchDecoder, Decoding
from ragcachekit.plan.link_plan import LinkPlan


def decoder_for(rag: RagCache, **limits: Any) -> BatchDecoder:
    limits = {"max_batch": 16, "max_bytes": 1 << 30, "decode": rag.components.parser.decode, **limits}
    return BatchDecoder(rag.model, rag.components.rope, **limits)


def plan_for(rag: RagCache, prompt: Prompt, policy: str | None = None) -> LinkPlan:
    return rag.plan(rag.prepare(prompt, policy=policy))


def begin(decoder: BatchDecoder, rag: RagCache, prompt: Prompt, **asked: Any) -> Decoding:
    """Begin a greedy request; ``policy``, ``stop``, ``cancel``, and options."""
    plan = plan_for(rag, prompt, asked.pop("policy", None))
    named = {name: asked.pop(name) for name in ("stop", "cancel", "capture_missing_rows") if name in asked}
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, **asked}
    assert decoder.why_alone(options) is None
    return decoder.begin(plan, options, **named)


def finish(decoder: BatchDecoder) -> None:
    while decoder.active:
        decoder.step()


def held(decoder: BatchDecoder) -> int:
    """Bytes of the storages that hold KV of the active requests, each counted once."""
    parts = [part for one in decoder.active if one.kv is not None for _, _, part in one.kv.parts]
    storages = [side.untyped_storage() for part in parts for side in (*part.keys, *part.values)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@dataclass
class Asked:
    """A request, with what it should get: ``dropped`` is after how many steps it is given up."""

    prompt: Prompt
    options: dict[str, Any]
    expected: tuple[int, ...]
    dropped: int | None = None
    decoding: Decoding | None = None

    @property
    def is_answered(self) -> bool:
        assert self.decoding is not None
        got = self.decoding.generated().token_ids
        if self.decoding.cancelled:
            return len(got) > 0 and got == self.expected[: len(got)]
        return got == self.expected


def serve(decoder: BatchDecoder, rag: RagCache, asked: Sequence[Asked], seed: int) -> int:
    """Let requests arrive at random and drop some; returns the size of the largest batch."""
    draw, waiting, largest = random.Random(seed), list(asked), 0
    while waiting or decoder.active:
        while waiting and draw.random() < 0.7:
            one = waiting[0]
            length = sum(len(part.token_ids or ()) for part in one.prompt.segments)
            if not decoder.has_room(length + one.options["max_new_tokens"]):
                break
            waiting.pop(0)
            one.decoding = begin(decoder, rag, one.prompt, **one.options)
        largest = max(largest, len(decoder.active))
        before = set(decoder.active)
        ended = decoder.step()
        assert before == {*ended, *decoder.active}
        assert all(decoding.finished for decoding in ended)
        for one in asked:
            if one.dropped and one.decoding and len(one.decoding.token_ids) > one.dropped:
                decoder.drop(one.decoding)
    return largest

"""Responses in OpenAI's form, whole or in pieces, with the tokens' log probabilities."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from uuid import uuid4

import torch
from transformers import LogitsProcessor

from ragcachekit import Answer, ToolCallReader
from ragcachekit.generate.tool_calls import ToolCall
from ragcachekit.server.errors import ApiError, stopping

CACHE_HEADER = "x-ragcachekit-cache"


class Logprobs(LogitsProcessor):  # type: ignore[misc]
    """Records distributions as the model gives them, before temperature and the cuts of sampling.

    A token's entry is complete when the next one is chosen, the last one's at the end.
    """

    def __init__(self, top: int, tokenizer: Any) -> None:
        self._top, self._tokenizer = top, tokenizer
        self._last: torch.Tensor | None = None
        self._taken = 0
        self.entries: list[dict[str, Any]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._complete(int(input_ids[0, -1]))
        self._last = scores[0].float().log_softmax(-1)
        return scores

    def take(self) -> list[dict[str, Any]]:
        """The entries since the last call, as in chat completions."""
        entries = self.entries[self._taken :]
        self._taken += len(entries)
        return entries

    def end(self, token_ids: Sequence[int], text: str) -> None:
        """Complete the last token's entry; drop those after ``text``, of an end token or a stop string."""
        if token_ids:
            self._complete(token_ids[-1])
        count = len(token_ids)
        while count and len(self._decode(token_ids[: count - 1], skip_special_tokens=True)) >= len(text):
            count -= 1
        del self.entries[max(count, self._taken) :]

    def _decode(self, ids: Sequence[int], **options: bool) -> str:
        return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False, **options))

    def _complete(self, token: int) -> None:
        if self._last is None:
            return
        values, ids = self._last.topk(min(self._top, len(self._last)))
        top = zip(ids.tolist(), values.tolist(), strict=True)
        entry = _entry(self._decode([token]), float(self._last[token]))
        entry["top_logprobs"] = [_entry(self._decode([one]), value) for one, value in top]
        self._last = None
        self.entries.append(entry)


class Penalties(LogitsProcessor):  # type: ignore[misc]
    """OpenAI's: a token loses ``frequency`` each time it was generated, ``presence`` once; for one answer."""

    def __init__(self, frequency: float, presence: float) -> None:
        self._frequency, self._presence = frequency, presence
        self._prompt: int | None = None  # tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._prompt is None:
            self._prompt = input_ids.shape[1]
        new, given = input_ids[0, self._prompt :], scores
        scores = given.clone()
        scores[0, new] = given[0, new] - self._presence
        scores[0].index_add_(0, new, given.new_full(new.shape, -self._frequency))
        return scores


def _entry(token: str, logprob: float) -> dict[str, Any]:
    whole = "\ufffd" not in token  # else a part of a character, whose bytes are unknown
    logprob = max(logprob, -9999.0)
    return {"token": token, "logprob": logprob, "bytes": list(token.encode()) if whole else None}


@dataclass(frozen=True)
class Form:
    """The form of one response: that of chat or of text completions."""

    chat: bool
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: uuid4().hex)
    heartbeat: ClassVar[bytes] = b": heartbeat\n\n"
    done: ClassVar[bytes] = b"data: [DONE]\n\n"

    def choice(self, index: int, tools: Sequence[dict[str, Any]], parallel: bool) -> Choice:
        """One answer in this form."""
        return Choice(self, index, tools, parallel)

    def whole(self, choices: list[dict[str, Any]], prompts: Sequence[Sequence[Answer]]) -> dict[str, Any]:
        """A response that is not streamed."""
        return self.body(choices, usage_of(prompts))

    def line(self, event: dict[str, Any]) -> bytes:
        """An event of a stream as it is sent."""
        return b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"

    def usage_events(self, prompts: Sequence[Sequence[Answer]], wanted: bool) -> list[dict[str, Any]]:
        """The events after all answers; ``wanted``: the request asks for its usage."""
        return [self.body([], usage_of(prompts), chunk=True)] if wanted else []

    def error(self, error: ApiError) -> dict[str, Any]:
        """The last event of a stream that failed."""
        return error.body()

    def body(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None, *, chunk: bool = False
    ) -> dict[str, Any]:
        """A whole response, or with ``chunk`` an event of a stream."""
        kind, id = "text_completion", f"cmpl-{self.id}"
        if self.chat:
            kind, id = "chat.completion.chunk" if chunk else "chat.completion", f"chatcmpl-{self.id}"
        body = {"id": id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        return body if usage is None else {**body, "usage": usage}


@dataclass(frozen=True)
class OneAnswerForm(Form):
    """The form of a response that is its one choice, in events under their types' names, with its usage."""

    done: ClassVar[bytes] = b""

    def whole(self, choices: list[dict[str, Any]], prompts: Sequence[Sequence[Answer]]) -> dict[str, Any]:
        return choices[0]

    def line(self, event: dict[str, Any]) -> bytes:
        return f"event: {event['type']}\n".encode() + super().line(event)

    def usage_events(self, prompts: Sequence[Sequence[Answer]], wanted: bool) -> list[dict[str, Any]]:
        return []


class Choice:
    """One answer of a response: its text, calls and log probabilities."""

    def __init__(self, form: Form, index: int, tools: Sequence[dict[str, Any]], parallel: bool) -> None:
        self._form, self.index, self._parallel = form, index, parallel
        self._reader = ToolCallReader(tools)
        self.logprobs: Logprobs | None = None

    def start(self, tokens: int) -> list[dict[str, Any]]:
        """The first event of a streamed chat answer to a prompt of so many tokens."""
        return [self._event({"role": "assistant", "content": ""})] if self._form.chat else []

    def push(self, text: str) -> list[dict[str, Any]]:
        """The event of a new piece of text, unless it may belong to a tool call."""
        text = self._reader.push(text)
        return [self._event({"content": text})] if text else []

    def end(self, answer: Answer) -> list[dict[str, Any]]:
        """The last events of a stream: what is left, and why it ended."""
        text, calls, reason = self._rest(answer)
        events = [self._event({"content": text})] if text else []
        if calls:
            events.append(self._event({"tool_calls": [{"index": n, **c} for n, c in enumerate(calls)]}))
        return [*events, self._event({}, reason)]

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The choice of a response that is not streamed."""
        text, calls, reason = self._rest(answer)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        return self._shown({"message": message} if self._form.chat else {"text": text}, reason)

    def _rest(self, answer: Answer) -> tuple[str, list[dict[str, Any]], str]:
        reason = answer.report.finish_reason
        if reason == "cancelled":  # by the engine: a client that went away gets no answer
            raise stopping()
        if self.logprobs is not None:
            self.logprobs.end(answer.token_ids, answer.text)
        text = self._reader.rest(answer.text)
        text += "".join(call.text for call in self._reader.invalid)
        calls = self._reader.calls if self._parallel else self._reader.calls[:1]
        return text, [_called(call) for call in calls], "tool_calls" if calls else reason

    def _event(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        shown = {"delta": delta} if self._form.chat else {"text": delta.get("content", "")}
        return self._form.body([self._shown(shown, reason)], chunk=True)

    def _shown(self, shown: dict[str, Any], reason: str | None) -> dict[str, Any]:
        entries = self.logprobs.take() if self.logprobs is not None else []
        logprobs = {"content": entries, "refusal": None} if entries else None
        return {"index": self.index, **shown, "finish_reason": reason, "logprobs": logprobs}


def usage_of(prompts: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    """Token counts of the answers to each prompt; a prompt counts once, as its first answer found it."""
    links = [answers[0].report.link for answers in prompts]
    first = prompts[0][0].report
    prompt_tokens = sum(link.prompt_tokens for link in links)
    output = sum(answer.report.output_tokens for answers in prompts for answer in answers)
    ours = {
        name: sum(getattr(link, name) for link in links)
        for name in ("exact_tokens", "approximate_tokens", "recomputed_tokens", "computed_tokens")
    }
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output,
        "total_tokens": prompt_tokens + output,
        "prompt_tokens_details": {
            "cached_tokens": sum(link.reused_tokens for link in links),
            "cache_write_tokens": sum(link.written_tokens for link in links),
        },
        "ragcachekit": {
            **ours,
            "miss_reason": links[0].miss_reason or None,
            "ttft_ms": first.ttft_ms,
            "queue_ms": first.queue_ms,
        },
    }


def cache_header(prompts: Sequence[Sequence[Answer]]) -> dict[str, str]:
    """What the first prompt reused, or why nothing, as a response header."""
    link = prompts[0][0].report.link
    if link.reused_tokens:
        return {CACHE_HEADER: f"hit; tokens={link.reused_tokens}"}
    reason = link.miss_reason.replace('"', "'").encode("ascii", "replace").decode()
    return {CACHE_HEADER: f'miss; reason="{" ".join(reason.split())}"'}


def _called(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}
    return {"id": call.id, "type": "function", "function": function}

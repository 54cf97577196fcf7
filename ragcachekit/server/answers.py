"""Responses in OpenAI's form, whole or in pieces, with the tokens' log probabilities."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import chain, count
from typing import Any
from uuid import uuid4

import torch
from transformers import LogitsProcessor

from ragcachekit import Answer, ToolCallReader
from ragcachekit.generate.tool_calls import ToolCall
from ragcachekit.server.errors import stopping

CACHE_HEADER = "x-ragcachekit-cache"

Event = dict[str, Any]
"""Of a stream, or a part of a response."""

Prompts = Sequence[Sequence[Answer]]
"""The answers to each prompt."""


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


class Choice:
    """One answer of a response: its text, its tool calls, and its tokens' log probabilities."""

    def __init__(self, index: int, tools: Sequence[dict[str, Any]], parallel: bool) -> None:
        self.index, self._reader, self._most = index, ToolCallReader(tools), None if parallel else 1
        self.called = 0  # calls that were given
        self.logprobs: Logprobs | None = None

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """What a new piece completes: text that is no part of a call, and calls."""
        return self._reader.push(text), self._calls()

    def end(self, answer: Answer) -> tuple[str, list[ToolCall], str]:
        """The text and calls that are left, and why the answer ended."""
        reason = answer.report.finish_reason
        if reason == "cancelled":  # by the engine: a client that went away gets no answer
            raise stopping()
        if self.logprobs is not None:
            self.logprobs.end(answer.token_ids, answer.text)
        text = self._reader.rest(answer.text)
        text += "".join(call.text for call in self._reader.invalid)
        return text, self._calls(), "tool_calls" if self.called else reason

    def _calls(self) -> list[ToolCall]:
        calls = self._reader.calls[: self._most][self.called :]
        self.called += len(calls)
        return calls


class Form:
    """The form of one response, of its events if it is streamed: here OpenAI's, of chats and of texts.

    Without ``done`` after them, an answer's last event ends the stream, and has its usage.
    """

    heartbeat, done = b": heartbeat\n\n", b"data: [DONE]\n\n"

    def __init__(self, model: str, chat: bool = True) -> None:
        self.model, self._chat, self.created, self.id = model, chat, int(time.time()), uuid4().hex

    def line(self, event: Event) -> bytes:
        """An event of a stream as it is sent, under its type's name."""
        name = f"event: {event['type']}\n" if "type" in event else ""
        return f"{name}data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()

    def start(self, choice: Choice, tokens: int) -> list[Event]:
        """The first events of an answer to a prompt of so many tokens."""
        return [self._event(choice, {"role": "assistant", "content": ""})] if self._chat else []

    def push(self, choice: Choice, text: str, calls: Sequence[ToolCall]) -> list[Event]:
        """The events of new text and of new calls."""
        first = choice.called - len(calls)
        deltas: list[Event] = [{"content": text}] if text else []
        deltas += [{"tool_calls": [{"index": n, **_called(call)}]} for n, call in enumerate(calls, first)]
        return [self._event(choice, delta) for delta in deltas]

    def end(self, choice: Choice, answer: Answer, reason: str) -> list[Event]:
        """The last events of an answer, after all of its text and calls."""
        return [self._event(choice, {}, reason)]

    def usage(self, prompts: Prompts) -> Event:
        """The event after all answers if the request asks for its usage."""
        return self._body([], usage_of(prompts), chunk=True)

    def whole(self, choices: Sequence[Choice], prompts: Prompts) -> Event:
        """A response that is not streamed."""
        shown = map(self._whole, choices, chain.from_iterable(prompts))
        return self._body(list(shown), usage_of(prompts))

    def _whole(self, choice: Choice, answer: Answer) -> Event:
        text, calls, reason = choice.end(answer)
        message: Event = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": list(map(_called, calls))}
        return self._shown(choice, {"message": message} if self._chat else {"text": text}, reason)

    def _event(self, choice: Choice, delta: Event, reason: str | None = None) -> Event:
        shown = {"delta": delta} if self._chat else {"text": delta.get("content", "")}
        return self._body([self._shown(choice, shown, reason)], chunk=True)

    def _shown(self, choice: Choice, shown: Event, reason: str | None) -> Event:
        entries = choice.logprobs.take() if choice.logprobs is not None else []
        logprobs = {"content": entries, "refusal": None} if entries else None
        return {"index": choice.index, **shown, "finish_reason": reason, "logprobs": logprobs}

    def _body(self, choices: list[Event], usage: Event | None = None, chunk: bool = False) -> Event:
        kind, id = "text_completion", f"cmpl-{self.id}"
        if self._chat:
            kind, id = "chat.completion.chunk" if chunk else "chat.completion", f"chatcmpl-{self.id}"
        body = {"id": id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        return body if usage is None else {**body, "usage": usage}


class ResponseForm(Form):
    """``/v1/responses``: a response is one message of text, and its events are numbered."""

    done = b""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._numbers, self._text = count(), ""
        self._item_id = f"msg_{self.id}"
        self._place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def line(self, event: Event) -> bytes:
        event = {**event["error"], "type": "error"} if "error" in event else event
        return super().line({**event, "sequence_number": next(self._numbers)})

    def start(self, choice: Choice, tokens: int) -> list[Event]:
        response = self._response("in_progress", [])
        return [
            {"type": "response.created", "response": response},
            {"type": "response.in_progress", "response": response},
            {"type": "response.output_item.added", "output_index": 0, "item": self._item("in_progress", [])},
            {"type": "response.content_part.added", **self._place, "part": _part("")},
        ]

    def push(self, choice: Choice, text: str, calls: Sequence[ToolCall]) -> list[Event]:
        self._text += text
        named = {"type": "response.output_text.delta", **self._place, "logprobs": []}
        return [{**named, "delta": text}] if text else []

    def end(self, choice: Choice, answer: Answer, reason: str) -> list[Event]:
        response = self._ended(answer, self._text)
        return [
            {"type": "response.output_text.done", **self._place, "text": self._text, "logprobs": []},
            {"type": "response.content_part.done", **self._place, "part": _part(self._text)},
            {"type": "response.output_item.done", "output_index": 0, "item": response["output"][0]},
            {"type": f"response.{response['status']}", "response": response},
        ]

    def whole(self, choices: Sequence[Choice], prompts: Prompts) -> Event:
        text, *_ = choices[0].end(prompts[0][0])
        return self._ended(prompts[0][0], text)

    def _ended(self, answer: Answer, text: str) -> Event:
        usage = {
            name.replace("prompt", "input").replace("completion", "output"): value
            for name, value in usage_of([[answer]]).items()
        }
        ended: Event = {"usage": {**usage, "output_tokens_details": {"reasoning_tokens": 0}}}
        status = "completed"
        if answer.report.finish_reason == "length":
            status, ended["incomplete_details"] = "incomplete", {"reason": "max_output_tokens"}
        return self._response(status, [self._item(status, [_part(text)])]) | ended

    def _item(self, status: str, content: list[Event]) -> Event:
        named = {"type": "message", "id": self._item_id, "role": "assistant"}
        return {**named, "status": status, "content": content}

    def _response(self, status: str, output: list[Event]) -> Event:
        named = {"id": f"resp_{self.id}", "object": "response", "model": self.model}
        known = {"created_at": self.created, "status": status, "error": None, "output": output}
        return {**named, **known, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}


def _part(text: str) -> Event:
    return {"type": "output_text", "text": text, "annotations": []}


def usage_of(prompts: Prompts) -> dict[str, Any]:
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


def cache_header(prompts: Prompts) -> dict[str, str]:
    """What the first prompt reused, or why nothing, as a response header."""
    link = prompts[0][0].report.link
    if link.reused_tokens:
        return {CACHE_HEADER: f"hit; tokens={link.reused_tokens}"}
    reason = link.miss_reason.replace('"', "'").encode("ascii", "replace").decode()
    return {CACHE_HEADER: f'miss; reason="{" ".join(reason.split())}"'}


def _called(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}
    return {"id": call.id, "type": "function", "function": function}

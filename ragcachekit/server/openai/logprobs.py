"""Log probabilities of an answer's tokens, observed while they are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ragcachekit.generate.hooks import ScoreObserver


@dataclass(frozen=True)
class TokenLogprob:
    """A token's text and log probability in nats, and those of the most likely ones in its place."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...]

    def chat(self) -> dict[str, Any]:
        """As in chat completions."""
        top = [_entry(token, logprob) for token, logprob in self.top]
        return {**_entry(self.token, self.logprob), "top_logprobs": top}


class Logprobs(ScoreObserver):
    """Records distributions as the model gives them, before temperature and the cuts of sampling.

    A token's entry is complete when the next one is chosen, the last one's at the end.
    """

    def __init__(self, top: int, tokenizer: Any) -> None:
        self._top, self._tokenizer = top, tokenizer
        self._last: torch.Tensor | None = None
        self._taken = 0
        self.entries: list[TokenLogprob] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._complete(int(input_ids[0, -1]))
        self._last = scores[0].float().log_softmax(-1)
        return scores

    @property
    def pending(self) -> bool:
        """Whether entries were not taken."""
        return self._taken < len(self.entries)

    def take(self) -> list[TokenLogprob]:
        """The entries since the last call."""
        entries = self.entries[self._taken :]
        self._taken += len(entries)
        return entries

    def end(self, token_ids: Sequence[int], text: str) -> None:
        """Complete the last token's entry; drop those behind ``text``, of an end token or a stop string."""
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
        entry = TokenLogprob(
            self._decode([token]),
            max(float(self._last[token]), -9999.0),
            tuple((self._decode([one]), max(value, -9999.0)) for one, value in top),
        )
        self._last = None
        self.entries.append(entry)


def text_logprobs(entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """As in text completions; the first token stands ``offset`` characters behind the answer's start."""
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.token)
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [dict(entry.top) for entry in entries],
        "text_offset": offsets,
    }


def _entry(token: str, logprob: float) -> dict[str, Any]:
    whole = "�" not in token  # else a part of a character, whose bytes the tokenizer does not tell
    return {"token": token, "logprob": logprob, "bytes": list(token.encode()) if whole else None}

"""What an engine has done since it was made: shadow mode, encoding, the queue."""

from __future__ import annotations

from dataclasses import dataclass

from ragcachekit.reports.base import Report


@dataclass(frozen=True)
class ShadowReport(Report):
    """What answering a share of the requests a second time, in full, has shown.

    - ``requests``: Prompts answered while shadow mode was on.
    - ``shadowed``: Of these, prefilled in full as well: drawn, and approximately reused.
    - ``compared``: Of these, with compared answers (greedy ones that ran to their end).
    - ``agreement``: Share of the compared answers with the same text as full (the same ids, without a
      tokenizer).
    - ``f1``: Mean F1 of their token ids, as a bag, against those of full.
    - ``mean_kl``, ``max_kl``: KL(full || reused) of the first token, in nats.
    - ``recent_disagreement``: Answers that differed among the last ``window`` compared, as a share of
      ``window``; the highest of all namespaces.
    - ``waiting``, ``dropped``, ``failed``: Shadow prefills not begun yet, left out because too many waited,
      and ended by an error.
    - ``falling_back``: Whether prompts are computed in full because of it.
    """

    requests: int = 0
    shadowed: int = 0
    compared: int = 0
    agreement: float | None = None
    f1: float | None = None
    mean_kl: float | None = None
    max_kl: float | None = None
    recent_disagreement: float = 0.0
    waiting: int = 0
    dropped: int = 0
    failed: int = 0
    falling_back: bool = False

    def __str__(self) -> str:
        text = f"{self.shadowed} of {self.requests} requests shadowed"
        if self.agreement is not None:
            text += f", {self.agreement:.1%} of {self.compared} answers as in full (F1 {self.f1:.3f})"
        if self.mean_kl is not None:
            text += f", first-token KL {self.mean_kl:.3g} on average, {self.max_kl:.3g} at most"
        lost = [f"{n} {what}" for n, what in ((self.dropped, "dropped"), (self.failed, "failed")) if n]
        return "; ".join([text, *lost, *(["falling back to full"] if self.falling_back else [])])


@dataclass(frozen=True)
class EncodingStats(Report):
    """What missed entries cost since the engine was made, in tokens of chunks and first texts.

    - ``missed_tokens``: Computed in place by the requests that missed them.
    - ``captured_tokens``: Of these, stored as they were computed.
    - ``encoded_tokens``: Computed once more to be stored, after an answer or by ``encode``; the text that
      they are encoded after is not counted.
    """

    missed_tokens: int = 0
    captured_tokens: int = 0
    encoded_tokens: int = 0

    def __str__(self) -> str:
        return (
            f"{self.missed_tokens} missed tokens computed in place, {self.captured_tokens} of them stored "
            f"as they were; {self.encoded_tokens} tokens encoded"
        )


@dataclass(frozen=True)
class QueueStats(Report):
    """What became of the requests of one queue.

    - ``submitted``: Requests accepted; each ends as one of the next four.
    - ``done``, ``cancelled``, ``expired``, ``failed``: Answered, cancelled, not answered within their
      deadline, and ended by another error.
    - ``waiting``, ``running``: Before their turn, and in the batch.
    - ``steps``, ``mean_batch``: Decoding steps, and requests decoded in one on average.
    - ``most_overtaken``: How often later requests of its namespace overtook one request, at most.
    """

    submitted: int = 0
    done: int = 0
    cancelled: int = 0
    expired: int = 0
    failed: int = 0
    waiting: int = 0
    running: int = 0
    steps: int = 0
    mean_batch: float = 0.0
    most_overtaken: int = 0

    def __str__(self) -> str:
        return (
            f"{self.submitted} requests: {self.done} done, {self.cancelled} cancelled, {self.expired} "
            f"expired, {self.failed} failed, {self.waiting} waiting, {self.running} running; "
            f"{self.mean_batch:.1f} per step, overtaken {self.most_overtaken} times at most"
        )

"""Answers and reports: plain frozen data, without torch, shown as text and in notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any


class Report:
    """Base of report dataclasses: ``to_dict``, and a table in notebooks."""

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON-able data."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    def _repr_html_(self) -> str:
        return pairs_html((f.name, getattr(self, f.name)) for f in fields(self) if f.repr)  # type: ignore[arg-type]


# -- requests --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChunkUse(Report):
    """How one cacheable segment of a prompt, a chunk or the text before the first, was served.

    - ``source``: Its tier (``host``, ``disk``), that of the knowledge tree (``tree:host``: its tokens then
      include the fixed text in front of it), ``computed``, or ``encoded`` for this prompt
      (``deterministic=True``).
    - ``recomputed``: Rows that the policy recomputed.
    - ``exact``: Comes after exactly the text that it was encoded after (as the prompt's first text does).
    - ``contexts``: How many contexts it was encoded in; if several, their mean was used. 0: computed.
    """

    chunk_id: str
    tokens: int
    source: str
    recomputed: int = 0
    exact: bool = False
    contexts: int = 0

    def __str__(self) -> str:
        how = "exact" if self.exact else f"{self.recomputed} recomputed"
        how += f", mean of {self.contexts} contexts" if self.contexts > 1 else ""
        return f"{self.chunk_id[:8]} {self.tokens} tokens from {self.source}, {how}"


@dataclass(frozen=True)
class LinkReport(Report):
    """What one prompt reused, recomputed, loaded and saved.

    - ``prompt_tokens``: Rows of the whole prompt.
    - ``exact_tokens``: Rows reused exactly (the prefix, chunks after exactly their encoding context).
    - ``approximate_tokens``: Rows reused from chunk KV and not recomputed: the approximation.
    - ``recomputed_tokens``: Cached rows that the policy recomputed.
    - ``computed_tokens``: Rows with nothing cached: the question, fixed text, missing chunks.
    - ``written_tokens``: Of ``computed_tokens``, rows whose KV is kept for later prompts, as far as there is
      room: missing chunks as this prompt computed them, its beginning in the knowledge tree, its turn. Chunks
      that are encoded in a forward of their own are in :class:`EncodingStats`. Known with the answer; else 0.
    - ``recompute_ratio``: Recomputed / cached rows over all layers; 0 when nothing was cached.
    - ``chunks``: How each chunk was served, in order.
    - ``prefix``: How the text before the first chunk was served, if there is one.
    - ``link_ms``: Milliseconds to assemble the linked cache, including waits.
    - ``plan_ms``: Of these, milliseconds to look entries up and to choose rows.
    - ``load_ms``, ``wait_ms``: Milliseconds of look-ups and reads from slow tiers, and how many of them the
      request waited for.
    - ``loaded_bytes``: Bytes from slow tiers.
    - ``tree_tokens``: Rows of the beginning from the knowledge tree, all exact; chunks after it are
      approximate unless ``chunks`` has them as exact.
    - ``fallback``: Why the prompt was prefilled in full, if it was.
    - ``notes``: Damaged entries, why no chunk was found, and the like.
    - ``kernels``: What attended in the linked forward: ``triton``, or ``torch`` and why. Empty where the
      prompt was prefilled in full.
    - ``miss_reason``: Why nothing was reused; empty where something was.
    - ``retries``: How often it was planned again, as entries failed to load or the linked prefill failed.
    - ``grade``: ``linked``, or ``prefix`` where the model reuses exact beginnings alone.
    """

    policy: str
    encoder: str
    namespace: str
    prompt_tokens: int
    exact_tokens: int = 0
    approximate_tokens: int = 0
    recomputed_tokens: int = 0
    computed_tokens: int = 0
    recompute_ratio: float = 0.0
    chunks: tuple[ChunkUse, ...] = ()
    link_ms: float = 0.0
    load_ms: float = 0.0
    fallback: str | None = None
    wait_ms: float = 0.0
    loaded_bytes: int = 0
    tree_tokens: int = 0
    notes: tuple[str, ...] = ()
    kernels: str = ""
    prefix: ChunkUse | None = None
    plan_ms: float = 0.0
    miss_reason: str = ""
    grade: str = "linked"
    retries: int = 0
    written_tokens: int = 0

    @property
    def reused_tokens(self) -> int:
        """Rows whose KV was reused (what LangChain calls ``cache_read``)."""
        fresh = sum(use.tokens - use.recomputed for use in self.uses if use.source == "encoded")
        return self.exact_tokens + self.approximate_tokens - fresh

    @property
    def uses(self) -> tuple[ChunkUse, ...]:
        """All cacheable segments: the prefix, if there is one, then the chunks."""
        return (*([self.prefix] if self.prefix is not None else []), *self.chunks)

    @property
    def overlap(self) -> float | None:
        """Share of the loading that no request waited for, 0 to 1; None if nothing came from a slow tier."""
        if not self.loaded_bytes or not self.load_ms:
            return None
        return min(max(1 - self.wait_ms / self.load_ms, 0.0), 1.0)

    def __str__(self) -> str:
        of_tree = f", {self.tree_tokens} of them from the knowledge tree" if self.tree_tokens else ""
        share = f" ({self.recompute_ratio:.1%} of the cached)" if self.recomputed_tokens else ""
        text = (
            f"{self.policy}: {self.reused_tokens} of {self.prompt_tokens} prompt tokens reused "
            f"({self.exact_tokens} exactly{of_tree}), {self.recomputed_tokens} recomputed{share}, "
            f"{self.computed_tokens} computed, link {self.link_ms:.1f} ms"
        )
        if self.overlap is not None:
            text += (
                f", {self.loaded_bytes / 1e6:.1f} MB loaded in {self.load_ms:.1f} ms "
                f"({self.overlap:.0%} of it hidden)"
            )
        if self.prefix is not None:
            source = self.prefix.source
            source = source if source == "computed" else f"from {source}"
            text += f", {self.prefix.tokens} tokens before the first chunk {source}"
        if self.kernels:
            text += f", kernels {self.kernels}"
        why = [f"fell back to a full prefill: {self.fallback}"] if self.fallback else []
        if self.miss_reason and not self.fallback:
            why = [f"nothing was reused: {self.miss_reason}"]
        return "; ".join([text, *why, *self.notes])


@dataclass(frozen=True)
class GenerateReport(Report):
    """A :class:`LinkReport` with what generation measured; ``ttft_ms`` and ``total_ms`` count from the call.

    ``queue_ms`` is the part of them before its turn. ``batch`` is the largest number of requests decoded
    together with it, itself included.
    """

    link: LinkReport
    output_tokens: int
    ttft_ms: float
    total_ms: float
    finish_reason: str
    queue_ms: float = 0.0
    batch: int = 0

    def __str__(self) -> str:
        text = (
            f"{self.link}; first token after {self.ttft_ms:.0f} ms, {self.output_tokens} tokens "
            f"in {self.total_ms:.0f} ms ({self.finish_reason})"
        )
        queued = f"; {self.queue_ms:.0f} ms in the queue, decoded in a batch of {self.batch}"
        return text + queued if self.batch > 1 or self.queue_ms >= 50 else text


@dataclass(frozen=True, repr=False)
class Answer:
    """Generated text, its token ids (without the prompt), and the report."""

    text: str
    token_ids: tuple[int, ...]
    report: GenerateReport

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        link, text = self.report.link, shorten(self.text, 60)
        return (
            f"Answer({text!r}, {len(self.token_ids)} tokens, {link.reused_tokens} of {link.prompt_tokens} "
            f"prompt tokens reused, first token after {self.report.ttft_ms:.0f} ms)"
        )


# -- what an engine has done since it was made -------------------------------------------------------


@dataclass(frozen=True)
class ShadowReport(Report):
    """What prefilling a share of the requests a second time, in full, has shown.

    - ``requests``: Prompts answered while shadow mode was on.
    - ``shadowed``: Of these, prefilled in full as well: drawn, and approximately reused.
    - ``agreement``: Share of the first 8 tokens of full's greedy answer that are the most probable ones
      with reuse as well.
    - ``mean_kl``, ``max_kl``: KL(full || reused) per token of that answer, in nats.
    - ``recent_disagreement``: Prompts with a token that differed among the last ``window``, as a share of
      ``window``; the highest of all namespaces.
    - ``waiting``, ``dropped``, ``failed``: Shadow prefills not begun yet, left out because too many waited,
      and ended by an error.
    - ``falling_back``: Whether prompts are computed in full because of it.
    """

    requests: int = 0
    shadowed: int = 0
    agreement: float | None = None
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
            text += f", {self.agreement:.1%} of the tokens as in full"
            text += f", KL {self.mean_kl:.3g} on average, {self.max_kl:.3g} at most"
        lost = [f"{n} {what}" for n, what in ((self.dropped, "dropped"), (self.failed, "failed")) if n]
        return "; ".join([text, *lost, *(["falling back to full"] if self.falling_back else [])])


@dataclass(frozen=True)
class EncodingStats(Report):
    """What misses have cost since the engine was created, in tokens of chunks and of the texts before them.

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
    - ``most_overtaken``: The largest number of later requests of its namespace that overtook one request.
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


# -- HTML ------------------------------------------------------------------------------------------

_LEFT = "style='text-align:left;white-space:pre-wrap'"


def pairs_html(pairs: Iterable[tuple[str, object]]) -> str:
    """A table of names and values."""

    def row(name: str, value: object) -> str:
        text = "\n".join(map(str, value)) if isinstance(value, tuple) else str(value)
        head, cell = html.escape(name.replace("_", " ")), html.escape(text)
        return f"<tr><th {_LEFT}>{head}</th><td {_LEFT}>{cell}</td></tr>"

    return f"<table>{''.join(row(*pair) for pair in pairs)}</table>"


def shorten(text: str, most: int) -> str:
    """The first ``most`` characters, with an ellipsis if there are more."""
    return text if len(text) <= most else text[:most].rstrip() + "…"

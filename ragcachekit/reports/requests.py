"""Answers and reports of what requests reused and cost."""

from __future__ import annotations

from dataclasses import dataclass

from ragcachekit.reports.base import Report, folded_html, shorten, text_html


@dataclass(frozen=True)
class ChunkUse(Report):
    """How one cacheable segment of a prompt, a chunk or the text before the first, was served.

    - ``source``: Its tier (``host``, ``disk``), that of the knowledge tree (``tree:host``: its tokens then
      include the fixed text in front of it), or ``computed``.
    - ``recomputed``: Rows that the policy recomputed.
    - ``exact``: Comes after exactly the text that it was encoded after (as the prompt's first text does).
    """

    chunk_id: str
    tokens: int
    source: str
    recomputed: int = 0
    exact: bool = False

    def __str__(self) -> str:
        how = "exact" if self.exact else f"{self.recomputed} recomputed"
        return f"{self.chunk_id[:8]} {self.tokens} tokens from {self.source}, {how}"


@dataclass(frozen=True)
class LinkReport(Report):
    """What one prompt reused, recomputed, loaded and saved.

    - ``prompt_tokens``: Rows of the whole prompt.
    - ``exact_tokens``: Rows reused exactly (the prefix, chunks after exactly their encoding context).
    - ``approximate_tokens``: Rows reused from chunk KV and not recomputed: the approximation.
    - ``recomputed_tokens``: Cached rows that the policy recomputed.
    - ``computed_tokens``: Rows with nothing cached: the question, fixed text, missing chunks.
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

    @property
    def reused_tokens(self) -> int:
        """Rows whose KV was reused (what LangChain calls ``cache_read``)."""
        return self.exact_tokens + self.approximate_tokens

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

    def _shown(self) -> list[tuple[str, object]]:
        return [*super()._shown(), ("overlap", self.overlap)]

    def __str__(self) -> str:
        of_tree = f", {self.tree_tokens} of them from the knowledge tree" if self.tree_tokens else ""
        text = (
            f"{self.policy}: {self.reused_tokens} of {self.prompt_tokens} prompt tokens reused "
            f"({self.exact_tokens} exactly{of_tree}), {self.recomputed_tokens} recomputed "
            f"(ratio {self.recompute_ratio:.3f}), {self.computed_tokens} computed, link {self.link_ms:.1f} ms"
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

    ``queue_ms`` of them passed before its turn; at most ``batch`` requests were decoded together with it,
    itself included.
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

    def _repr_html_(self) -> str:
        return f"{text_html(self.text)}{folded_html(str(self.report), self.report)}"

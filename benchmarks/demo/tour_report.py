"""What the short demo prints and draws: a row and a line per question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.markup import escape
from rich.table import Table

from benchmarks.demo.answers import contains
from benchmarks.demo.report import CACHED, GREY, INK
from benchmarks.demo.side_by_side import NAMES
from ragcachekit.commands.console import show
from ragcachekit.commands.report import machine

RESULTS, PICTURE = "demo.json", "demo.png"


@dataclass(frozen=True)
class Compared:
    """One prompt of ``prompt_tokens``, answered by the bare model and with its passages' KV cached.

    Of the ``tokens`` of the bare answer, ``agreed`` are the likeliest with the cache, too.
    ``bare_ms`` and ``cached_ms`` (one per warm repeat) are milliseconds to the first token. ``reused`` counts
    tokens that were not computed, ``recomputed`` those that were although they were cached.
    """

    question: str
    known: str
    bare: str
    cached: str
    tokens: int
    agreed: int
    bare_ms: float
    cached_ms: tuple[float, ...]
    prompt_tokens: int
    reused: int
    recomputed: int
    policy: str


def speedups(found: Sequence[Compared]) -> list[float]:
    """By how much sooner the first token comes, per question: medians of its warm repeats."""
    return [one.bare_ms / median(one.cached_ms) for one in found]


def summary(found: Sequence[Compared]) -> tuple[float, float, float]:
    """Medians over the questions: seconds to the first token without and with the cache, and the speed-up."""
    bare = median(one.bare_ms for one in found) / 1e3
    cached = median(ms for one in found for ms in one.cached_ms) / 1e3
    return bare, cached, median(speedups(found))


def figures(found: Sequence[Compared], queries: dict[str, Any]) -> None:
    """A row per question, and what they come to."""
    n, faster = len(found), speedups(found)
    out = Table(
        title="First token in seconds, and the answers (* has the known answer)", title_justify="left"
    )
    out.add_column("question", width=34, overflow="fold")
    for name in (*NAMES, "sooner"):
        out.add_column(name, justify="right", max_width=12)
    for name in NAMES:
        out.add_column(f"answer: {name}", width=30, overflow="fold")
    for one, speedup in zip(found, faster, strict=True):
        out.add_row(
            escape(one.question),
            f"{one.bare_ms / 1e3:.2f}",
            f"{median(one.cached_ms) / 1e3:.2f}",
            f"[bold]{speedup:.1f}x[/]",
            _answer(one.bare, one.known),
            "= the same text" if one.bare == one.cached else _answer(one.cached, one.known),
        )
    show(out)
    bare, cached, middle = summary(found)
    times = sorted(ms / 1e3 for one in found for ms in one.cached_ms)
    tokens = sum(one.prompt_tokens for one in found)
    reused, again = sum(one.reused for one in found), sum(one.recomputed for one in found)
    same, all_tokens = sum(one.agreed for one in found), sum(one.tokens for one in found)
    right = [
        sum(contains(text, one.known) for one, text in zip(found, side, strict=True))
        for side in _sides(found)
    ]
    lines = [
        f"[bold]{middle:.1f}x sooner[/] ({min(faster):.1f}x to {max(faster):.1f}x): {bare:.2f} s without, "
        f"{cached:.2f} s with the cache ({times[0]:.2f} to {times[-1]:.2f}, {len(times)} warm prompts); "
        f"{machine()['processor']}, {machine()['threads']} threads",
        f"Answers: the same next token after {same / all_tokens:.0%} of {all_tokens} beginnings; the same "
        f"text {sum(one.bare == one.cached for one in found)} of {n}; the known answer in {right[0]} of {n} "
        f"without, {right[1]} with the cache",
        f"Tokens: {tokens / n:,.0f} per prompt, {reused / tokens:.0%} of them reused as they were cached, "
        f"{again / tokens:.1%} recomputed ({found[0].policy})",
        f"Searches: the query cache answered {queries['hits']} of {queries['n']} wordings, "
        f"{queries['wrong']} with another question's search",
    ]
    show("\n".join(lines))


def _sides(found: Sequence[Compared]) -> tuple[list[str], list[str]]:
    return [one.bare for one in found], [one.cached for one in found]


def _answer(text: str, known: str) -> str:
    return f"{'* ' * contains(text, known)}{escape(text)}"


def draw(found: Sequence[Compared], path: Path) -> None:
    """Write the picture: per question, from without to with the cache, on a logarithmic axis."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list
    from matplotlib.ticker import FuncFormatter, NullLocator

    bare, cached, middle = summary(found)
    height = 1.9 + 0.42 * len(found)
    figure = Figure(figsize=(11, height), facecolor="white")
    axes = figure.subplots()
    figure.subplots_adjust(left=0.42, right=0.97, top=1 - 1.15 / height, bottom=0.45 / height)
    for place, one in enumerate(found):
        ends = median(one.cached_ms) / 1e3, one.bare_ms / 1e3
        axes.plot(ends, (place, place), color="#cfd6dc", linewidth=3, zorder=1)
        axes.scatter(ends[1], place, s=90, color=GREY, zorder=2)
        axes.scatter(ends[0], place, s=90, color=CACHED, zorder=2)
        label = f"{one.bare_ms / median(one.cached_ms):.0f}x"
        axes.text((ends[0] * ends[1]) ** 0.5, place - 0.16, label, ha="center", fontsize=10, color=INK)
    axes.set_xscale("log")
    axes.set_yticks(range(len(found)), [one.question for one in found])
    axes.invert_yaxis()
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = min(min(one.cached_ms) for one in found) / 1e3, max(one.bare_ms for one in found) / 1e3
    axes.set_xticks([tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if low / 2 < tick < high * 2])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g} s"))
    axes.grid(axis="x", alpha=0.25)
    axes.tick_params(length=0, labelsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    title = f"The answer begins {middle:.0f} times sooner: after {cached:.1f} s instead of {bare:.1f} s"
    figure.suptitle(title, fontsize=16, fontweight="bold", color=INK, x=0.015, y=1 - 0.2 / height, ha="left")
    tokens, used = sum(one.prompt_tokens for one in found) / len(found), machine()
    detail = (
        "Time to the first token, logarithmic; grey: transformers, green: with RagCacheKit. SmolLM2-135M, "
        f"prompts of {tokens:,.0f} tokens, {used['processor']}, {used['threads']} threads"
    )
    figure.text(0.015, 1 - 0.75 / height, detail, fontsize=9.5, color=GREY)
    figure.savefig(path, dpi=130)

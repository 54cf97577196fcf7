"""What the demo prints and draws: answers side by side, first-token times, quality and the query cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from benchmarks.demo import first_token, query_hits
from benchmarks.demo.answers import Answered
from ragcachekit.commands.console import show
from ragcachekit.commands.report import BenchReport, machine, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]

STATES = {
    "full": "full prefill,\nno cache",
    "cold": "first time,\nnothing cached yet",
    "host": "chunks in memory",
    "disk": "chunks on disk",
    "restart": "after a restart,\nchunks on disk",
}
_COLUMNS = (
    "state",
    "ttft_ms",
    "ttft_ms_min",
    "ttft_ms_max",
    "speedup",
    "prompt_tokens",
    "reused_tokens",
    "n",
)


def answers(answered: Sequence[Answered]) -> None:
    """Question, answer of full, answer with both caches."""
    title = "Answers (* has the known answer; both caches: '=' is the same text as full)"
    out = Table(title=title, title_justify="left", show_lines=True)
    for name, width in (("question", 38), ("known", 16), ("full", 40), ("both caches", 40)):
        out.add_column(name, width=width, overflow="fold")
    for one in answered:
        cached = "=" if one.same else escape(one.cached)
        out.add_row(
            *(escape(one.question), escape(one.known)),
            f"{'* ' * one.full_right}{escape(one.full)}",
            f"{'* ' * one.cached_right}{cached}",
        )
    show(out)


def figures(report: BenchReport) -> None:
    """First-token times, quality and the query cache."""
    rows = report.part(first_token.PART).rows
    times = [{**row, "state": STATES[row["state"]].replace("\n", " ")} for row in rows]
    cores = machine()
    title = f"Time to the first token in ms, medians; {cores['processor']}, {cores['threads']} threads"
    show(table(title, times, _COLUMNS))
    show(
        "\n".join(
            [*_quality(report.part("quality").rows[0]), *_queries(report.part(query_hits.PART).rows[0])]
        )
    )
    show(report.part(query_hits.SWEEP).table("Query cache by tolerance"))


def _quality(row: Row) -> list[str]:
    n = row["n"]
    return [
        f"[bold]Policy {row['policy']}, encoder {row['encoder']}[/], {n} questions:",
        f"  full through the library = the model's own generate, token for token: {n} of {n}",
        f"  known answer in the text: full {row['full_right']} of {n} ({_share(row, 'full_right')}), "
        f"both caches {row['cached_right']} of {n} ({_share(row, 'cached_right')})",
        f"  against full: F1 {_mean(row, 'f1')}, the same text {row['same']} of {n}; KL of the first token "
        f"{_mean(row, 'kl')} nats; loss of full's answer {_mean(row, 'full_loss')} -> "
        f"{_mean(row, 'cached_loss')} nats per token, {_mean(row, 'loss_added')} more",
        f"  {row['tokens_reused']:.0%} of the prompts' tokens reused, {row['recompute_ratio']:.1%} of the "
        f"cached rows recomputed; {row['other_chunks']} of {n} prompts with other chunks, by the query cache",
    ]


def _queries(row: Row) -> list[str]:
    return [
        f"[bold]Query cache[/], {row['n']} wordings: {row['hits']} hits, {row['right']} right, "
        f"{row['wrong']} wrong (another question's entry); {row['harmful']} harmful (the answer's chunk "
        "lost)",
        f"  tolerance {row['tolerance']:.3f} (cosine), calibrated on {row['calibration_pairs']} wordings of "
        f"other questions; the chunk with the answer found: {row['recall']:.0%} without the cache, "
        f"{row['cached_recall']:.0%} with it",
        f"  a search takes {row['search_ms']:.1f} ms, a hit {_hit(row)} ms, embedding the question "
        f"{row['embed_ms']:.1f} ms either way; all hits together saved {row['saved_ms']:,.0f} ms",
    ]


def _hit(row: Row) -> str:
    return "-" if row["hit_ms"] is None else f"{row['hit_ms']:.1f}"


def _mean(row: Row, name: str) -> str:
    return f"{row[name]:.3f} ({row[f'{name}_low']:.3f}-{row[f'{name}_high']:.3f})"


def _share(row: Row, name: str) -> str:
    return f"{row[f'{name}_low']:.0%}-{row[f'{name}_high']:.0%}"


GREY, CACHED, WRONG, PALE, INK = "#5f6b7a", "#1f8a70", "#d1495b", "#a9d6c9", "#22303c"


def draw(report: BenchReport, path: Path) -> None:
    """Write the picture; the name's ending says which kind."""
    from matplotlib.figure import Figure  # not pyplot, which keeps figures in a global list

    quality, queries = report.part("quality").rows[0], report.part(query_hits.PART).rows[0]
    figure = Figure(figsize=(17, 6), facecolor="white")
    panels = figure.subplots(1, 3)
    figure.subplots_adjust(left=0.085, right=0.985, top=0.72, bottom=0.15, wspace=0.38)
    _draw_times(panels[0], report.part(first_token.PART).rows)
    _draw_quality(panels[1], quality)
    _draw_queries(panels[2], queries, report.part(query_hits.SWEEP).rows)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=0, labelsize=10)
        axes.set_axisbelow(True)
        axes.grid(axis="y" if axes is panels[2] else "x", alpha=0.25)
    used = machine()
    figure.suptitle(
        f"SmolLM2-135M-Instruct answers {quality['n']} questions from the documentation of Python's standard "
        f"library.  Policy {quality['policy']};  {used['processor']}, threads: {used['threads']}",
        **{"fontsize": 11.5, "color": GREY, "x": 0.012, "y": 0.97, "ha": "left"},
    )
    figure.savefig(path, dpi=130)


def _title(axes: Axes, question: str, detail: str) -> None:
    axes.set_title(question, fontsize=15, fontweight="bold", color=INK, loc="left", pad=46)
    axes.text(0, 1.03, detail, transform=axes.transAxes, fontsize=10, color=GREY, linespacing=1.4)


def _bar(axes: Axes, place: int, middle: float, low: float, high: float, colour: str, label: str) -> None:
    axes.barh(place, middle, 0.62, color=colour)
    axes.plot([low, high], [place, place], color=INK, linewidth=1.2)
    axes.text(max(middle, high), place, f"  {label}", va="center", fontsize=11, color=INK)


def _draw_times(axes: Axes, rows: Sequence[Row]) -> None:
    for place, row in enumerate(rows):
        uncached = row["state"] in ("full", "cold")
        label = f"{row['ttft_ms']:,.0f} ms" + ("" if uncached else f"  ({row['speedup']:.1f}x faster)")
        times = row["ttft_ms"], row["ttft_ms_min"], row["ttft_ms_max"]
        _bar(axes, place, *times, GREY if uncached else CACHED, label)
    axes.set_yticks(range(len(rows)), [STATES[row["state"]] for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.32 * max(row["ttft_ms_max"] for row in rows))
    axes.set_xlabel("milliseconds")
    (warm,) = (row for row in rows if row["state"] == "host")
    detail = (
        f"Time to the first token: median and range of {warm['n']} prompts,\n"
        f"about {warm['prompt_tokens']:.0f} tokens each; green: {warm['reused_tokens']:.0f} of them reused"
    )
    _title(axes, "How soon does the answer begin?", detail)


def _draw_quality(axes: Axes, row: Row) -> None:
    n = row["n"]
    bars = {
        "right answer,\nfull prefill": ("full_right", n, GREY),
        "right answer,\nboth caches": ("cached_right", n, CACHED),
        "the same text,\nword for word": ("same", n, PALE),
        "words shared\n(F1)": ("f1", None, PALE),
    }
    for place, (name, whole, colour) in enumerate(bars.values()):
        share = row[name] / (whole or 1)
        label = f"{row[name]} of {n}" if whole else f"{100 * share:.0f} %"
        _bar(axes, place, share, row[f"{name}_low"], row[f"{name}_high"], colour, label)
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.22)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.set_xlabel(
        f"KL of the first token: {row['kl']:.3f} ({row['kl_low']:.3f}-{row['kl_high']:.3f}) nats; "
        f"{row['other_chunks']} of {n} prompts had other chunks\n"
        f"loss of full's answer: {row['full_loss']:.2f}, with caches {row['cached_loss']:.2f} nats per token"
    )
    right = "Right: the text has the known answer. The lower bars"
    detail = f"{right}\ncompare both caches (chunks, queries) with full. 95 % intervals"
    _title(axes, "Are the answers as good?", detail)


def _draw_queries(axes: Axes, row: Row, sweep: Sequence[Row]) -> None:
    shown = sorted([*sweep, row], key=lambda one: float(one["tolerance"]))
    for place, one in enumerate(shown):
        axes.bar(place, one["right"], 0.7, color=CACHED if one is row else PALE)
        axes.bar(place, one["wrong"], 0.7, bottom=one["right"], color=WRONG)
        label = f"{one['hits']}" + (f"\n({one['wrong']})" if one["wrong"] else "")
        top = one["hits"] + row["n"] / 100
        axes.text(place, top, label, ha="center", va="bottom", fontsize=10, color=INK)
    names = [
        f"{one['tolerance']:.3f}\ncalibrated" if one is row else f"{one['tolerance']:g}" for one in shown
    ]
    axes.set_xticks(range(len(shown)), names)
    axes.set_ylim(0, row["n"])
    axes.set_xlabel("tolerance: greatest cosine distance of a hit")
    axes.set_ylabel(f"lookups that hit, of {row['n']}")
    detail = (
        f"Every question in four wordings; a search takes {row['search_ms']:.1f} ms,\n"
        f"a hit {_hit(row)} ms. Red: hits on another question's entry"
    )
    _title(axes, "How many searches are saved?", detail)

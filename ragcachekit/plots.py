"""Pictures of the last requests and of what a calibration measured, as matplotlib Axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ragcachekit.errors import missing_extra
from ragcachekit.plan.link_plan import COMPUTED
from ragcachekit.reports import GenerateReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes


COLOURS = {"exact": "#b7e4c7", "approximate": "#fff1a8", "recomputed": "#ffcf9e", "computed": "#d6e4ff"}
"""Of tokens by how their KV was had; also the background of pieces in ``rag.inspect``."""


class MeasuredPolicy(NamedTuple):
    """A point of a calibration: its share of recomputed cached rows, and what it loses."""

    name: str
    ratio: float
    loss: float


class Plots:
    """``rag.plot``: every method draws into ``ax`` (default: a new figure) and returns it.

    ``reports`` gives those of the last requests, the latest last. ``measured`` gives the points of a
    namespace and the name of their loss. All raise ImportError without matplotlib, and ValueError where
    there is nothing to draw.
    """

    def __init__(
        self,
        reports: Callable[[], Sequence[GenerateReport]],
        measured: Callable[[str | None], tuple[Sequence[MeasuredPolicy], str]],
    ) -> None:
        self._reports, self._measured = reports, measured

    def time(self, ax: Axes | None = None) -> Axes:
        """Where the time of every request went: the queue, waiting for loads, prefill, decoding."""
        reports = self._last()
        parts = {
            "queue": [r.queue_ms for r in reports],
            "wait for loads": [r.link.wait_ms for r in reports],
            "prefill": [max(r.ttft_ms - r.queue_ms - r.link.wait_ms, 0.0) for r in reports],
            "decode": [max(r.total_ms - r.ttft_ms, 0.0) for r in reports],
        }
        return _stacked(ax, parts, "milliseconds")

    def tokens(self, ax: Axes | None = None) -> Axes:
        """Prompt tokens of every request: reused exactly or approximately, recomputed, computed.

        The colours are those of :meth:`ragcachekit.RagCache.inspect`.
        """
        links = [report.link for report in self._last()]
        parts = {
            "exact": [link.exact_tokens for link in links],
            "approximate": [link.approximate_tokens for link in links],
            "recomputed": [link.recomputed_tokens for link in links],
            "computed": [link.computed_tokens for link in links],
        }
        return _stacked(ax, parts, "prompt tokens", COLOURS)

    def tiers(self, ax: Axes | None = None) -> Axes:
        """Where the tokens of chunks, and of the text before them, came from in every request."""
        links = [report.link for report in self._last()]
        found = {use.source for link in links for use in link.uses}
        parts = {
            name: [sum(use.tokens for use in link.uses if use.source == name) for link in links]
            for name in sorted(found, key=lambda name: (name == COMPUTED, name))
        }
        return _stacked(ax, parts, "cacheable tokens")

    def quality(self, ax: Axes | None = None, *, namespace: str | None = None) -> Axes:
        """Quality over the recompute ratio, as ``ragcachekit calibrate`` or ``rag.tune`` measured it."""
        points, unit = self._measured(namespace)
        ax = _axes(ax)
        ax.scatter([point.ratio for point in points], [point.loss for point in points])
        for point in points:
            ax.annotate(point.name, (point.ratio, point.loss), (4, 4), textcoords="offset points", fontsize=8)
        ax.set(xlabel="recomputed / cached rows", ylabel=f"loss ({unit})")
        return ax

    def _last(self) -> Sequence[GenerateReport]:
        if not (reports := self._reports()):
            raise ValueError("no request was answered yet; rag.plot draws the last ones")
        return reports


def _stacked(
    ax: Axes | None, parts: Mapping[str, Sequence[float]], unit: str, colours: Mapping[str, str] | None = None
) -> Axes:
    ax = _axes(ax)
    count = max(map(len, parts.values()), default=0)
    below = [0.0] * count
    for name, values in parts.items():
        if any(values):
            ax.bar(range(1, count + 1), values, bottom=below, label=name, color=colours and colours[name])
            below = [base + value for base, value in zip(below, values, strict=True)]
    ax.set(xlabel="request", ylabel=unit)
    ax.locator_params(integer=True, min_n_ticks=1)
    if ax.get_legend_handles_labels()[0]:  # above the axes, where no bar is
        ax.legend(fontsize=8, frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    return ax


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError as error:
        install = missing_extra("notebook", "matplotlib")
        raise ImportError(f"rag.plot needs matplotlib: {install}") from error
    return pyplot.subplots(layout="constrained")[1]

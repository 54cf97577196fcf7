"""Pictures of the last requests and of calibrations: the figures drawn are those of the reports."""

import matplotlib as mpl
import pytest
from matplotlib.colors import to_hex

from ragcachekit.engine.inspection import PromptPiece, PromptView
from ragcachekit.plots import MeasuredPolicy, Plots
from ragcachekit.reports import ChunkUse, GenerateReport, LinkReport
from soak_kit import soaked


def report(reused: int, source: str, ttft: float) -> GenerateReport:
    uses = (ChunkUse("ab" * 32, 60, source),)
    link = LinkReport(
        "reuse", "standalone", "default", 100, 10, reused, 0, 90 - reused, chunks=uses, wait_ms=5.0
    )
    return GenerateReport(link, 8, ttft_ms=ttft, total_ms=ttft + 40, finish_reason="stop", queue_ms=10.0)


REPORTS = [report(0, "computed", 300.0), report(60, "disk", 90.0), report(60, "host", 50.0)]
POINTS = [MeasuredPolicy("reuse", 0.0, 0.3), MeasuredPolicy("impact:0.1", 0.1, 0.05)]


@pytest.fixture(autouse=True)
def _close():
    mpl.use("Agg")
    yield
    mpl.pyplot.close("all")


@pytest.fixture
def plots():
    return Plots(lambda: REPORTS, lambda namespace: (POINTS, "KL"))


def heights(axes) -> dict[str, list[float]]:
    return {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers}


def test_tokens(plots) -> None:
    assert heights(plots.tokens()) == {
        "exact": [10, 10, 10],
        "approximate": [0, 60, 60],
        "computed": [90, 30, 30],
    }


@pytest.mark.parametrize("count", soaked([1, 2, 3, 40], 1, 40))
@pytest.mark.parametrize("name", ["tokens", "time", "tiers"])
def test_ticks_are_whole_numbers_and_the_legend_covers_no_bar(name, count) -> None:
    axes = getattr(Plots(lambda: (REPORTS * 14)[:count], lambda _: ((), "")), name)()
    axes.figure.canvas.draw()
    for axis in (axes.xaxis, axes.yaxis):
        ticks = axis.get_ticklocs()
        assert len(ticks) > 0
        assert [float(tick).is_integer() for tick in ticks] == [True] * len(ticks)
    legend = axes.get_legend().get_window_extent()
    assert not any(legend.overlaps(bar.get_window_extent()) for bars in axes.containers for bar in bars)
    assert axes.figure.bbox.contains(legend.x0, legend.y1)


def test_colours_are_those_of_inspect(plots) -> None:
    view = PromptView((PromptPiece("a", 1, 0, "exact", "host"),), REPORTS[0].link)
    for bars in plots.tokens().containers:
        assert to_hex(bars[0].get_facecolor()) in view._repr_html_()


def test_time_adds_up_to_the_whole(plots) -> None:
    found = heights(plots.time())
    assert found == {
        "queue": [10] * 3,
        "wait for loads": [5] * 3,
        "prefill": [285, 75, 35],
        "decode": [40] * 3,
    }


def test_quality(plots) -> None:
    axes = plots.quality()
    assert axes.collections[0].get_offsets().tolist() == [[0.0, 0.3], [0.1, 0.05]]
    assert [text.get_text() for text in axes.texts] == ["reuse", "impact:0.1"]

"""The kernel bench at small sizes: what it refuses to report, and whether its figures belong together."""

from dataclasses import replace
from functools import partial

import pytest

from benchmarks.kernels import assembly as kernel_assembly
from benchmarks.kernels import attention as kernel_attention
from benchmarks.kernels import baselines as kernel_baselines
from benchmarks.kernels import device_timing
from benchmarks.kernels import run as kernels
from ragcachekit.errors import RagCacheError
from ragcachekit_kernels import dispatch

pytestmark = pytest.mark.soak

SMALL = kernels.KernelSettings(
    tokens=(192,), heads=4, kv_heads=2, head_dim=16, layers=2, dtype="float32", runs=3, device="cpu"
)


@pytest.fixture(scope="module")
def report():
    with pytest.MonkeyPatch.context() as patch:
        best = device_timing.Ceilings(2.0, 10.0)
        patch.setattr(kernels, "ceilings", lambda *_: best)
        return kernels.run(SMALL)


def test_figures_belong_together(report):
    median = {row["case"]: row["ms"] for row in report.rows if row["kernel"] == "sparse_attention"}
    for row in report.rows:
        assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
        assert row["ceiling"] == {"TFLOP/s": 2.0, "GB/s": 10.0}[row["unit"]]
        assert row["share"] == pytest.approx(row["achieved"] / row["ceiling"])
        if row["kernel"] == "baseline":
            case = row["case"].split(":")[0]
            case = "lego:16" if case == "lego" else case
            assert row["speedup_over"] == pytest.approx(row["ms"] / median[case])
        else:
            assert row["error"] < 1e-5
            assert row["speedup_over"] is None


def test_the_work_is_what_the_rows_need():
    sizes = kernels._sizes(SMALL, 192)
    cases = {case.name: case for case in kernel_attention.attention_cases(sizes)}
    pairs = sum(1 for row in cases["lego:16"].rows for key in range(192) if key <= row)
    assert cases["lego:16"].work == 2 * (16 + 16) * pairs * 4  # two products per pair, head by head
    assert cases["question"].work == 2 * 2 * 192 * 16 * 4
    assert set(range(16)) | set(range(128, 192)) == set(cases["lego:16"].rows)


@pytest.mark.parametrize("kernel", ["sparse_attention", "column_scores"])
def test_a_wrong_kernel_gets_no_figure(monkeypatch, kernel):
    right = getattr(dispatch, kernel)
    monkeypatch.setattr(dispatch, kernel, lambda *args, **kwargs: right(*args, **kwargs) * 1.01)
    with pytest.raises(RagCacheError, match="off by"):
        kernels.run(replace(SMALL, kernels=(kernel,)))


def test_late_rows_that_are_zero_get_no_figure(monkeypatch):
    """Their values are small next to those of the first rows; they count as much."""

    def forgetful(*args, **kwargs):
        out = right(*args, **kwargs)
        out[:, 20:] = 0
        return out

    right = dispatch.sparse_attention
    monkeypatch.setattr(dispatch, "sparse_attention", forgetful)
    with pytest.raises(RagCacheError, match="off by 1"):
        kernels.run(replace(SMALL, kernels=("sparse_attention",)))


def test_a_baseline_that_does_not_run_leaves_a_row(monkeypatch):
    def broken():
        raise RuntimeError("no such kernel")

    other = kernel_baselines.Baseline("other", broken)
    monkeypatch.setattr(kernels, "full_baselines", lambda sizes: [other])
    report = kernels.run(replace(SMALL, kernels=("sparse_attention",)))
    (row,) = [row for row in report.rows if row["case"] == "question: other"]
    assert (row["ms"], row["failed"]) == (None, "RuntimeError: no such kernel")
    report.table("kernels")


def test_an_assembly_that_does_not_rotate_gets_no_figure(monkeypatch):
    right = kernel_assembly._angles
    turned = partial(right, replace(kernels._sizes(SMALL, 192), tokens=193))
    monkeypatch.setattr(dispatch, "assemble", partial(_with_table, dispatch.assemble, turned))
    with pytest.raises(RagCacheError, match="assembly"):
        kernels.run(replace(SMALL, kernels=("assembly",)))


def _with_table(assemble, table, out, tensors, places, rotation):
    if rotation is not None:
        rotation = rotation._replace(cos=table().cos[1:], sin=table().sin[1:])
    assemble(out, tensors, places, rotation)


def test_a_baseline_that_computes_something_else_is_no_baseline(monkeypatch):
    def shifted(sizes, positions):
        return right(sizes, [max(p - 1, 0) for p in positions])

    right = kernel_baselines.row_baselines
    monkeypatch.setattr(kernels, "row_baselines", shifted)
    with pytest.raises(RagCacheError, match="differ"):
        kernels.run(replace(SMALL, kernels=("sparse_attention",)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernels": ("nonsense",)}, "unknown kernels"),
        ({"tokens": (64,)}, "at least 128 tokens"),
        ({"heads": 5}, "cannot share"),
        ({"dtype": "int4"}, "unknown dtype"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)

"""Statistics and clocks of the claims, by SciPy and by hand."""

import ast
import math

import numpy as np
import pytest
import scipy.stats
import torch

from ecinn.studies.paper.measuring import Sizes, mean_difference, median_seconds, pearson, spearman
from helpers.paths import REPOSITORY


def test_correlations_are_those_of_scipy_and_intervals_cover_them(generator) -> None:
    a = torch.randn(300, generator=generator).double()
    b = 0.6 * a + 0.8 * torch.randn(300, generator=generator) + (a > 1)
    rounded = (2 * b).round()  # with ties
    for ours, theirs, other in (
        (pearson, scipy.stats.pearsonr, b),
        (spearman, scipy.stats.spearmanr, rounded),
    ):
        found = ours(a, other, generator)
        assert found.mean == pytest.approx(theirs(a.numpy(), other.numpy()).statistic)
        # Fisher's interval is half as wide to within a third.
        width = 2 * 1.96 * (1 - found.mean**2) / math.sqrt(300)
        assert found.high - found.low == pytest.approx(width, rel=1 / 3)
        assert found.low < found.mean < found.high
    gaps = torch.where(torch.arange(300) == 5, torch.nan, b)
    kept = [i for i in range(300) if i != 5]
    assert pearson(a, gaps, generator).mean == pytest.approx(np.corrcoef(a[kept], b[kept])[0, 1])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_clock_waits_for_the_device(device, monkeypatch) -> None:
    events = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append("wait"))
    clock = "time.perf_counter" if device == "cuda" else "time.process_time"
    monkeypatch.setattr(clock, lambda: events.append("clock") or 1.0)
    median_seconds(lambda: events.append("run"), 2, torch.device(device))
    each = ["wait", "clock", "run", "wait", "clock"]
    waited = ["run", *each, *each]
    assert events == [e for e in waited if device == "cuda" or e != "wait"]


@pytest.mark.parametrize("repeats", [1, 2, 5])
def test_seconds_are_the_median_of_runs_after_the_first(repeats, monkeypatch) -> None:
    clock, taken = 0.0, iter([100.0, 7.0, 1.0, 3.0, 9.0, 2.0])

    def run() -> None:
        nonlocal clock
        clock += next(taken)

    monkeypatch.setattr("time.process_time", lambda: clock)
    upper = sorted([7.0, 1.0, 3.0, 9.0, 2.0][:repeats])[repeats // 2]
    assert median_seconds(run, repeats, torch.device("cpu")) == upper


def test_a_difference_of_means_is_that_of_welch(generator) -> None:
    a, b = torch.rand(90, generator=generator), torch.rand(40, generator=generator) ** 2
    found = mean_difference(a, b, generator)
    assert found.mean == pytest.approx(float(a.double().mean() - b.double().mean()))
    error = math.sqrt(float(a.double().var()) / 90 + float(b.double().var()) / 40)
    assert (found.low, found.high) == pytest.approx(
        (found.mean - 1.96 * error, found.mean + 1.96 * error), abs=0.25 * error
    )
    assert found.n == 40
    nothing = mean_difference(a, b[:0], generator)
    assert (nothing.low, nothing.high, nothing.n) == (-1, 1, 0)


def test_limits_apply_to_all_sizes() -> None:
    whole, least = vars(Sizes()), vars(Sizes().limited(50))
    assert least["digits"] == least["faces"] == least["samples"] == 50
    assert least["maps"] == least["face_maps"] == least["searched"] == 5
    assert least["twin_images"] == 5000
    assert all(least[name] <= whole[name] for name in whole)
    assert Sizes().limited(10**6) == Sizes()
    assert Sizes().limited(20).maps == 2


def test_studies_name_their_confidence() -> None:
    """A model's default must not change what they measure; only the sheets of faces show it."""
    source, calls = REPOSITORY / "src" / "ecinn", []
    for path in (*(source / "studies").rglob("*.py"), *(source / "training").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", None))
                if name in ("explain", "audit"):
                    calls.append((path.name, {keyword.arg for keyword in node.keywords}))
    assert len(calls) > 15
    assert [name for name, given in calls if "confidence" not in given] == ["faces.py"]

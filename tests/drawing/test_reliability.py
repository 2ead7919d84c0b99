"""The reliability plot: what is drawn where, and that it can be read back."""

import io

import numpy as np
import pytest
from matplotlib.axes import Axes
from PIL import Image

from ecinn.drawing.reliability import ReliabilityPoint, reliability_plot

POINTS = [
    ReliabilityPoint(0.4, 0.6, 0.55, 0.3, 0.2, 0.45, 12),
    ReliabilityPoint(0.8, 1.0, 0.93, 0.97, 0.9, 0.99, 3_000),
]


def test_points_intervals_and_counts_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, tuple] = {}
    for name in ("errorbar", "bar"):
        original = getattr(Axes, name)

        def watched(axes, *arguments, name=name, original=original, **look):
            drawn[name] = arguments
            return original(axes, *arguments, **look)

        monkeypatch.setattr(Axes, name, watched)
    picture = Image.open(io.BytesIO(reliability_plot(POINTS, "a model", "a note")))
    assert np.asarray(picture.convert("L")).std() > 10
    confidence, accuracy, (below, above) = drawn["errorbar"]
    assert confidence == pytest.approx([55, 93])
    assert accuracy == pytest.approx([30, 97])
    assert below == pytest.approx([10, 7])
    assert above == pytest.approx([15, 2])
    left, images, width = drawn["bar"]
    assert left == pytest.approx([40, 80])
    assert images == [12, 3_000]
    assert width == pytest.approx([20, 20])


def test_the_same_points_give_the_same_bytes() -> None:
    assert reliability_plot(POINTS, "a", "b") == reliability_plot(POINTS, "a", "b")
    assert reliability_plot(POINTS, "a", "b") != reliability_plot(POINTS[:1], "a", "b")

"""What is concluded from a look at the pictures."""

import numpy as np
import pytest

from ecinn.data.framing import Intensity
from ecinn.data.inspection import SAMPLE, Look, fitting_size, sample, value_range

WINDOW = Intensity(-160.0, 240.0, "DICOM window")
OTHER = Intensity(0.0, 80.0, "DICOM window")


def deep(low: float, high: float, *, whole: bool = True, window: Intensity | None = None) -> Look:
    return Look(16, values=(low, high), whole=whole, window=window)


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([Look(16), Look(16)], None),
        ([deep(5.0, 900.0), deep(3.0, 1024.0), Look(16)], (0, 2047)),
        ([deep(0.0, 200.0)], (0, 255)),
        ([deep(0.1, 0.9, whole=False), deep(0.0, 1.0)], (0, 1)),
        ([deep(0.5, 250.5, whole=False)], (0, 255)),
        ([deep(0.5, 60.5, whole=False), deep(0.25, 3.0, whole=False)], (0.25, 60.5)),
        ([deep(-1000.0, 40.0), deep(-900.0, 3000.0)], (-1000, 3000)),
        ([deep(2.5, 2.5, whole=False)], (2.5, 3.5)),
        ([deep(-9.0, 9.0, window=WINDOW), deep(-5.0, 99.0, window=WINDOW)], (-160, 240)),
        ([deep(-9.0, 9.0, window=WINDOW), deep(-5.0, 99.0, window=OTHER)], None),
        ([deep(-9.0, 9.0, window=WINDOW), deep(-5.0, 99.0)], (-9, 99)),
    ],
)
def test_the_range_of_values(looks: list[Look], expected: tuple[float, float] | None) -> None:
    notes: list[str] = []
    found = value_range(looks, notes)
    assert (found and (found.low, found.high)) == expected
    assert bool(notes) == (len({look.window for look in looks} - {None}) == 2)


@pytest.mark.parametrize("seed", range(5))
def test_the_size_is_the_largest_not_above_the_median(seed: int) -> None:
    sides = np.random.default_rng(seed).integers(8, 200, 31).tolist()
    median = sorted(sides)[15]
    fitting = [size for size in (16, 24, 28, 32, 48, 64, 96, 128) if size <= median]
    assert fitting_size([Look(side) for side in sides]) == ((fitting or [16])[-1], median)


@pytest.mark.parametrize("seed", range(5))
def test_a_sample_has_pictures_of_all_classes(seed: int) -> None:
    random = np.random.default_rng(seed)
    labels = [str(label) for label in random.geometric(0.2, 3000)]
    rows = sample(labels, seed)
    assert len(set(rows)) == SAMPLE
    chosen = [labels[row] for row in rows]
    for label in set(labels):
        assert chosen.count(label) >= min(labels.count(label), SAMPLE // len(set(labels)))
    assert rows == sample(labels, seed)
    assert len(sample(labels[:10], seed)) == 10

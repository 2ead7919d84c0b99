"""Look at pictures before they are decoded: their size, colours and range of values."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ecinn.data.decoded_images import in_threads
from ecinn.data.framing import Intensity, bits_used
from ecinn.data.photographs import open_picture
from ecinn.data.sources import Pictures
from ecinn.progress import Observer, counter

SIZES = (16, 24, 28, 32, 48, 64, 96, 128)
SAMPLE = 256
"""Pictures to look at before size and colours are chosen."""
COLOUR = (16, 0.01)
"""Channels that differ by more, on a larger share of pixels, are colours, not compression."""


@dataclass(frozen=True)
class Look:
    """Size, colour and range of values of one picture."""

    side: int
    """The shorter one."""
    coloured: bool = False
    values: tuple[float, float] | None = None
    """Smallest and largest value; None with 8 bits."""
    whole: bool = True
    """All values are whole numbers."""
    window: Intensity | None = None


def look_at(pictures: Pictures, rows: Sequence[int], task: str, observe: Observer) -> list[Look]:
    """Look at some pictures; damaged ones are left to the decoding, which lists them."""
    looks: dict[int, Look] = {}

    def look(position: int) -> None:
        try:
            looks[position] = _look(pictures, rows[position])
        except Exception:  # a decoder given garbage may raise anything
            return

    in_threads(look, len(rows), counter(observe, task, len(rows)))
    return [looks[position] for position in sorted(looks)]


def problem(pictures: Pictures, row: int) -> str:
    """Say why a picture cannot be read."""
    try:
        _look(pictures, row)
    except Exception as error:
        return " ".join(str(error).split())
    return ""


def _look(pictures: Pictures, row: int) -> Look:
    picture = open_picture(pictures.read(row), [])
    side = min(picture.image.size)
    if picture.deep:
        values = np.asarray(picture.image, dtype=np.float64)
        values = values[np.isfinite(values)]
        limits, whole = (float(values.min()), float(values.max())), (values % 1 == 0).all()
        return Look(side, values=limits, whole=bool(whole), window=picture.window)
    if picture.image.mode in ("L", "LA", "1"):
        return Look(side)
    colours = np.asarray(picture.image.convert("RGB"), dtype=np.int16)
    return Look(side, coloured=bool((np.ptp(colours, axis=2) > COLOUR[0]).mean() > COLOUR[1]))


def fitting_size(looks: Iterable[Look]) -> tuple[int, int]:
    """Return the largest size that is not above the median short side, and that side."""
    median = statistics.median_low(look.side for look in looks)
    return max((side for side in SIZES if side <= median), default=SIZES[0]), median


def value_range(looks: Iterable[Look], notes: list[str]) -> Intensity | None:
    """Return the values of training pictures that become black and white.

    None if they have 8 bits, or each DICOM file has a window of its own.
    """
    deep = [(look, look.values) for look in looks if look.values is not None]
    windows = {look.window for look, _ in deep}
    if len(windows) > 1 and None not in windows:
        notes.append(
            f"every DICOM file has its own window, {len(windows)} in all: --window LOW,HIGH gives "
            "all the same"
        )
    if None not in windows:  # also without any
        return windows.pop() if len(windows) == 1 else None
    low, high = min(values[0] for _, values in deep), max(values[1] for _, values in deep)
    if low >= 0 and all(look.whole for look, _ in deep):
        return bits_used(high)
    if low >= 0 and (high <= 1 or 128 <= high <= 255):
        top = 1.0 if high <= 1 else 255.0
        return Intensity(0.0, top, f"floats up to {top:g}")
    return Intensity(low, high if high > low else low + 1, "range of the training pictures")


def sample(labels: Sequence[str], seed: int) -> list[int]:
    """Return pictures of all classes in turn, at random."""
    seen: Counter[str] = Counter()
    turns: dict[int, int] = {}
    for row in np.random.default_rng(seed).permutation(len(labels)).tolist():
        seen[labels[row]] += 1
        turns[row] = seen[labels[row]]
    return sorted(turns, key=turns.__getitem__)[:SAMPLE]

"""Drawings with a round pen, framed like MNIST: digits drawn again, and shapes that are no digits.

An out-of-distribution detector learns from the shapes. Digits are drawn again with the same pens,
so that it learns the difference in shape and not in the pen.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, UInt8
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ecinn.data.photographs import DIGIT_BOX
from ecinn.pixels import StoredImages

SIDE = 28
PAGE_PEN = (2.3, 1.1, 1.0)
"""Width, halo and softness of the web page's pen (`web/page/strokes.js`), in pixels."""
SHAPES = {
    "A": "08-30 30-68 15-55|08-17-14-22-30-42-54-57-68 14-54|08-30-68 24-44",
    "C": "51-30-11-04-17-38-57|60-20-02-06-28-68|60-00 00-08 08-68",
    "D": "00-08 00-30-52-56-38-08|10-18 00-40-62-66-48-08",
    "E": "00-08 00-50 04-44 08-58|60-00-00-08-08-68 04-54|51-30-11-13-34 34-15-07-28-57",
    "F": "00-08 00-60 04-44|10-18 00-60 14-54",
    "G": "51-30-11-04-17-38-57-54 34-54|60-20-02-06-28-58-65 65-35 65-68|61-30-03-06-38-66-64-44",
    "H": "00-08 60-68 04-64|10-18 50-58 14-54",
    "J": "50-56-38-18-06|10-60 40-46-28-07",
    "K": "00-08 60-04 24-68|00-08 50-14-58",
    "L": "00-08 08-58|10-17-18-28-58",
    "M": "08-00 00-35 35-60 60-68|08-10 10-36 36-50 50-68|08-01-00-20-34-34-40-60-61-68",
    "N": "08-00 00-68 68-60|08-01-00-10-57-68-67-60|08-00 00-60 60-68",
    "P": "00-08 00-40-62-44-04|10-18 00-50-62-54-15",
    "Q": "30-11-03-05-17-38-57-65-63-51-30 45-68",
    "R": "00-08 00-40-62-44-04 24-68|10-18 00-50-62-44-14 34-58",
    "T": "00-60 30-38|01-60 30-28",
    "U": "00-05-18-48-65-60|00-05-18-48-65-60 60-68|00-08 08-68 68-60",
    "V": "00-38 38-60|00-28-38-60",
    "W": "00-18 18-32 32-58 58-60|00-06-28-36-32-36-48-66-60",
    "X": "00-68 60-08|10-58 60-08",
    "Y": "00-34 60-34 34-38|00-34 60-18",
    "d": "60-68 64-33-05-17-38-66",
    "e": "04-54-51-30-11-05-17-38-57",
    "f": "51-30-22-28 04-44",
    "h": "00-08 04-23-44-48",
    "k": "10-18 53-15 25-58",
    "m": "02-08 04-12-23-28 24-42-53-58",
    "n": "02-08 04-22-43-48",
    "p": "02-08 03-32-53-45-26-05",
    "r": "02-08 05-22-42",
    "t": "30-36-48-57 13-53",
    "u": "02-06-18-37-42 42-48",
    "w": "02-07-18-34-48-57-62",
    "x": "02-48 42-08",
    "Γ": "00-08 00-60",
    "Δ": "30-08 08-68 68-30|30-08 08-68 68-30 24-44",
    "Λ": "10-34-68 34-08",
    "π": "01-61 21-18 41-48",
    "Σ": "60-00 00-34 34-08 08-68",
    "Φ": "30-38 22-04-26-46-64-42-22",
    "Ψ": "01-04-26-46-64-61 30-38",
    "Ω": "08-28 28-04-11-30-51-64-48 48-68",
    "+": "04-64 30-38|30-38 03-63 06-66",
    "=": "03-63 05-65|10-18 50-58",
    "~": "04-12-33-45-54-73",
    "?": "12-20-41-43-35-36 37-38",
    "#": "20-18 50-48 02-62 06-66|10-18 50-58 12-52 16-56",
    "@": "43-24-26-45-42 43-46-65-61-30-01-05-28-58",
    "→": "04-64 64-42 64-46",
    "✓": "05-28 28-60",
    "□": "01-61 61-67 67-07 07-01",
    "◇": "30-04 04-38 38-64 64-30",
    "☆": "30-18 18-63 63-03 03-58 58-30",
    "♡": "32-10-01-03-38 38-63-61-50-32",
    "⌂": "04-30 30-64 14-18 54-58 18-58",
    "☺": "30-11-03-05-17-38-57-65-63-51-30 22-23 42-43 25-36-45",
    "fish": "04-22-43-65 04-26-45-63",
}
"""Letters and signs that are no digits, as strokes: column and row of points, 0 at the top left.

Variants are separated by |. B, I, O, S and Z are left out: they are drawn like digits.
"""
RANDOM_SHARE = 0.2
"""Share of the shapes that are random strokes between nine points."""
_FINER = 3
"""Points per pixel and direction of the grid on which digits are thinned."""
_INK = 0.4
"""Share of white from which a point of that grid is ink."""
_MARGIN = 11
"""Pixels from the middle of a drawing to the end of its ink: half the digit box, and half the
largest softness."""
_CENTRES = torch.arange(0.5 - _MARGIN, _MARGIN)
"""Centres of the pixels in a row of such a drawing, from its middle."""
_AT_ONCE = 50

Points = Float[Tensor, "_ 2"]
"""Points (x, y) close together on the centreline of a drawing, in any unit."""


class Pens(NamedTuple):
    """A pen for each of some drawings, in pixels."""

    width: Float[Tensor, " drawings"]
    halo: Float[Tensor, " drawings"]
    """Width that a faint line adds."""
    softness: Float[Tensor, " drawings"]
    """Width over which ink ends."""


def page_pens(count: int) -> Pens:
    """Return the pen of the web page."""
    return Pens(*(torch.full((count,), value) for value in PAGE_PEN))


def random_pens(count: int, generator: torch.Generator) -> Pens:
    """Return the page's pen for every other drawing on average, and pens of any kind."""
    drawn = torch.rand((4, count), generator=generator)
    low, high = torch.tensor([1.3, 0.0, 0.8]), torch.tensor([4.6, 1.5, 2.0])
    others = low[:, None] + (high - low)[:, None] * drawn[:3]
    page = torch.stack(page_pens(count))
    return Pens(*torch.where(drawn[3] < 0.5, page, others))


def draw(lines: Sequence[Points], pens: Pens) -> StoredImages:
    """Draw each line in the digit box, and move its centre of mass to the middle."""
    length = torch.tensor([len(line) for line in lines])
    drawn = torch.empty((len(lines), 1, SIDE, SIDE), dtype=torch.uint8)
    for rows in length.argsort(stable=True).split(_AT_ONCE):
        points = pad_sequence([lines[row] for row in rows.tolist()], batch_first=True)
        inside = torch.arange(points.shape[1]) < length[rows, None]
        points = torch.where(inside[..., None], points, points[:, :1])
        drawn[rows, 0] = _draw(points, Pens(*(each[rows] for each in pens)))
    return drawn


def _draw(
    points: Float[Tensor, "drawings points 2"], pens: Pens
) -> UInt8[Tensor, "drawings height width"]:
    """Draw lines with the same number of points."""
    low, high = points.amin(1), points.amax(1)
    scale = (DIGIT_BOX - pens.width - pens.halo) / (high - low).amax(1).clamp(min=1e-6)
    drawn = _ink((points - (low + high)[:, None] / 2) * scale[:, None, None], pens)
    mass = torch.stack([(drawn.sum(axis) * _CENTRES).sum(1) for axis in (1, 2)], 1)
    # The middle is a corner of four pixels: whole pixels move the ink and do not change it.
    shift = (-mass / drawn.sum((1, 2))[:, None]).round().long()
    y, x = (torch.arange(SIDE) + SIDE // 2 + _MARGIN - shift[:, axis, None] for axis in (1, 0))
    framed = F.pad((255 * drawn).round().to(torch.uint8), (SIDE,) * 4)
    return framed[torch.arange(len(framed))[:, None, None], y[:, :, None], x[:, None]]


def _ink(
    points: Float[Tensor, "drawings points 2"], pens: Pens
) -> Float[Tensor, "drawings height width"]:
    """Return shares of white around the origin: a full line over a faint, wider one."""
    width, halo, softness = (value[:, None, None] for value in pens)
    across, down = (_CENTRES - points[..., None]).square().unbind(2)
    distance = (down[..., None] + across[:, :, None]).amin(1).sqrt()
    full = ((width / 2 - distance) / softness + 0.5).clamp(0, 1)
    faint = (((width + halo) / 2 - distance) / softness + 0.5).clamp(0, 1)
    return full + 0.35 * (1 - full) * faint


def draw_shapes(count: int, generator: torch.Generator) -> StoredImages:
    """Draw shapes that are no digits, each distorted at random, with random pens."""
    codes = [code for variants in SHAPES.values() for code in variants.split("|")]
    each = math.ceil(count * (1 - RANDOM_SHARE) / len(codes))
    lines = [line for code in codes for line in _distorted(code, each, generator)]
    several = math.ceil(count * RANDOM_SHARE / 4)
    for strokes in range(3, 7):
        lines += _random_strokes(strokes, several, generator)
    chosen = torch.randperm(len(lines), generator=generator)[:count]
    return draw([lines[row] for row in chosen.tolist()], random_pens(count, generator))


def redraw(images: StoredImages, pens: Pens) -> StoredImages:
    """Draw the centrelines of digits with other pens."""
    return draw(centrelines(images), pens)


def _curve(points: Float[Tensor, "points dim"]) -> Float[Tensor, "samples dim"]:
    """Follow a stroke as the page does: a line, or a curve through the middles of its points."""
    here, curves = points[0], []
    t = torch.linspace(0, 1, 16)[:, None]
    for corner, following in pairwise(points[1:]):
        end = (corner + following) / 2
        curves.append((1 - t) ** 2 * here + 2 * t * (1 - t) * corner + t**2 * end)
        here = end
    t = torch.linspace(0, 1, 16 if curves else 40)[:, None]
    return torch.cat([*curves, here + t * (points[-1] - here)])


def _distorted(code: str, count: int, generator: torch.Generator) -> list[Points]:
    """Move the points of a shape, equal points together, and slant, rotate and scale it."""
    strokes = [stroke.split("-") for stroke in code.split()]
    names = [name for stroke in strokes for name in stroke]
    places = torch.tensor([[float(digit) for digit in name] for name in names])
    first = torch.tensor([names.index(name) for name in names])
    # A curve is linear in its points: one matrix for all drawings of a shape.
    own = torch.eye(len(names)).split([len(stroke) for stroke in strokes])
    follow = torch.cat([_curve(rows) for rows in own])
    together, apart = torch.randn((2, count, len(names), 2), generator=generator)
    moved = places + 0.3 * together[:, first] + 0.12 * apart
    return list(follow @ moved @ _distortions(count, generator))


def _random_strokes(strokes: int, count: int, generator: torch.Generator) -> list[Points]:
    """Join random pairs of nine points, by lines and arcs."""
    grid = torch.tensor([[3.0 * x, 4.0 * y] for x in range(3) for y in range(3)])
    start = torch.randint(9, (count, strokes), generator=generator)
    end = (start + torch.randint(1, 9, start.shape, generator=generator)) % 9
    bent = torch.rand((count, strokes, 1), generator=generator) < 0.4
    noise = torch.randn((4, count, strokes, 2), generator=generator)
    middle = (grid[start] + grid[end]) / 2 + 2.5 * bent * noise[3]
    points = torch.stack([grid[start], middle, grid[end]], 2) + 0.3 * noise[:3].movedim(0, 2)
    follow = torch.block_diag(*[_curve(torch.eye(3))] * strokes)
    return list(follow @ points.flatten(1, 2) @ _distortions(count, generator))


def _distortions(count: int, generator: torch.Generator) -> Float[Tensor, "count 2 2"]:
    """Rotate by up to 12°, shear by up to 1/4 and scale each axis by up to e^±1/4."""
    signed = 2 * torch.rand((4, count), generator=generator) - 1
    angle, shear = math.radians(12) * signed[0], 0.25 * signed[1]
    wide, high = (0.25 * signed[2:]).exp()
    cos, sin = angle.cos(), angle.sin()
    columns = [cos * wide, sin * wide, (cos * shear - sin) * high, (sin * shear + cos) * high]
    return torch.stack(columns, 1).reshape(-1, 2, 2)


def centrelines(images: StoredImages) -> list[Points]:
    """Return the middle of the strokes of each image, in steps of a third of a pixel."""
    lines = []
    for some in images.split(10 * _AT_ONCE):
        grey = some.float() / 255
        finer = F.interpolate(grey, scale_factor=_FINER, mode="bicubic", align_corners=False)
        mask = thin(finer[:, 0] > _INK)
        mask[:, 0, 0] |= ~mask.flatten(1).any(1)  # a blank image has one point
        counts = mask.sum((1, 2)).tolist()
        for points in mask.nonzero()[:, 1:].flip(1).float().split(counts):
            # The mean of close points has no steps. Tiny weights would be denormal, which is slow.
            close = (-torch.cdist(points, points).square() / 4).clamp(min=-40).exp()
            lines.append(close @ points / close.sum(1, keepdim=True))
    return lines


def thin(ink: Bool[Tensor, "batch height width"]) -> Bool[Tensor, "batch height width"]:
    """Remove the edges of ink until lines of one point are left (Zhang and Suen 1984)."""
    padded = F.pad(ink.to(torch.uint8), (1, 1, 1, 1))
    flat, row = padded.view(-1), padded.shape[2]
    around = (-row, 1 - row, 1, row + 1, row, row - 1, -1, -row - 1)
    code = torch.zeros_like(flat)
    for bit, offset in enumerate(around):
        code |= flat.roll(-offset) << bit
    points, before = flat.nonzero()[:, 0], -1
    while len(points) != before:
        before = len(points)
        for removable in _removable():
            gone = removable[code[points].int()]
            removed, points = points[gone], points[~gone]
            for bit, offset in enumerate(around):
                code[removed - offset] -= 1 << bit
    left = torch.zeros_like(padded, dtype=torch.bool)
    left.view(-1)[points] = True
    return left[:, 1:-1, 1:-1]


def _removable() -> tuple[Bool[Tensor, "256"], Bool[Tensor, "256"]]:
    """Return for all neighbours of a point, as bits, if either half of a round removes it."""
    near = torch.arange(256) >> torch.arange(8)[:, None] & 1
    up, right, down, left = near[::2]
    count = near.sum(0)
    pieces = ((near == 0) & (near.roll(-1, 0) == 1)).sum(0)
    thick = (count >= 2) & (count <= 6) & (pieces == 1)
    return (
        thick & (up * right * down == 0) & (right * down * left == 0),
        thick & (up * right * left == 0) & (up * down * left == 0),
    )

"""Drawings with a round pen: the ink, the framing, centrelines and shapes."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from scipy import ndimage

from ecinn.data import pen
from ecinn.data.mnist import load_mnist
from ecinn.model import Model


def by_pillow(points: np.ndarray, finer: int = 16) -> np.ndarray:
    """The page's two lines, one over the other, on a finer grid: circles at every point."""
    shares = []
    for width in (pen.PAGE_PEN[0] + pen.PAGE_PEN[1], pen.PAGE_PEN[0]):
        paper = Image.new("L", (28 * finer, 28 * finer))
        for x, y in points * finer:
            radius = width * finer / 2
            ImageDraw.Draw(paper).ellipse((x - radius, y - radius, x + radius, y + radius), 255)
        shares.append(np.asarray(paper).reshape(28, finer, 28, finer).mean((1, 3)) / 255)
    faint, full = shares
    return 255 * (full + 0.35 * (1 - full) * faint)


def test_ink_is_that_of_two_round_pens() -> None:
    """A slanted line and a circle, already framed: 16.6 pixels long, about the middle."""
    t = torch.linspace(0, 1, 200)
    line = torch.stack([9 + 10 * t, 5.7 + 16.6 * t], 1)
    arc = 14 + 8.3 * torch.stack([(6.283 * t).cos(), (6.283 * t).sin()], 1)
    drawn = pen.draw([line, arc], pen.page_pens(2))
    for image, points in zip(drawn, (line, arc), strict=True):
        difference = np.abs(image[0].numpy() - by_pillow(points.numpy()))
        assert difference.max() < 40
        assert difference.mean() < 2


def test_a_line_is_drawn_alike_among_longer_and_shorter_ones(generator: torch.Generator) -> None:
    steps = torch.randn(120, 90, 2, generator=generator)
    lengths = torch.randint(2, 90, (120,), generator=generator).tolist()
    lines = [way[:n] for way, n in zip(steps.cumsum(1), lengths, strict=True)]
    pens = pen.random_pens(120, generator)
    alone = [
        pen.draw([line], pen.Pens(*(value[row : row + 1] for value in pens)))
        for row, line in enumerate(lines)
    ]
    assert torch.equal(pen.draw(lines, pens), torch.cat(alone))


def test_drawings_are_framed_as_digits(generator: torch.Generator) -> None:
    drawn = pen.draw_shapes(120, generator)
    assert drawn.shape == (120, 1, 28, 28)
    assert drawn.dtype == torch.uint8
    ink = drawn[:, 0].double()
    for axis in (1, 2):
        profile = ink.sum(axis)
        centre = (profile * torch.arange(28)).sum(1) / profile.sum(1)
        assert (centre - 13.5).abs().max() < 0.6
    rows, columns = ((ink > 64).any(axis).sum(1) for axis in (2, 1))
    longest = torch.maximum(rows, columns)
    assert longest.min() >= 16
    assert longest.max() <= 22
    assert len(drawn.flatten(1).unique(dim=0)) == 120
    again = pen.draw_shapes(120, torch.Generator().manual_seed(generator.initial_seed()))
    assert torch.equal(again, drawn)


def test_no_shape_is_drawn_like_a_digit() -> None:
    assert not set("BIOSZ0123456789") & set(pen.SHAPES)
    strokes = [s for variants in pen.SHAPES.values() for s in variants.replace("|", " ").split()]
    for points in (stroke.split("-") for stroke in strokes):
        assert len(points) > 1
        assert all(len(p) == 2 and p.isdecimal() and int(p[1]) <= 8 for p in points)


def test_thin_lines_are_connected_as_the_ink_is(generator: torch.Generator) -> None:
    """Discs and bars of five points and more become lines in their middle, none wider than two."""
    ink = torch.zeros(3, 40, 40, dtype=torch.bool)
    ink[0, 10:17, 4:36] = True
    ink[1, 5:35, 8:13] = ink[1, 20:25, 8:30] = True
    away = torch.cartesian_prod(torch.arange(40.0), torch.arange(40.0)) - 20
    ink[2] = ((away.norm(dim=1) - 12).abs() < 3).reshape(40, 40)  # a ring has a hole
    thinned = pen.thin(ink)
    assert not (thinned & ~ink).any()
    assert torch.equal(pen.thin(thinned), thinned)
    for before, after in zip(ink.numpy(), thinned.numpy(), strict=True):
        for inside, structure in ((True, np.ones((3, 3))), (False, None)):
            counts = [ndimage.label(m == inside, structure)[1] for m in (before, after)]
            assert counts[0] == counts[1]
        assert ndimage.binary_opening(after, np.ones((3, 3))).sum() == 0
        depth = ndimage.distance_transform_edt(before)
        assert depth[after].min() >= 1
    rows = thinned[0].nonzero()[:, 0]
    assert set(rows.tolist()) <= {12, 13, 14}
    radius = away.norm(dim=1).reshape(40, 40)[thinned[2]]
    assert (radius - 12).abs().max() < 1.6


def test_digits_that_are_drawn_again_are_the_same_digits(mnist: Model) -> None:
    digits = load_mnist("test").first(150)
    again = pen.redraw(digits.images, pen.page_pens(150))
    agree = mnist.predict(again).argmax(1) == digits.labels
    assert agree.float().mean() > 0.93
    blank = pen.redraw(torch.zeros_like(digits.images[:1]), pen.page_pens(1))
    assert blank.shape == (1, 1, 28, 28)


@pytest.mark.parametrize("count", [1, 400])
def test_pens(count: int, generator: torch.Generator) -> None:
    pens = pen.random_pens(count, generator)
    assert all(values.shape == (count,) for values in pens)
    if count > 1:
        page = torch.stack(pens) == torch.tensor(pen.PAGE_PEN)[:, None]
        assert 0.4 < page.all(0).float().mean() < 0.6
        assert 1.3 <= pens.width.min() < pens.width.max() <= 4.6

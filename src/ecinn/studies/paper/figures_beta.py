"""Make Figure 10: counterfactuals of models trained at increasing β, with their accuracies."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from ecinn.drawing.pictures import Array, image_array
from ecinn.errors import InputError
from ecinn.studies.paper import beta_models, style
from ecinn.studies.paper.artefact import Context, Made
from ecinn.studies.paper.beta_models import TradeOff

SIDE = 3
"""Digits per side of a square."""
TIMES = 4
_GAP, _HEADING, _MARGIN = 0.17, 0.29, 0.05
_CURVES_LEFT, _CURVES_RIGHT, _CURVES_BOTTOM = 0.26, 0.27, 0.25


def draw(result: TradeOff, part: int = 0) -> Figure:
    """Draw nine inputs as a square, a square per β, and curves of error and bits/dim over β."""
    shown = slice(part * SIDE**2, (part + 1) * SIDE**2)
    already, failed = result.already[:, shown], ~(result.reached | result.already)[:, shown]
    squares = [result.images[shown], *result.counterfactuals[:, shown]]
    columns = math.ceil((len(squares) + 1) / 2)
    side = style.enlarged(SIDE * squares[0].shape[-1], TIMES)
    across, down = side + _GAP, side + _HEADING + _GAP / 2
    width = columns * across - _GAP + 2 * _MARGIN + _CURVES_RIGHT
    height = 2 * down - _GAP / 2 + 2 * _MARGIN
    figure, axes = style.page(width, height)
    for number, images in enumerate(squares):
        left = _MARGIN + number % columns * across
        top = _MARGIN + number // columns * down
        name, remark = "input", f"all into $q$ = {result.target}"
        if number:
            name = rf"$\beta$ = {result.beta[number - 1]:g}"
            remark = f"{100 * (1 - result.error[number - 1]):.2f} % right"
        style.write(axes, left + side / 2, top, name, fontsize=style.NORMAL)
        style.write(axes, left + side / 2, top + 0.135, remark, color=style.MUTED)
        style.place(axes, square(images), left, top + _HEADING, TIMES)
        if number:
            corner = (left, top + _HEADING)
            _mark(axes, failed[number - 1], corner, side / SIDE, style.WARNING)
            _mark(axes, already[number - 1], corner, side / SIDE, style.MUTED)
    left = _MARGIN + (columns - 1) * across + _CURVES_LEFT
    top = _MARGIN + down + _HEADING / 2
    right, bottom = width - _MARGIN - _CURVES_RIGHT, height - _MARGIN - _CURVES_BOTTOM
    inside = (left / width, 1 - bottom / height, (right - left) / width, (bottom - top) / height)
    _curves(figure, inside, result)
    return figure


def square(images: UInt8[Tensor, "images channels height width"]) -> Array:
    """Join nine images, three to a row."""
    arrays = [image_array(image) for image in images]
    rows = [arrays[start : start + SIDE] for start in range(0, SIDE**2, SIDE)]
    return np.concatenate([np.concatenate(row, axis=1) for row in rows])


def _mark(
    axes: Axes,
    selected: Bool[Tensor, " images"],
    corner: tuple[float, float],
    digit: float,
    colour: str,
) -> None:
    """Frame some digits of a square."""
    left, top = (style.whole_pixels(place) for place in corner)
    look: dict[str, Any] = {"fill": False, "edgecolor": colour, "linewidth": 0.8, "zorder": 4}
    for place in selected.nonzero()[:, 0].tolist():
        row, column = divmod(place, SIDE)
        inside = (left + column * digit + 0.01, top + row * digit + 0.01)
        axes.add_patch(Rectangle(inside, digit - 0.02, digit - 0.02, **look))


def _curves(figure: Figure, inside: tuple[float, float, float, float], result: TradeOff) -> None:
    """Draw the error on the left axis and bits/dim on the right, over β."""
    with style.styled():
        left = figure.add_axes(inside)
        right = left.twinx()
        percent = [100 * error for error in result.error]
        for axes, values, colour in (
            (left, percent, style.BLUE),
            (right, result.bits_per_dim, style.VERMILION),
        ):
            axes.plot(result.beta, values, "o-", color=colour, markersize=2)
            axes.tick_params("y", colors=colour, pad=1)
        left.set_xscale("log")
        left.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
        left.minorticks_off()
        left.tick_params("x", pad=1)
        left.set_xlabel(r"$\beta$", labelpad=0, fontsize=style.SMALL)
        left.set_ylim(bottom=0)
        right.spines["right"].set_visible(True)
        look: dict[str, Any] = {"fontsize": style.SMALL, "pad": 3}
        left.set_title("error, %", color=style.BLUE, loc="left", **look)
        right.set_title("bits/dim", color=style.VERMILION, loc="right", **look)


def numbers(result: TradeOff, shown: slice) -> Mapping[str, object]:
    """Return the numbers behind these digits."""
    columns = {name: getattr(result, name) for name in ("beta", *beta_models.METRICS)} | {
        "shown": (~result.already[:, shown]).sum(1).tolist(),
        "reached_of_shown": result.reached[:, shown].sum(1).tolist(),
    }
    return {
        "target": result.target,
        "test_images_shown": list(result.places[shown]),
        "training": dict(result.training),
        "models": [
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
        ],
        "command": "ecinn beta --out DIR",
    }


def _results(context: Context) -> TradeOff:
    path = beta_models.find(context.beta)
    if path is None:
        raise InputError(
            "models at increasing β are needed: train them with `ecinn beta --out DIR`"
        )
    return beta_models.read(path)


def figure_10(context: Context) -> Made:
    """Counterfactuals of models trained at increasing β."""
    result = _results(context)
    error, bits = ((min(values), max(values)) for values in (result.error, result.bits_per_dim))
    said = {"result": result, "error": error, "bits": bits}
    return Made.single("figure-10", draw(result), numbers(result, slice(SIDE**2)), **said)


def supplement_10(context: Context) -> Made:
    """Further digits by the same models."""
    result = _results(context)
    pages = [draw(result, part) for part in range(1, len(result.images) // SIDE**2)]
    shown, digits = slice(SIDE**2, None), SIDE**2 * len(pages)
    return Made.single("supplement-10", pages, numbers(result, shown), digits=digits)

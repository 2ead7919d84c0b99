"""Render audits, verdicts and distillations as self-contained HTML pages, from templates."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from torch import Tensor

from ecinn import __version__
from ecinn.auditing.measurement import EXAMPLES
from ecinn.auditing.result import Audit, Comparison, count
from ecinn.auditing.verdict import Verdict, percentage
from ecinn.data.face_regions import FACE, FACE_REGIONS, Box
from ecinn.drawing import pictures
from ecinn.drawing.heatmaps import overlay_array
from ecinn.drawing.pictures import Array
from ecinn.drawing.table import number_interval
from ecinn.metrics.statistics import Interval
from ecinn.pixels import to_uint8
from ecinn.training.distillation import Distilled

COLUMNS = ("far left", "left", "centre", "right", "far right")
DIFFERENT = 0.1
"""Similarity of maps up to which two models look at different features."""
NOT_EXPLAINED = 0.1
"""The report warns if at least this share of the counterfactuals is not explained; our choice."""
PERCENTILE = 99.9
"""Percentile of a map that gets full colour, so that a single dot stays visible."""


@dataclass(frozen=True)
class Cell:
    """A cell of the coarse grid: its name, its place, and its change relative to the mean."""

    name: str
    box: Box
    change: float


def render(audit: Audit, command: str) -> str:
    """Fill in the template; it escapes every name and path."""
    mean_image = to_uint8(audit.images.float().mean(0) / 256)
    own_change = audit.flips.change.abs().mean(0)
    return template("page.html").render(
        audit=audit,
        command=command,
        version=__version__,
        names=audit.class_names,
        mean_image=overlay_array(mean_image, own_change),
        own_change=own_change,
        cells=ranked_cells(audit),
        examples=(
            ("At random", range(min(EXAMPLES, len(audit.images)))),
            ("Least likely changed images", audit.unlikely),
            ("Misclassified images, most confident first", audit.misclassified),
        ),
        face=FACE,
        face_regions=FACE_REGIONS,
        url=pictures.data_url,
        image=_image,
        heatmap=_heatmap,
        colours=_colours,
        matrix=lambda kind: _matrix(audit, kind),
        verdict=_verdict,
        count=count,
        percent=pictures.percent,
    )


def template(name: str) -> Template:
    """Return a template of this folder; it escapes every value."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template(name)


def render_verdict(verdict: Verdict, command: str) -> str:
    """Fill in the template of a verdict."""
    return template("verdict.html").render(
        verdict=verdict,
        command=command,
        version=__version__,
        examples=(
            ("Ten at random", verdict.random),
            ("The ten that convince the other network least", verdict.worst),
        ),
        url=pictures.data_url,
        image=_image,
        heatmap=_heatmap,
        percent=pictures.percent,
    )


def render_distillation(distilled: Distilled, command: str) -> str:
    """Fill in the template of a distillation's report."""
    agreement = distilled.agreement
    return template("distillation.html").render(
        agreement=agreement,
        queries=distilled.queries,
        measures=[*_measures(distilled)],
        limit=NOT_EXPLAINED,
        command=command,
        version=__version__,
        examples=(
            ("Ten at random", agreement.random),
            ("The ten that convince the classifier least", agreement.worst),
        ),
        interval=percentage,
        share=lambda value: f"{100 * value:.1f} %",
        url=pictures.data_url,
        image=_image,
        heatmap=_heatmap,
        percent=pictures.percent,
    )


def _measures(distilled: Distilled) -> Iterator[tuple[str, str, int, str]]:
    """Yield name, value, number of images and meaning of every measure."""
    a, accuracy = distilled.agreement, distilled.accuracy
    one, three, four = (partial(number_interval, digits=digits) for digits in (1, 3, 4))
    rows: list[tuple[str, Callable[[Interval], str], Interval, str]] = [
        ("agreement", percentage, a.agreement, "both predict the same class"),
        (
            "difference of probabilities",
            four,
            a.difference,
            "mean over classes and images, from 0 to 1",
        ),
        ("… along paths", four, a.path_difference, "the same on changed images"),
        (
            "flipped, before correction",
            percentage,
            a.flipped,
            "changed images that the classifier reads as their target, as the student made them",
        ),
        ("flipped, corrected", percentage, a.flipped_after, "the same after at most 8 queries"),
        (
            "not explained",
            percentage,
            a.not_explained,
            "the classifier does not read the corrected image as requested, or only far outside",
        ),
        (
            "as sure of unchanged images",
            percentage,
            a.sure,
            "images of whose class the classifier is as sure as was requested of changed images",
        ),
        (
            "requested confidence, r",
            three,
            a.correlation,
            "correlation of requested and obtained confidence, before correction",
        ),
        ("… corrected", three, a.correlation_after, "the same after correction"),
        (
            "… within 0.05",
            percentage,
            a.within_after,
            "corrected images with the requested confidence",
        ),
        (
            "queries",
            one,
            a.queries_per_counterfactual,
            "per changed image, besides the image itself",
        ),
    ]
    if accuracy is not None:
        meaning = f"on labelled images; by chance {100 * accuracy.chance:.1f} %"
        rows.insert(0, ("the classifier's accuracy", percentage, accuracy.accuracy, meaning))
    for name, shown, value, meaning in rows:
        yield name, shown(value), value.n, meaning


def ranked_cells(audit: Audit) -> list[Cell]:
    """Return the grid's cells, most changed first, divided as `regions_by_change` does."""
    rows, columns = audit.grid.shape

    def spans(pixels: int, parts: int) -> list[tuple[float, float]]:
        split = torch.arange(pixels).tensor_split(parts)
        return [(int(part[0]) / pixels, (int(part[-1]) + 1) / pixels) for part in split]

    down, across = map(spans, audit.images.shape[2:], audit.grid.shape)
    cells = []
    for cell in audit.grid.flatten().argsort().tolist()[::-1]:
        row, column = divmod(cell, columns)
        place = COLUMNS[column] if columns == len(COLUMNS) else f"column {column + 1}"
        (top, bottom), (left, right) = down[row], across[column]
        name, box = f"row {row + 1} of {rows}, {place}", Box(top, left, bottom, right)
        cells.append(Cell(name, box, float(audit.grid[row, column])))
    return cells


def _matrix(audit: Audit, kind: str) -> list[list[tuple[int, Array] | None]]:
    """Return count and mean map of every pair of classes; mean images on the diagonal."""
    # One scale for all maps, so that pairs can be compared.
    joined = torch.cat([getattr(pair, kind) for pair in audit.pairs], 1)
    limit = pictures.robust_limit(joined, PERCENTILE)
    shown = {}
    for p in audit.flips.p.unique().tolist():
        images = audit.images[audit.flips.p == p]
        shown[p, p] = len(images), _image(images.float().mean(0) / 256)
    for pair in audit.pairs:
        mean = getattr(pair, kind)
        picture = _image(mean) if kind == "counterfactual" else _heatmap(mean, limit)
        shown[pair.p, pair.q] = pair.n, picture
    classes = range(len(audit.class_names))
    return [[shown.get((p, q)) for q in classes] for p in classes]


def _verdict(comparison: Comparison) -> str:
    same, control = comparison.same.absolute, comparison.shuffled.absolute
    if same.low <= control.high:
        return "hardly more similar than"
    return "more similar than" if same.mean > DIFFERENT else "nearly as different as"


def _image(image: Tensor) -> Array:
    return pictures.image_array(image if image.dtype == torch.uint8 else to_uint8(image))


def _heatmap(values: Tensor, limit: float | None = None) -> Array:
    return pictures.heatmap_array(values, limit or pictures.robust_limit(values, PERCENTILE))


def _colours(change: Tensor) -> Array:
    """Show a change of colour around grey."""
    return _image(0.5 + 0.5 * change / (float(change.abs().quantile(0.995)) or 1.0))

"""Make the supplement: many further samples of every figure, drawn at random, never chosen."""

from collections.abc import Iterator, Sequence

import torch

from ecinn.drawing import pictures
from ecinn.progress import Progress
from ecinn.studies.paper import figures_digits as digits
from ecinn.studies.paper.artefact import ABOUT, Context, Made, caption
from ecinn.studies.paper.explained import Magnify, Shown, columns, draw, explain_each
from ecinn.studies.paper.figures_faces import FACE_MODELS, cnn_grids, draw_faces, inn_grids
from ecinn.studies.paper.figures_method import pipelines, projected
from ecinn.studies.paper.style import Grid, draw_grids

SHEETS = 20
"""Sheets per figure, of nine columns each."""
SHEETS_PER_PAGE = 4
FACES = 40
"""Faces per label: half of them in each direction."""
HEATMAP_FACES = 8
"""Faces with heatmaps of four labels: gradients through an INN take a while."""
FACES_PER_PAGE = 2
"""Faces with heatmaps on a page, a row per label."""

FURTHER = 100
"""Added to the number of a figure, for draws that differ from those of the figure itself."""


def _counted(context: Context, figure: int, total: int) -> Iterator[int]:
    for number in range(total):
        yield number
        context.observe(Progress(f"supplement of figure {figure}", number + 1, total))


def _book(
    name: str,
    shown: Sequence[Shown],
    magnify: Magnify | None = None,
    percentile: float = pictures.PERCENTILE,
) -> Made:
    """Arrange sheets of digits, a few on every page."""
    sheets, title = [columns(one, magnify, percentile) for one in shown], ABOUT[name]["heading"]
    pages = [
        draw_grids(sheets[start : start + SHEETS_PER_PAGE], title, 4)
        for start in range(0, len(sheets), SHEETS_PER_PAGE)
    ]
    made, reached = sum(len(one.pairs) for one in shown), sum(one.reached() for one in shown)
    text = caption("supplement", title=title, made=made, reached=reached)
    return Made(
        books={name: pages}, data={name: [one.numbers() for one in shown]}, captions={name: text}
    )


def figure_1(context: Context) -> Made:
    """Twelve further faces."""
    figures, shown = pipelines(context, 12, context.generator(FURTHER + 1))
    return Made.single("supplement-1", figures, shown.numbers())


def figure_2(context: Context) -> Made:
    """Nine further pairs of digits."""
    model, data = context.tested("mnist")
    generator, figures, numbers = context.generator(FURTHER + 2), [], []
    for _ in _counted(context, 2, 9):
        p, q = torch.randperm(digits.CLASSES, generator=generator)[:2].tolist()
        geometry, figure, place = projected(model, data, p, q, generator)
        figures.append(figure)
        means = {key: value for key, value in geometry.numbers().items() if key != "points"}
        numbers.append({"p": p, "q": q, "test_image": place, **means})
    return Made.single("supplement-2", figures, numbers)


def figure_3(context: Context) -> Made:
    """Two hundred further samples of FakeMNIST."""
    _, data = context.tested("fakemnist")
    generator, rows, places = context.generator(FURTHER + 3), [], []
    for _ in range(20):
        samples, drawn = digits.samples(data, generator)
        rows.append(tuple(panel for row in samples.rows for panel in row))
        places.append(drawn)
    pages = [
        draw_grids([Grid(tuple(rows[start : start + 10]))], "Further FakeMNIST samples", 4)
        for start in (0, 10)
    ]
    return Made.single("supplement-3", pages, places)


def _any_to_all(context: Context, name: str, figure: int) -> list[Shown]:
    """Explain random images of any class with all other classes as targets."""
    tested, generator = context.tested(name), context.generator(FURTHER + figure)
    everything = torch.ones(len(tested[1]), dtype=torch.bool)
    shown = digits.one_to_all(tested, everything, generator, SHEETS)
    return [next(shown) for _ in _counted(context, figure, SHEETS)]


def figure_4(context: Context) -> Made:
    """Images of FakeMNIST into all other classes."""
    shown = _any_to_all(context, "fakemnist", 4)
    return _book("supplement-4", shown, digits.top_left, digits.LARGEST)


def figure_5(context: Context) -> Made:
    """Digits into all others."""
    return _book("supplement-5", _any_to_all(context, "mnist", 5))


def figure_6(context: Context) -> Made:
    """All digits into one other, two sheets for every target."""
    tested, generator = context.tested("mnist"), context.generator(FURTHER + 6)
    numbers = _counted(context, 6, SHEETS)
    return _book(
        "supplement-6", [digits.all_to_one(tested, number // 2, generator) for number in numbers]
    )


def figure_7(context: Context) -> Made:
    """Images of one digit into another, on the first page fours into nines."""
    generator, shown = context.generator(FURTHER + 7), []
    for number in _counted(context, 7, SHEETS):
        p, q = (4, 9)
        if number >= SHEETS_PER_PAGE:
            p, q = torch.randperm(digits.CLASSES, generator=generator)[:2].tolist()
        shown.append(digits.same_pair(context.tested("mnist"), p, q, 9, generator))
    return _book("supplement-7", shown)


def figure_8(context: Context) -> Made:
    """Faces of four labels in both directions."""
    generator, pages, numbers = context.generator(FURTHER + 8), [], {}
    for step in _counted(context, 8, len(FACE_MODELS)):
        name, short = list(FACE_MODELS.items())[step]
        tested, sheets = context.tested(name), list[Shown]()
        for label in (0, 1):
            places = draw([tested], tested[1].labels == label, FACES // 2, generator)
            sheets += [explain_each(tested, part, 1 - label) for part in places.split(10)]
        numbers[name] = [sheet.numbers() for sheet in sheets]
        grids = [columns(sheet, names=short) for sheet in sheets]
        title = f"{name}: {FACES} random test faces"
        pages += [draw_grids(grids[start : start + 2], title) for start in range(0, len(grids), 2)]
    return Made.single("supplement-8", pages, numbers, faces=FACES)


def figure_9(context: Context) -> Made:
    """Heatmaps of further faces by the models of four labels, arranged as in Figure 9."""
    labels = draw_faces(context, HEATMAP_FACES, context.generator(FURTHER + 9))
    other = "a residual CNN" if context.inception is None else "Inception-V3"
    grids = {"the INNs": inn_grids(labels), other: cnn_grids(labels)}
    pages = [
        draw_grids(faces[start : start + FACES_PER_PAGE], f"Heatmaps of random faces on {network}")
        for start in range(0, HEATMAP_FACES, FACES_PER_PAGE)
        for network, faces in grids.items()
    ]
    numbers = {faces.name: faces.numbers for faces in labels}
    said = {"faces": HEATMAP_FACES, "networks": " and on ".join(grids)}
    return Made.single("supplement-9", pages, numbers, **said)

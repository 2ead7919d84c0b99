"""The supplement: many further samples of every figure, drawn at random, not chosen."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from matplotlib.figure import Figure

from ecinn.data.dataset import Dataset
from ecinn.drawing import pictures
from ecinn.model import Model
from ecinn.studies.paper import digits, grid
from ecinn.studies.paper.artefact import Artefact, Context, Made, Need
from ecinn.studies.paper.draws import draw, generator
from ecinn.studies.paper.explained import Magnify, Shown, columns, every_image, every_target
from ecinn.studies.paper.faces import FACE_MODELS, Rows, cnn_grid, inn_grid
from ecinn.studies.paper.geometry import projected
from ecinn.studies.paper.pipeline import pipelines

SHEETS = 20
"""Of nine columns each."""
ON_A_PAGE = 4
FACES = 40
"""Of every label: half of them each way."""
HEATMAP_FACES = 8
"""Of every label: gradients through an INN take a while."""


def _draws(context: Context, figure: int) -> torch.Generator:
    # Others than the figure's own.
    return generator(context, 100 + figure)


def _counted(context: Context, what: str, total: int) -> Iterator[int]:
    for number in range(total):
        yield number
        context.observe(what, number + 1, total)


def _book(
    name: str,
    title: str,
    shown: Sequence[Shown],
    magnify: Magnify | None = None,
    percentile: float = pictures.PERCENTILE,
) -> Made:
    """Sheets of digits, a few on every page."""
    sheets = [columns(one, magnify, percentile) for one in shown]
    pages = [
        grid.draw_all(tuple(sheets[start : start + ON_A_PAGE]), title, 4)
        for start in range(0, len(sheets), ON_A_PAGE)
    ]
    pairs = sum(len(one.pairs) for one in shown)
    words = (
        f"{title}: {pairs} counterfactuals, "
        f"{sum(one.reached() for one in shown)} of them read as asked from 8 bits."
    )
    numbers = [one.numbers() for one in shown]
    return Made(books={name: pages}, data={name: numbers}, captions={name: words})


def _pages_of(name: str, title: str, figures: Sequence[Figure], numbers: Any) -> Made:  # noqa: ANN401
    return Made(books={name: figures}, data={name: numbers}, captions={name: f"{title}."})


def _figure_1(context: Context) -> Made:
    figures, shown = pipelines(context, 12, _draws(context, 1))
    return _pages_of("supplement-1", "Twelve further faces", figures, shown.numbers())


def _figure_2(context: Context) -> Made:
    model, data = digits.mnist(context)
    draws, figures, numbers = _draws(context, 2), [], []
    for _ in _counted(context, "supplement of figure 2", 9):
        p, q = torch.randperm(digits.CLASSES, generator=draws)[:2].tolist()
        found, figure, place = projected(model, data, p, q, draws)
        figures.append(figure)
        means = {key: value for key, value in found.numbers().items() if key != "points"}
        numbers.append({"p": p, "q": q, "test_image": place, **means})
    return _pages_of("supplement-2", "Nine further pairs of digits", figures, numbers)


def _figure_3(context: Context) -> Made:
    _, data = digits.fake_mnist(context)
    draws, rows, places = _draws(context, 3), [], []
    for _ in range(20):
        samples, drawn = digits.samples(data, draws)
        rows.append(tuple(panel for row in samples.rows for panel in row))
        places.append(drawn)
    pages = [
        grid.draw_all(
            (grid.Grid(tuple(rows[start : start + 10])),), "Further FakeMNIST samples", 4
        )
        for start in (0, 10)
    ]
    return _pages_of("supplement-3", "Two hundred further samples", pages, places)


def _any_to_all(context: Context, model: Model, data: Dataset, figure: int) -> list[Shown]:
    """Random images of any class into all others."""
    everything = torch.ones(len(data), dtype=torch.bool)
    places = draw(model, data, everything, SHEETS, _draws(context, figure)).tolist()
    return [
        every_target(model.explain(data.images[places[number]]), (places[number],))
        for number in _counted(context, f"supplement of figure {figure}", SHEETS)
    ]


def _figure_4(context: Context) -> Made:
    shown = _any_to_all(context, *digits.fake_mnist(context), 4)
    title = "Random FakeMNIST images into all other classes"
    return _book("supplement-4", title, shown, digits.top_left, digits.LARGEST)


def _figure_5(context: Context) -> Made:
    shown = _any_to_all(context, *digits.mnist(context), 5)
    return _book("supplement-5", "Random digits into all others", shown)


def _figure_6(context: Context) -> Made:
    draws = _draws(context, 6)
    shown = [
        digits.all_to_one(*digits.mnist(context), number // 2, draws)
        for number in _counted(context, "supplement of figure 6", SHEETS)
    ]
    return _book("supplement-6", "A random image of each digit into one other", shown)


def _figure_7(context: Context) -> Made:
    draws, shown = _draws(context, 7), []
    for number in _counted(context, "supplement of figure 7", SHEETS):
        p, q = (4, 9)
        if number >= ON_A_PAGE:
            p, q = torch.randperm(digits.CLASSES, generator=draws)[:2].tolist()
        shown.append(digits.same_pair(*digits.mnist(context), p, q, 9, draws))
    title = "Nine random images of one digit into another, from the thinnest to the boldest"
    return _book("supplement-7", title, shown)


def _figure_8(context: Context) -> Made:
    draws, pages, numbers = _draws(context, 8), [], {}
    for step in _counted(context, "supplement of figure 8", len(FACE_MODELS)):
        name, short = list(FACE_MODELS.items())[step]
        model = context.model(name)
        data = context.data(model.checkpoint.recipe.dataset, "test")
        sheets: list[Shown] = []
        for label in (0, 1):
            places = draw(model, data, data.labels == label, FACES // 2, draws)
            for part in places.split(10):
                explanation = model.explain(data.images[part], 1 - label)
                sheets.append(every_image(explanation, tuple(part.tolist())))
        numbers[name] = [sheet.numbers() for sheet in sheets]
        grids = [columns(sheet, names=short) for sheet in sheets]
        words = f"{name}: {FACES} random test faces"
        pages += [
            grid.draw_all(tuple(grids[start : start + 2]), words)
            for start in range(0, len(grids), 2)
        ]
    title = f"{FACES} random faces of each of four labels"
    return _pages_of("supplement-8", title, pages, numbers)


def _figure_9(context: Context) -> Made:
    draws = _draws(context, 9)
    rows = [Rows(context, name, HEATMAP_FACES, draws) for name in FACE_MODELS]
    title = f"Heatmaps of {HEATMAP_FACES} random test faces of each label"
    pages = []
    for row in rows:
        pages.append(grid.draw_all((inn_grid([row]),), f"{title}: {row.name}"))
        if context.inception is not None:
            words = f"{title}: Inception-V3 of {row.attribute.replace('_', ' ')}"
            pages.append(grid.draw_all((cnn_grid([row]),), words))
    numbers = {row.name: row.numbers for row in rows}
    networks = "the INNs" if context.inception is None else "the INNs and on Inception-V3"
    made = _pages_of("supplement-9", f"{title}, on {networks}", pages, numbers)
    if context.inception is None:
        return replace(made, skipped={"supplement-9 on Inception-V3": "inception"})
    return made


def _artefact(figure: int, make: Callable[[Context], Made], *needs: Need) -> Artefact:
    title = f"further random samples of figure {figure}"
    return Artefact(f"supplement-{figure}", title, make, frozenset(needs))


SUPPLEMENT = (
    _artefact(1, _figure_1, "faces"),
    _artefact(2, _figure_2),
    _artefact(3, _figure_3),
    _artefact(4, _figure_4),
    _artefact(5, _figure_5),
    _artefact(6, _figure_6),
    _artefact(7, _figure_7),
    _artefact(8, _figure_8, "faces"),
    _artefact(9, _figure_9, "faces"),
)

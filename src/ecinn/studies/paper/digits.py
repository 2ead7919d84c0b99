"""Figures 3 to 7: FakeMNIST and MNIST."""

from typing import Any

import torch
from matplotlib.figure import Figure

from ecinn.data.dataset import Dataset
from ecinn.drawing import pictures
from ecinn.model import Model
from ecinn.studies.paper import grid
from ecinn.studies.paper.artefact import Artefact, Context, Made
from ecinn.studies.paper.draws import draw, generator
from ecinn.studies.paper.explained import Shown, columns, every_image, every_target

CLASSES = 10
LARGEST = 100.0
"""Percentile of the changes: on FakeMNIST few pixels change, and none is to be saturated."""


def top_left(array: pictures.Array) -> pictures.Array:
    """The 10×2 pixels in which FakeMNIST says its label."""
    return array[:10, :2]


def samples(data: Dataset, draws: torch.Generator) -> tuple[grid.Grid, list[int]]:
    """One random image of every class, in two rows of five, and their places."""
    places = []
    for label in range(CLASSES):
        candidates = (data.labels == label).nonzero()[:, 0]
        places.append(int(candidates[torch.randint(len(candidates), (), generator=draws)]))
    arrays = [pictures.image_array(data.images[place]) for place in places]
    panels = [
        grid.Panel(array, f"$y$ = {label}", magnified=top_left(array))
        for label, array in enumerate(arrays)
    ]
    return grid.Grid((tuple(panels[:5]), tuple(panels[5:]))), places


def one_to_all(
    model: Model, data: Dataset, label: int, n: int, draws: torch.Generator
) -> list[Shown]:
    """So many random images of a class, each into all other classes."""
    places = draw(model, data, data.labels == label, n, draws)
    shown = []
    for place in places.tolist():
        shown.append(every_target(model.explain(data.images[place]), (place,)))
    return shown


def all_to_one(model: Model, data: Dataset, target: int, draws: torch.Generator) -> Shown:
    """A random image of every other class into the target."""
    others = [label for label in range(CLASSES) if label != target]
    places = torch.cat([draw(model, data, data.labels == label, 1, draws) for label in others])
    return every_image(model.explain(data.images[places], target), tuple(places.tolist()))


def same_pair(
    model: Model, data: Dataset, p: int, q: int, n: int, draws: torch.Generator
) -> Shown:
    """So many random images of p into q, from the thinnest to the boldest."""
    places = draw(model, data, data.labels == p, n, draws)
    places = places[data.images[places].float().mean((1, 2, 3)).argsort()]
    return every_image(model.explain(data.images[places], q), tuple(places.tolist()))


def mnist(context: Context) -> tuple[Model, Dataset]:
    """The shipped model and the test digits."""
    return context.model("mnist"), context.data("mnist", "test")


def fake_mnist(context: Context) -> tuple[Model, Dataset]:
    """The shipped model and the test images with dots."""
    return context.model("fakemnist"), context.data("fakemnist", "test")


def _figure_3(context: Context) -> Made:
    shown, places = samples(fake_mnist(context)[1], generator(context, 3))
    numbers = [{"test_image": place, "label": label} for label, place in enumerate(places)]
    caption = (
        "A random test image of every class of FakeMNIST. The strip to the left of each image "
        "magnifies its top left 10×2 pixels: the dot in row *y* is all that says the label."
    )
    return _made("figure-3", grid.draw(shown, 5), numbers, caption)


def _figure_4(context: Context) -> Made:
    (shown,) = one_to_all(*fake_mnist(context), 0, 1, generator(context, 4))
    figure = grid.draw(columns(shown, top_left, LARGEST), 4)
    words = (
        "A random test image of the class 0 of FakeMNIST into all others. The strips magnify the "
        f"top left 10×2 pixels. {said(shown, LARGEST)}"
    )
    return _made("figure-4", figure, shown.numbers(), words)


def _figure_5(context: Context) -> Made:
    (shown,) = one_to_all(*mnist(context), 3, 1, generator(context, 5))
    return _explained("figure-5", shown, "A random test image of a three into all other digits.")


def _figure_6(context: Context) -> Made:
    shown = all_to_one(*mnist(context), 0, generator(context, 6))
    return _explained("figure-6", shown, "A random test image of each other digit into a zero.")


def _figure_7(context: Context) -> Made:
    shown = same_pair(*mnist(context), 4, 9, 9, generator(context, 7))
    words = "Nine random fours of the test set into nines, from the thinnest to the boldest."
    return _explained("figure-7", shown, words)


def _explained(stem: str, shown: Shown, words: str) -> Made:
    figure = grid.draw(columns(shown))
    return _made(stem, figure, shown.numbers(), f"{words} {said(shown)}")


def _made(stem: str, figure: Figure, numbers: Any, caption: str) -> Made:  # noqa: ANN401
    return Made({stem: figure}, data={stem: numbers}, captions={stem: caption})


def said(shown: Shown, percentile: float = pictures.PERCENTILE) -> str:
    """How to read the rows, and what came out."""
    return (
        "Rows: input, tipping point (α₀), convincing counterfactual (α₁), heatmap h = x̂ − x at "
        "α₁ (red: light added, blue: taken away, white: none; full colour at "
        f"{shown.limit(percentile):.2f} of a pixel's range). Numbers: what the model says of the "
        "8-bit image above them. As computed, before rounding to 8 bits, both classes of a "
        f"tipping point are equally likely to within {shown.largest_gap():.0e}; "
        f"{shown.reached()} of {len(shown.pairs)} convincing counterfactuals are read as asked."
    )


FIGURE_3 = Artefact(
    "figure-3",
    "FakeMNIST samples with magnified dots",
    _figure_3,
    reported="Random samples from FakeMNIST; small rectangles magnify the top left 10×2 pixels.",
)
FIGURE_4 = Artefact(
    "figure-4",
    "a FakeMNIST zero into all other classes",
    _figure_4,
    reported=(
        "Input, α₀ and α₁ counterfactuals for all targets: the dot travels downwards, the digit "
        "stays, and at α₀ there is almost no dot."
    ),
)
FIGURE_5 = Artefact(
    "figure-5",
    "a three into all other digits",
    _figure_5,
    reported=(
        "A three properly becomes any of the other nine; at α₀ even a human might mistake it for "
        "both classes."
    ),
)
FIGURE_6 = Artefact(
    "figure-6",
    "nine other digits into a zero",
    _figure_6,
    reported="Nine different zeros: a narrow, tilted one becomes a narrow, tilted zero.",
)
FIGURE_7 = Artefact(
    "figure-7",
    "diverse fours into nines",
    _figure_7,
    reported="Bold inputs yield bold counterfactuals, slim ones slim; likewise tilt and size.",
)

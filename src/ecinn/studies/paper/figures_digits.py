"""Make Figures 3 to 7: FakeMNIST and MNIST."""

import torch

from ecinn.data.dataset import Dataset
from ecinn.drawing import pictures
from ecinn.model import Model
from ecinn.studies.paper.artefact import Context, Made, caption
from ecinn.studies.paper.explained import Shown, columns, draw, every_image, every_target
from ecinn.studies.paper.style import Grid, Panel, draw_grid

CLASSES = 10
LARGEST = 100.0
"""Percentile of the changes: few pixels of FakeMNIST change, and none should be saturated."""


def top_left(array: pictures.Array) -> pictures.Array:
    """Return the 10×2 pixels that hold the label of FakeMNIST."""
    return array[:10, :2]


def samples(data: Dataset, generator: torch.Generator) -> tuple[Grid, list[int]]:
    """Draw one image of every class, in two rows of five; also return their positions."""
    places = []
    for label in range(CLASSES):
        candidates = (data.labels == label).nonzero()[:, 0]
        places.append(int(candidates[torch.randint(len(candidates), (), generator=generator)]))
    arrays = [pictures.image_array(data.images[place]) for place in places]
    panels = [
        Panel(array, f"$y$ = {label}", magnified=top_left(array))
        for label, array in enumerate(arrays)
    ]
    return Grid((tuple(panels[:5]), tuple(panels[5:]))), places


def one_to_all(model: Model, data: Dataset, label: int, generator: torch.Generator) -> Shown:
    """Explain a random image of a class with all other classes as targets."""
    place = int(draw(model, data, data.labels == label, 1, generator))
    return every_target(model.explain(data.images[place], confidence="alpha_1"), (place,))


def all_to_one(model: Model, data: Dataset, target: int, generator: torch.Generator) -> Shown:
    """Explain a random image of every other class with one target."""
    others = [label for label in range(CLASSES) if label != target]
    drawn = [draw(model, data, data.labels == label, 1, generator) for label in others]
    places = torch.cat(drawn)
    explanation = model.explain(data.images[places], target, confidence="alpha_1")
    return every_image(explanation, tuple(places.tolist()))


def same_pair(
    model: Model, data: Dataset, p: int, q: int, n: int, generator: torch.Generator
) -> Shown:
    """Explain n random images of p with target q, from the thinnest to the boldest."""
    places = draw(model, data, data.labels == p, n, generator)
    places = places[data.images[places].float().mean((1, 2, 3)).argsort()]
    explanation = model.explain(data.images[places], q, confidence="alpha_1")
    return every_image(explanation, tuple(places.tolist()))


def figure_3(context: Context) -> Made:
    """Random samples of FakeMNIST."""
    shown, places = samples(context.tested("fakemnist")[1], context.generator(3))
    numbers = [{"test_image": place, "label": label} for label, place in enumerate(places)]
    return Made.single("figure-3", draw_grid(shown, 5), numbers, caption("figure-3"))


def figure_4(context: Context) -> Made:
    """An image of FakeMNIST into all other classes."""
    shown = one_to_all(*context.tested("fakemnist"), 0, context.generator(4))
    figure = draw_grid(columns(shown, top_left, LARGEST), 4)
    text = caption("figure-4", legend=shown.legend(LARGEST))
    return Made.single("figure-4", figure, shown.numbers(), text)


def figure_5(context: Context) -> Made:
    """A three into all other digits."""
    return _explained("figure-5", one_to_all(*context.tested("mnist"), 3, context.generator(5)))


def figure_6(context: Context) -> Made:
    """All other digits into a zero."""
    return _explained("figure-6", all_to_one(*context.tested("mnist"), 0, context.generator(6)))


def figure_7(context: Context) -> Made:
    """Fours into nines."""
    return _explained(
        "figure-7", same_pair(*context.tested("mnist"), 4, 9, 9, context.generator(7))
    )


def _explained(stem: str, shown: Shown) -> Made:
    text = caption(stem, legend=shown.legend())
    return Made.single(stem, draw_grid(columns(shown)), shown.numbers(), text)

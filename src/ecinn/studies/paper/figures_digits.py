"""Make Figures 3 to 7: FakeMNIST and MNIST."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ecinn.data.dataset import Dataset
from ecinn.drawing import pictures
from ecinn.model import Model
from ecinn.studies.paper.artefact import Context, Made
from ecinn.studies.paper.explained import Shown, columns, draw, every_target, explain_each
from ecinn.studies.paper.style import Grid, Panel, draw_grid

Tested = tuple[Model, Dataset]
"""A model and its test images."""
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


def one_to_all(
    tested: Tested, among: Tensor, generator: torch.Generator, n: int = 1
) -> Iterator[Shown]:
    """Explain n random images of some with all other classes as targets."""
    model, data = tested
    for place in draw([tested], among, n, generator).tolist():
        explanation = model.explain(data.images[place], confidence="alpha_1")
        yield every_target(explanation, (place,))


def all_to_one(tested: Tested, target: int, generator: torch.Generator) -> Shown:
    """Explain a random image of every other class with one target."""
    labels, others = tested[1].labels, [label for label in range(CLASSES) if label != target]
    drawn = [draw([tested], labels == label, 1, generator) for label in others]
    return explain_each(tested, torch.cat(drawn), target)


def same_pair(tested: Tested, p: int, q: int, n: int, generator: torch.Generator) -> Shown:
    """Explain n random images of p with target q, from the thinnest to the boldest."""
    data = tested[1]
    places = draw([tested], data.labels == p, n, generator)
    thickness = data.images[places].float().mean((1, 2, 3))
    return explain_each(tested, places[thickness.argsort()], q)


def figure_3(context: Context) -> Made:
    """Random samples of FakeMNIST."""
    shown, places = samples(context.tested("fakemnist")[1], context.generator(3))
    numbers = [{"test_image": place, "label": label} for label, place in enumerate(places)]
    return Made.single("figure-3", draw_grid(shown, 5), numbers)


def figure_4(context: Context) -> Made:
    """An image of FakeMNIST into all other classes."""
    tested = context.tested("fakemnist")
    (shown,) = one_to_all(tested, tested[1].labels == 0, context.generator(4))
    figure = draw_grid(columns(shown, top_left, LARGEST), 4)
    return Made.single("figure-4", figure, shown.numbers(), legend=shown.legend(LARGEST))


def figure_5(context: Context) -> Made:
    """A three into all other digits."""
    tested = context.tested("mnist")
    (shown,) = one_to_all(tested, tested[1].labels == 3, context.generator(5))
    return _explained("figure-5", shown)


def figure_6(context: Context) -> Made:
    """All other digits into a zero."""
    return _explained("figure-6", all_to_one(context.tested("mnist"), 0, context.generator(6)))


def figure_7(context: Context) -> Made:
    """Fours into nines."""
    shown = same_pair(context.tested("mnist"), 4, 9, 9, context.generator(7))
    return _explained("figure-7", shown)


def _explained(stem: str, shown: Shown) -> Made:
    figure = draw_grid(columns(shown))
    return Made.single(stem, figure, shown.numbers(), legend=shown.legend())

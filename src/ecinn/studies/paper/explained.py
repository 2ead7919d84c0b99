"""Draw random test images and show their explanations as columns of a figure and as numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ecinn.data.dataset import Dataset
from ecinn.drawing import pictures
from ecinn.drawing.pictures import Array
from ecinn.errors import InputError
from ecinn.explanation.result import Explanation
from ecinn.model import Model
from ecinn.pixels import to_uint8
from ecinn.studies.paper.artefact import caption
from ecinn.studies.paper.style import Grid, Panel, share

ROWS = ("input", r"$\alpha_0$", r"$\alpha_1$", r"$h$")
Pair = tuple[int, int]
"""An image of an explanation, and one of its targets."""
Magnify = Callable[[Array], Array]
_BATCH_SIZE = 64


def draw(
    tested: Sequence[tuple[Model, Dataset]],
    among: Bool[Tensor, " batch"],
    n: int,
    generator: torch.Generator,
) -> Int[Tensor, " n"]:
    """Draw n of these images that every model classifies correctly; return their positions.

    The test sets of several models have the same images, and labels of their own.
    """
    candidates = among.nonzero()[:, 0]
    shuffled = candidates[torch.randperm(len(candidates), generator=generator)]
    correct: list[Tensor] = []
    for places in shuffled.split(max(n, min(_BATCH_SIZE, 2 * n))):
        right = [
            model.predict(data.images[places]).argmax(1).cpu() == data.labels[places]
            for model, data in tested
        ]
        correct.append(places[torch.stack(right).all(0)])
        if sum(map(len, correct)) >= n:
            return torch.cat(correct)[:n]
    raise InputError(
        f"only {sum(map(len, correct))} of {len(candidates)} such test images are classified "
        f"correctly, but {n} are needed: use more images or another model"
    )


@dataclass(frozen=True)
class Shown:
    """The part of an explanation that a figure shows, a column per pair."""

    explanation: Explanation
    pairs: tuple[Pair, ...]
    places: tuple[int, ...]
    """Positions of the images in the test set."""

    def limit(self, percentile: float = pictures.PERCENTILE) -> float:
        """Return the change that gets full colour, the same for all maps."""
        maps = self.explanation.heatmap
        return max(pictures.robust_limit(maps[pair], percentile) for pair in self.pairs)

    def largest_gap(self) -> float:
        """max |p(p) − p(q)| over the tipping points in latent space."""
        e = self.explanation
        posterior = e.tipping_certificate.posterior
        return max(
            abs(float(posterior[pair][e.p[pair[0]]] - posterior[pair][e.q[pair]]))
            for pair in self.pairs
        )

    def reached(self) -> int:
        """Count the stored convincing counterfactuals that are read as q."""
        return sum(bool(self.explanation.convincing_certificate.reached[p]) for p in self.pairs)

    def numbers(self) -> list[dict[str, Any]]:
        """Return the numbers behind every column."""
        return [self._numbers(pair) for pair in self.pairs]

    def _numbers(self, pair: Pair) -> dict[str, Any]:
        e, image, names = self.explanation, pair[0], self.explanation.class_names
        third = int(e.third_class[pair])

        def by_name(posterior: Tensor) -> dict[str, float]:
            return {name: round(float(p), 6) for name, p in zip(names, posterior, strict=True)}

        return {
            "test_image": self.places[image],
            "p": names[int(e.p[image])],
            "q": names[int(e.q[pair])],
            "alpha_0": round(float(e.alpha_0[pair]), 6),
            "alpha_1": round(float(e.alpha_1[pair]), 6),
            "posterior": by_name(e.posterior[image]),
            "tipping_point": by_name(e.tipping_certificate.posterior[pair]),
            "tipping_point_stored": by_name(e.tipping_certificate.verdict[pair]),
            "convincing": by_name(e.convincing_certificate.posterior[pair]),
            "convincing_stored": by_name(e.convincing_certificate.verdict[pair]),
            "reached": bool(e.convincing_certificate.reached[pair]),
            "third_class": None if third < 0 else names[third],
        }

    def legend(self, percentile: float = pictures.PERCENTILE) -> str:
        """Explain the rows and report the outcome, as the second part of a caption."""
        counts = {"reached": self.reached(), "pairs": len(self.pairs)}
        return caption("legend", limit=self.limit(percentile), gap=self.largest_gap(), **counts)


def every_target(explanation: Explanation, places: tuple[int, ...], image: int = 0) -> Shown:
    """Show one image and all of its targets."""
    pairs = tuple((image, target) for target in range(explanation.q.shape[1]))
    return Shown(explanation, pairs, places)


def every_image(explanation: Explanation, places: Int[Tensor, " images"]) -> Shown:
    """Show all images and their first target."""
    pairs = tuple((image, 0) for image in range(len(places)))
    return Shown(explanation, pairs, tuple(places.tolist()))


def explain_each(
    tested: tuple[Model, Dataset], places: Int[Tensor, " images"], q: int | Tensor
) -> Shown:
    """Explain test images at α₁, each with one target."""
    model, data = tested
    return every_image(model.explain(data.images[places], q, confidence="alpha_1"), places)


def columns(
    shown: Shown,
    magnify: Magnify | None = None,
    percentile: float = pictures.PERCENTILE,
    names: Sequence[str] | None = None,
) -> Grid:
    """Arrange input, tipping point, convincing counterfactual and heatmap, a column per pair.

    With short names of the classes, headings have only the target.
    """
    e, limit = shown.explanation, shown.limit(percentile)
    name = tuple(names or e.class_names)
    panels = [_column(e, pair, limit, name, magnify) for pair in shown.pairs]
    headings = [
        f"{'' if names else name[int(e.p[pair[0]])] + ' '}→ {name[int(e.q[pair])]}"
        for pair in shown.pairs
    ]
    return Grid(tuple(zip(*panels, strict=True)), ROWS, tuple(headings))


def _column(
    e: Explanation, pair: Pair, limit: float, names: tuple[str, ...], magnify: Magnify | None
) -> tuple[Panel, ...]:
    image, _ = pair
    p, q = int(e.p[image]), int(e.q[pair])

    def panel(array: Array, text: str = "", *, warning: bool = False) -> Panel:
        return Panel(array, text, warning, magnify(array) if magnify else None)

    def shares(posterior: Tensor, *labels: int) -> str:
        return "\n".join(f"{names[y]}: {share(float(posterior[y]))}" for y in labels)

    tipping, convincing = e.tipping_certificate.verdict[pair], e.convincing_certificate
    third, winner = int(e.third_class[pair]), int(convincing.winner[pair])
    return (
        panel(pictures.image_array(to_uint8(e.x[image])), shares(e.posterior[image], p)),
        panel(
            pictures.image_array(e.stored_tipping_point[pair]),
            shares(tipping, p, q) if third < 0 else f"{shares(tipping, third)}\nwins",
            warning=third >= 0,
        ),
        panel(
            pictures.image_array(e.stored_convincing[pair]),
            shares(convincing.verdict[pair], winner),
            warning=winner != q,
        ),
        panel(pictures.heatmap_array(e.heatmap[pair], limit)),
    )

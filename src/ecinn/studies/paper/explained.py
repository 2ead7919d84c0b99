"""Explanations as columns of a figure, and as the numbers beside it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ecinn.drawing import pictures
from ecinn.drawing.pictures import Array
from ecinn.explanation.result import Explanation
from ecinn.pixels import to_uint8
from ecinn.studies.paper.grid import Grid, Panel
from ecinn.studies.paper.style import share

ROWS = ("input", r"$\alpha_0$", r"$\alpha_1$", r"$h$")
Pair = tuple[int, int]
"""Which image of an explanation, and which of its targets."""
Magnify = Callable[[Array], Array]


@dataclass(frozen=True)
class Shown:
    """What of an explanation a figure shows, a column per pair."""

    explanation: Explanation
    pairs: tuple[Pair, ...]
    places: tuple[int, ...]
    """The images' numbers in the test set."""

    def limit(self, percentile: float = pictures.PERCENTILE) -> float:
        """The change that gets full colour: one scale for all, so that maps can be compared."""
        maps = self.explanation.heatmap
        return max(pictures.robust_limit(maps[pair], percentile) for pair in self.pairs)

    def largest_gap(self) -> float:
        """max |p(p) − p(q)| over the tipping points, as computed."""
        e = self.explanation
        posterior = e.tipping_certificate.posterior
        return max(
            abs(float(posterior[pair][e.p[pair[0]]] - posterior[pair][e.q[pair]]))
            for pair in self.pairs
        )

    def reached(self) -> int:
        """How many convincing counterfactuals are read as q from 8 bits."""
        return sum(bool(self.explanation.convincing_certificate.reached[p]) for p in self.pairs)

    def numbers(self) -> list[dict[str, Any]]:
        """What each column shows."""
        return [self._numbers(pair) for pair in self.pairs]

    def _numbers(self, pair: Pair) -> dict[str, Any]:
        e, (image, _) = self.explanation, pair
        names = e.class_names
        third = int(e.third_class[pair])

        def posterior(of: Tensor) -> dict[str, float]:
            return {name: round(float(p), 6) for name, p in zip(names, of, strict=True)}

        return {
            "test_image": self.places[image],
            "p": names[int(e.p[image])],
            "q": names[int(e.q[pair])],
            "alpha_0": round(float(e.alpha_0[pair]), 6),
            "alpha_1": round(float(e.alpha_1[pair]), 6),
            "posterior": posterior(e.posterior[image]),
            "tipping_point": posterior(e.tipping_certificate.posterior[pair]),
            "tipping_point_stored": posterior(e.tipping_certificate.verdict[pair]),
            "convincing": posterior(e.convincing_certificate.posterior[pair]),
            "convincing_stored": posterior(e.convincing_certificate.verdict[pair]),
            "reached": bool(e.convincing_certificate.reached[pair]),
            "third_class": None if third < 0 else names[third],
        }


def every_target(explanation: Explanation, places: tuple[int, ...], image: int = 0) -> Shown:
    """One image into all of its targets."""
    pairs = tuple((image, target) for target in range(explanation.q.shape[1]))
    return Shown(explanation, pairs, places)


def every_image(explanation: Explanation, places: tuple[int, ...]) -> Shown:
    """All images into their first target."""
    return Shown(explanation, tuple((image, 0) for image in range(len(places))), places)


def columns(
    shown: Shown,
    magnify: Magnify | None = None,
    percentile: float = pictures.PERCENTILE,
    names: Sequence[str] | None = None,
) -> Grid:
    """Input, tipping point, convincing counterfactual and heatmap, a column per pair.

    Args:
        magnify: what of each image is also shown enlarged.
        percentile: of the changes gets full colour.
        names: of the classes, where there is little room; headings then say only the target.
    """
    e, limit = shown.explanation, shown.limit(percentile)
    name = tuple(names or e.class_names)
    panels = [_column(e, pair, limit, name, magnify) for pair in shown.pairs]
    before = ["" if names else f"{name[int(e.p[image])]} " for image, _ in shown.pairs]
    headings = [
        f"{p}→ {name[int(e.q[pair])]}" for p, pair in zip(before, shown.pairs, strict=True)
    ]
    return Grid(tuple(zip(*panels, strict=True)), ROWS, tuple(headings))


def _column(
    e: Explanation, pair: Pair, limit: float, names: tuple[str, ...], magnify: Magnify | None
) -> tuple[Panel, ...]:
    image, _ = pair
    p, q = int(e.p[image]), int(e.q[pair])

    def panel(array: Array, caption: str = "", *, warning: bool = False) -> Panel:
        return Panel(array, caption, warning, magnify(array) if magnify else None)

    def says(posterior: Tensor, *labels: int) -> str:
        return "\n".join(f"{names[y]}: {share(float(posterior[y]))}" for y in labels)

    tipping, convincing = e.tipping_certificate.verdict[pair], e.convincing_certificate
    third, winner = int(e.third_class[pair]), int(convincing.winner[pair])
    return (
        panel(pictures.image_array(to_uint8(e.x[image])), says(e.posterior[image], p)),
        panel(
            pictures.image_array(e.stored_tipping_point[pair]),
            says(tipping, p, q) if third < 0 else f"{says(tipping, third)}\nwins",
            warning=third >= 0,
        ),
        panel(
            pictures.image_array(e.stored_convincing[pair]),
            says(convincing.verdict[pair], winner),
            warning=winner != q,
        ),
        panel(pictures.heatmap_array(e.heatmap[pair], limit)),
    )

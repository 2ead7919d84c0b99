"""What cancels out of mean latents, tested on a rotation, where every answer is known."""

import copy
import json
import math

import pytest
import torch
from torch import Tensor

from ecinn.data.dataset import Dataset
from ecinn.data.mnist import load_mnist
from ecinn.data.planted import FAKE_MNIST_CUE, Cue
from ecinn.errors import InputError
from ecinn.metrics.statistics import Interval, proportion
from ecinn.model import Model, load
from ecinn.studies.benchmark.record import jsonable
from ecinn.studies.benchmark.side_by_side import Pairs
from ecinn.studies.judges import load_judges
from ecinn.studies.paper import claims_planted as averages
from ecinn.studies.paper.claim import judgement
from ecinn.studies.paper.claims_planted import Carried, Left
from ecinn.studies.paper.measuring import ratio_of_sums

CUE = Cue(FAKE_MNIST_CUE.marks, 28, 28, on=170, off=90)
"""Neither black nor white, so that nothing is cut off."""
K, N = 10, 4000
SPREAD = 12.0
"""Standard deviation, in grey levels, of what is independent of the class."""


class Rotation:
    """z = R(x − ½): means of latents are means of images."""

    image_shape = (1, 28, 28)

    def __init__(self) -> None:
        noise = torch.randn((784, 784), generator=torch.Generator().manual_seed(1))
        self.turn = torch.linalg.qr(noise).Q

    def encode_with_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x.flatten(1) - 0.5) @ self.turn, torch.zeros(len(x))

    def decode(self, z: Tensor) -> Tensor:
        return (z @ self.turn.T + 0.5).reshape(-1, 1, 28, 28)


def images_of(labels: Tensor, pattern: Tensor, seed: int) -> Tensor:
    """128, a pattern of the class, and noise that does not know it; and the cue."""
    noise = torch.randn((len(labels), 1, 28, 28), generator=torch.Generator().manual_seed(seed))
    grey = 128 + pattern[labels][:, None] + SPREAD * noise
    return CUE.paint(grey.round().clamp(0, 255).to(torch.uint8), labels)


def rotated(pattern: Tensor) -> tuple[Model, Dataset, Pairs]:
    """A model whose latents are rotated images, what it was trained on, and 60 pairs."""
    training = Dataset(
        images_of(torch.arange(N) % K, pattern, 2), torch.arange(N) % K, tuple("0123456789")
    )
    model = Model(copy.copy(load("fakemnist").checkpoint))
    model.classifier = Rotation()
    z = model.encode(training.images)
    model.mu_bar = torch.stack([z[training.labels == label].mean(0) for label in range(K)])
    p = torch.arange(60) % K
    q = (p + 1 + torch.arange(60) // K) % K
    return model, training, Pairs(torch.arange(60), images_of(p, pattern, 3), p, q)


def ends(share: Interval) -> tuple[float, float, float]:
    return share.mean, share.low, share.high


def level(images: Tensor) -> Tensor:
    """Of the left half."""
    return images[..., :14].double().mean((1, 2, 3))


LEVEL = {"level": level}
"""A feature that is linear in pixels."""


def parts(pattern: Tensor) -> dict[int, Left]:
    model, training, pairs = rotated(pattern)
    judges = load_judges("mnist")
    return averages.independent_parts(model, pairs, training, CUE, judges, 200, 0, LEVEL)


def test_class_independent_parts_cancel_as_one_over_n() -> None:
    left = parts(torch.zeros(K, 28, 28))
    assert list(left) == [1, 10, 100, N // K]
    for n, each in left.items():
        # Rounding to whole grey levels adds 1/12 to the squared change of a pixel.
        rounding = 1 / 12 / (2 * SPREAD**2)
        assert each.shares["pixels"].mean == pytest.approx(1 / n + rounding, rel=0.06)
        assert each.shares["pixels"].low < 1.05 * (1 / n + rounding)
        # Sixty values of one number each are known to a fifth or so.
        assert each.shares["level"].mean == pytest.approx(1 / n, rel=0.6)
        assert each.says_q.mean == 1
        assert each.cancelled is (n >= 100)


def test_class_dependent_parts_remain_for_every_n() -> None:
    generator = torch.Generator().manual_seed(4)
    pattern = 6 * torch.randn((K, 28, 28), generator=generator)
    left = parts(pattern)
    # Every image's neighbour, which it is compared with, is of another class.
    expected = 36 / (SPREAD**2 + 36)
    assert left[N // K].shares["pixels"].mean == pytest.approx(expected, rel=0.06)
    assert left[100].shares["pixels"].mean == pytest.approx(
        expected + 0.01 * (1 - expected), rel=0.06
    )
    assert not left[N // K].cancelled


@pytest.mark.parametrize("taken", [1.0, 0.5, 0.0, -1.0])
def test_share_of_a_class_difference_that_delta_carries_over(taken) -> None:
    generator = torch.Generator().manual_seed(4)
    size = 2 * torch.randn(K, generator=generator)
    model, training, pairs = rotated(size[:, None, None].expand(K, 28, 28))
    model.mu_bar = model.mu_bar * taken
    found = averages.dependent_parts(model, pairs, training, 200, 0, LEVEL)["level"]
    # The cue, ten pixels at 90 or 170, takes a little of the level's difference away.
    assert found.share.mean == pytest.approx(taken, abs=0.06)
    assert found.share.low <= found.share.mean <= found.share.high
    assert found.cancelled is (taken < 0.5)
    differences = torch.stack([a - b for i, a in enumerate(size) for b in size[:i]])
    within = SPREAD / math.sqrt(14 * 28 - 10)
    apart = float(differences.square().mean().sqrt()) / within
    assert found.apart == pytest.approx(apart, rel=0.1)


def test_moved_dots_leave_nothing_and_other_digits_everything(generator) -> None:
    judges, cue = load_judges("mnist"), FAKE_MNIST_CUE
    p, q = torch.arange(40) % K, (torch.arange(40) + 3) % K
    pairs = Pairs(torch.arange(40), cue.paint(load_mnist("test").images[:40], p), p, q)
    perfect = averages.left_over(pairs, cue.paint(pairs.images, q), cue, judges, generator)
    assert set(perfect.shares) == {"pixels", "slant", "thickness"}
    assert {ends(share) for share in perfect.shares.values()} == {(0, 0, 0)}
    assert perfect.same_digit.mean == perfect.says_q.mean == 1
    assert perfect.cancelled
    # Whoever changes nothing has nothing left either, but does not take the class along.
    copies = averages.left_over(pairs, pairs.images, cue, judges, generator)
    assert copies.shares == perfect.shares
    assert copies.says_q.mean == 0
    assert not copies.cancelled
    other = averages.left_over(pairs, pairs.images.roll(1, 0), cue, judges, generator)
    assert {ends(share) for share in other.shares.values()} == {(1, 1, 1)}
    read = judges.verdicts(pairs.images.masked_fill(cue.mask, 0))["convolutional"].tolist()
    again = sum(a == b for a, b in zip(read, [read[-1], *read], strict=False))
    assert other.same_digit.mean == again / 40


def test_mean_differences_point_from_p_to_q_and_are_redrawn(generator) -> None:
    values = torch.arange(5.0)[:, None] + 100 * torch.arange(3.0)[:, None, None]  # class, image
    p, q = torch.tensor([0, 2, 1] * 20), torch.tensor([1, 0, 2] * 20)
    every = averages.mean_differences(values, p, q, 5, generator)
    torch.testing.assert_close(every[:3, 0], torch.tensor([100.0, -200.0, 100.0]))
    assert len(every.unique()) == 2  # nothing is drawn twice, so all five give the same
    single = averages.mean_differences(values, p, q, 1, generator)[p == 0, 0] - 100
    assert {float(value) for value in single} <= set(range(-4, 5))
    assert len(single.unique()) > 3


def test_images_of_every_class_are_drawn_once(generator) -> None:
    labels = torch.arange(40) % 4
    images = torch.arange(40, dtype=torch.uint8)[:, None, None, None]
    data = Dataset(images, labels, tuple("abcd"))
    drawn = averages.draw_classes(data, 7, generator)[:, :, 0, 0, 0]
    assert (drawn % 4 == torch.arange(4)[:, None]).all()
    assert [len(own.unique()) for own in drawn] == [7] * 4
    assert not (drawn == averages.draw_classes(data, 7, generator)[:, :, 0, 0, 0]).all()


def test_ratio_of_sums_has_the_interval_of_the_delta_method(generator, uniform) -> None:
    whole = uniform(400) + 0.5
    part = 0.3 * whole + 0.1 * uniform(400)
    found = ratio_of_sums(part, whole, generator)
    assert found.mean == pytest.approx(float(part.sum() / whole.sum()))
    error = float((part - found.mean * whole).std() / whole.mean()) / math.sqrt(400)
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.15)
    gap = torch.where(torch.arange(400) == 7, torch.nan, part)
    kept = torch.arange(400) != 7
    again = ratio_of_sums(gap, whole, generator).mean
    assert again == pytest.approx(float(part[kept].sum() / whole[kept].sum()))
    with pytest.raises(InputError, match="at least one value"):
        ratio_of_sums(part * torch.nan, whole, generator)


def measured(high: float) -> Interval:
    return Interval(high / 2, 0.0, high, 40)


@pytest.mark.parametrize(
    ("left", "stayed", "verdict"),
    [
        (0.019, 0.49, "supported"),
        (0.019, 0.51, "partly"),
        (0.021, 0.49, "partly"),
        (0.021, 0.51, "refuted"),
    ],
)
def test_the_verdict_follows_from_the_thresholds(left, stayed, verdict) -> None:
    names = ("pixels", *averages.FEATURES)
    digit, says_q = proportion(torch.arange(4) < 3), proportion(torch.ones(99, dtype=torch.bool))
    parts = {
        1: Left({name: measured(0.9) for name in names}, digit, says_q),
        # One of them above is enough.
        6000: Left(
            {**{name: measured(0.001) for name in names}, "slant": measured(left)}, digit, says_q
        ),
    }
    features = {name: Carried(0.5, measured(stayed)) for name in averages.FEATURES}
    mu_bar = torch.tensor([[3.0, 0.0], [5.0, 0.0]])
    claim = judgement(averages.cancelled(parts, features, mu_bar))
    assert claim.verdict == verdict
    assert (claim.numbers["common_squared"], claim.numbers["delta_squared"]) == (16, 4)
    assert ("whether or not it makes the class" in claim.measured) is (stayed > 0.5)
    assert "| 6,000 |" in claim.table.markdown()
    assert json.dumps(jsonable(claim.numbers))

"""Every metric against its definition, computed another way."""

import math
from itertools import pairwise

import numpy as np
import pytest
import scipy.linalg
import scipy.spatial.distance
import scipy.stats
import torch
from torch import Tensor

from ecinn.errors import InputError
from ecinn.metrics import counterfactuals as metrics
from ecinn.metrics.statistics import Interval
from ecinn.studies.inception.network import torchvision_models


@pytest.fixture
def images(generator: torch.Generator):
    def draw(*shape: int) -> Tensor:
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8)

    return draw


def test_reaching_q_and_leaving_p_are_two_things_and_a_failure_is_neither() -> None:
    p, q = torch.tensor([0, 0, 0, 0, 0]), torch.tensor([1, 1, 1, 1, -1])
    read_as = torch.tensor([1, 2, 0, -1, -1])
    assert metrics.reached(read_as, q).tolist() == [True, False, False, False, False]
    assert metrics.class_changed(read_as, p).tolist() == [True, True, False, False, False]


def test_preference_is_asked_of_those_that_are_read_as_p_or_q(generator) -> None:
    read_as, p, q = (torch.randint(4, (200,), generator=generator) for _ in range(3))
    triples = zip(read_as.tolist(), p.tolist(), q.tolist(), strict=True)
    expected = [read == target for read, start, target in triples if read in (start, target)]
    assert metrics.prefers_q(read_as, p, q).tolist() == expected
    assert 0 < sum(expected) < len(expected) < 200


def test_oracle_agrees_where_its_largest_score_is_q() -> None:
    scores = torch.tensor([[-3.0, -1.0, -2.0], [0.2, 0.1, 0.7]])
    assert metrics.oracle_agrees(scores, torch.tensor([1, 0])).tolist() == [True, False]


def test_norms_are_those_of_the_change_in_pixels_of_0_to_1(images) -> None:
    x, x_hat = images(5, 3, 4, 2), images(5, 3, 4, 2)
    delta = x_hat.double().flatten(1) / 255 - x.double().flatten(1) / 255
    l1 = torch.linalg.vector_norm(delta, 1, dim=1)
    l2 = torch.linalg.vector_norm(delta, 2, dim=1)
    torch.testing.assert_close(metrics.l1(x, x_hat), l1)
    torch.testing.assert_close(metrics.l2(x, x_hat), l2)
    torch.testing.assert_close(metrics.elastic_net(x, x_hat), l1 + l2)
    assert metrics.elastic_net(x, x).tolist() == [0] * 5


def test_im1_and_im2_by_their_formulas(uniform) -> None:
    c, by_p, by_q, by_all = (uniform(4, 1, 3, 5) - 0.5 for _ in range(4))
    im1, im2 = metrics.im1(c, by_q, by_p), metrics.im2(c, by_q, by_all)
    for i in range(4):
        a, p, q, every = (np.asarray(t[i]).ravel() for t in (c, by_p, by_q, by_all))
        to_p, to_q = np.linalg.norm(a - p) ** 2, np.linalg.norm(a - q) ** 2
        assert float(im1[i]) == pytest.approx(to_q / (to_p + 1e-5), rel=1e-12)
        apart = np.linalg.norm(q - every) ** 2
        assert float(im2[i]) == pytest.approx(apart / (np.abs(a).sum() + 1e-5), rel=1e-12)


def test_im1_and_im2_stay_finite_where_the_denominator_is_zero() -> None:
    zero, one = torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 2, 2)
    assert metrics.im1(zero, one, zero).item() == pytest.approx(4e5)
    assert metrics.im2(zero, one, zero).item() == pytest.approx(4e5)


def correlated(uniform, n: int, features: int) -> Tensor:
    return uniform(n, features) @ (uniform(features, features) - 0.3) + uniform(features)


def test_frechet_distance_is_its_formula_with_scipys_matrix_root(uniform) -> None:
    a, b = correlated(uniform, 40, 6), correlated(uniform, 70, 6)
    cov_a, cov_b = np.cov(a.numpy(), rowvar=False), np.cov(b.numpy(), rowvar=False)
    root = scipy.linalg.sqrtm(cov_a @ cov_b).real
    mean = np.sum((a.mean(0) - b.mean(0)).numpy() ** 2)
    expected = mean + np.trace(cov_a + cov_b - 2 * root)
    assert metrics.frechet_distance(a, b).mean == pytest.approx(expected, rel=1e-10)
    assert metrics.frechet_distance(b, a).mean == pytest.approx(expected, rel=1e-10)


def test_frechet_distance_is_torchmetrics(images, uniform) -> None:
    torchvision_models()  # which torchmetrics imports too, where it is installed
    fid = pytest.importorskip("torchmetrics.image.fid")

    class Projection(torch.nn.Module):
        num_features = 5

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("matrix", uniform(12, 5) / 255)

        def forward(self, batch: Tensor) -> Tensor:
            return batch.flatten(1).double() @ self.matrix

    project = Projection()
    oracle = fid.FrechetInceptionDistance(feature=project).set_dtype(torch.float64)
    a, b = images(50, 3, 2, 2), images(60, 3, 2, 2) // 2
    oracle.update(a, real=True)
    oracle.update(b, real=False)
    ours = metrics.frechet_distance(project(a), project(b)).mean
    assert ours == pytest.approx(float(oracle.compute()), rel=1e-6)


def jackknife(statistic, images: Tensor) -> float:
    """1.96 standard errors from the values without one image each (Tukey 1958)."""
    n = len(images)
    rows = torch.arange(n)
    values = [statistic(images[rows != left_out]) for left_out in range(n)]
    return 1.96 * math.sqrt((n - 1) * np.var(values))


@pytest.mark.parametrize("features", [6, 90])
def test_interval_of_a_frechet_distance_is_the_jackknifes(features: int, uniform) -> None:
    """Also with more features than images, where no covariance has an inverse."""
    a, b = correlated(uniform, 80, features), correlated(uniform, 99, features)
    found = metrics.frechet_distance(a, b)
    expected = jackknife(lambda some: metrics.frechet_distance(some, b).mean, a)
    assert found.high - found.mean == pytest.approx(expected, rel=0.05)
    assert (found.low, found.n) == (max(2 * found.mean - found.high, 0), 80)


def test_interval_of_a_frechet_distance_does_not_go_below_0(uniform) -> None:
    a = correlated(uniform, 30, 3)
    found = metrics.frechet_distance(a, a + 1e-3)
    assert found.low == 0 < found.mean < found.high


@pytest.mark.parametrize("n", [40, 300])
def test_interval_of_diversity_is_the_jackknifes(n: int, images, uniform) -> None:
    real = images(9, 1, 4, 4)
    made = (images(n, 1, 4, 4) * uniform(n, 1, 1, 1)).to(torch.uint8)
    found = metrics.diversity(made, real)
    expected = jackknife(lambda some: metrics.diversity(some, real).mean, made)
    assert found.half_width == pytest.approx(expected, rel=0.05)
    assert (found.low + found.high) / 2 == pytest.approx(found.mean)


@pytest.mark.parametrize("n", [4, 30])
def test_frechet_distance_of_a_shift_and_of_a_scaling(n: int, uniform) -> None:
    """With four images in nine dimensions covariances have no inverse and no smooth root."""
    a, shift = correlated(uniform, n, 9), uniform(9)
    variance = float(a.var(0).sum())
    assert metrics.frechet_distance(a, a).mean == pytest.approx(0, abs=1e-12 * variance)
    moved = metrics.frechet_distance(a, a + shift).mean
    assert moved == pytest.approx(float(shift.square().sum()), rel=1e-10)
    scaled = metrics.frechet_distance(a, a.mean(0) + 3 * (a - a.mean(0))).mean
    assert scaled == pytest.approx(4 * variance, rel=1e-10)


def test_label_variation_is_scipys_jensen_shannon_divergence(uniform) -> None:
    before, after = (3 * uniform(20, 4)).softmax(1), (9 * uniform(20, 4)).softmax(1)
    after[0] = torch.tensor([0.0, 1, 0, 0])
    distance = scipy.spatial.distance.jensenshannon(before.numpy(), after.numpy(), axis=1)
    expected = torch.from_numpy(distance).square()
    torch.testing.assert_close(metrics.label_variation_score(before, after), expected)
    sure = torch.eye(2).double()
    assert metrics.label_variation_score(sure, sure.flip(0)).tolist() == [math.log(2)] * 2
    assert metrics.label_variation_score(sure, sure).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("steps", [1, 3, 12, 20])
def test_transition_replaces_pixels_one_by_one_from_the_most_changed(
    steps: int, images, uniform
) -> None:
    x, x_hat = images(4, 2, 3, 4), images(4, 2, 3, 4)
    p, q = torch.tensor([0, 1, 2, 0]), torch.tensor([2, 0, 1, 1])
    weights = (uniform(24, 3) - 0.5) / 100

    def posterior(batch: Tensor) -> Tensor:
        assert batch.dtype == torch.uint8
        return (batch.flatten(1).double() @ weights).softmax(1)

    curves = metrics.transition_curves(posterior, x, x_hat, p, q, steps)
    for i in range(4):
        change = (x_hat[i].double() - x[i].double()).abs().sum(0)
        order = sorted(np.ndindex(3, 4), key=lambda at: -float(change[at]))
        expected_p, expected_q = [], []
        for step in range(steps + 1):
            mixed = x[i].clone()
            for row, column in order[: 12 * step // steps]:
                mixed[:, row, column] = x_hat[i, :, row, column]
            answer = posterior(mixed[None])[0]
            expected_p.append(float(answer[p[i]]))
            expected_q.append(float(answer[q[i]]))
        np.testing.assert_allclose(curves.p[i].numpy(), expected_p)
        np.testing.assert_allclose(curves.q[i].numpy(), expected_q)
        area = [
            sum((a + b) / 2 for a, b in pairwise(curve)) / steps
            for curve in (expected_q, expected_p)
        ]
        assert float(curves.cout[i]) == pytest.approx(area[0] - area[1])


@pytest.mark.parametrize(("decisive", "cout"), [(0, 1 - 1 / 4), (3, 1 / 4 - 1)])
def test_cout_is_high_where_the_most_changed_pixel_decides(decisive: int, cout: float) -> None:
    x = torch.zeros((1, 1, 2, 2), dtype=torch.uint8)
    x_hat = torch.tensor([200, 150, 100, 50], dtype=torch.uint8).reshape(1, 1, 2, 2)

    def posterior(batch: Tensor) -> Tensor:
        changed = (batch.flatten(1)[:, decisive] > 0).double()
        return torch.stack([1 - changed, changed], 1)

    label = torch.tensor([0]), torch.tensor([1])
    curves = metrics.transition_curves(posterior, x, x_hat, *label, steps=4)
    assert curves.cout.tolist() == [cout]


@pytest.mark.parametrize("n", [7, 256, 300])
def test_diversity_is_the_ratio_of_mean_distances(n: int, images) -> None:
    """Distances are computed for 256 images at a time."""
    made, real = images(n, 3, 4, 4) // 2, images(n + 2, 3, 4, 4)
    spread = [
        scipy.spatial.distance.pdist(some.flatten(1).double().numpy()).mean()
        for some in (made, real)
    ]
    assert metrics.diversity(made, real).mean == pytest.approx(spread[0] / spread[1], rel=1e-12)
    assert metrics.diversity(real.flip(0), real).mean == pytest.approx(1)
    assert metrics.diversity(made[:1].expand(5, -1, -1, -1), real) == Interval(0.0, 0.0, 0.0, 5)


def test_a_frechet_distance_needs_two_images() -> None:
    with pytest.raises(InputError, match="at least two"):
        metrics.frechet_distance(torch.zeros(1, 2), torch.zeros(5, 2))


def every(asked: Tensor) -> Tensor:
    return torch.ones_like(asked, dtype=torch.bool)


def test_confidence_consistency_is_numpys_over_counted_pairs(uniform, generator) -> None:
    asked, obtained, counted = uniform(6, 5), uniform(6, 5), uniform(6, 5) < 0.8
    answer = metrics.confidence_consistency(asked, obtained, counted, generator=generator)
    a, b = asked[counted].numpy(), obtained[counted].numpy()
    assert answer.correlation.mean == pytest.approx(np.corrcoef(a, b)[0, 1])
    assert answer.mean_squared_error.mean == pytest.approx(np.mean((a - b) ** 2))
    assert answer.within.mean == pytest.approx(np.mean(np.abs(a - b) <= 0.05))


def test_confidence_consistency_resamples_images_with_all_their_levels(uniform, generator) -> None:
    """By scipy's bootstrap of image numbers; pairs alone would give much narrower intervals."""
    asked = torch.linspace(0.1, 0.9, 8, dtype=torch.float64).expand(40, 8)
    obtained = asked + 0.4 * (uniform(40, 1) - 0.5) + 0.02 * uniform(40, 8)
    counted = uniform(40, 8) < 0.9
    answer = metrics.confidence_consistency(asked, obtained, counted, generator=generator)

    def interval(statistic):
        def of_images(rows):
            rows = rows.astype(int)
            kept = counted[rows].numpy()
            return statistic(asked[rows].numpy()[kept], obtained[rows].numpy()[kept])

        return scipy.stats.bootstrap(
            (np.arange(40),), of_images, n_resamples=2000, method="percentile", vectorized=False,
            rng=np.random.default_rng(1),
        ).confidence_interval  # fmt: skip

    for found, statistic in (
        (answer.correlation, lambda a, b: np.corrcoef(a, b)[0, 1]),
        (answer.within, lambda a, b: np.mean(np.abs(a - b) <= 0.05)),
        (answer.mean_squared_error, lambda a, b: np.mean((a - b) ** 2)),
    ):
        low, high = interval(statistic)
        assert (found.low, found.high) == pytest.approx((low, high), abs=0.12 * (high - low))
        assert found.n == 40


def test_confidence_within_a_twentieth_includes_the_twentieth(generator) -> None:
    asked = torch.tensor([[0.5, 0.6, 0.7, 0.8]], dtype=torch.float64)
    obtained = torch.tensor([[0.55, 0.55, 0.76, 0.6]], dtype=torch.float64)

    def consistency(asked, obtained):
        return metrics.confidence_consistency(asked, obtained, every(asked), generator=generator)

    assert consistency(asked, obtained).within.mean == 0.5
    assert consistency(asked, asked).correlation.mean == pytest.approx(1)
    assert math.isnan(consistency(torch.full_like(asked, 0.5), obtained).correlation.mean)


def test_share_inside_counts_squares_and_is_nan_where_nothing_changed(uniform) -> None:
    change = uniform(3, 2, 4, 4) - 0.5
    change[2] = 0
    mask = uniform(3, 4, 4) > 0.6
    each = metrics.share_inside(change, mask)
    for i in range(2):
        inside = sum(float(change[i, channel][mask[i]].square().sum()) for channel in range(2))
        assert float(each[i]) == pytest.approx(inside / float(change[i].square().sum()))
    assert math.isnan(float(each[2]))
    same = metrics.share_inside(change, mask[0])
    torch.testing.assert_close(same[0], each[0])
    assert metrics.share_inside(change[:2], torch.ones(4, 4).bool()).tolist() == [1, 1]


@pytest.mark.parametrize("k", [1, 3, 7])
def test_the_manifold_is_that_of_scipys_neighbours(k: int, uniform) -> None:
    """Nearest neighbours by a k-d tree; sizes that do not divide the batches of rows."""
    generated, real = uniform(300, 4), 0.8 * uniform(290, 4)
    inside = metrics.in_manifold(generated, real, k)
    tree = scipy.spatial.cKDTree(real.numpy())
    radius = tree.query(real.numpy(), k + 1)[0][:, k]
    expected = [any(np.linalg.norm(real.numpy() - g, axis=1) <= radius) for g in generated.numpy()]
    assert inside.tolist() == expected
    assert 0.02 < inside.double().mean() < 0.98
    assert metrics.in_manifold(real, real, k).all()


def test_precision_of_gaussians(generator: torch.Generator) -> None:
    """Inside for the same Gaussian, outside for one that is far away or much wider."""

    def gaussian(spread: float, shift: float) -> Tensor:
        return spread * torch.randn((400, 5), generator=generator) + shift

    real = gaussian(1, 0)
    shares = [
        float(metrics.in_manifold(gaussian(spread, shift), real).double().mean())
        for spread, shift in ((1, 0), (0.3, 0), (4, 0), (1, 9))
    ]
    assert 0.7 < shares[0] < 0.97
    assert shares[1] > 0.99
    assert shares[2] < 0.15
    assert shares[3] == 0

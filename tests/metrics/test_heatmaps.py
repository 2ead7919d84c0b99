"""Every metric of heatmaps against its definition, computed another way."""

import math
from itertools import pairwise, product

import numpy as np
import pytest
import scipy.fft
import scipy.ndimage
import scipy.spatial.distance
import scipy.stats
import torch
from torch import Tensor

from ecinn.errors import InputError
from ecinn.metrics import heatmaps as metrics


@pytest.fixture
def maps(uniform):
    """Signed, with neither a mean of zero nor one sign."""
    return lambda *shape: uniform(*shape) - 0.3


@pytest.fixture
def noise(generator: torch.Generator):
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


def alternating(height: int, width: int) -> Tensor:
    """+1 and −1 as on a chessboard."""
    sign = 1 - 2 * ((torch.arange(height)[:, None] + torch.arange(width)) % 2)
    return sign.double()[None, None]


def test_importance_sums_magnitudes_so_that_colours_do_not_cancel(maps) -> None:
    h = maps(3, 4, 5, 2)
    expected = np.zeros((3, 5, 2))
    for i, c, row, column in np.ndindex(3, 4, 5, 2):
        expected[i, row, column] += abs(float(h[i, c, row, column]))
    np.testing.assert_allclose(metrics.importance(h).numpy(), expected)
    red_to_blue = torch.tensor([1.0, 0.0, -1.0]).reshape(1, 3, 1, 1)
    assert metrics.importance(red_to_blue).item() == 2
    for bad in (math.nan, math.inf):
        h[1, 2, 3, 1] = bad
        with pytest.raises(InputError, match="not finite"):
            metrics.importance(h)


@pytest.mark.parametrize("insertion", [False, True])
@pytest.mark.parametrize("steps", [1, 5, 12, 30])
def test_curve_replaces_whole_pixels_one_by_one(steps, insertion, uniform, generator) -> None:
    x, other, s = uniform(4, 3, 4, 3), uniform(4, 3, 4, 3), uniform(4, 4, 3)
    weights = uniform(36) - 0.5
    calls = []

    def score(images: Tensor) -> Tensor:
        calls.append(len(images))
        return (images.flatten(1) @ weights).sin()

    options = {"insertion": insertion, "steps": steps}
    curve = metrics.replacement_curve(score, x, other, s, generator=generator, **options)
    assert calls == [4] * (steps + 1)
    ends = score(x), score(other)
    calls.clear()
    same = metrics.replacement_curve(score, x, other, s, generator=generator, ends=ends, **options)
    assert calls == [4] * (steps - 1)
    assert torch.equal(same, curve)
    for i in range(4):
        order = sorted(np.ndindex(4, 3), key=lambda at: -float(s[i][at]))
        for step in range(steps + 1):
            mixed = (other if insertion else x)[i].clone()
            for row, column in order[: 12 * step // steps]:
                mixed[:, row, column] = (x if insertion else other)[i, :, row, column]
            assert float(curve[i, step]) == pytest.approx(float(score(mixed[None])))


def test_curve_of_a_linear_score_is_a_cumulative_sum(uniform, generator) -> None:
    """Every pixel gives what its weights give; sorted by that, no order falls faster."""
    x, other, weights = uniform(5, 2, 3, 4), uniform(5, 2, 3, 4), uniform(2, 3, 4)
    gain = ((x - other) * weights).sum(1)

    def score(images: Tensor) -> Tensor:
        return (images * weights).sum((1, 2, 3))

    steps = {"insertion": False, "steps": 12, "generator": generator}
    curve = metrics.replacement_curve(score, x, other, gain, **steps)
    falls = gain.flatten(1).sort(1, descending=True).values.cumsum(1)
    expected = torch.cat([score(x)[:, None], score(x)[:, None] - falls], 1)
    torch.testing.assert_close(curve, expected)
    area = metrics.area_under_curve(curve)
    for control in (uniform(5, 3, 4), -gain):
        slower = metrics.replacement_curve(score, x, other, control, **steps)
        assert (metrics.area_under_curve(slower) > area).all()


def test_equally_important_pixels_go_by_lot() -> None:
    x, other = torch.zeros(2, 1, 20, 30), torch.ones(2, 1, 20, 30)
    s = torch.zeros(2, 20, 30)
    s[:, 7, 5], s[:, 3, 1] = 1, -1

    def order(seed: int) -> list[list[int]]:
        seen = []

        def score(images: Tensor) -> Tensor:
            seen.append(images.flatten(1))
            return images.sum((1, 2, 3))

        ends = score(x), score(other)
        generator = torch.Generator().manual_seed(seed)
        options = {"insertion": False, "steps": 600, "generator": generator, "ends": ends}
        metrics.replacement_curve(score, x, other, s, **options)
        changed = [x.flatten(1), *seen[2:], other.flatten(1)]
        return torch.stack([b - a for a, b in pairwise(changed)]).argmax(2).T.tolist()

    one, again, another = order(0), order(0), order(1)
    assert one == again
    for pixels in (*one, *another):
        assert (pixels[0], pixels[-1]) == (7 * 30 + 5, 3 * 30 + 1)
        assert sorted(pixels) == list(range(600))
        # With reading order the correlation is 1; by lot its standard deviation is 0.04.
        assert abs(scipy.stats.spearmanr(pixels[1:-1], range(598)).statistic) < 0.2
    assert len({tuple(pixels) for pixels in (*one, *another)}) == 4


def test_curve_keeps_no_gradient_and_refuses_what_is_not_a_score(uniform, generator) -> None:
    x, weights = uniform(2, 1, 2, 2), uniform(4, 3).requires_grad_()
    arguments = x, 1 - x, uniform(2, 2, 2)

    def score(images: Tensor) -> Tensor:
        return images.flatten(1) @ weights[:, 0]

    how = {"insertion": True, "generator": generator}
    curve = metrics.replacement_curve(score, *arguments, **how)
    assert not curve.requires_grad
    assert curve.shape == (2, metrics.STEPS + 1)


def test_area_of_a_step_of_a_line_and_of_any_curve(uniform) -> None:
    step = torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0]])
    assert metrics.area_under_curve(step).item() == pytest.approx(1.5 / 4)
    line = torch.linspace(0.2, 0.6, 7)[None]
    assert metrics.area_under_curve(line).item() == pytest.approx(0.4)
    curve = uniform(3, 11)
    expected = np.trapezoid(curve.numpy(), np.linspace(0, 1, 11), axis=1)
    np.testing.assert_allclose(metrics.area_under_curve(curve).numpy(), expected)


@pytest.mark.parametrize(("shape", "sigma"), [((9, 13), 0.1), ((12, 7), 0.3), ((5, 6), 2.0)])
def test_blur_is_scipys_with_sigma_of_the_shorter_side(shape, sigma, uniform) -> None:
    x = uniform(2, 3, *shape)
    pixels = sigma * min(shape)
    expected = scipy.ndimage.gaussian_filter(
        x.numpy(), pixels, mode="reflect", radius=math.ceil(4 * pixels), axes=(2, 3)
    )
    answer = metrics.blurred(x, sigma)
    np.testing.assert_allclose(answer.numpy(), expected, rtol=1e-12)
    torch.testing.assert_close(answer.mean((2, 3)), x.mean((2, 3)))
    assert metrics.blurred(x.float(), sigma).dtype == torch.float32


def test_noise_is_uniform_and_the_generators(uniform) -> None:
    x = uniform(4, 3, 20, 20).float()
    draws = [metrics.noise_like(x, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert (draws[0].shape, draws[0].dtype) == (x.shape, x.dtype)
    assert scipy.stats.kstest(draws[0].flatten().numpy(), "uniform").pvalue > 0.01


def test_share_and_density_are_sums_over_the_regions_pixels(uniform) -> None:
    s, mask = uniform(4, 5, 6), uniform(4, 5, 6) > 0.6
    share, density = metrics.share_inside(s, mask), metrics.relative_density(s, mask)
    for i in range(4):
        inside = sum(float(s[i][at]) for at in np.ndindex(5, 6) if mask[i][at])
        assert float(share[i]) == pytest.approx(inside / float(s[i].sum()))
        mean = float(s[i][mask[i]].mean() / s[i].mean())
        assert float(density[i]) == pytest.approx(mean)
    torch.testing.assert_close(metrics.share_inside(s, mask[2])[2], share[2])
    torch.testing.assert_close(metrics.relative_density(s, mask[2])[2], density[2])
    flat = torch.full_like(s, 0.7)
    torch.testing.assert_close(metrics.relative_density(flat, mask), torch.ones(4).double())


def test_pointing_game_is_won_by_the_maximum_and_not_by_a_tie(uniform) -> None:
    s, mask = uniform(40, 4, 5), uniform(4, 5) > 0.5
    expected = [bool(mask.flatten()[int(each.argmax())]) for each in s]
    assert metrics.pointing_game(s, mask).tolist() == expected
    assert len(set(expected)) == 2
    s[:] = 0
    (inside, also), (outside, _) = mask.nonzero()[:2].tolist(), (~mask).nonzero()[:2].tolist()
    s[0][*inside] = s[0][*also] = 1
    s[1][*inside] = s[1][*outside] = 1
    assert metrics.pointing_game(s[:3], mask).tolist() == [True, False, False]


@pytest.mark.parametrize("levels", [2, 5, 10**6])
def test_localisation_auc_is_mann_whitneys_u_with_ties(levels: int, uniform) -> None:
    s, mask = (levels * uniform(4, 6, 5)).floor(), uniform(4, 6, 5) > 0.7
    answer = metrics.localisation_auc(s.float(), mask)
    for i in range(4):
        inside, outside = s[i][mask[i]].tolist(), s[i][~mask[i]].tolist()
        wins = [(a > b) + (a == b) / 2 for a, b in product(inside, outside)]
        assert float(answer[i]) == pytest.approx(np.mean(wins))
        u = scipy.stats.mannwhitneyu(inside, outside).statistic
        assert float(answer[i]) == pytest.approx(u / len(wins))
    assert metrics.localisation_auc(mask.double(), mask).tolist() == [1] * 4
    assert metrics.localisation_auc((~mask).double(), mask).tolist() == [0] * 4


def test_nothing_is_inside_an_empty_region(uniform) -> None:
    s, nothing = uniform(2, 3, 3), torch.zeros(3, 3).bool()
    assert metrics.share_inside(s, nothing).tolist() == [0, 0]
    assert metrics.pointing_game(s, nothing).tolist() == [False, False]


def neighbours(height: int, width: int) -> np.ndarray:
    """1 where two pixels share an edge: at distance 1 of each other."""
    places = np.array(list(np.ndindex(height, width)))
    apart = scipy.spatial.distance.cdist(places, places, "cityblock")
    return (apart == 1).astype(float)


@pytest.mark.parametrize("shape", [(5, 4), (1, 7), (6, 1)])
def test_variation_and_coherence_over_all_pairs_of_neighbours(shape, maps) -> None:
    h, w = maps(3, 2, *shape), neighbours(*shape)
    variation, coherence = metrics.total_variation(h), metrics.spatial_coherence(h)
    for i in range(3):
        flat = h[i].flatten(1).numpy()
        steps = sum((w * np.abs(c[:, None] - c)).sum() / 2 for c in flat)
        assert float(variation[i]) == pytest.approx(steps / np.abs(flat).sum())
        d = flat - flat.mean(1, keepdims=True)
        moran = d.shape[1] / w.sum() * sum(c @ w @ c for c in d) / (d**2).sum()
        assert float(coherence[i]) == pytest.approx(moran)


def test_noise_measures_of_a_chessboard_a_slope_and_a_dot() -> None:
    board = alternating(8, 6)
    assert metrics.spatial_coherence(board).item() == pytest.approx(-1)
    assert metrics.high_frequency_share(board).item() == pytest.approx(1)
    assert metrics.total_variation(board).item() == pytest.approx(2 * (7 * 6 + 5 * 8) / 48)
    slope = torch.arange(-50.0, 50.0)[None, None, None].expand(1, 1, 100, 100)
    assert metrics.spatial_coherence(slope).item() > 0.95
    assert metrics.high_frequency_share(slope).item() < 0.05
    dot = torch.zeros(1, 2, 5, 5)
    dot[0, 1, 2, 3] = -3
    assert metrics.total_variation(dot).item() == 4


@pytest.mark.parametrize("shape", [(8, 10), (7, 9), (12, 5)])
def test_high_frequency_share_by_scipys_transform(shape, maps) -> None:
    h = maps(3, 2, *shape)
    down, across = np.meshgrid(*(scipy.fft.fftfreq(n) for n in shape), indexing="ij")
    radius = np.hypot(down, across)
    high, any_but_mean = radius > 0.25 + 1e-9, radius > 0
    for i in range(3):
        power = sum(np.abs(scipy.fft.fft2(c)) ** 2 for c in h[i].numpy())
        expected = power[high].sum() / power[any_but_mean].sum()
        assert float(metrics.high_frequency_share(h)[i]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("down", "across", "share"),
    [(7, 0, 0.0), (8, 0, 1.0), (0, 7, 0.0), (0, -8, 1.0), (5, 5, 1.0), (5, 4, 0.0), (14, 0, 1.0)],
)
def test_a_grating_counts_as_high_above_half_of_nyquist(down, across, share) -> None:
    """Half of Nyquist is 7 cycles in 28 pixels, in any direction: 5² + 5² is above 7²."""
    place = torch.arange(28).double()
    phase = down * place[:, None] + across * place
    grating = (2 * math.pi * phase / 28 + 0.4).cos()[None, None]
    assert metrics.high_frequency_share(grating + 3).item() == pytest.approx(share, abs=1e-9)


def test_noise_measures_of_white_noise_are_those_of_theory(noise) -> None:
    h = noise(3000, 1, 12, 10)
    down, across = np.meshgrid(scipy.fft.fftfreq(12), scipy.fft.fftfreq(10), indexing="ij")
    frequencies = np.mean((np.hypot(down, across) > 0.25 + 1e-9).ravel()[1:])
    expected = {
        metrics.spatial_coherence: -1 / 119,
        metrics.high_frequency_share: frequencies,
        metrics.total_variation: math.sqrt(2) * (11 * 10 + 9 * 12) / 120,
    }
    for measure, value in expected.items():
        each = measure(h)
        # The ratio of means in the last is only nearly the mean of ratios.
        assert abs(float(each.mean()) - value) < 4 * float(each.std()) / math.sqrt(3000) + 0.002
    large = metrics.high_frequency_share(noise(3, 1, 300, 300))
    torch.testing.assert_close(large.mean().item(), 1 - math.pi / 16, atol=0.003, rtol=0)


@pytest.mark.parametrize("factor", [1e-8, -1.0, 300.0])
def test_scale_and_sign_of_a_map_change_no_measure_but_its_similarity(factor, maps) -> None:
    h, other, mask = maps(3, 2, 6, 5), maps(3, 2, 6, 5), maps(6, 5) > 0.2
    close = torch.testing.assert_close
    for name in ("total_variation", "spatial_coherence", "high_frequency_share"):
        measure = getattr(metrics, name)
        close(measure(factor * h), measure(h))
    s, scaled = metrics.importance(h), metrics.importance(factor * h)
    for name in ("share_inside", "relative_density", "pointing_game", "localisation_auc"):
        measure = getattr(metrics, name)
        close(measure(scaled, mask), measure(s, mask))
    ranks = metrics.importance(other)
    close(metrics.rank_similarity(scaled, ranks), metrics.rank_similarity(s, ranks))
    sign = math.copysign(1, factor)
    close(metrics.map_similarity(factor * h, other), sign * metrics.map_similarity(h, other))
    close(metrics.map_similarity(factor * h, h), torch.full((3,), sign).double())


def test_similarities_are_scipys(maps, uniform) -> None:
    a, b = maps(4, 2, 3, 5), maps(4, 2, 3, 5)
    s, t = (6 * uniform(4, 3, 5)).floor(), uniform(4, 3, 5)
    cosine, rho = metrics.map_similarity(a, b), metrics.rank_similarity(s, t)
    for i in range(4):
        apart = scipy.spatial.distance.cosine(a[i].flatten(), b[i].flatten())
        assert float(cosine[i]) == pytest.approx(1 - apart)
        expected = scipy.stats.spearmanr(s[i].flatten(), t[i].flatten()).statistic
        assert float(rho[i]) == pytest.approx(expected)
    torch.testing.assert_close(metrics.rank_similarity(t, t**3), torch.ones(4).double())


@pytest.mark.parametrize("value", [0.0, 0.1, -1e7])
def test_constant_maps_have_the_documented_values(value: float, maps) -> None:
    h, mask = value * torch.ones(2, 3, 7, 11).double(), maps(7, 11) > 0
    s, other = metrics.importance(h), maps(2, 3, 7, 11)
    nothing = [0.0, 0.0]
    assert metrics.total_variation(h).tolist() == nothing
    assert metrics.spatial_coherence(h).tolist() == nothing
    assert metrics.high_frequency_share(h).tolist() == nothing
    assert metrics.rank_similarity(s, metrics.importance(other)).tolist() == nothing
    assert metrics.localisation_auc(s, mask).tolist() == [0.5, 0.5]
    assert metrics.pointing_game(s, mask).tolist() == [False, False]
    if value == 0:
        assert metrics.map_similarity(h, other).tolist() == nothing
        assert metrics.share_inside(s, mask).tolist() == nothing
        assert metrics.pointing_game(s, mask | True).tolist() == [False, False]
        assert metrics.relative_density(s, mask).tolist() == nothing
    assert metrics.spatial_coherence(h[:, :, :1, :1]).tolist() == nothing


@pytest.mark.parametrize("grid", [(1, 1), (2, 4), (3, 3), (7, 8)])
def test_regions_tile_the_picture_evenly(grid: tuple[int, int], uniform) -> None:
    mean_map = uniform(7, 8)
    answer = metrics.regions_by_change(mean_map, grid)
    bands = [np.array_split(np.arange(n), k) for n, k in zip((7, 8), grid, strict=True)]
    for (i, rows), (j, columns) in product(*map(enumerate, bands)):
        expected = mean_map.numpy()[np.ix_(rows, columns)].mean()
        assert float(answer[i, j]) == pytest.approx(expected)

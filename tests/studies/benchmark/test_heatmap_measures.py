"""The heatmap benchmark where the truth is known: who wins, and that losses are reported."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from ecinn.attribution.heatmaps import Heatmaps
from ecinn.data.dataset import load_dataset
from ecinn.data.face_regions import region_mask
from ecinn.metrics.statistics import Interval
from ecinn.pixels import to_pixels
from ecinn.studies.benchmark import heatmap_tables, heatmaps
from ecinn.studies.benchmark.heatmap_measures import (
    Reader,
    evidence_for_p,
    noisiness,
    relative_noisiness,
    verdict,
    white_noise_maps,
)
from ecinn.studies.benchmark.heatmap_tables import lost
from ecinn.studies.benchmark.side_by_side import draw_pairs
from helpers.builders import random_images, small_model
from helpers.heatmap_benchmark import CUE, SEED, measure, row_of
from helpers.paths import SHARED

CELEBA = SHARED / "celeba"


def test_evidence_for_p_deletes_p_fastest_and_magnitude_does_not() -> None:
    """log-odds of q are w·x, so h = w·x pixel by pixel, and a black replacement takes it away."""
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(5, 1, 8, 8, generator=generator)
    w = torch.randn(64, generator=generator) / 4
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 2, bias=False)).requires_grad_(False)  # noqa: FBT003
    network[1].weight.copy_(torch.stack([0 * w, w]))
    p = torch.zeros(5, dtype=torch.long)
    made = Heatmaps("deep_lift", x * w.reshape(8, 8), torch.zeros(5), 1)
    black = {"blur": torch.zeros_like(x)}

    def predict(images):
        return network(images).softmax(1)

    reader = Reader("replacement", predict, x, p, black, 7, 0)
    by_magnitude = Reader("magnitude", predict, x, p, black, 7, 0)
    areas = {
        each.name: area
        for each, area in (reader.of_maps(made) | by_magnitude.of_maps(made)).items()
    }
    for kind, sign in (("deletion", 1), ("insertion", -1)):
        own, magnitude = (areas[f"{kind} AUC, blur{end}"] for end in ("", ", by |h|"))
        for order in (-evidence_for_p(made), torch.rand(5, 8, 8, generator=generator)):
            other = {each.name: area for each, area in reader.areas(order).items()}
            assert (sign * (other[f"{kind} AUC, blur"] - own) > 0).all()
        assert (sign * (magnitude - own) > 0).all()


def perfect_for(winner: str):
    """One method marks exactly what tells p from q, all others everything but that."""

    def maps(explained, x, p, q, method, **options) -> Heatmaps:
        marks = CUE.stencils
        inside = (marks[p] | marks[q])[:, None].to(x)
        change = None if method == "ecinn" else torch.ones(len(x))
        return Heatmaps(method, inside if method == winner else 1.1 - inside, change, 2)

    return maps


@pytest.mark.slow
@pytest.mark.parametrize("winner", ["ecinn", "deep_lift"])
def test_a_perfect_map_wins_localisation_and_losses_are_reported(monkeypatch, winner) -> None:
    monkeypatch.setattr(heatmaps, "heatmaps", perfect_for(winner))
    result, _ = measure(small_model(), methods=("deep_lift",))
    block = result.blocks[0]
    names = ("share in the marks of p and q", "pointing game", "localisation AUC")
    for name in names:
        figure = row_of(block, winner).figures[name]
        assert (figure.mean, figure.low, figure.high) == pytest.approx((1, 1, 1))
        comparison = row_of(block, "deep_lift").against[name]
        assert comparison.verdict == ("better" if winner == "ecinn" else "worse")
    table = next(t for t in heatmap_tables.heatmap_tables(result) if "minus" in t.title)
    cells = dict(row[:2] for row in table.rows)
    if winner == "ecinn":
        assert not set(names) & set(lost(block))
        assert cells["pointing game ↑"].startswith("better +1.000 [+1.000")
        of_place = tuple(each for each in block.measures if each.section == "localisation")
        alone = replace(block, measures=of_place)
        table = heatmap_tables.heatmap_tables(replace(result, blocks=(alone,)))[2]
        assert table.notes[0] == "ECINNh loses on nothing here."
        return
    assert table.notes[0].startswith("**ECINNh loses on: ")
    assert all(f"{name} (against DeepLift)" in table.notes[0] for name in names)
    assert cells["pointing game ↑"].startswith("**worse** -1.000 [-1.000")


@pytest.mark.parametrize(
    ("low", "high", "better", "word"),
    [
        (0.1, 0.2, "more", "better"), (0.1, 0.2, "less", "worse"), (0.1, 0.2, None, "more"),
        (-0.2, -0.1, "more", "worse"), (-0.2, -0.1, "less", "better"), (-0.2, -0.1, None, "less"),
        (-0.1, 0.1, "more", "no difference"), (0.0, 0.1, "less", "no difference"),
        (-0.1, 0.1, None, "no difference"),
    ],
)  # fmt: skip
def test_words_follow_the_interval(low, high, better, word) -> None:
    assert verdict(Interval((low + high) / 2, low, high, 9), better) == word


@pytest.mark.slow
def test_faces_are_measured_by_regions() -> None:
    model = small_model(3, 2, "celeba/Smiling")
    result, shown = measure(model, n=3, methods=("gradient_shap",))
    block = result.blocks[0]
    maps = shown.maps["INN", "gradient_shap"].abs().sum(1)
    better = {measure.name: measure.better for measure in block.measures}
    for region in ("mouth", "eyes", "cheeks", "face", "background"):
        mask = region_mask(region, 8, 8)
        share = float((maps[:, mask].sum(1) / maps.sum((1, 2))).mean())
        figures = row_of(block, "gradient_shap").figures
        assert figures[f"share, {region}"].mean == pytest.approx(share, 1e-4)
        density = share / float(mask.double().mean())
        assert figures[f"density, {region}"].mean == pytest.approx(density, 1e-4)
        wanted = {"mouth": "more", "face": "more", "background": "less"}.get(region)
        assert better[f"share, {region}"] == better[f"density, {region}"] == wanted
    assert torch.equal(shown.pairs.q, 1 - shown.pairs.p)
    # A density follows from the share, and the background's share from the face's.
    roles = {each.name: each.role for each in block.measures if each.section == "localisation"}
    counted = {name for name, role in roles.items() if role == "counted"}
    assert counted == {f"share, {region}" for region in ("mouth", "eyes", "cheeks", "face")}
    assert {role for name, role in roles.items() if name not in counted} == {"compared"}


def test_digits_without_a_cue_have_no_localisation() -> None:
    result, _ = measure(small_model(dataset="mnist"), n=2, methods=())
    assert "localisation" not in {m.section for m in result.blocks[0].measures}
    assert result.density == ()


class Enlarging(nn.Module):
    """A network that enlarges its images, as Inception-V3 does, and then flattens them."""

    def __init__(self, side: int, classes: int = 3) -> None:
        super().__init__()
        self.enlarge = nn.Upsample((side, side), mode="bilinear", align_corners=False)
        self.classes = classes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.enlarge(x).flatten(1)[:, : self.classes]


def bilinear(small: int, large: int) -> np.ndarray:
    """Row i: the weights of the small image's pixels at (i + ½)·small/large − ½."""
    place = ((np.arange(large) + 0.5) * small / large - 0.5).clip(0, small - 1)
    return np.maximum(1 - abs(place[:, None] - np.arange(small)), 0)


def means(noise) -> list[float]:
    return [float(values.mean()) for values in noise.values()]


def test_white_noise_passes_through_the_transpose_of_the_resize() -> None:
    generator = torch.Generator().manual_seed(4)
    x, baseline = torch.rand(5, 2, 6, 6, generator=generator), torch.rand(2, 6, 6)
    for network, b in ((Enlarging(21), bilinear(6, 21)), (nn.Flatten(), np.eye(6))):
        made = white_noise_maps(network, x, baseline, torch.Generator().manual_seed(8), 2)
        draws, expected = torch.Generator().manual_seed(8), []
        for some in x.split(2):
            noise = torch.randn((len(some), 2, len(b), len(b)), generator=draws).double().numpy()
            expected.append((some - baseline).numpy() * (b.T @ noise @ b))
        np.testing.assert_allclose(made.numpy(), np.concatenate(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("small", "large"), [(40, 40), (32, 112), (40, 90)])
def test_noise_of_a_resize_follows_from_the_correlation_of_neighbours(small, large) -> None:
    """Gaussian neighbours with correlation ρ: Moran's I is ρ, and E|a − b| is √(1 − ρ) E|a| √2."""
    generator = torch.Generator().manual_seed(small)
    x = torch.ones(40, 3, small, small)
    maps = white_noise_maps(Enlarging(large), x, torch.zeros(3, small, small), generator)
    covariance = bilinear(small, large).T @ bilinear(small, large)
    middle = small // 2
    rho = covariance[middle, middle + 1] / covariance[middle, middle]
    variation, coherence, _ = means(noisiness(maps))
    assert coherence == pytest.approx(rho, abs=0.02)
    edges = (small - 1) / small
    assert variation == pytest.approx(2 * np.sqrt(2 * (1 - rho)) * edges, rel=0.02)


def test_relative_noise_is_0_for_smooth_maps_and_1_for_the_networks_own_noise() -> None:
    generator = torch.Generator().manual_seed(6)
    x, black = torch.ones(60, 1, 24, 24), torch.zeros(1, 24, 24)
    ramp = torch.linspace(-1, 1, 200).expand(3, 1, 200, 200)
    for network in (Enlarging(80), nn.Flatten()):
        null, again = (noisiness(white_noise_maps(network, x, black, generator)) for _ in range(2))
        relative = relative_noisiness(again, null)
        assert means(relative) == pytest.approx([1, 1, 1], abs=0.02)
        # (m − s) / (null − s), with s = 0, 1 and 0.
        v, c, h = means(again)
        v0, c0, h0 = means(null)
        assert means(relative) == pytest.approx([v / v0, (1 - c) / (1 - c0), h / h0], rel=1e-6)
        smooth = relative_noisiness(noisiness(ramp), null)
        assert means(smooth) == pytest.approx([0, 0, 0], abs=0.03)
        assert {(each.better, each.role) for each in smooth} == {("less", "counted")}


@pytest.mark.celeba
@pytest.mark.skipif(not CELEBA.is_dir(), reason="needs ../shared/data/celeba")
def test_white_noise_of_inception_v3_looks_smoother_than_of_the_inn() -> None:
    """64 → 224 pixels: 2.46, .24 and .65, where smile's maps on Inception-V3 lie."""
    images = to_pixels(load_dataset("celeba/Smiling", "test", CELEBA).images[:200])
    null = {
        side: noisiness(
            white_noise_maps(Enlarging(side), images, images.mean(0), torch.Generator())
        )
        for side in (64, 224)
    }
    assert means(null[224]) == pytest.approx([2.46, 0.24, 0.65], abs=0.01)
    assert means(null[64]) == pytest.approx([2.81, 0.0, 0.805], abs=0.01)


@pytest.mark.slow
def test_every_network_is_compared_with_its_own_noise() -> None:
    model, network = small_model(), Enlarging(28).eval()
    result, _ = measure(model, n=6, cnn=network, methods=("gradient_shap",))
    inn, cnn = (row_of(block, "white noise").figures for block in result.blocks)
    names = ("total variation", "spatial coherence", "high-frequency share")
    relative = ("total variation", "spatial incoherence", "high-frequency share")
    for null in (inn, cnn):
        assert set(null) == {*names, *(f"relative {name}" for name in relative)}
        assert [null[f"relative {n}"].mean for n in relative] == pytest.approx([1, 1, 1])
    x = to_pixels(draw_pairs(model, random_images(12, 1, 3, 1), 6, SEED).images)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(SEED))
    mean = to_pixels(random_images(40, 1, 3, 2).images)[order[:30]].mean(0)
    for null, b in ((inn, np.eye(8)), (cnn, bilinear(8, 28))):
        shape, generator = (6, 1, len(b), len(b)), torch.Generator().manual_seed(SEED)
        maps = (x - mean).numpy() * (b.T @ torch.randn(shape, generator=generator).numpy() @ b)
        steps = sum(abs(np.diff(maps, axis=axis)).sum((1, 2, 3)) for axis in (2, 3))
        variation = (steps / abs(maps).sum((1, 2, 3))).mean()
        assert null["total variation"].mean == pytest.approx(variation, 1e-4)
    for block, null in zip(result.blocks, (inn, cnn), strict=True):
        for method, own in (("ecinn", inn), ("gradient_shap", null)):
            figures = row_of(block, method).figures
            for name, other in zip(names, relative, strict=True):
                smooth = 1 if name == "spatial coherence" else 0
                expected = (figures[name].mean - smooth) / (own[name].mean - smooth)
                assert figures[f"relative {other}"].mean == pytest.approx(expected, rel=1e-6)
    table = next(
        t for t in heatmap_tables.heatmap_tables(result) if t.title.startswith("CNN: Noise")
    )
    assert table.head[-1] == "white noise"
    assert [row[0] for row in table.rows[-3:]] == [f"relative {name} ↓" for name in relative]

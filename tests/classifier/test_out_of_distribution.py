"""Out-of-distribution detection: likelihood, texture, pose, distance and shape."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.spatial.distance import mahalanobis
from scipy.stats import chi2

from ecinn.classifier.out_of_distribution import (
    FALSE_ALARM_RATE,
    FAR_RATE,
    REASONS,
    RIDGE,
    SHAPE_RATE,
    OODDetector,
    Shape,
    band_energies,
    fit_distance,
    fit_log_p,
    fit_pose,
    fit_texture,
)
from ecinn.data.augmentation import misplace
from ecinn.flow.network import Architecture, Stage, build_inn, latent_frequencies
from helpers.builders import randomise

FREQUENCY = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2, 2])


@pytest.fixture
def residual(generator: torch.Generator) -> torch.Tensor:
    """Latents whose frequencies share a loudness."""
    loudness = torch.randn(3000, 1, generator=generator, dtype=torch.float64).exp()
    return loudness * torch.randn(3000, 10, generator=generator, dtype=torch.float64)


def test_energies_are_logs_of_mean_squares(residual: torch.Tensor) -> None:
    energies = band_energies(residual, FREQUENCY)
    for k, part in enumerate([slice(0, 2), slice(2, 5), slice(5, 10)]):
        expected = np.log((residual[:, part].numpy() ** 2).mean(1))
        assert np.allclose(energies[:, k].numpy(), expected)


def test_texture_is_the_mahalanobis_distance_of_energies(residual: torch.Tensor) -> None:
    texture = fit_texture(band_energies(residual, FREQUENCY), FREQUENCY)
    energies = band_energies(residual, FREQUENCY).numpy()
    inverse = np.linalg.inv(np.cov(energies.T))
    mean = energies.mean(0)
    expected = [mahalanobis(row, mean, inverse) ** 2 for row in energies[:50]]
    assert np.allclose(texture.distance(residual[:50]).numpy(), expected, rtol=1e-4)
    outside = (texture.distance(residual) > texture.limit).float().mean()
    assert abs(float(outside) - FALSE_ALARM_RATE) < 0.001
    # All at once louder is usual here; one frequency against the others is not.
    smooth = residual[:20] * torch.where(FREQUENCY == 2, 0.02, 1.0)
    assert (texture.distance(smooth) > texture.limit).all()
    assert (texture.distance(1.5 * residual[:20]) > texture.limit).float().mean() < 0.2


def test_unusual_log_p_is_flagged_on_both_sides(generator: torch.Generator) -> None:
    log_p = 7 + torch.randn(20_000, generator=generator)
    low, high = fit_log_p(log_p)
    expected = np.quantile(
        log_p.double().numpy(), [FALSE_ALARM_RATE / 2, 1 - FALSE_ALARM_RATE / 2]
    )
    assert np.allclose([low, high], expected)
    z = torch.zeros(3, 4)
    flags = OODDetector((low, high)).flags(z, z, torch.tensor([low - 1, 7.0, high + 1]))
    assert flags.tolist() == [[True] + 4 * [False], 5 * [False], [True] + 4 * [False]]


def test_the_distance_is_that_of_a_chi_square(generator: torch.Generator) -> None:
    """Latents of unit variance around the mean of their class, and others farther away."""
    residual = torch.randn(40_000, 30, generator=generator)
    limit = fit_distance(residual.square().sum(1))
    assert limit == pytest.approx(chi2.ppf(1 - FAR_RATE, df=30), rel=0.02)
    norms = torch.tensor([0.98, 1.02]) * limit**0.5
    rows = torch.nn.functional.normalize(residual[:2]) * norms[:, None]
    flags = OODDetector((-1.0, 1.0), distance=limit).flags(rows + 5, rows, torch.zeros(2))
    assert flags.tolist() == [5 * [False], [reason == "distance" for reason in REASONS]]


def test_pose_generalises_to_new_images(generator: torch.Generator) -> None:
    direction = torch.randn(40, generator=generator)
    z = torch.randn(2000, 40, generator=generator) + direction
    other = torch.randn(3000, 40, generator=generator) - direction
    pose = fit_pose(z[:1000], other[:1000], z[1000:].split(300))
    assert float((pose.score(other[1000:]) < pose.limit).float().mean()) > 0.97
    fresh = torch.randn(5000, 40, generator=generator) + direction
    assert float((pose.score(fresh) < pose.limit).float().mean()) < 0.02
    usual = OODDetector((-1.0, 1.0), pose=pose)
    flags = usual.flags(other[:9], other[:9], torch.zeros(9))
    assert flags[:, REASONS.index("pose")].all()
    assert not flags[:, 0].any()


def test_pose_is_a_ridge_regression_with_a_limit_from_other_images(
    generator: torch.Generator,
) -> None:
    """In the primal form, with an intercept by centring."""
    count = 150
    scale = 20 * torch.rand(12, generator=generator, dtype=torch.float64)
    z = 4 + scale * torch.randn(900, 12, generator=generator, dtype=torch.float64)
    other = scale * torch.randn(400, 12, generator=generator, dtype=torch.float64) - 3
    pose = fit_pose(z[:count], other[:count], z[count:].split(400))
    rows = np.concatenate([z[:count], other[:count]])
    rows -= rows.mean(0)
    sign = np.repeat([1.0, -1.0], count)
    weight = np.linalg.solve(rows.T @ rows + RIDGE * np.eye(12), rows.T @ sign)
    assert np.allclose(pose.weight.numpy(), weight)
    assert pose.limit == pytest.approx(np.quantile(z[count:].numpy() @ weight, FALSE_ALARM_RATE))


def test_a_band_without_energy_is_flagged(residual: torch.Tensor) -> None:
    texture = fit_texture(band_energies(residual, FREQUENCY), FREQUENCY)
    silent = residual[:3] * (FREQUENCY != 1)
    assert band_energies(silent, FREQUENCY).isfinite().all()
    for quiet in (silent, 0 * silent):
        flags = OODDetector((-1.0, 1.0), texture).flags(quiet, quiet, torch.zeros(3).double())
        assert flags[:, REASONS.index("texture")].all()


def test_frequencies_are_those_of_the_last_layer(generator: torch.Generator) -> None:
    """A pure cosine of frequency (i, j) at the end of the network lands on latents of i + j."""
    a = Architecture(1, 16, 8, 2, (Stage(1, 4), Stage(1, 4)), dense_width=0)
    frequency = latent_frequencies(a)
    assert frequency is not None
    pooling = build_inn(a).bijections[-1]
    rows, columns = torch.arange(4.0), torch.arange(2.0)
    for i in range(4):
        for j in range(2):
            wave = torch.cos(torch.pi * (rows[:, None] + 0.5) * i / 4) * torch.cos(
                torch.pi * (columns + 0.5) * j / 2
            )
            z, _ = pooling(wave.expand(1, 16, 4, 2))
            assert (frequency[z[0].abs() > 1e-4] == i + j).all()
    dense = Architecture(1, 16, 8, 2, (Stage(1, 4),), dense_width=8)
    assert latent_frequencies(dense) is None


def test_misplaced_images_are_complete_and_different(generator: torch.Generator) -> None:
    images = torch.randint(256, (200, 3, 10, 10), generator=generator, dtype=torch.uint8)
    moved = misplace(images, generator)
    assert moved.shape == images.shape
    assert (moved != images).flatten(1).any(1).all()
    kinds = {
        "upside down": images.flip(2),
        "inverted": 255 - images,
        "quarter": images.transpose(2, 3).flip(2),
        "other quarter": images.transpose(2, 3).flip(3),
        "down": torch.cat([images[:, :, :3].flip(2), images[:, :, :7]], 2),
        "up": torch.cat([images[:, :, 3:], images[:, :, 7:].flip(2)], 2),
        "right": torch.cat([images[..., :3].flip(3), images[..., :7]], 3),
        "left": torch.cat([images[..., 3:], images[..., 7:].flip(3)], 3),
    }
    counts = {name: int((moved == kind).flatten(1).all(1).sum()) for name, kind in kinds.items()}
    assert sum(counts.values()) == 200
    assert min(counts.values()) > 8
    flat = misplace(images[:, :, :6], generator)
    assert flat.shape == (200, 3, 6, 10)


def test_a_calibrated_model_flags_out_of_distribution_images(tmp_path) -> None:
    """Through calibration, a file and an explanation."""
    import dataclasses

    from ecinn.classifier.checkpoint import load_checkpoint, save_checkpoint
    from ecinn.classifier.generative import GenerativeClassifier
    from ecinn.classifier.recipes import CELEBA_ATTRIBUTES
    from ecinn.data.dataset import Dataset
    from ecinn.model import Model
    from ecinn.training.calibration import calibrate

    generator = torch.Generator().manual_seed(3)
    ramp = torch.linspace(0, 200, 16)[:, None].expand(16, 16)
    noise = torch.randint(40, (600, 3, 16, 16), generator=generator)
    images = (ramp + noise).to(torch.uint8)
    architecture = Architecture(3, 16, 16, 2, (Stage(1, 8), Stage(1, 8)), dense_width=0)
    recipe = dataclasses.replace(CELEBA_ATTRIBUTES, architecture=architecture)
    classifier = GenerativeClassifier(architecture)
    randomise(classifier, scale=0.1)
    data = Dataset(images, torch.arange(600) % 2, ("a", "b"))
    checkpoint = calibrate(recipe, data, classifier.state_dict(), torch.device("cpu"), {})
    save_checkpoint(checkpoint, tmp_path / "m.safetensors")
    model = Model(load_checkpoint(tmp_path / "m.safetensors"))
    assert model.ood.texture is not None
    assert model.ood.pose is not None
    assert model.explain(images[:200], "all", check=False).typical.float().mean() > 0.95
    flat = torch.full((1, 3, 16, 16), 120, dtype=torch.uint8)
    assert "texture" in model.explain(flat, "all", check=False).reasons(0)
    turned = model.explain(images[:50].flip(2), "all", check=False)
    assert turned.out_of_distribution[:, REASONS.index("pose")].float().mean() > 0.9


@pytest.mark.parametrize("held_out", [True, False])
def test_dense_models_get_a_distance_from_held_out_images(*, held_out: bool) -> None:
    import dataclasses

    from ecinn.classifier.generative import GenerativeClassifier
    from ecinn.classifier.recipes import MNIST
    from ecinn.training.calibration import calibrate
    from helpers.builders import random_images

    architecture = Architecture(1, 8, 8, 3, (Stage(1, 4),), dense_width=8)
    recipe = dataclasses.replace(MNIST, architecture=architecture)
    classifier = randomise(GenerativeClassifier(architecture), scale=0.1)
    data, other = random_images(900, 1, 3, 5), random_images(400, 1, 3, 6)
    device = torch.device("cpu")
    found = calibrate(
        recipe, data, classifier.state_dict(), device, {}, held_out=other if held_out else None
    )
    images = (other if held_out else data).images.double() / 256 + 1 / 512
    z = found.classifier.encode(images.float())
    squares = torch.cdist(z.double(), found.mu_bar.double()).square().min(1).values
    assert found.ood.distance == pytest.approx(np.quantile(squares, 1 - FAR_RATE), rel=1e-3)


def test_shipped_digits_flag_letters_and_no_digits(mnist) -> None:
    """An A, a K and an M in broad strokes, framed as photographs are."""
    from PIL import Image, ImageDraw

    from ecinn.data.mnist import load_mnist

    def pen(*strokes: list[tuple[int, int]]) -> torch.Tensor:
        paper = Image.new("L", (280, 280))
        for stroke in strokes:
            ImageDraw.Draw(paper).line(stroke, 255, 26, joint="curve")
        return mnist.photograph(paper).image

    letters = [
        pen([(50, 230), (140, 40), (230, 230)], [(85, 160), (195, 160)]),
        pen([(60, 40), (60, 240)], [(200, 40), (60, 140), (200, 240)]),
        pen([(50, 240), (50, 40), (140, 150), (230, 40), (230, 240)]),
    ]

    def flagged(images: torch.Tensor) -> torch.Tensor:
        # With a target that is not the prediction, whichever it is.
        target = (mnist.predict(images).argmax(1, keepdim=True) + 1) % 10
        return mnist.explain(images, target, check=False).out_of_distribution

    flags = flagged(torch.stack(letters))
    assert flags[:, REASONS.index("shape")].all()
    assert flagged(load_mnist("test").images[:200]).any(1).float().mean() < 0.02


def test_models_of_digits_get_a_shape_and_a_distance_that_flags_less(tmp_path) -> None:
    """Other models get none."""
    import dataclasses

    from ecinn.classifier.checkpoint import load_checkpoint, save_checkpoint
    from ecinn.classifier.generative import GenerativeClassifier
    from ecinn.classifier.recipes import MNIST
    from ecinn.data.mnist import load_mnist
    from ecinn.data.pen import page_pens, redraw
    from ecinn.pixels import to_pixels
    from ecinn.training.calibration import calibrate

    architecture = Architecture(1, 28, 28, 10, (Stage(1, 4), Stage(1, 4)), dense_width=8)
    recipe = dataclasses.replace(MNIST, architecture=architecture)
    weights = randomise(GenerativeClassifier(architecture), scale=0.05).state_dict()
    data, other = load_mnist("train").first(60), load_mnist("validation").first(80)
    device = torch.device("cpu")
    found = calibrate(recipe, data, weights, device, {}, held_out=other)
    dots = dataclasses.replace(recipe, mnist_framing=False)
    assert calibrate(dots, data, weights, device, {}, held_out=other).ood.shape is None
    both = torch.cat([other.images, redraw(other.images, page_pens(80))])
    z = found.classifier.encode(to_pixels(both))
    shape = found.ood.shape
    assert shape is not None
    scores = shape.score(z).double().numpy()
    assert shape.limit == pytest.approx(np.quantile(scores, 1 - SHAPE_RATE), abs=1e-4)
    squares = torch.cdist(z[:80].double(), found.mu_bar.double()).square().min(1).values
    expected = np.quantile(squares, 1 - FALSE_ALARM_RATE)
    assert found.ood.distance == pytest.approx(expected, rel=1e-3)
    save_checkpoint(found, tmp_path / "m.safetensors")
    back = load_checkpoint(tmp_path / "m.safetensors").ood.shape
    assert back.limit == shape.limit
    for one, same in zip(back[:3], shape[:3], strict=True):
        assert torch.equal(one, same)


def test_the_shape_flags_what_exceeds_its_limit(generator: torch.Generator) -> None:
    z = torch.randn(40, 6, generator=generator)
    weight, bias, out = (torch.randn(s, generator=generator) for s in ((3, 6), (3,), (3,)))
    scores = np.maximum(z.numpy() @ weight.numpy().T + bias.numpy(), 0) @ out.numpy()
    shape = Shape(weight, bias, out, float(np.median(scores)))
    flags = OODDetector((-1.0, 1.0), shape=shape).flags(z, z, torch.zeros(40))
    assert flags.sum(0).tolist() == [0, 0, 0, 0, 20]
    assert np.array_equal(flags[:, REASONS.index("shape")].numpy(), scores > np.median(scores))


# Letters of the goal as a visitor draws them on the page: straight strokes and arcs, in fractions
# of the canvas. None of them took part in fitting the score.
DRAWN = {
    "A": [[(20, 85), (35, 50), (50, 12)], [(50, 12), (66, 50), (80, 86)], [(30, 60), (72, 61)]],
    "E": [[(72, 16), (28, 15)], [(28, 15), (27, 84)], [(27, 84), (74, 85)], [(28, 48), (62, 49)]],
    "F": [[(30, 14), (29, 86)], [(30, 14), (74, 13)], [(30, 46), (64, 47)]],
    "H": [[(24, 14), (23, 86)], [(76, 13), (77, 87)], [(23, 51), (77, 48)]],
    "K": [[(28, 12), (28, 88)], [(74, 14), (29, 54)], [(40, 45), (75, 88)]],
    "M": [[(16, 86), (18, 15)], [(18, 15), (49, 60)], [(49, 60), (82, 14)], [(82, 14), (84, 87)]],
    "N": [[(24, 87), (25, 14)], [(25, 14), (75, 86)], [(75, 86), (76, 13)]],
    "T": [[(20, 16), (80, 15)], [(50, 16), (51, 87)]],
    "W": [[(12, 14), (30, 86)], [(30, 86), (50, 30)], [(50, 30), (70, 86)], [(70, 86), (88, 13)]],
    "X": [[(22, 14), (78, 86)], [(78, 13), (22, 87)]],
}


@pytest.mark.parametrize("name", ["mnist", "mnist-finetuned"])
def test_letters_drawn_with_the_pages_pen_are_flagged(name: str) -> None:
    from ecinn.data import pen
    from ecinn.data.mnist import load_mnist
    from ecinn.model import load

    model = load(name)
    t = torch.linspace(0, 1, 60)[:, None]
    lines = [
        torch.cat([
            torch.tensor(a, dtype=torch.float32) * (1 - t) + torch.tensor(b) * t
            for stroke in strokes
            for a, b in pairwise(stroke)
        ])
        for strokes in DRAWN.values()
    ]  # fmt: skip
    letters = pen.draw(lines, pen.page_pens(len(lines)))
    digits = pen.redraw(load_mnist("test").images[:200], pen.page_pens(200))
    found = (
        model.ood.shape.score(model.encode(torch.cat([letters, digits]))) > model.ood.shape.limit
    )
    missed = [letter for letter, flag in zip(DRAWN, found.tolist(), strict=False) if not flag]
    assert missed == []
    assert int(found[len(letters) :].sum()) <= 4

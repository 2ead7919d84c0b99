"""Calibration: class means and temperature of a finished model."""

import dataclasses

import numpy as np
import pytest
import scipy.optimize
import torch
import torch.nn.functional as F
from torch import Tensor

from ecinn.classifier.checkpoint import Checkpoint
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.out_of_distribution import FALSE_ALARM_RATE, fit_log_p
from ecinn.classifier.recipes import MNIST
from ecinn.data.dataset import Dataset
from ecinn.data.mnist import load_mnist
from ecinn.explanation.counterfactual import class_means
from ecinn.flow.network import Architecture, Stage
from ecinn.pixels import to_pixels
from ecinn.training import calibration
from ecinn.training.calibration import calibrate, fit_tau, label_means, platt_scaling
from helpers.builders import randomise

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data() -> Dataset:
    return load_mnist("train").first(300)


def overlapping(
    generator: torch.Generator, tau: float, classes: int, n: int = 20000
) -> tuple[Tensor, Tensor, Tensor]:
    """Latents, labels drawn from the posterior with this τ, and means."""
    mu = torch.randn((classes, 5), generator=generator, dtype=torch.float64)
    z = torch.randn((n, 5), generator=generator, dtype=torch.float64)
    posterior = (-0.5 * tau * torch.cdist(z, mu).square()).softmax(1)
    return z, torch.multinomial(posterior, 1, generator=generator)[:, 0], mu


def one_hot(labels: Tensor, classes: int) -> Tensor:
    return F.one_hot(labels, classes).double()


@pytest.mark.parametrize("tau", [0.05, 0.4, 2.0])
@pytest.mark.parametrize("classes", [2, 6])
def test_tau_is_found_where_labels_follow_the_posterior(generator, tau, classes) -> None:
    z, labels, mu = overlapping(generator, tau, classes)
    fitted = float(fit_tau(z.split(3000), one_hot(labels, len(mu)), mu))
    assert fitted == pytest.approx(tau, rel=0.1)

    def loss(tau: float) -> float:
        log_posterior = (-0.5 * tau * torch.cdist(z, mu).square()).log_softmax(1)
        smoothing = 1 / (len(z) + 2)
        targets = torch.full_like(log_posterior, smoothing / (classes - 1))
        targets.scatter_(1, labels[:, None], 1 - smoothing)
        return float(F.cross_entropy(log_posterior, targets))

    assert loss(fitted) < min(loss(0.999 * fitted), loss(1.001 * fitted))


def test_perfect_predictions_do_not_give_certainty(generator) -> None:
    """Platt's rule: n right answers of n justify a confidence of about 1 − 1/(n + 2)."""
    mu = torch.tensor([[-1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    labels = torch.arange(200) % 2
    tau = fit_tau([mu[labels]], one_hot(labels, 2), mu)
    confidence = torch.sigmoid(2 * tau)
    assert float(confidence) == pytest.approx(1 - 1 / 202, abs=1e-4)


@pytest.mark.parametrize("soft", [False, True])
def test_platt_scaling_finds_the_boundary_that_labels_follow(generator, soft) -> None:
    """Labels of two classes with shifted means: as SciPy's minimiser, from other parameters."""
    mu = torch.randn((2, 5), generator=generator, dtype=torch.float64)
    z = 2 * torch.randn((20000, 5), generator=generator, dtype=torch.float64)
    true_tau, part = 0.8, 0.3
    moved = mu + part * (mu[1] - mu[0])
    posterior = (-0.5 * true_tau * torch.cdist(z, moved).square()).softmax(1)
    labels = torch.multinomial(posterior, 1, generator=generator)[:, 0]
    targets = posterior if soft else one_hot(labels, 2)
    tau, shift = platt_scaling(z.split(3000), targets, mu)
    assert float(tau) == pytest.approx(true_tau, rel=0.005 if soft else 0.06)
    expected = part * (mu[1] - mu[0])
    torch.testing.assert_close(shift, expected, rtol=0.005 if soft else 0.1, atol=0.0)
    smoothing = 1 / (len(z) + 2)
    targets = (1 - smoothing) * targets + smoothing * targets.flip(1)

    def loss(parameters: np.ndarray) -> float:
        means = mu + parameters[1] * (mu[1] - mu[0])
        logits = -0.5 * parameters[0] * torch.cdist(z, means).square()
        return float(F.cross_entropy(logits, targets))

    found = scipy.optimize.minimize(loss, (1.0, 0.0), method="Nelder-Mead", tol=1e-10)
    assert float(tau) == pytest.approx(found.x[0], rel=1e-4)
    torch.testing.assert_close(shift, found.x[1] * (mu[1] - mu[0]), rtol=1e-3, atol=1e-6)


def test_no_shift_moves_the_boundary_past_a_mean(generator) -> None:
    """Answers that are all one class, or that have nothing to do with the latents."""
    mu = torch.tensor([[-1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    z = torch.randn((500, 2), generator=generator, dtype=torch.float64)
    assert platt_scaling([z], one_hot(torch.zeros(500).long(), 2), mu) is None
    assert platt_scaling([z], one_hot((z[:, 1] > -0.7).long(), 2), mu) is None


@pytest.mark.parametrize("balanced", [True, False])
def test_two_tied_means_move_together(balanced, data: Dataset) -> None:
    """By what Platt scaling says; a balanced recipe has the boundary halfway between them."""
    architecture = Architecture(1, 28, 28, 2, (Stage(1, 8), Stage(1, 8)), dense_width=16)
    classifier = randomise(GenerativeClassifier(architecture).eval(), scale=0.05)
    recipe = dataclasses.replace(
        MNIST, architecture=architecture, stored_bits=32, balanced=balanced
    )

    def two(images: Dataset) -> Dataset:
        """Zeros against three other digits: unequal classes with unequal variances."""
        kept = images.select((images.labels < 4).nonzero()[:, 0])
        return dataclasses.replace(kept, labels=(kept.labels > 0).long(), class_names=("0", "1"))

    held_out = two(load_mnist("validation").first(400))
    model = calibrate(recipe, two(data), classifier.state_dict(), CPU, {}, held_out)
    z = model.classifier.encode(to_pixels(held_out.images))
    shift, targets = model.classifier.mu - model.mu_bar, one_hot(held_out.labels, 2)
    if balanced:
        assert not shift.any()
        assert float(model.classifier.tau) == float(fit_tau([z], targets, model.mu_bar))
        return
    tau, expected = platt_scaling([z], targets, model.mu_bar)
    torch.testing.assert_close(shift, expected.expand(2, -1), rtol=1e-4, atol=1e-5)
    assert float(shift.norm()) > 0.01 * float((model.mu_bar[1] - model.mu_bar[0]).norm())
    assert float(model.classifier.tau) == float(tau)


def test_label_means_are_zero_for_a_class_without_images(generator) -> None:
    z = torch.randn((6, 3), generator=generator)
    means = label_means(z.split(4), torch.tensor([0, 2, 0, 2, 2, 0]).split(4), z.new_empty(3, 3))
    expected = torch.stack([z[[0, 2, 5]].mean(0), torch.zeros(3), z[[1, 3, 4]].mean(0)])
    torch.testing.assert_close(means, expected)


@pytest.mark.parametrize("classes", [2, 5])
def test_one_image_is_enough_for_tau(classes) -> None:
    """Read right: a confidence of 1 − 1/(1 + 2). Read wrong: no confidence at all."""
    mu = 3 * torch.eye(classes, dtype=torch.float64)
    for label, expected in ((1, 2 / 3), (0, 1 / classes)):
        tau = fit_tau([mu[1:2]], one_hot(torch.tensor([label]), len(mu)), mu)
        posterior = (-0.5 * tau * torch.cdist(mu[1:2], mu).square()).softmax(1)
        assert float(posterior[0, 1]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_means_become_the_measured_means(tied, data: Dataset) -> None:
    architecture = Architecture(1, 28, 28, 10, (Stage(1, 8), Stage(1, 8)), dense_width=16)
    classifier = randomise(GenerativeClassifier(architecture).eval(), scale=0.05)
    recipe = dataclasses.replace(
        MNIST, architecture=architecture, tied=tied, tau=0.3, stored_bits=32
    )
    weights = classifier.state_dict() | {"tau": torch.tensor(0.3)}
    if not tied:
        z = classifier.encode(to_pixels(data.images)).detach()
        weights["mu"] = label_means([z], [data.labels], classifier.mu.detach())
    held_out = load_mnist("validation").first(100)
    model = calibrate(recipe, data, weights, CPU, {}, held_out)
    z = model.classifier.encode(to_pixels(data.images))
    by_label = torch.stack([z[data.labels == label].mean(0) for label in range(10)])
    torch.testing.assert_close(model.mu_bar, class_means([z], by_label))
    log_p = model.classifier.log_marginal(to_pixels(data.images))
    assert model.ood.log_p == pytest.approx(fit_log_p(log_p), rel=1e-6)
    tau = float(model.classifier.tau)
    if not tied:
        assert torch.equal(model.classifier.mu, weights["mu"])
        assert tau == pytest.approx(0.3)
        return
    assert torch.equal(model.classifier.mu, model.mu_bar)
    z = model.classifier.encode(to_pixels(held_out.images))
    assert tau == float(
        fit_tau([z], one_hot(held_out.labels, len(model.mu_bar)), model.classifier.mu)
    )
    without = calibrate(recipe, data, weights, CPU, {})
    assert float(without.classifier.tau) == pytest.approx(0.3)


def test_latents_that_are_computed_again_give_the_same_model(data, monkeypatch) -> None:
    """With all scores of the detector; many latents are never held at once."""
    architecture = Architecture(1, 28, 28, 10, (Stage(1, 8), Stage(1, 8)), dense_width=0)
    classifier = randomise(GenerativeClassifier(architecture).eval(), scale=0.05)
    recipe = dataclasses.replace(MNIST, architecture=architecture, stored_bits=32, aligned=True)
    encode, passes = GenerativeClassifier.encode_with_log_det, []

    def counted(network: GenerativeClassifier, x: Tensor) -> tuple[Tensor, Tensor]:
        passes.append(len(x))
        return encode(network, x)

    monkeypatch.setattr(GenerativeClassifier, "encode_with_log_det", counted)
    monkeypatch.setattr(calibration, "PART", 128)  # 300 images: an incomplete part

    def calibrated(limit: int) -> tuple[Checkpoint, int]:
        monkeypatch.setattr(calibration, "LATENTS_LIMIT", limit)
        passes.clear()
        model = calibrate(recipe, data, classifier.state_dict(), CPU, {}, data.first(50))
        return model, sum(passes)

    kept, once = calibrated(300 * 784 * 4)
    again, often = calibrated(300 * 784 * 4 - 1)
    assert (once, often) == (300 + 50 + 2 * 150, 4 * 300 + 50 + 2 * 150)
    assert torch.equal(again.mu_bar, kept.mu_bar)
    assert torch.equal(again.classifier.tau, kept.classifier.tau)
    assert again.ood.log_p == kept.ood.log_p
    for name in ("texture", "pose"):
        for one, other in zip(getattr(again.ood, name), getattr(kept.ood, name), strict=True):
            torch.testing.assert_close(one, other)
    # The pose is fitted to the first half; its limit lets all but 0.2 % of the rest pass.
    z = kept.classifier.encode(to_pixels(data.images))
    scores = np.quantile(kept.ood.pose.score(z[150:]).double().numpy(), FALSE_ALARM_RATE)
    assert kept.ood.pose.limit == pytest.approx(float(scores), rel=1e-6)


def test_a_detector_is_fitted_to_a_sample_of_many_images(data, monkeypatch) -> None:
    architecture = Architecture(1, 28, 28, 10, (Stage(1, 8), Stage(1, 8)), dense_width=0)
    classifier = randomise(GenerativeClassifier(architecture).eval(), scale=0.05)
    recipe = dataclasses.replace(MNIST, architecture=architecture, stored_bits=32, seed=5)
    monkeypatch.setattr(calibration, "OOD_IMAGES", 120)
    model = calibrate(recipe, data, classifier.state_dict(), CPU, {})
    order = torch.randperm(300, generator=torch.Generator().manual_seed(5))
    log_p = model.classifier.log_marginal(to_pixels(data.images[order[:120]]))
    assert model.ood.log_p == pytest.approx(fit_log_p(log_p), rel=1e-6)
    z = model.classifier.encode(to_pixels(data.images))  # means are those of all images
    by_label = torch.stack([z[data.labels == label].mean(0) for label in range(10)])
    torch.testing.assert_close(model.mu_bar, class_means([z], by_label))

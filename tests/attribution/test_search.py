"""Search methods on a scaled rotation, whose boundaries are known, and on a random flow."""

import math

import pytest
import torch
from torch import Tensor

from ecinn import equations
from ecinn.attribution.search import (
    ecinn,
    latent_gradient,
    model_means,
    nearest_image,
    pixel_gradient,
    proximal_step,
)
from ecinn.data.dataset import load_dataset
from ecinn.explanation.counterfactual import counterfactual, explain
from ecinn.pixels import to_pixels, to_uint8
from helpers.builders import RotationClassifier

SCALE = 20.0


class Pixels(RotationClassifier):
    """z = 20 Q(x − ½), class means inside the unit cube. Counts images, not calls."""

    def __init__(self, classes: int = 4, seed: int = 0, shape: tuple[int, int, int] = (1, 2, 3)):
        super().__init__(shape=shape, classes=classes, seed=seed)
        generator = torch.Generator().manual_seed(seed + 100)
        centres = torch.rand(self.mu.shape, generator=generator, dtype=torch.float64)
        self.mu = SCALE * (0.2 + 0.6 * centres - 0.5) @ self.q.T
        self.mu_bar = 1.1 * self.mu
        self.calls = {"encode": 0, "decode": 0, "backward": 0}

    def encode_with_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self._count("encode", x)
        return SCALE * (x.flatten(1) - 0.5) @ self.q.T, x.new_zeros(len(x))

    def decode(self, z: Tensor) -> Tensor:
        self._count("decode", z)
        return (z @ self.q / SCALE).reshape(-1, *self.shape) + 0.5

    def log_posterior(self, x: Tensor) -> Tensor:
        z = SCALE * (x.flatten(1) - 0.5) @ self.q.T
        return (-0.5 * self.tau * (z[:, None] - self.mu).square().sum(-1)).log_softmax(1)

    def _count(self, what: str, given: Tensor) -> None:
        self.calls[what] += len(given)
        if given.requires_grad:
            given.register_hook(self._count_backward)

    def _count_backward(self, gradient: Tensor) -> None:
        self.calls["backward"] += len(gradient)


class Latents:
    """The identity on the latents of another classifier, shaped as images of one row."""

    def __init__(self, mu: Tensor, tau: Tensor):
        self.mu, self.tau = mu, tau

    def encode_with_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.flatten(1), x.new_zeros(len(x))

    def decode(self, z: Tensor) -> Tensor:
        return z[:, None, None]


@pytest.fixture
def pixels() -> Pixels:
    return Pixels()


@pytest.fixture
def x(pixels: Pixels, uniform) -> Tensor:
    return to_pixels(to_uint8(0.1 + 0.8 * uniform(9, 1, 2, 3))).double()


def other(classifier: Pixels, x: Tensor) -> Tensor:
    """A target for every image."""
    p = classifier.log_posterior(x).argmax(1)
    return ((p + 1 + torch.arange(len(x)) % (len(classifier.mu) - 1)) % len(classifier.mu))[
        :, None
    ]


def log_q(classifier: Pixels, images: Tensor, q: Tensor) -> Tensor:
    return classifier.log_posterior(images).gather(1, q)[:, 0]


@pytest.mark.parametrize("n", [9, 99])
def test_ecinn_is_the_explanation_at_alpha_1(pixels, uniform, n) -> None:
    """Nine images with three targets are one batch of 64; 99 images are several."""
    x = 0.1 + 0.8 * uniform(n, 1, 2, 3)
    answer = ecinn(pixels, pixels.mu_bar, x, "all")
    assert pixels.calls == {"encode": n, "decode": 3 * n, "backward": 0}
    expected = explain(pixels, pixels.mu_bar, x, "all")
    torch.testing.assert_close(answer.images, expected.convincing)
    assert torch.equal(answer.q, expected.q)
    assert torch.equal(answer.p, expected.p)
    assert torch.equal(answer.passes, torch.full((n, 3), 2))
    assert not answer.failed.any()
    q = other(pixels, x)
    torch.testing.assert_close(
        ecinn(pixels, pixels.mu_bar, x, q).images[:, 0],
        counterfactual(pixels, pixels.mu_bar, x, q[:, 0]),
    )


def test_model_means_are_ecinn_with_mu(pixels, x) -> None:
    answer = model_means(pixels, pixels.mu_bar, x, "all")
    torch.testing.assert_close(answer.images, explain(pixels, pixels.mu, x, "all").convincing)
    measured = explain(pixels, pixels.mu_bar, x, "all").convincing
    assert (answer.images - measured).abs().amax() > 0.01


def test_nearest_image_is_the_nearest(pixels, x, uniform, generator) -> None:
    """Candidates come in parts of 4096, which is fewer than there are of any class."""
    images = to_uint8(uniform(20_000, 1, 2, 3))
    predicted = torch.randint(0, 4, (20_000,), generator=generator)
    answer = nearest_image(pixels, pixels.mu_bar, x, "all", images=images, predicted=predicted)
    assert predicted.bincount().min() > 4096
    for row in range(9):
        for column in range(3):
            allowed = images[predicted == answer.q[row, column]]
            difference = (to_pixels(allowed).double() - x[row]).flatten(1).abs().numpy()
            nearest = (difference**2).sum(1).argmin()
            assert torch.equal(answer.stored[row, column], allowed[int(nearest)])
    assert torch.equal(answer.passes, torch.ones(9, 3, dtype=torch.long))
    assert pixels.calls == {"encode": 9, "decode": 0, "backward": 0}
    assert not answer.failed.any()


def test_class_without_an_image_is_a_failure_of_its_pairs_alone(pixels, x) -> None:
    q = other(pixels, x)
    images, predicted = torch.zeros(1, 1, 2, 3, dtype=torch.uint8), q[:1, 0]
    answer = nearest_image(pixels, pixels.mu_bar, x, q, images=images, predicted=predicted)
    assert torch.equal(answer.failed, q != q[0])
    assert answer.failed.any()
    torch.testing.assert_close(answer.images[answer.failed], x[answer.failed[:, 0]])


@pytest.mark.parametrize("seed", range(5))
def test_pixel_gradient_goes_straight_to_the_boundary(uniform, seed) -> None:
    """For two classes p(q) = c is the plane wᵀz + b = logit c; the shortest way is along w."""
    pixels = Pixels(classes=2, seed=seed)
    x = to_pixels(to_uint8(0.4 + 0.2 * uniform(5, 1, 2, 3))).double()
    p = pixels.log_posterior(x).argmax(1)
    answer = pixel_gradient(
        pixels, pixels.mu_bar, x, 1 - p[:, None], norm="l2", weight=1e-3, learning_rate=1e-3
    )
    z, _ = pixels.encode_with_log_det(x)
    w, b = equations.decision_boundary(pixels.mu[p], pixels.mu[1 - p])
    shortest = (math.log(0.9 / 0.1) - (w * z).sum(1) - b) / w.norm(dim=1) / SCALE
    inside = ((answer.images[:, 0] > 0) & (answer.images[:, 0] < 1)).flatten(1).all(1)
    assert inside.any()
    assert not answer.failed.any()
    length = (answer.images[:, 0] - x).flatten(1).norm(dim=1)
    torch.testing.assert_close(length[inside], shortest[inside], atol=0.01, rtol=0.03)


def test_pixel_gradient_reaches_q_with_the_stored_image(pixels, x) -> None:
    x[:4, :, 0] = 0.5 / 256
    x[2:, :, 1] = 255.5 / 256
    answer = pixel_gradient(pixels, pixels.mu_bar, x, "all")
    assert answer.images.amin() >= 0
    assert answer.images.amax() <= 1
    assert not answer.failed.all()
    for column in range(3):
        stored = to_pixels(answer.stored[:, column]).double()
        reached = log_q(pixels, stored, answer.q[:, column, None]) >= math.log(0.9)
        assert torch.equal(reached, ~answer.failed[:, column])


def test_l1_changes_fewer_pixels_by_less(pixels, x) -> None:
    def change(weight: float) -> Tensor:
        q = other(pixels, x)
        answer = pixel_gradient(pixels, pixels.mu_bar, x, q, weight=weight, learning_rate=0.02)
        assert not answer.failed.any()
        return (answer.images[:, 0] - x).flatten(1)

    sparse, dense = change(30.0), change(0.0)
    assert (sparse == 0).sum() >= 5
    assert not (dense == 0).any()
    assert sparse.abs().sum(1).mean() < 0.95 * dense.abs().sum(1).mean()


def test_a_large_weight_does_not_prevent_q(pixels, x) -> None:
    """With a constant λ of 100, above every gradient, no pixel would move."""
    answer = pixel_gradient(pixels, pixels.mu_bar, x, other(pixels, x), weight=100.0)
    assert not answer.failed.any()


@pytest.mark.parametrize(("norm", "power"), [("l1", 1), ("l2", 2)])
def test_proximal_step_minimises_what_defines_it(uniform, norm, power) -> None:
    change, weight = 2 * uniform(20, 1) - 1, 0.5 * uniform(20, 1)
    u = torch.linspace(-1, 1, 20_001, dtype=torch.float64)
    best = u[(0.5 * (u - change).square() + weight * u.abs() ** power).argmin(1)]
    step = proximal_step(change, weight, norm)[:, 0]
    torch.testing.assert_close(step, best, atol=1e-4, rtol=0)


def test_latent_ascent_of_one_pixel_is_adams() -> None:
    pixels = Pixels(classes=2, shape=(1, 1, 1))
    pixels.mu = torch.tensor([[-2.0], [3.0]], dtype=torch.float64)
    x = torch.full((1, 1, 1, 1), 0.4, dtype=torch.float64)
    z = pixels.encode_with_log_det(x)[0].requires_grad_()
    adam = torch.optim.Adam([z], lr=0.1, betas=(0.9, 0.9), maximize=True)
    steps = 0
    while (log_p := equations.log_posterior(z, pixels.mu, pixels.tau)[0, 1]) < math.log(0.99):
        adam.zero_grad()
        log_p.backward()
        adam.step()
        steps += 1
    answer = latent_gradient(pixels, pixels.mu, x, 1, learning_rate=0.1)
    torch.testing.assert_close(answer.images[:, 0], pixels.decode(z.detach()))
    assert 10 < steps < 100
    assert answer.passes.tolist() == [[1 + 4 * steps + 2]]


def test_latent_ascent_through_the_image_is_ascent_in_z(small_classifier, uniform) -> None:
    """f(f⁻¹(z)) = z: the flow between z and its own posterior changes nothing."""
    small_classifier.mu *= 3
    x = uniform(4, 1, 8, 8)
    z = small_classifier.encode(x)
    through = latent_gradient(small_classifier, small_classifier.mu, x, "all")
    latents = Latents(small_classifier.mu, small_classifier.tau)
    straight = latent_gradient(latents, latents.mu, z[:, None, None], "all")
    assert not through.failed.any()
    assert through.passes.unique().numel() > 1
    assert torch.equal(through.passes, straight.passes)
    torch.testing.assert_close(
        through.images.flatten(0, 1),
        small_classifier.decode(straight.images.flatten(0, 3)),
        atol=1e-5,  # the rotations of the flow are orthogonal in float32
        rtol=1e-4,
    )


def test_latent_gradient_convinces_another_judge(pixels, x) -> None:
    judge = Pixels(seed=5)
    q = ((pixels.log_posterior(x).argmax(1) + 1) % 4)[:, None]
    answer = latent_gradient(pixels, pixels.mu_bar, x, q, judge=judge.log_posterior, steps=400)
    assert not answer.failed.any()
    assert (log_q(judge, answer.images[:, 0], q) >= math.log(0.99)).all()
    assert (log_q(pixels, answer.images[:, 0], q) < math.log(0.99)).any()


@pytest.mark.parametrize("method", [pixel_gradient, latent_gradient])
def test_every_image_is_searched_as_if_alone_and_its_passes_are_counted(pixels, x, method) -> None:
    """A finished image neither moves nor counts passes while its neighbours are searched."""
    q = other(pixels, x)
    together = method(pixels, pixels.mu_bar, x, q)
    assert together.passes.unique().numel() > 2
    for row in range(len(x)):
        pixels.calls = {"encode": 0, "decode": 0, "backward": 0}
        alone = method(pixels, pixels.mu_bar, x[row : row + 1], q[row : row + 1])
        torch.testing.assert_close(alone.images[0], together.images[row])
        assert int(alone.passes) == int(together.passes[row]) == sum(pixels.calls.values())


@pytest.mark.parametrize(("method", "passes"), [(pixel_gradient, 4), (latent_gradient, 7)])
def test_target_out_of_reach_is_a_failure_with_the_best_image(pixels, x, method, passes) -> None:
    q = other(pixels, x)
    answer = method(pixels, pixels.mu_bar, x, q, steps=1, learning_rate=0.004)
    assert answer.failed.all()
    assert torch.equal(answer.passes, torch.full((9, 1), passes))
    assert (log_q(pixels, answer.images[:, 0], q) > log_q(pixels, x, q)).all()


def test_best_image_is_not_the_last_when_steps_overshoot(pixels, x) -> None:
    """A judge whose peak is below the goal, and steps that go back and forth over it."""

    def judge(image: Tensor) -> Tensor:
        return -(image - 0.6).square().sum((2, 3)).expand(-1, 4) - 0.1

    q = other(pixels, x)
    nearest = [
        judge(
            latent_gradient(
                pixels, pixels.mu_bar, x, q, judge=judge, steps=n, learning_rate=2.0
            ).images[:, 0]
        )[:, 0]
        for n in range(1, 20)
    ]
    assert (torch.stack(nearest).diff(dim=0) >= 0).all()


@pytest.mark.parametrize("method", [pixel_gradient, latent_gradient])
def test_image_that_is_not_a_number_fails_alone(pixels, x, method) -> None:
    x[4] = math.nan
    q = other(pixels, x)
    answer = method(pixels, pixels.mu_bar, x, q)
    assert answer.failed[:, 0].tolist() == [row == 4 for row in range(9)]
    assert int(answer.passes[4]) == (2 if method is pixel_gradient else 3)


def test_gradient_that_is_not_finite_ends_the_search(pixels, x) -> None:
    def judge(image: Tensor) -> Tensor:
        return pixels.log_posterior(image) + (0 * image).sum((2, 3)).sqrt()

    answer = latent_gradient(pixels, pixels.mu_bar, x, other(pixels, x), judge=judge)
    assert answer.failed.all()
    torch.testing.assert_close(answer.images[:, 0], x)
    assert torch.equal(answer.passes, torch.full((9, 1), 5))


@pytest.mark.parametrize("method", [ecinn, model_means, pixel_gradient, latent_gradient])
def test_results_carry_no_gradients_and_inference_mode_changes_nothing(pixels, x, method) -> None:
    q = other(pixels, x)
    expected = method(pixels, pixels.mu_bar, x, q)
    assert not expected.images.requires_grad
    with torch.inference_mode():
        inside = method(pixels, pixels.mu_bar, x + 0, q)
    torch.testing.assert_close(inside.images, expected.images)


@pytest.mark.slow
def test_shipped_model(mnist) -> None:
    train = load_dataset("mnist", "train").first(300)
    images = load_dataset("mnist", "test").images[:2]
    x = to_pixels(images)
    q = (mnist.classifier.predict(x)[:, None] + 3) % 10
    answers = {
        "ecinn": ecinn(mnist.classifier, mnist.mu_bar, x, q),
        "pixel": pixel_gradient(mnist.classifier, mnist.mu_bar, x, q),
        "latent": latent_gradient(mnist.classifier, mnist.mu_bar, x, q),
        "nearest": nearest_image(
            mnist.classifier, mnist.mu_bar, x, q, images=train.images, predicted=train.labels
        ),
    }
    change = {}
    for name, answer in answers.items():
        assert not answer.failed.any()
        stored = answer.stored[:, 0]
        assert torch.equal(mnist.classifier.predict(to_pixels(stored)), q[:, 0])
        change[name] = float((stored.float() - images.float()).abs().sum() / 255 / 2)
    assert change["pixel"] < 5 < 50 < min(change["ecinn"], change["latent"])
    assert answers["pixel"].passes.max() <= 20
    assert answers["latent"].passes.max() <= 60

"""Asked confidence, correction of α and paths, on a rotation whose every answer is known."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ecinn.errors import InputError
from ecinn.explanation.correction import (
    MAX_CORRECTIONS,
    TOLERANCE,
    Ends,
    Line,
    correct_alpha,
    newton_step,
    shortfall,
)
from ecinn.explanation.counterfactual import explain
from ecinn.pixels import to_pixels, to_uint8


class BrightRotation:
    """z = s·Q(x − ½), so that images near grey, which 8 bits can show, span several classes."""

    def __init__(self, classes: int = 3, seed: int = 0, stretch: float = 12.0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.shape = (1, 4, 4)
        self.rotation = torch.linalg.qr(torch.randn((16, 16), generator=g, dtype=torch.float64))[0]
        directions = torch.randn((classes, 16), generator=g, dtype=torch.float64)
        self.mu = 3 * torch.nn.functional.normalize(directions, dim=1)
        self.mu_bar = self.mu + 0.1 * torch.randn((classes, 16), generator=g, dtype=torch.float64)
        self.stretch = stretch
        self.tau = torch.tensor(0.8, dtype=torch.float64)
        self.calls = {"encode": 0, "decode": 0}
        self.images = {"encode": 0, "decode": 0}

    def encode_with_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls["encode"] += 1
        self.images["encode"] += len(x)
        return self.stretch * (x.flatten(1) - 0.5) @ self.rotation.T, x.new_zeros(len(x))

    def decode(self, z: Tensor) -> Tensor:
        self.calls["decode"] += 1
        self.images["decode"] += len(z)
        return (z @ self.rotation / self.stretch).reshape(-1, *self.shape) + 0.5

    def stored_posterior(self, x: Tensor) -> Tensor:
        """Of the 8-bit image, by distances to the means."""
        z = self.stretch * (to_pixels(to_uint8(x)).double().flatten(1) - 0.5) @ self.rotation.T
        return (-0.5 * self.tau * torch.cdist(z, self.mu).square()).softmax(1)


@pytest.fixture
def rotation() -> BrightRotation:
    return BrightRotation()


@pytest.fixture
def x(rotation: BrightRotation, generator: torch.Generator) -> Tensor:
    z = rotation.mu[torch.tensor([0, 1, 2, 0, 1, 2])]
    x = rotation.decode(z + 0.4 * torch.randn(z.shape, generator=generator, dtype=torch.float64))
    rotation.calls = {"encode": 0, "decode": 0}
    return x


@pytest.mark.parametrize("confidence", [0.3, 0.6, 0.95])
def test_asked_confidence_is_obtained_in_two_evaluations(rotation, x, confidence: float) -> None:
    e = explain(rotation, rotation.mu_bar, x, "all", confidence=confidence, check=False)
    assert rotation.calls == {"encode": 1, "decode": 1}
    assert e.passes == 2
    assert e.confidence == confidence
    of_q = e.convincing_certificate.posterior.gather(-1, e.q[..., None]).squeeze(-1)
    assert e.reachable.all()
    torch.testing.assert_close(of_q, torch.full_like(of_q, confidence))
    # And it is the posterior of that image, not only of that latent.
    z = rotation.encode_with_log_det(e.convincing.flatten(0, 1))[0]
    by_distance = (-0.5 * rotation.tau * torch.cdist(z, rotation.mu).square()).softmax(1)
    torch.testing.assert_close(by_distance.gather(1, e.q.reshape(-1, 1)).reshape(of_q.shape), of_q)
    assert not torch.allclose(e.alpha, e.alpha_1)


@pytest.mark.parametrize("confidence", [0.0, 1.0, -0.5, 7.0, float("nan")])
def test_confidence_outside_is_refused(rotation, x, confidence: float) -> None:
    with pytest.raises(InputError, match="above 0 and below 1"):
        explain(rotation, rotation.mu_bar, x, "all", confidence=confidence)


def test_a_confidence_that_a_third_class_forbids_is_noted_with_the_highest() -> None:
    """The mean of a third class lies on the way; q is never surer than about a half."""
    rotation = BrightRotation(classes=3)
    first, second = torch.eye(16, dtype=torch.float64)[:2]
    rotation.mu = torch.stack([-3 * first, 3 * first, 3 * first + 0.5 * second])
    rotation.mu_bar = rotation.mu.clone()
    rotation.mu_bar[1] += 0.25 * second  # the measured mean lies between both
    x = rotation.decode(rotation.mu[:1])
    e = explain(rotation, rotation.mu_bar, x, 1, confidence=0.9)
    assert not e.reachable.any()
    highest = float(e.convincing_certificate.posterior[0, 0, 1])
    assert 0.4 < highest < 0.9
    z = rotation.mu[0] + torch.linspace(-1, 10, 5000, dtype=torch.float64)[:, None] * (
        rotation.mu_bar[1] - rotation.mu_bar[0]
    )
    on_line = (-0.5 * rotation.tau * torch.cdist(z, rotation.mu).square()).softmax(1)[:, 1]
    assert highest == pytest.approx(float(on_line.max()), abs=1e-4)
    corrected = explain(rotation, rotation.mu_bar, x, 1, confidence=0.9, correct=True)
    assert corrected.corrections.sum() == 0  # nothing to be had by trying


def test_corrected_images_fulfil_the_request_and_every_try_is_counted() -> None:
    """Rounding a strongly stretched rotation disturbs the posterior by more than is tolerated."""
    rotation = BrightRotation(stretch=30.0, seed=3)
    rotation.mu *= 2
    rotation.mu_bar *= 2
    generator = torch.Generator().manual_seed(0)
    z = rotation.mu[torch.arange(60) % 3]
    z = z + 0.4 * torch.randn(z.shape, generator=generator, dtype=torch.float64)
    x = rotation.decode(z)
    plain = explain(rotation, rotation.mu_bar, x, "all", confidence=0.7)
    of_q = plain.convincing_certificate.verdict.gather(-1, plain.q[..., None]).squeeze(-1)
    missed = (of_q - 0.7).abs() > TOLERANCE
    assert 5 < missed.sum() < missed.numel()
    rotation.images = {"encode": 0, "decode": 0}
    e = explain(rotation, rotation.mu_bar, x, "all", confidence=0.7, correct=True)
    assert torch.equal(e.corrections > 0, missed)
    assert int(e.corrections.max()) <= MAX_CORRECTIONS
    tries = int(e.corrections.sum())
    # Input, its round trip, tipping point and counterfactual of each pair, then the tries.
    assert rotation.images == {"encode": 60 + 240 + tries, "decode": 60 + 240 + tries}
    by_hand = rotation.stored_posterior(e.convincing.flatten(0, 1)).reshape(60, 2, 3)
    torch.testing.assert_close(
        e.convincing_certificate.stored_posterior, by_hand, rtol=1e-4, atol=1e-5
    )
    after = (by_hand.gather(-1, e.q[..., None]).squeeze(-1) - 0.7).abs()
    assert (after > TOLERANCE).sum() < missed.sum() / 4
    assert (after <= (of_q - 0.7).abs() + 1e-6).all()  # the best is kept: never worse than before
    torch.testing.assert_close(e.alpha[~missed], plain.alpha[~missed])


def test_the_best_try_is_kept_where_none_succeeds() -> None:
    """Stretched so far that rounding alone decides: a try may be worse than the first."""
    rotation = BrightRotation(stretch=250.0, seed=3)
    generator = torch.Generator().manual_seed(1)
    z = rotation.mu[torch.arange(60) % 3]
    x = rotation.decode(z + 0.4 * torch.randn(z.shape, generator=generator, dtype=torch.float64))

    def distance(*, correct: bool) -> Tensor:
        e = explain(rotation, rotation.mu_bar, x, "all", confidence=0.4, correct=correct)
        of_q = rotation.stored_posterior(e.convincing.flatten(0, 1))
        return (of_q.gather(1, e.q.reshape(-1, 1)).squeeze(1) - 0.4).abs()

    before, after = distance(correct=False), distance(correct=True)
    assert (after <= before + 1e-6).all()
    assert (after > TOLERANCE).any()
    assert (after < before - 0.01).any()


class FadingRotation(BrightRotation):
    """Whose images fade to grey the further out they are: past a point, less of q and not more."""

    def decode(self, z: Tensor) -> Tensor:
        norm = z.norm(dim=1, keepdim=True)
        return super().decode(z * torch.where(norm > 4.0, (4.0 / norm) ** 6, 1.0))


def test_a_search_that_went_astray_turns_back() -> None:
    rotation = FadingRotation()
    x = rotation.decode(rotation.mu)

    def share_of_q(*, correct: bool) -> Tensor:
        e = explain(rotation, rotation.mu_bar, x, "all", confidence=0.999999, correct=correct)
        return e.convincing_certificate.verdict.gather(-1, e.q[..., None]).squeeze(-1)

    before, after = share_of_q(correct=False), share_of_q(correct=True)
    assert (after >= before).all()
    assert (after > before + 0.4).any()


def test_above_one_half_a_confidence_also_asks_for_q_to_win() -> None:
    obtained = torch.tensor([[[0.49, 0.50, 0.01]], [[0.60, 0.30, 0.10]], [[0.53, 0.4, 0.07]]])
    q = torch.zeros((3, 1), dtype=torch.long)
    missed = shortfall(obtained, q, 0.52)
    assert missed[0] > missed[1] > 0  # nearer in number, but another class wins
    assert missed[2] == 0
    assert shortfall(obtained, q, 0.47)[0] == 0
    plain = shortfall(obtained, q, None)
    assert plain[0] > 0
    assert (plain[1:] == 0).all()


def test_verified_alpha_1_goes_further_until_q_is_read() -> None:
    """Measured means that are too near leave α₁ short of the boundary."""
    rotation = BrightRotation(stretch=30.0)
    x = rotation.decode(rotation.mu)
    shrunk = rotation.mu + 0.0
    shrunk = shrunk.mean(0) + 0.25 * (shrunk - shrunk.mean(0))
    plain = explain(rotation, shrunk, x, "all")
    assert not plain.convincing_certificate.reached.all()
    e = explain(rotation, shrunk, x, "all", correct=True)
    assert e.convincing_certificate.reached.all()
    short = ~plain.convincing_certificate.reached
    assert (e.alpha > plain.alpha)[short].all()
    torch.testing.assert_close(e.alpha[short], (plain.alpha + 0.1 * e.corrections)[short])
    assert e.corrections[~short].sum() == 0


@pytest.mark.parametrize("alphas", [5, [0.0, 0.5, 1.0, 2.0]])
def test_path_is_the_line_in_one_decode(rotation, x, alphas: object) -> None:
    e = explain(rotation, rotation.mu_bar, x, "all", path=alphas)
    assert rotation.calls == {"encode": 2, "decode": 1}
    assert e.path is not None
    steps = e.path.alphas.shape[-1]
    assert e.path.images.shape == (6, 2, steps, 1, 4, 4)
    for step in range(steps):
        for column in range(2):
            delta = (rotation.mu_bar[e.q[:, column]] - rotation.mu_bar[e.p]) @ rotation.rotation
            moved = e.path.alphas[:, column, step, None] * delta / rotation.stretch
            torch.testing.assert_close(e.path.images[:, column, step], x + moved.reshape(x.shape))
            by_hand = rotation.stored_posterior(e.path.images[:, column, step])
            torch.testing.assert_close(
                e.path.verdict[:, column, step], by_hand, rtol=1e-4, atol=1e-5
            )
    if alphas == 5:
        torch.testing.assert_close(e.path.images[:, :, 0], x[:, None].expand_as(e.convincing))
        torch.testing.assert_close(e.path.images[:, :, -1], e.convincing)


@pytest.mark.parametrize("alphas", [1, 0, 1001, [], [float("nan")], [0.0] * 1001])
def test_wrong_paths_are_refused(rotation, x, alphas: object) -> None:
    with pytest.raises(InputError, match=r"path has 2 to|path must be"):
        explain.__wrapped__(rotation, rotation.mu_bar, x, "all", path=alphas)


def test_a_path_too_large_for_the_memory_is_refused(rotation, x) -> None:
    with pytest.raises(InputError, match="take fewer"):
        explain(rotation, rotation.mu_bar, x.repeat(10, 1, 1, 1), "all", path=900)


def test_path_ends_at_the_corrected_counterfactual() -> None:
    rotation = BrightRotation(stretch=30.0)
    x = rotation.decode(rotation.mu)
    near = rotation.mu.mean(0) + 0.25 * (rotation.mu - rotation.mu.mean(0))
    e = explain(rotation, near, x, "all", path=3, correct=True)
    assert e.corrections.any()
    torch.testing.assert_close(e.path.images[:, :, -1], e.convincing)
    torch.testing.assert_close(e.path.alphas[..., -1], e.alpha)
    assert e.passes == 5


def test_a_missed_request_is_reported() -> None:
    """Rounding a strongly stretched rotation leaves no 8-bit image near the asked confidence."""
    rotation = BrightRotation(stretch=250.0, seed=3)
    x = rotation.decode(rotation.mu)
    e = explain(rotation, rotation.mu_bar, x, "all", confidence=0.7)
    of_q = e.convincing_certificate.verdict.gather(-1, e.q[..., None]).squeeze(-1)
    expected = ((of_q - 0.7).abs() <= TOLERANCE) & e.convincing_certificate.reached
    assert torch.equal(e.as_requested, expected)
    assert not e.as_requested.all()
    plain = explain(rotation, rotation.mu_bar, x, "all")
    assert torch.equal(plain.as_requested, plain.convincing_certificate.reached)


def test_plot_of_a_way_backwards_stays_inside(rotation, x) -> None:
    forwards = explain(rotation, rotation.mu_bar, x, "all", path=[0.0, 0.5, 1.0])
    backwards = explain(rotation, rotation.mu_bar, x, "all", path=[1.0, 0.5, 0.0])
    left_out = 44  # the margin with the axis' names
    for plot in (forwards.path.plot(), backwards.path.plot()):
        inked = plot.crop((left_out, 40, 448, 200)).convert("RGB").getcolors(100_000)
        assert any(red > 150 > blue for _, (red, _, blue) in inked)


def test_film_and_plot_show_the_path(rotation, x) -> None:
    e = explain(rotation, rotation.mu_bar, x, "all", path=4)
    frames = e.path.film(index=1, target=1)
    assert len(frames) == 4
    assert len({frame.tobytes() for frame in frames}) == 4
    assert e.path.plot(0, 0).size == (448, 240)
    assert e.path.plot(0, 0, step=2).tobytes() != e.path.plot(0, 0).tobytes()


def test_newton_step_is_the_logit_difference_over_the_slope_at_most_a_quarter(rotation) -> None:
    """The slope by central differences; requests far from the line's posterior are clamped."""
    generator = torch.Generator().manual_seed(4)
    z = rotation.mu[:2] + 0.1 * torch.randn((2, 16), generator=generator, dtype=torch.float64)
    q = torch.tensor([1, 2])
    delta = rotation.mu_bar[q] - rotation.mu_bar[torch.tensor([0, 1])]
    alpha = torch.tensor([0.45, 0.5], dtype=torch.float64)

    def posterior(alpha: Tensor) -> Tensor:
        distance = torch.cdist(z + alpha[:, None] * delta, rotation.mu).square()
        return (-0.5 * rotation.tau * distance).softmax(1)

    def logit(alpha: Tensor) -> Tensor:
        return torch.logit(posterior(alpha).gather(1, q[:, None]).squeeze(1))

    slope = (logit(alpha + 1e-5) - logit(alpha - 1e-5)) / 2e-5
    near = torch.sigmoid(logit(alpha) + 0.1 * slope).mean().item()
    arguments = (z, delta, rotation.mu, rotation.tau, q, alpha, posterior(alpha))
    expected = (torch.logit(torch.tensor(near, dtype=torch.float64)) - logit(alpha)) / slope
    assert expected.abs().max() < 0.25
    torch.testing.assert_close(newton_step(*arguments, near), expected, atol=1e-6, rtol=1e-5)
    for confidence in (0.001, 0.9999):
        far = (math.log(confidence / (1 - confidence)) - logit(alpha)) / slope
        clamped = far.clamp(-0.25, 0.25)
        assert not torch.equal(far, clamped)
        torch.testing.assert_close(newton_step(*arguments, confidence), clamped)


class Scripted:
    """A classifier of one dimension whose stored images are read as a script says.

    The latent is α itself (z = 0, Δ = 1); `script` maps α to p(q) of the stored image.
    """

    mu = torch.tensor([[-2.0], [2.0]], dtype=torch.float64)
    tau = torch.tensor(1.0, dtype=torch.float64)

    def __init__(self, script: Callable[[float], float]) -> None:
        self.script = script
        self.tried: list[float] = []

    def decode(self, z: Tensor) -> Tensor:
        self.tried += z.flatten().tolist()
        return z.reshape(-1, 1, 1, 1)

    def encode_with_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # The last decoded α, which rounding to 8 bits would have lost.
        share = torch.tensor([[self.script(self.tried[-1])]], dtype=torch.float64)
        return torch.logit(share) / 4, torch.zeros(1, dtype=torch.float64)


def search(script: Callable[[float], float], confidence: float) -> tuple[list[float], Ends]:
    """Start at α = 0.4 with what the script says there; return every α tried after it."""
    one = torch.tensor([[[1.0]]], dtype=torch.float64)
    line = Line(torch.zeros_like(one), one, torch.tensor([[1]]))
    start = torch.tensor([[0.4]], dtype=torch.float64)
    share = script(0.4)
    stored = torch.tensor([[[1 - share, share]]], dtype=torch.float64)
    ends = Ends(
        stored, stored, alpha=start, image=start[..., None, None, None],
        corrections=torch.zeros((1, 1), dtype=torch.long),
    )  # fmt: skip
    classifier = Scripted(script)
    reachable = torch.ones((1, 1), dtype=torch.bool)
    best = correct_alpha(classifier, line, ends, confidence, reachable)
    return classifier.tried, best


def reference_search(script: Callable[[float], float], confidence: float) -> list[float]:
    """The documented search in plain Python: p(q) has the slope 4 in logits along α."""

    def miss(share: float) -> float:
        distance = abs(share - confidence)
        distance = 0.0 if distance <= TOLERANCE else distance
        return distance + (share < 0.5 if confidence > 0.5 else 0)

    def logit(share: float) -> float:
        return math.log(share / (1 - share))

    at, obtained, scale = 0.4, script(0.4), 1.0
    best_at, best_obtained, best = at, obtained, miss(obtained)
    tried = []
    while best > 0 and len(tried) < MAX_CORRECTIONS:
        step = max(-0.25, min(0.25, (logit(confidence) - logit(obtained)) / 4))
        at = at + scale * step
        tried.append(at)
        obtained = script(at)
        now, returning = miss(obtained), scale < 0
        better = now < best
        if better:
            best_at, best_obtained = at, obtained
        if now > best + 0.01 or (now >= 1 and not better):
            at, obtained, scale = best_at, best_obtained, -0.5 * scale
        else:
            scale *= 1.5 if better and returning else 0.8
        best = min(best, now)
    return tried


def deceptive(alpha: float) -> float:
    """Rises the wrong way: q becomes less likely with α above 0.3, slowly more below it."""
    share = 0.2 + (0.5 if alpha < 0.4 else 0.6) * (0.4 - alpha)
    return min(0.98, max(0.02, share))


@pytest.mark.parametrize("confidence", [0.45, 0.6, 0.9])
@pytest.mark.parametrize(
    "script",
    [
        deceptive,
        lambda alpha: min(0.99, max(0.01, 0.1 + 0.35 * alpha)),
        lambda alpha: 0.5 + 0.45 * math.sin(9 * alpha),
        lambda alpha: 0.3 - 0.01 * alpha if alpha > 0.35 else 0.42 + 0.01 * alpha,
    ],
)
def test_search_takes_exactly_the_documented_steps(script, confidence: float) -> None:
    """Clamped Newton steps, back to the best with half the step, 1.5 on the way back, else 0.8."""
    tried, best = search(script, confidence)
    expected = reference_search(script, confidence)
    assert tried == pytest.approx(expected)
    assert best.corrections.item() == len(expected)
    misses = [abs(script(alpha) - confidence) for alpha in (0.4, *expected)]
    assert abs(best.stored_posterior[0, 0, 1].item() - confidence) <= max(
        min(misses) + 1e-9, TOLERANCE
    )


def test_corrected_certificate_is_about_the_corrected_image() -> None:
    """The clamped share and both posteriors belong to the final α, not to the first one."""
    rotation = BrightRotation(stretch=1.5, seed=1)
    generator = torch.Generator().manual_seed(2)
    z = rotation.mu[torch.arange(60) % 3]
    z = z + 0.5 * torch.randn(z.shape, generator=generator, dtype=torch.float64)
    x = rotation.decode(z)
    plain = explain(rotation, rotation.mu_bar, x, "all", confidence=0.8)
    e = explain(rotation, rotation.mu_bar, x, "all", confidence=0.8, correct=True)
    outside = ((e.convincing < 0) | (e.convincing > 1)).double().mean((2, 3, 4))
    torch.testing.assert_close(
        e.convincing_certificate.clamped.double(), outside, atol=1e-6, rtol=0
    )
    before = plain.convincing_certificate.clamped
    changed = e.alpha != plain.alpha
    assert bool((e.convincing_certificate.clamped != before)[changed].any())

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
    UNDECIDED,
    Line,
    LineSearch,
    Points,
    correct_alpha,
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
    # Nothing is to be had by trying: only the tipping point is corrected.
    rotation.stretch = 30.0
    noise = torch.randn((20, 16), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = rotation.decode(rotation.mu[0] + 0.3 * noise)
    plain = explain(rotation, rotation.mu_bar, x, 1, confidence=0.99)
    corrected = explain(rotation, rotation.mu_bar, x, 1, confidence=0.99, correct=True)
    assert not corrected.reachable.any()
    assert torch.equal(corrected.alpha, plain.alpha)
    assert torch.equal(corrected.stored_convincing, plain.stored_convincing)
    for name in ("posterior", "stored_posterior"):
        torch.testing.assert_close(
            getattr(corrected.convincing_certificate, name),
            getattr(plain.convincing_certificate, name),
        )
    assert not corrected.as_requested.any()
    assert corrected.corrections.sum() > 0
    before, after = (
        log_odds(each.tipping_certificate.stored_posterior, each.p, each.q).abs()
        for each in (plain, corrected)
    )
    assert (after <= before + 1e-5).all()
    assert (before > UNDECIDED).sum() > (after > UNDECIDED).sum()


def stretched(seed: int = 3, stretch: float = 30.0) -> tuple[BrightRotation, Tensor]:
    """Rounding a strongly stretched rotation disturbs the posterior by more than is tolerated."""
    rotation = BrightRotation(stretch=stretch, seed=seed)
    rotation.mu *= 2
    rotation.mu_bar *= 2
    generator = torch.Generator().manual_seed(0)
    z = rotation.mu[torch.arange(60) % 3]
    z = z + 0.4 * torch.randn(z.shape, generator=generator, dtype=torch.float64)
    x = rotation.decode(z)
    rotation.calls = {"encode": 0, "decode": 0}
    rotation.images = {"encode": 0, "decode": 0}
    return rotation, x


def log_odds(posterior: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Of q against p, of shape (images, targets)."""
    of_p = posterior.gather(-1, p[:, None, None].expand(*q.shape, 1))
    return (posterior.gather(-1, q[..., None]) / of_p).log().squeeze(-1)


def test_corrected_images_fulfil_the_request_and_every_try_is_counted() -> None:
    rotation, x = stretched()
    plain = explain(rotation, rotation.mu_bar, x, "all", confidence=0.7)
    of_q = plain.convincing_certificate.verdict.gather(-1, plain.q[..., None]).squeeze(-1)
    missed = (of_q - 0.7).abs() > TOLERANCE
    assert 5 < missed.sum() < missed.numel()
    rotation.images = {"encode": 0, "decode": 0}
    e = explain(rotation, rotation.mu_bar, x, "all", confidence=0.7, correct=True)
    assert int(e.corrections.max()) <= MAX_CORRECTIONS + 2
    tries = int(e.corrections.sum())
    # Input, its round trip, tipping point and counterfactual of each pair, then the tries.
    assert rotation.images == {"encode": 60 + 240 + tries, "decode": 60 + 240 + tries}
    by_hand = rotation.stored_posterior(e.convincing.flatten(0, 1)).reshape(60, 2, 3)
    torch.testing.assert_close(
        e.convincing_certificate.stored_posterior, by_hand, rtol=1e-4, atol=1e-5
    )
    after = (by_hand.gather(-1, e.q[..., None]).squeeze(-1) - 0.7).abs()
    assert (after > TOLERANCE).sum() < missed.sum() / 10
    assert (after <= (of_q - 0.7).abs() + 1e-6).all()  # the best is kept: never worse than before
    torch.testing.assert_close(e.alpha[~missed], plain.alpha[~missed])


@pytest.mark.parametrize("confidence", ["alpha_1", 0.6])
def test_corrected_tipping_points_are_ties_as_stored(confidence: object) -> None:
    rotation, x = stretched()
    plain = explain(rotation, rotation.mu_bar, x, "all", confidence=confidence)
    e = explain(rotation, rotation.mu_bar, x, "all", confidence=confidence, correct=True)
    by_hand = rotation.stored_posterior(e.tipping_point.flatten(0, 1)).reshape(60, 2, 3)
    torch.testing.assert_close(
        e.tipping_certificate.stored_posterior, by_hand, rtol=1e-4, atol=1e-5
    )
    before = log_odds(plain.tipping_certificate.stored_posterior, e.p, e.q).abs()
    after = log_odds(by_hand, e.p, e.q).abs()
    tied = before <= UNDECIDED
    assert 0.1 < tied.double().mean() < 0.8
    assert (after <= UNDECIDED).double().mean() > 0.95
    assert (after <= before + 1e-5).all()
    # Nothing is tried where both are as they should be.
    stays = tied & plain.as_requested
    torch.testing.assert_close(e.alpha_0[stays], plain.alpha_0[stays])
    assert e.corrections[stays].sum() == 0
    assert (e.corrections[~tied] > 0).all()
    # The image is that of α₀, and who wins there is read from the stored image.
    z = rotation.encode_with_log_det(x)[0][:, None] + e.alpha_0[..., None] * (
        rotation.mu_bar[e.q] - rotation.mu_bar[e.p][:, None]
    )
    torch.testing.assert_close(e.tipping_point.flatten(0, 1), rotation.decode(z.flatten(0, 1)))
    winner = by_hand.argmax(-1)
    third = (winner != e.p[:, None]) & (winner != e.q)
    assert torch.equal(e.third_class >= 0, third)


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
    torch.testing.assert_close(e.alpha[~short], plain.alpha[~short])


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


FIRST = (0.6, 0.4)
"""α of the first counterfactual and tipping point."""


def search(script: Callable[[float], float], confidence: float) -> tuple[list[float], LineSearch]:
    """Start with what the script says at both; return every α tried after them."""
    one = torch.ones((1, 1), dtype=torch.float64)
    line = Line(torch.zeros_like(one), one, torch.tensor([1]))
    alphas = torch.tensor([FIRST], dtype=torch.float64)
    shares = torch.tensor([[0.0, *map(script, FIRST)]], dtype=torch.float64)
    shares[0, 0] = script(0.0)
    answers = torch.stack([1 - shares, shares], -1)
    classifier = Scripted(script)
    first = Points(alphas, alphas[:, :, None, None, None].clone(), answers[:, 1:].clone())
    p, reachable = torch.tensor([0]), torch.tensor([True])
    found = correct_alpha(classifier, line, answers[:, 0], p, confidence, reachable, first)
    return classifier.tried, found


def bracket(points: list[tuple[float, float]]) -> tuple[float, float]:
    """The first α whose margin is not negative, and the last one before it."""
    high = min((alpha for alpha, margin in points if margin >= 0), default=math.inf)
    return max(alpha for alpha, margin in points if margin < 0 and alpha < high), high


def zero_between(points: list[tuple[float, float]]) -> float:
    """The next α by the Illinois rule in plain Python, from (α, margin) in order of asking."""
    low, high = bracket(points)
    margin_of = dict(points)
    stays = 0
    while stays + 1 < len(points) and (points[-2 - stays][1] >= 0) == (points[-1][1] >= 0):
        stays += 1
    below, above = margin_of[low], margin_of[high]
    if points[-1][1] >= 0:
        below *= 0.5**stays
    else:
        above *= 0.5**stays
    share = min(max(below / (below - above), 0.1), 0.9)
    return low + share * (high - low)


def reference_search(script: Callable[[float], float], confidence: float) -> list[float]:
    """The documented search: first for the request, then for a tie; one query is kept for it."""

    def logit(share: float) -> float:
        return math.log(share / (1 - share))

    def fulfilled(share: float) -> bool:
        return abs(share - confidence) <= TOLERANCE and (confidence <= 0.5 or share >= 0.5)

    asked = [0.0]
    guesses = {"end": FIRST[0], "tip": FIRST[1]}
    queries = 2 + MAX_CORRECTIONS
    for number in range(queries):
        done = any(fulfilled(script(alpha)) for alpha in asked[1:])
        tied = any(abs(logit(script(alpha))) <= UNDECIDED for alpha in asked[1:])
        goal = "tip" if done or number == queries - 1 else "end"
        if tied if goal == "tip" else done:
            break
        wanted = 0.0 if goal == "tip" else logit(confidence)
        points = [(alpha, logit(script(alpha)) - wanted) for alpha in asked]
        guess = guesses.pop(goal, None)
        low, high = bracket(points)
        take = guess is not None and low < guess < high
        asked.append(guess if take else zero_between(points))
    return [alpha for alpha in asked[1:] if alpha not in FIRST]


@pytest.mark.parametrize("confidence", [0.45, 0.6, 0.9])
@pytest.mark.parametrize(
    "script",
    [
        lambda alpha: 1 / (1 + math.exp(3 - 9 * alpha)),
        lambda alpha: 1 / (1 + math.exp(4 - 40 * alpha**3)),
        lambda alpha: min(0.99, max(0.01, 0.02 + 1.6 * alpha + 0.1 * math.sin(40 * alpha))),
        lambda alpha: 0.97 if alpha > 0.37 else 0.03,  # never as requested, and never a tie
    ],
)
def test_search_takes_exactly_the_documented_steps(script, confidence: float) -> None:
    tried, found = search(script, confidence)
    expected = reference_search(script, confidence)
    assert tried == pytest.approx(expected)
    assert found.corrections.item() == len(expected)
    shares = [script(alpha) for alpha in (*FIRST, *expected)]
    best = min(abs(share - confidence) for share in shares)
    assert abs(found.end.answer[0, 1].item() - confidence) <= max(best + 1e-9, TOLERANCE)
    tie = min(abs(math.log(share / (1 - share))) for share in shares)
    assert found.tipping_point.miss.item() <= max(tie + 1e-6, UNDECIDED)


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

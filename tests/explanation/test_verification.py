"""Explanations of one classifier by another, on a rotation where every answer is a formula."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ecinn.explanation.correction import (
    TOLERANCE,
    UNDECIDED,
    next_alpha,
    request_margin,
    tie_margin,
)
from ecinn.explanation.counterfactual import explain
from ecinn.explanation.result import FARTHEST, Explanation, join
from ecinn.explanation.verification import MAX_QUERIES, STRAIGHT, besides
from ecinn.pixels import to_pixels, to_uint8

SHAPE = (1, 4, 4)


class Student:
    """z = s·Q(x − ½): images near grey, which 8 bits can show, span all classes."""

    def __init__(self, seed: int, classes: int = 2, stretch: float = 10.0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.rotation = torch.linalg.qr(torch.randn((16, 16), generator=g, dtype=torch.float64))[0]
        self.mu = 3 * torch.nn.functional.normalize(
            torch.randn((classes, 16), generator=g, dtype=torch.float64), dim=1
        )
        self.tau = torch.tensor(0.8, dtype=torch.float64)
        self.stretch = stretch

    def encode_with_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.stretch * (x.flatten(1) - 0.5) @ self.rotation.T, x.new_zeros(len(x))

    def decode(self, z: Tensor) -> Tensor:
        return (z @ self.rotation / self.stretch).reshape(-1, *SHAPE) + 0.5


class Linear:
    """A classifier whose logits are linear in the student's latent: Wz + b. Keeps what it saw."""

    name = "linear"

    def __init__(self, student: Student, weight: Tensor, bias: Tensor) -> None:
        self.student, self.weight, self.bias = student, weight, bias
        self.asked: list[Tensor] = []

    def logits(self, z: Tensor) -> Tensor:
        return z @ self.weight.T + self.bias

    def predict(self, images: Tensor) -> Tensor:
        assert images.dtype == torch.uint8
        self.asked.append(images)
        z, _ = self.student.encode_with_log_det(to_pixels(images).double())
        return self.logits(z).softmax(1).float()


def draw(seed: int, classes: int = 2, n: int = 12) -> tuple[Student, Linear, Tensor]:
    """A student, a classifier that differs from it, and images that the latter calls 0."""
    g = torch.Generator().manual_seed(seed)
    student = Student(seed, classes)
    weight = 0.6 * student.mu + 0.1 * torch.randn(student.mu.shape, generator=g).double()
    reader = Linear(student, weight, torch.randn(classes, generator=g).double())
    z = student.mu[:1] + 0.3 * torch.randn((20 * n, 16), generator=g).double()
    x = to_pixels(to_uint8(student.decode(z))).double()
    x = x[reader.predict(to_uint8(x)).argmax(1) == 0][:n]
    assert len(x) == n
    reader.asked.clear()
    return student, reader, x


def exact_margin(student: Student, reader: Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    """Log-odds of class 1 against 0 at α = 0, and their slope in α."""
    z, _ = student.encode_with_log_det(x)
    delta = student.mu[1] - student.mu[0]
    w = reader.weight[1] - reader.weight[0]
    return z @ w + reader.bias[1] - reader.bias[0], delta @ w


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("confidence", [0.3, 0.7, 0.95])
def test_alpha_is_where_the_classifier_has_the_confidence_and_is_undecided(
    seed: int, confidence: float
) -> None:
    student, reader, x = draw(seed)
    at_zero, slope = exact_margin(student, reader, x)
    assert (at_zero < -1).all()
    e = explain(student, student.mu, x, 1, confidence=confidence, reader=reader)
    # Rounding to 8 bits moves log-odds by a few hundredths.
    wanted = math.log(confidence / (1 - confidence))
    obtained = at_zero + e.alpha[:, 0] * slope
    share = torch.sigmoid(obtained)
    assert ((share - confidence).abs() < TOLERANCE + 0.02).all(), obtained - wanted
    tie = at_zero + e.alpha_0[:, 0] * slope
    assert (tie.abs() < UNDECIDED + 0.1).all()
    # The student alone is elsewhere.
    alone = explain(student, student.mu, x, 1, confidence=confidence)
    assert (at_zero + alone.alpha[:, 0] * slope - wanted).abs().max() > 0.3
    assert e.explained.all()
    assert e.verification.tied.all()
    assert (e.verification.queries <= MAX_QUERIES).all()


def test_certificates_are_about_the_stored_images_and_queries_are_counted() -> None:
    student, reader, x = draw(5, classes=3)
    e = explain(student, student.mu, x, "all", confidence=0.8, reader=reader)
    assert sum(len(images) for images in reader.asked) == len(x) + int(
        e.verification.queries.sum()
    )
    assert len(reader.asked) <= 1 + MAX_QUERIES  # all pairs together
    reader_again = Linear(student, reader.weight, reader.bias)
    for certificate, images in (
        (e.convincing_certificate, e.stored_convincing),
        (e.tipping_certificate, e.stored_tipping_point),
    ):
        answers = reader_again.predict(images.flatten(0, 1)).unflatten(0, e.q.shape).double()
        assert torch.equal(certificate.answer, answers)
        assert torch.equal(certificate.verdict, answers)
        z, _ = student.encode_with_log_det(to_pixels(images.flatten(0, 1)).double())
        own = (-0.5 * student.tau * torch.cdist(z, student.mu).square()).softmax(1)
        torch.testing.assert_close(certificate.stored_posterior.flatten(0, 1), own)
    original = reader_again.predict(to_uint8(x)).double()
    assert torch.equal(e.verification.posterior, original)
    of_q = e.convincing_certificate.answer.gather(2, e.q[..., None])[..., 0]
    assert torch.equal(e.as_requested, (of_q - 0.8).abs() <= TOLERANCE)


def test_without_a_confidence_one_query_is_enough_where_the_classifier_agrees() -> None:
    student, _, x = draw(1)
    same = Linear(
        student, student.tau * student.mu, -0.5 * student.tau * student.mu.square().sum(1)
    )
    e = explain(student, student.mu, x, 1, reader=same)
    alone = explain(student, student.mu, x, 1)
    assert torch.equal(e.alpha, alone.alpha)
    assert (e.corrections == 0).all()
    assert torch.equal(e.verification.uncorrected, e.convincing_certificate.answer)
    assert e.verification.queries.max() == 2  # the other is the tipping point
    torch.testing.assert_close(e.alpha_0, alone.alpha_0)


def test_a_classifier_that_needs_more_is_followed_beyond_alpha_1() -> None:
    student, reader, x = draw(2)
    at_zero, slope = exact_margin(student, reader, x)
    reader.bias = reader.bias - torch.tensor([0.0, 1.2]) * slope.item()  # the tie is 1.2 further
    e = explain(student, student.mu, x, 1, reader=reader)
    first = e.verification.uncorrected.argmax(2)
    assert (first == 0).all()
    assert (e.convincing_certificate.winner == 1).all()
    assert (e.corrections > 0).all()
    tie = 1.2 - at_zero / slope
    assert (e.alpha[:, 0] > tie - 0.05).all()
    assert (e.alpha_0[:, 0] - tie).abs().max() < 0.05


def test_p_is_the_classifiers_and_its_direction_is_taken() -> None:
    """The student reads class 1, the classifier class 2: Δ = μ̄_q − μ̄_2."""
    student = Student(3, classes=3)
    x = to_pixels(to_uint8(student.decode(student.mu[1:2]))).double()
    swapped = student.mu[[0, 2, 1]]
    reader = Linear(student, swapped, -0.5 * swapped.square().sum(1))
    e = explain(student, student.mu, x, "all", confidence=0.9, reader=reader)
    assert e.p.tolist() == [2]
    assert e.q.tolist() == [[0, 1]]
    assert e.posterior.argmax(1).tolist() == [1]
    assert "student reads 1, linear reads 2" in e.notes[0][0]
    moved, _ = student.encode_with_log_det(e.convincing[0])
    at, _ = student.encode_with_log_det(x)
    delta = student.mu[[0, 1]] - student.mu[2]
    torch.testing.assert_close(moved - at, e.alpha[0][:, None] * delta)


def test_what_the_classifier_never_says_is_not_explained_and_counted() -> None:
    student, reader, x = draw(4, classes=3)
    reader.bias = reader.bias + torch.tensor([0.0, -1e4, 0.0])
    e = explain(student, student.mu, x, "all", reader=reader)
    against = (e.q == 1).nonzero(as_tuple=True)
    others = (e.q == 2).nonzero(as_tuple=True)
    assert not e.explained[against].any()
    assert e.explained[others].all()
    assert not e.verification.tied[against].any()
    assert (e.verification.queries[against] == MAX_QUERIES).all()
    report = e.to_dict()
    assert report["classifier"]["not_explained"] == len(x)
    assert report["classifier"]["queries"] == len(x) + int(e.verification.queries.sum())
    assert any("not explained" in note for note in report["images"][0]["notes"])
    assert "not_explained" not in json.dumps(explain(student, student.mu, x, "all").to_dict())


@pytest.mark.parametrize("tie", [1.2, 2.2, 4.0])
def test_an_answer_far_outside_explains_nothing(tie: float) -> None:
    """The classifier is undecided at this α, and so is a student that is unsure of its classes."""
    student, reader, _ = draw(2)
    student.stretch = 40.0  # so that 8 bits can show what lies far outside
    x = to_pixels(to_uint8(student.decode(student.mu[:1]))).double()
    at_zero, slope = exact_margin(student, reader, x)
    reader.bias = reader.bias + torch.tensor([0.0, -1.0]) * (at_zero + tie * slope).item()
    delta = student.mu[1] - student.mu[0]
    student.tau = math.log(0.7 / 0.3) / ((tie - 0.5) * delta.square().sum())
    e = explain(student, student.mu, x, 1, confidence=0.7, reader=reader)
    assert abs(float(e.alpha) - tie - math.log(0.7 / 0.3) / slope) < 0.1
    assert e.as_requested.all()
    assert bool(e.explained) == (tie < FARTHEST)
    report = e.to_dict()
    assert report["classifier"]["not_explained"] == (tie > FARTHEST)
    assert report["images"][0]["targets"][0]["explained"] == (tie < FARTHEST)
    assert any("far outside" in note for note in e.notes[0]) == (tie > FARTHEST)


def test_the_best_point_is_kept_where_the_confidence_does_not_exist() -> None:
    """Another class is always a little more likely than q."""
    student, reader, x = draw(4, classes=3, n=3)
    reader.weight[2], reader.bias[2] = reader.weight[1], reader.bias[1] + 0.5
    for row in x:
        reader.asked.clear()
        e = explain(student, student.mu, row[None], 1, confidence=0.9, reader=reader)
        asked = torch.cat(reader.asked[1:])
        assert len(asked) == MAX_QUERIES
        assert int(e.corrections) == 6  # one query is kept for the tipping point
        assert not e.explained.any()
        assert float(e.convincing_certificate.answer[0, 0, 1]) == float(
            reader.predict(asked)[:, 1].max()
        )


def a_third_class_in_the_way(n: int = 12) -> tuple[Student, Linear, Tensor]:
    """Along Δ from 0 to 1, the classifier sees 2; away from the mean of 2, it sees 1."""
    student, reader, x = draw(4, classes=3, n=n)
    mu, delta = student.mu, student.mu[1] - student.mu[0]
    other = mu[2] - delta * (mu[2] @ delta) / delta.square().sum()  # says nothing about Δ
    reader.weight = torch.stack([0 * delta, 3 * delta, 3 * delta + 4 * other])
    reader.bias = torch.zeros(3).double()
    z, _ = student.encode_with_log_det(x)
    # At the image 0 is seen, and far along Δ it is 2, by a margin of 1 or more.
    reader.bias[1:] = -2 - (z @ (3 * delta)).max()
    reader.bias[2] += 1 - (z @ (4 * other)).min()
    reader.bias[0] = (reader.logits(z)[:, 1:].amax(1)).max() + 2
    return student, reader, x


def test_the_direction_is_bent_where_another_class_is_in_the_way(monkeypatch) -> None:
    student, reader, x = a_third_class_in_the_way()
    e = explain(student, student.mu, x, 1, reader=reader, path=5)
    assert e.explained.all()
    assert e.verification.bent.all()
    assert (e.verification.queries > STRAIGHT).all()
    assert (e.verification.queries <= MAX_QUERIES).all()
    assert sum(len(images) for images in reader.asked) == len(x) + int(
        e.verification.queries.sum()
    )
    # What it saw instead is an answer about a point of Δ, without q.
    asked = [reader.predict(images) for images in reader.asked[1 : 1 + STRAIGHT]]
    seen = torch.stack([besides(answers, e.q[:, 0]) for answers in asked]).double()
    assert ((seen - e.verification.instead[:, 0]).abs().amax(2).amin(0) < 1e-6).all()
    # The counterfactual and its path lie on the bent line.
    z, _ = student.encode_with_log_det(x)
    delta = e.direction(z[:, None], student.mu)
    assert (delta - (student.mu[1] - student.mu[0])).norm(dim=-1).min() > 1
    moved, _ = student.encode_with_log_det(e.convincing[:, 0])
    torch.testing.assert_close(moved - z, e.alpha * delta[:, 0])
    halfway, _ = student.encode_with_log_det(e.path.images[:, 0, 2])
    torch.testing.assert_close(halfway - z, 0.5 * e.alpha * delta[:, 0])
    assert all(pair["bent"] for image in e.to_dict()["images"] for pair in image["targets"])
    assert "leads away from 2, which linear saw instead" in e.notes[0][0]
    # Along Δ alone nothing is explained.
    monkeypatch.setattr("ecinn.explanation.verification.STRAIGHT", MAX_QUERIES)
    alone = explain(student, student.mu, x, 1, reader=reader)
    assert not alone.explained.any()
    assert not alone.verification.bent.any()


def test_a_bent_direction_that_helps_nothing_is_not_taken() -> None:
    student, reader, x = draw(4, classes=3)
    reader.bias = reader.bias + torch.tensor([0.0, -1e4, 0.0])
    e = explain(student, student.mu, x, 1, confidence=0.9, reader=reader)
    z, _ = student.encode_with_log_det(x)
    assert not e.verification.bent.any()
    delta = (student.mu[1] - student.mu[0]).expand(len(x), 1, -1)
    assert torch.equal(e.direction(z[:, None], student.mu), delta)


def test_the_direction_stays_where_an_answer_is_too_sure_of_q() -> None:
    """The answer turns so steeply that more than three queries are needed, all of them along Δ."""

    class Steep(Linear):
        def logits(self, z: Tensor) -> Tensor:
            pair = super().logits(z)
            margin = pair[:, 1] - pair[:, 0]
            steep = 30 * (margin / 20).pow(3) + 2 * margin.sign()
            return torch.stack([torch.zeros_like(steep), steep], 1)

    student, linear, x = draw(1)
    reader = Steep(student, linear.weight, linear.bias)
    e = explain(student, student.mu, x, 1, confidence=0.5, reader=reader)
    assert e.verification.queries.min() > STRAIGHT
    assert (e.verification.uncorrected[..., 1] > 0.55).any()
    too_sure = e.verification.uncorrected[:, 0, 1] > 0.55
    assert not e.verification.bent[too_sure].any()


def test_besides_is_the_answer_without_q() -> None:
    answers = torch.tensor([[0.5, 0.3, 0.2], [0.0, 1.0, 0.0]])
    seen = besides(answers, torch.tensor([0, 1]))
    torch.testing.assert_close(seen, torch.tensor([[0.0, 0.6, 0.4], [0.5, 0.0, 0.5]]))


def test_explanations_with_answers_are_stored_joined_and_cut(tmp_path: Path) -> None:
    student, reader, x = draw(6, classes=3, n=4)
    e = explain(student, student.mu, x, "all", reader=reader, path=3)
    e.save(tmp_path)
    assert Explanation.load(tmp_path) == e
    assert join([e[:1], e[1:]]) == e
    assert e[1].verification.queries.shape == (1, 2)
    torch.testing.assert_close(e.path.alphas[..., -1], e.alpha)
    assert (
        "linear" in json.loads((tmp_path / "explanation.json").read_text())["classifier"]["name"]
    )


def test_next_alpha_finds_the_root_of_a_line_at_once() -> None:
    g = torch.Generator().manual_seed(0)
    root, slope = torch.rand(50, generator=g) + 0.2, 10 * torch.rand(50, generator=g) + 1
    alphas = torch.stack([torch.zeros(50), root + 0.1 + torch.rand(50, generator=g)], 1)
    margins = slope[:, None] * (alphas - root[:, None])
    none = torch.full((50,), math.nan)
    torch.testing.assert_close(next_alpha(alphas, margins, none), root)
    inside, outside = alphas[:, 1] - 0.01, alphas[:, 1] + 0.01
    assert torch.equal(next_alpha(alphas, margins, inside), inside)
    torch.testing.assert_close(next_alpha(alphas, margins, outside), root)
    # Without a bracket the same line is extrapolated, by a step of at most one half.
    short = torch.stack([torch.zeros(50), root - 0.15], 1)
    beyond = next_alpha(short, slope[:, None] * (short - root[:, None]), none)
    torch.testing.assert_close(beyond, root)


@pytest.mark.parametrize("power", [0.3, 1.0, 4.0])
def test_next_alpha_narrows_brackets_of_curves(power: float) -> None:
    """margin = 20·(α^k − r^k): concave, linear and convex."""
    root = torch.linspace(0.15, 0.95, 30)

    def margin(alpha: Tensor) -> Tensor:
        return 20 * (alpha**power - root[:, None] ** power)

    alphas = torch.stack([torch.zeros(30), torch.ones(30)], 1)
    for _ in range(MAX_QUERIES - 1):
        new = next_alpha(alphas, margin(alphas), torch.full((30,), math.nan))
        alphas = torch.cat([alphas, new[:, None]], 1)
    assert ((alphas - root[:, None]).abs().amin(1) < 0.012).all()


def test_next_alpha_encloses_a_maximum_that_is_below_zero() -> None:
    """margin = −h − s(α − m)²: nothing fulfils the request, and the best point is near m."""
    g = torch.Generator().manual_seed(3)
    top, steep = 0.6 + torch.rand(200, generator=g), 4 + 60 * torch.rand(200, generator=g)
    first = (top + 0.6 * torch.rand(200, generator=g) - 0.3)[:, None]

    def margin(alpha: Tensor) -> Tensor:
        return -0.5 - steep[:, None] * (alpha - top[:, None]) ** 2

    alphas = torch.cat([torch.zeros((200, 1)), first], 1)
    for _ in range(MAX_QUERIES - 2):
        new = next_alpha(alphas, margin(alphas), torch.full((200,), math.nan))
        alphas = torch.cat([alphas, new[:, None]], 1)
    missed = (alphas - top[:, None]).abs().amin(1)
    assert float(missed.max()) < 0.16
    assert float(missed.median()) < 0.04
    # A rising margin is followed outwards.
    rising = torch.tensor([[0.0, 0.5, 0.9]])
    assert float(next_alpha(rising, rising - 5, torch.tensor([math.nan]))) > 0.9


def test_tie_margin_is_the_log_odds_of_two_classes_that_are_seen() -> None:
    answers = torch.tensor([[[0.2, 0.6, 0.2], [0.3, 0.3, 0.4], [1e-4, 1e-4, 0.9998]]])
    margin = tie_margin(answers, torch.tensor([0]), torch.tensor([1]))[0]
    torch.testing.assert_close(margin[:2], torch.tensor([math.log(3), 0.0]))
    assert margin[2] < -10  # a third class has it all: not a tie


def test_request_margin_is_the_difference_of_log_odds() -> None:
    answers = torch.rand((5, 3, 4), generator=torch.Generator().manual_seed(1)).softmax(2)
    q = torch.tensor([0, 1, 2, 3, 0])
    p_q = torch.stack([answers[i, :, q[i]] for i in range(5)])
    expected = torch.logit(p_q) - torch.logit(torch.tensor(0.8))
    torch.testing.assert_close(request_margin(answers, q, 0.8), expected)
    others = torch.stack(
        [answers[i][:, [c for c in range(4) if c != q[i]]].amax(1) for i in range(5)]
    )
    torch.testing.assert_close(request_margin(answers, q, None), (p_q / others).log())

"""Shared passes, compared with every request computed alone by the library."""

import copy
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from ecinn.classifier.out_of_distribution import OODDetector, Texture
from ecinn.drawing import pictures
from ecinn.errors import InputError
from ecinn.explanation.result import Explanation
from ecinn.model import Model
from ecinn.pixels import to_pixels
from ecinn.web.answers import article, sentences
from ecinn.web.batching import AbandonedError
from ecinn.web.passes import BEYOND, Question, explain_jointly, predict_jointly, split_network
from helpers.builders import random_images, small_model, with_default
from helpers.server import HeldClassifier


@pytest.fixture(scope="module")
def x(mnist: Model) -> Tensor:
    return to_pixels(mnist.checkpoint.recipe.load("test").images[:6])


def assert_same(one: Explanation, other: Explanation) -> None:
    for field in dataclasses.fields(Explanation):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, Tensor):
            torch.testing.assert_close(a, b, atol=2e-3, rtol=1e-3, msg=field.name)


@pytest.mark.slow
def test_joint_explanations_are_those_computed_alone(mnist: Model, x: Tensor) -> None:
    classifier = HeldClassifier(mnist.classifier)
    questions = [
        Question(x[:2], "all"),
        Question(x[2:3], (3, 8)),
        Question(x[3:4], (5, 8), path=(0.0, 0.7)),
        Question(x[4:5], (1,), confidence=0.9, correct=True),
    ]
    answers = explain_jointly(mnist, split_network(classifier, 32), questions)
    for question, e in zip(questions, answers, strict=True):
        assert isinstance(e, Explanation)
        targets = question.targets
        alone = mnist.explain(
            question.pixels,
            "all" if targets == "all" else list(targets or ()),
            confidence=question.confidence,
            correct=question.correct,
            path=question.path,
        )
        assert_same(e, alone)
        if alone.path is not None:
            assert e.path is not None
            torch.testing.assert_close(e.path.images, alone.path.images, atol=2e-3, rtol=1e-3)
            torch.testing.assert_close(
                e.path.stored_posterior, alone.path.stored_posterior, atol=2e-3, rtol=1e-3
            )


def test_a_request_for_the_default_joins_one_for_the_same_confidence() -> None:
    """Both are decoded together, and each answer says how it was requested."""
    model, x = with_default(small_model(), 0.9), to_pixels(random_images(3, 1, 3, 4).images)
    classifier = HeldClassifier(model.classifier)
    questions = [
        Question(x[i : i + 1], None, confidence=c) for i, c in enumerate((None, 0.9, "alpha_1"))
    ]
    default, same, plain = explain_jointly(model, split_network(classifier, 100), questions)
    assert classifier.decoded == [6, 3]
    assert [default.requested, same.requested, plain.requested] == [
        "90 % requested (this model's default)",
        "90 % requested",
        "α₁ (the paper's)",
    ]
    for e in (default, same):
        of_q = e.convincing_certificate.posterior[0, 0, int(e.q)]
        assert float(of_q) == pytest.approx(0.9, abs=1e-4)
    assert float(plain.alpha) == float(plain.alpha_1)


def test_requests_share_one_encode_one_decode_and_one_check(mnist: Model, x: Tensor) -> None:
    classifier = HeldClassifier(mnist.classifier)
    questions = [Question(x[i : i + 1], None) for i in range(6)]
    explain_jointly(mnist, split_network(classifier, 100), questions)
    assert classifier.encoded == [6, 12]
    assert classifier.decoded == [18]


def test_without_targets_the_runner_up_is_explained(mnist: Model, x: Tensor) -> None:
    (e,) = explain_jointly(mnist, split_network(mnist.classifier, 8), [Question(x, None)])
    assert isinstance(e, Explanation)
    expected = mnist.predict(x).topk(2).indices[:, 1]
    assert e.q[:, 0].tolist() == expected.tolist()


def test_frames_are_even_and_hold_the_tipping_and_the_convincing_alpha(
    mnist: Model, x: Tensor
) -> None:
    question = Question(x[:2], None, path=7)
    (e,) = explain_jointly(mnist, split_network(mnist.classifier, 8), [question])
    assert isinstance(e, Explanation)
    assert e.path is not None
    for row in range(2):
        alphas = e.path.alphas[row, 0].tolist()
        assert alphas == sorted(alphas)
        assert len(alphas) == 9
        end = float(e.alpha[row, 0])
        marks = [float(e.alpha_0[row, 0]), end]
        for mark, image in zip(marks, (e.tipping_point, e.convincing), strict=True):
            place = alphas.index(mark)
            torch.testing.assert_close(
                e.path.images[row, 0, place], image[row, 0], atol=2e-3, rtol=1e-3
            )
        even = [alpha for alpha in alphas if alpha not in marks]
        torch.testing.assert_close(
            torch.tensor(even), end * BEYOND * torch.arange(7) / 6, atol=1e-5, rtol=1e-5
        )
    assert question.cost(10) == 784 * 2 * (1 + 2 + 9)
    assert Question(x[:3], "all").cost(10) == 784 * 3 * (1 + 9 * 2)


def test_one_question_that_cannot_be_answered_leaves_the_others_alone(
    mnist: Model, x: Tensor
) -> None:
    already = int(mnist.predict(x[:1]).argmax())
    far = torch.full_like(x[:1], float("inf"))
    another = (int(mnist.classifier.predict(far)) + 1) % 10
    questions = [Question(x[:1], (already,)), Question(far, (another,)), Question(x[1:2], None)]
    wrong, overflow, right = explain_jointly(mnist, split_network(mnist.classifier, 8), questions)
    assert isinstance(wrong, InputError)
    assert "already predicted" in str(wrong)
    assert isinstance(overflow, InputError)
    assert "overflows" in str(overflow)
    assert isinstance(right, Explanation)
    assert_same(right, mnist.explain(x[1:2], right.q))


def test_joint_predictions_check_the_texture_too(mnist: Model, x: Tensor) -> None:
    frequency = torch.arange(784) % 4
    texture = Texture(frequency, torch.zeros(4), torch.eye(4), 0.0)
    z = mnist.classifier.encode(x)
    distances = texture.distance(z - mnist.mu_bar[mnist.predict(x).argmax(1)])
    model = copy.copy(mnist)
    limit = float(distances.median())
    model.ood = OODDetector(mnist.ood.log_p, texture._replace(limit=limit + 1e-3))
    (prediction,) = predict_jointly(model, split_network(mnist.classifier, 8), [x])
    assert not isinstance(prediction, InputError)
    assert prediction.out_of_distribution[:, 1].tolist() == (distances > limit + 1e-3).tolist()
    assert prediction.out_of_distribution[:, 1].any()


def test_joint_predictions_are_those_of_the_model(mnist: Model, x: Tensor) -> None:
    noise = torch.rand(x[:1].shape, generator=torch.Generator().manual_seed(1))
    predictions = predict_jointly(mnist, split_network(mnist.classifier, 4), [x[:4], noise, x[4:]])
    for prediction, pixels in zip(predictions, (x[:4], noise, x[4:]), strict=True):
        assert not isinstance(prediction, InputError)
        torch.testing.assert_close(
            prediction.posterior, mnist.predict(pixels), atol=1e-4, rtol=1e-3
        )
        e = mnist.explain(pixels)
        assert torch.equal(prediction.out_of_distribution, e.out_of_distribution)
        assert torch.equal(prediction.p, e.p)
    assert not isinstance(predictions[1], InputError)
    assert bool(predictions[1].out_of_distribution.any())


def test_parts_on_threads_are_the_whole_and_end_when_nobody_waits(mnist: Model, x: Tensor) -> None:
    classifier = HeldClassifier(mnist.classifier)
    with ThreadPoolExecutor(2) as threads:
        network = split_network(classifier, 4, threads)
        z, log_det = network.encode_with_log_det(x)
        whole, whole_log_det = mnist.classifier.encode_with_log_det(x)
        torch.testing.assert_close(z, whole, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(log_det, whole_log_det, atol=1e-2, rtol=1e-4)
        torch.testing.assert_close(network.decode(z), x, atol=1e-3, rtol=1e-3)
    assert sorted(classifier.encoded) == [2, 4]
    asked = iter([True, False])
    network = split_network(classifier, 1, wanted=lambda: next(asked))
    classifier.decoded.clear()
    with pytest.raises(AbandonedError):
        network.decode(z)
    assert classifier.decoded == [1]


def test_sentences_say_what_was_reached_and_what_was_not(mnist: Model, x: Tensor) -> None:
    e = mnist.explain(x[:1], [8])
    lines = sentences(e, 0, 0)
    share = float(e.convincing_certificate.verdict[0, 0].max())
    winner = int(e.convincing_certificate.winner[0, 0])
    assert f"classified as {article(str(winner))}" in lines[0]
    assert f"{100 * share:.1f} %" in lines[0] or "> 99.9 %" in lines[0]
    stored = e.tipping_certificate.stored_posterior[0, 0]
    shares = [pictures.percent(float(stored[label])) for label in (7, 8)]
    assert f"a 7 with {shares[0]} and an 8 with {shares[1]}" in " ".join(lines)
    missed = dataclasses.replace(
        e,
        convincing_certificate=dataclasses.replace(
            e.convincing_certificate, q=torch.tensor([[2]])
        ),
        q=torch.tensor([[2]]),
        tipping_certificate=dataclasses.replace(
            e.tipping_certificate, stored_posterior=torch.eye(10)[5].expand(1, 1, 10)
        ),
        out_of_distribution=torch.tensor([[False, True, False]]),
    )
    lines = sentences(missed, 0, 0)
    assert "The target, a 2, was not reached." in lines
    assert "and a 5 with > 99.9 %" in " ".join(lines)
    assert "smoother or rougher" in lines[-1]


@pytest.mark.parametrize("correct", [False, True])
def test_a_tie_before_rounding_is_claimed_only_where_there_is_one(
    mnist: Model, x: Tensor, *, correct: bool
) -> None:
    e = mnist.explain(x, "all", confidence=0.9, correct=correct)
    claims = [
        any("before rounding to 8 bits" in line for line in sentences(e, row, column))
        for row in range(len(e))
        for column in range(9)
    ]
    assert claims == [not correct] * len(claims)
    posterior = e.tipping_certificate.posterior
    of_p = posterior.gather(-1, e.p[:, None, None].expand(*e.q.shape, 1)).squeeze(-1)
    of_q = posterior.gather(-1, e.q[..., None]).squeeze(-1)
    ties = (of_p - of_q).abs() < 1e-3
    assert bool(ties.all()) is not correct


def test_skipped_images_are_reported_with_their_own_question(mnist: Model, x: Tensor) -> None:
    """Samples 0 to 5 are 7, 2, 1, 0, 4, 1."""
    questions = [Question(x[:3], (2,), path=2), Question(x[3:], (1,)), Question(x[2:3], (8,))]
    network = split_network(mnist, 8)
    one, other, last = explain_jointly(mnist, network, questions)
    assert isinstance(one, Explanation)
    assert isinstance(other, Explanation)
    assert isinstance(last, Explanation)
    assert (one.indices.tolist(), [s.index for s in one.skipped]) == ([0, 2], [1])
    assert (other.indices.tolist(), [s.index for s in other.skipped]) == ([0, 1], [2])
    assert (last.indices.tolist(), last.skipped) == ([0], ())
    assert_same(one, mnist.explain(x[:3], [2]))
    assert one.path is not None
    torch.testing.assert_close(one.path.images[:, 0, 0], x[[0, 2]], atol=2e-3, rtol=1e-3)

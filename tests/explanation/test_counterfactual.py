"""ECINN on a rotation, whose every answer is known."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from ecinn.classifier.out_of_distribution import OODDetector
from ecinn.drawing import pictures
from ecinn.errors import InputError
from ecinn.explanation.counterfactual import class_means, counterfactual, explain
from ecinn.explanation.sheet import explanation_sheet
from ecinn.explanation.targets import resolve_targets
from ecinn.pixels import to_pixels, to_uint8
from helpers.builders import RotationClassifier


@pytest.fixture
def rotation() -> RotationClassifier:
    return RotationClassifier()


@pytest.fixture
def x(rotation: RotationClassifier, generator: torch.Generator) -> Tensor:
    near = rotation.mu[torch.tensor([0, 1, 2, 3, 1])]
    noise = torch.randn(near.shape, generator=generator, dtype=torch.float64)
    return ((near + 0.3 * noise) @ rotation.q).reshape(-1, *rotation.shape) + 0.5


def test_protocol_is_met_by_the_rotation_and_by_the_network(rotation, small_classifier) -> None:
    from ecinn.explanation.counterfactual import InvertibleClassifier

    assert isinstance(rotation, InvertibleClassifier)
    assert isinstance(small_classifier, InvertibleClassifier)


@pytest.mark.parametrize("target", [0, [0, 3], "all"])
def test_two_evaluations_explain_any_number_of_images_and_targets(rotation, x, target) -> None:
    """The paper's title."""
    x = x[1:3]
    e = explain(rotation, rotation.mu_bar, x, target, check=False)
    assert rotation.calls == {"encode": 1, "decode": 1}
    assert e.passes == 2
    targets = 1 if target == 0 else 2 if target == [0, 3] else 3
    assert e.convincing.shape == (2, targets, 1, 2, 3)
    assert e.convincing_certificate.stored_posterior is None


def test_verification_costs_one_forward_pass_and_is_counted(rotation, x) -> None:
    e = explain(rotation, rotation.mu_bar, x, "all")
    assert rotation.calls == {"encode": 2, "decode": 1}
    assert e.passes == 3


def test_a_near_tie_is_explained_from_the_predicted_class(rotation) -> None:
    """In float32 a low τ rounds both posteriors to the same number, but not the logits."""
    rotation.mu, rotation.mu_bar = rotation.mu[:2], rotation.mu_bar[:2]
    rotation.tau = torch.tensor(1e-9)
    z = torch.lerp(*rotation.mu, 0.51)[None]
    x = (z @ rotation.q).reshape(1, *rotation.shape).float() + 0.5
    for name in ("mu", "mu_bar", "q"):
        setattr(rotation, name, getattr(rotation, name).float())
    e = explain(rotation, rotation.mu_bar, x, "all")
    assert (e.p.tolist(), e.q.tolist()) == ([1], [[0]])
    assert torch.isfinite(e.convincing).all()


def test_bare_counterfactual_is_the_explanations_in_two_evaluations(rotation, x) -> None:
    q = torch.tensor([1, 2, 3, 0, 3])
    e = explain(rotation, rotation.mu_bar, x, q[:, None], check=False)
    rotation.calls = {"encode": 0, "decode": 0}
    torch.testing.assert_close(counterfactual(rotation, rotation.mu_bar, x, q), e.convincing[:, 0])
    assert rotation.calls == {"encode": 1, "decode": 1}


def test_tipping_point_ties_p_and_q_in_image_space(rotation, x) -> None:
    e = explain(rotation, rotation.mu_bar, x, "all")
    for column in range(3):
        posterior = rotation.posterior(e.tipping_point[:, column])
        torch.testing.assert_close(
            posterior.gather(1, e.p[:, None]), posterior.gather(1, e.q[:, column, None])
        )
        torch.testing.assert_close(e.tipping_certificate.posterior[:, column], posterior)


def test_convincing_counterfactual_lies_at_alpha_1_on_the_line_through_x(rotation, x) -> None:
    """In the image space of a rotation the line is straight: x̂ = x + α₁ Qᵀ(μ̄_q − μ̄_p)."""
    e = explain(rotation, rotation.mu_bar, x, "all")
    torch.testing.assert_close(e.alpha_1, 0.8 + e.alpha_0 / 2)
    for column in range(3):
        delta = (rotation.mu_bar[e.q[:, column]] - rotation.mu_bar[e.p]) @ rotation.q
        expected = x + (e.alpha_1[:, column, None] * delta).reshape(x.shape)
        torch.testing.assert_close(e.convincing[:, column], expected)
        torch.testing.assert_close(e.heatmap[:, column], expected - x)
        posterior = rotation.posterior(expected)
        torch.testing.assert_close(e.convincing_certificate.posterior[:, column], posterior)


def test_certificate_speaks_of_the_stored_image(rotation, x) -> None:
    """Pixels of a rotation leave [0, 1] widely, so the stored image is another one."""
    e = explain(rotation, rotation.mu_bar, x, "all")
    assert e.convincing_certificate.stored_posterior is not None
    for column in range(3):
        stored = to_pixels(to_uint8(e.convincing[:, column])).double()
        posterior = rotation.posterior(stored)
        torch.testing.assert_close(
            e.convincing_certificate.stored_posterior[:, column], posterior, atol=1e-6, rtol=1e-6
        )
        expected = posterior.argmax(1) == e.q[:, column]
        assert torch.equal(e.convincing_certificate.reached[:, column], expected)
        outside = (e.convincing[:, column] < 0) | (e.convincing[:, column] > 1)
        torch.testing.assert_close(
            e.convincing_certificate.clamped[:, column], outside.float().mean((1, 2, 3))
        )
    assert not e.convincing_certificate.reached.all()
    assert e.convincing_certificate.clamped.max() > 0


def test_third_class_in_the_way_is_named() -> None:
    """Three means on a line: halfway from the first to the last lies the one between."""
    rotation = RotationClassifier(classes=3)
    direction = torch.nn.functional.normalize(rotation.mu[0], dim=0)
    rotation.mu = torch.stack([-5 * direction, 0 * direction, 5 * direction])
    rotation.mu_bar = rotation.mu.clone()
    x = rotation.decode(rotation.mu[:1])
    e = explain(rotation, rotation.mu_bar, x, [2, 1])
    assert e.third_class.tolist() == [[1, -1]]


def test_round_trip_error_and_likelihood_are_measured(rotation, x) -> None:
    e = explain(rotation, rotation.mu_bar, x, "all", ood=OODDetector((-1e9, 1e9)))
    assert e.round_trip_error.max() < 1e-12
    z = (x.flatten(1) - 0.5) @ rotation.q.T
    mixture = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(torch.ones(4)),
        torch.distributions.Independent(
            torch.distributions.Normal(rotation.mu, torch.ones_like(rotation.mu)), 1
        ),
    )
    torch.testing.assert_close(e.log_p, mixture.log_prob(z))
    assert e.typical is not None
    assert e.typical.all()
    low = float(e.log_p.sort()[0][2])
    assert (
        explain(rotation, rotation.mu_bar, x, "all", ood=OODDetector((low, 1e9))).typical.sum()
        == 3
    )
    assert (
        explain(rotation, rotation.mu_bar, x, "all", ood=OODDetector((-1e9, low))).typical.sum()
        == 3
    )


def test_a_broken_inverse_shows_in_the_certificate(rotation, x) -> None:
    exact = rotation.decode
    rotation.decode = lambda z: exact(z) + 0.01
    e = explain(rotation, rotation.mu_bar, x, "all")
    torch.testing.assert_close(e.round_trip_error, torch.full((5,), 0.01).double())
    # The largest error counts, not the mean: one broken pixel is one too many.
    spoilt = torch.zeros(rotation.shape, dtype=torch.float64)
    spoilt[0, 1, 2] = 0.3
    rotation.decode = lambda z: exact(z) - spoilt
    e = explain(rotation, rotation.mu_bar, x, "all")
    torch.testing.assert_close(e.round_trip_error, torch.full((5,), 0.3).double())


def test_class_means_group_by_prediction_not_by_label(generator: torch.Generator) -> None:
    mu = torch.tensor([[0.0, 0], [10, 0], [0, 10]])
    z = 10 * torch.rand((500, 2), generator=generator)
    nearest = torch.cdist(z, mu).argmin(1)
    expected = torch.stack([z[nearest == label].mean(0) for label in range(3)])
    torch.testing.assert_close(class_means(z.split(64), mu), expected)


def test_class_that_is_never_predicted_is_an_error() -> None:
    mu = torch.tensor([[0.0, 0], [100, 100]])
    with pytest.raises(InputError, match="class 1"):
        class_means([torch.zeros(3, 2)], mu)


def test_all_targets_are_the_other_classes() -> None:
    q = resolve_targets("all", torch.tensor([0, 2]), 3)
    assert q.tolist() == [[1, 2], [0, 1]]


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (1, "already predicted as one"),
        ([2, 1], "already predicted as one"),
        (3, "out of range"),
        (-1, "out of range"),
        ("some", "'all'"),
        (torch.zeros(3, 1, dtype=torch.long), "shape"),
        (torch.zeros(2, 0, dtype=torch.long), "shape"),
        ([], "shape"),
        ([0.5], "whole numbers"),
    ],
)
def test_wrong_targets_are_refused(target: object, says: str) -> None:
    with pytest.raises(InputError, match=says):
        # Bypass the runtime type checker, which users do not run.
        resolve_targets.__wrapped__(target, torch.tensor([0, 1]), 3, ["zero", "one", "two"])


def test_a_network_of_your_own_is_checked_before_it_is_used(rotation, x) -> None:
    explain_unchecked = explain.__wrapped__
    with pytest.raises(InputError, match="to_pixels"):
        explain_unchecked(rotation, rotation.mu_bar, to_uint8(x), 2)
    with pytest.raises(InputError, match="class means"):
        explain_unchecked(rotation, rotation.mu_bar[:2], x, 2)
    with pytest.raises(InputError, match="1 class names"):
        explain_unchecked(rotation, rotation.mu_bar, x, 2, class_names=("a",))


def test_planted_labels_are_named_and_have_a_fixed_scale(rotation, x) -> None:
    e = replace(explain(rotation, rotation.mu_bar, x[:1], [2, 3]), planted=True)
    assert e.heatmap_limit(0) == 1
    sheet = explanation_sheet(e, 0)
    p = int(e.p[0])
    assert sheet.title == f"Why is this “label {p}”, and not …?"
    assert [panel.caption for panel in sheet.rows[0]] == ["to label 2", "to label 3"]
    expected = pictures.heatmap_array(e.heatmap[0, 1], 1.0)
    assert (sheet.rows[3][1].array == expected).all()


def test_the_scale_below_a_sheet_has_the_colours_of_the_heatmaps(rotation, x) -> None:
    """From full blue over white to full red, on the lowest line of the picture with colours."""
    e = explain(rotation, rotation.mu_bar, x[:1], [2, 3])
    picture = np.asarray(e.picture().convert("RGB"), dtype=int)
    bar = picture[-19]
    blue, red = (
        (np.abs(bar - colour) < 7).all(1) for colour in (pictures.REMOVED, pictures.ADDED)
    )
    first, last = blue.nonzero()[0].min(), red.nonzero()[0].max()
    assert last - first == 96 - 3  # inside a frame
    assert (bar[(first + last) // 2] > 240).all()


def test_the_sheet_shows_the_requested_confidence(rotation, x) -> None:
    """The name of the end, the share that is shown, warnings, and the scale of the colours."""
    names = ("a", "b", "c", "d")
    for confidence in ("alpha_1", 0.25):
        e = explain(
            rotation, rotation.mu_bar, x[:1], [2, 3], confidence=confidence, class_names=names
        )
        sheet = explanation_sheet(e, 0)
        assert sheet.title == "Why is this “a”, and not …?"
        plain = confidence == "alpha_1"
        by_default = replace(e, confidence_by_default=not plain)
        assert explanation_sheet(by_default, 0).names[2] == (
            "convincing",
            "as far as\nin the paper" if plain else "25 % requested\n(this model's default)",
        )
        assert sheet.names[2][0] == ("convincing" if plain else "as requested")
        assert sheet.names[2][1] == ("as far as\nin the paper" if plain else "25 % requested")
        for column, q in enumerate((2, 3)):
            panel = sheet.rows[2][column]
            shown = int(e.convincing_certificate.winner[0, column]) if plain else q
            share = float(e.convincing_certificate.verdict[0, column, shown])
            assert panel.caption == f"{names[shown]}  {pictures.percent(share)}"
            fulfilled = shown == q if plain else bool(e.as_requested[0, column])
            assert panel.warning != fulfilled
        limit = max(pictures.robust_limit(heatmap) for heatmap in e.heatmap[0])
        assert e.heatmap_limit(0) == limit
        stored = e.tipping_certificate.stored_posterior[0]
        for column, q in enumerate((2, 3)):
            shares = [f"{names[y]}: {100 * stored[column, y]:.0f} %" for y in (0, q)]
            panel, winner = sheet.rows[1][column], int(stored[column].argmax())
            assert panel.caption.splitlines()[0] == "  ".join(shares)
            assert panel.warning == (winner not in (0, q))
            assert (f"{names[winner]} wins" in panel.caption) == panel.warning
    one = explain(rotation, rotation.mu_bar, x[:1], 3, class_names=names)
    assert explanation_sheet(one, 0).title == "Why is this “a”, and not “d”?"

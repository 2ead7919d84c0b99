"""Claims about heatmaps and faces: who is noisy, what ReLU does, which models look alike."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ecinn.audit import Audit, Comparison, Region, Similarity, rate
from ecinn.data.mnist import load_mnist
from ecinn.heatmaps import METHODS, Heatmaps
from ecinn.judges import load_judges, scaled
from ecinn.metrics.intervals import Interval
from ecinn.paper import claim_faces as faces
from ecinn.paper import claim_heatmaps as maps
from ecinn.pixels import to_pixels
from ecinn.pretrained import Model, load


def noise_of(maps_: dict[str, Tensor]) -> maps.Noise:
    return maps.noise_of({name: Heatmaps(name, m, None, 2) for name, m in maps_.items()})


@pytest.fixture
def smooth_and_rough(generator) -> tuple[Tensor, Tensor]:
    ramp = torch.linspace(-1, 1, 16)
    smooth = (torch.rand((12, 1, 1, 1), generator=generator) + ramp[:, None] * ramp).double()
    return smooth, torch.randn((12, 1, 16, 16), generator=generator).double()


def test_smooth_maps_are_less_noisy_than_noise_and_not_the_other_way(smooth_and_rough) -> None:
    smooth, rough = smooth_and_rough
    good = noise_of({m: smooth if m == "ecinn" else rough for m in METHODS})
    bad = noise_of({m: rough if m == "ecinn" else smooth for m in METHODS})
    assert maps.less_noisy(good).verdict == "supported"
    assert maps.less_noisy(bad).verdict == "refuted"
    assert maps.less_noisy_with_relu(good, bad).verdict == "supported"
    assert maps.less_noisy_with_relu(bad, good).verdict == "refuted"


def test_relu_is_the_cause_only_if_taking_it_away_makes_the_noise(smooth_and_rough) -> None:
    smooth, rough = smooth_and_rough
    quiet, loud = (noise_of(dict.fromkeys(METHODS, each)) for each in (smooth, rough))
    between = {
        method: {name: (quiet[method][name] + loud[method][name]) / 2 for name in loud[method]}
        for method in loud
    }
    for without, verdict, way in ((loud, "supported", 1.0), (quiet, "refuted", 0.0)):
        twins = {"ReLU": [(0.1, quiet)], "tanh": [(0.1, without)]}
        claim = maps.relu_is_the_cause(twins, loud)
        assert claim.verdict == verdict
        assert claim.numbers["way"]["tanh"] == pytest.approx((way, way, way))
    twins = {"ReLU": [(0.1, quiet)], "tanh": [(0.1, between)], "softplus": [(0.1, quiet)]}
    claim = maps.relu_is_the_cause(twins, loud)
    assert claim.numbers["way"]["tanh"] == pytest.approx((0.5, 0.5, 0.5))
    assert claim.verdict == "partly"
    assert "footnote" in claim.says


def test_seeds_that_disagree_about_relu_leave_it_open(smooth_and_rough) -> None:
    """Two of three networks go all the way: the mean is most of it, the interval is not."""
    quiet, loud = (noise_of(dict.fromkeys(METHODS, each)) for each in smooth_and_rough)
    twins = {
        "ReLU": [(0.1, quiet)] * 3,
        "tanh": [(0.1, loud), (0.1, quiet), (0.4, loud)],
    }
    claim = maps.relu_is_the_cause(twins, loud)
    assert claim.numbers["way"]["tanh"] == pytest.approx((2 / 3, 0, 1))
    assert claim.numbers["errors"]["tanh"] == pytest.approx(0.2)
    assert claim.verdict == "partly"
    assert "75 %" in claim.measured  # of three, all lie on one side of the median with 2/8


def test_the_judge_reads_pixels_as_it_reads_8_bit_images() -> None:
    images = load_mnist("test").images[:9]
    network = load_judges("mnist").networks.convolutional
    on_pixels = maps.OnPixels(network)(to_pixels(images))
    torch.testing.assert_close(on_pixels, network(scaled(images)), atol=1e-4, rtol=1e-4)


def test_evidence_is_more_faithful_than_noise(mnist, small_classifier, generator) -> None:
    """Who has the classifier's own evidence wins over noise; and loses with noise against it."""
    small = dataclasses.replace(
        mnist.checkpoint,
        classifier=small_classifier.float(),
        mu_bar=small_classifier.mu.detach().float(),
        class_names=("0", "1", "2"),
    )
    model = Model(small)
    x = torch.rand((40, 1, 8, 8), generator=generator)
    p = model.predict(x).argmax(1)
    explained = maps.Explained(model, x, p, (p + 1) % 3, x.roll(1, 0))
    signed = explained.maps(explained.inn, "integrated_gradients").maps
    noise = torch.randn(signed.shape, generator=generator)

    def made(own: Tensor, other: Tensor) -> dict[str, Heatmaps]:
        # ECINNh's order is |h|, the others' −h.
        return {
            m: Heatmaps(m, (-own).clamp(min=0) if m == "ecinn" else other, None, 2)
            for m in METHODS
        }

    assert maps.faithful(explained, made(signed, noise), 0).verdict in ("supported", "partly")
    assert maps.faithful(explained, made(noise, signed), 0).verdict == "refuted"


def audit_with(**fields: object) -> Audit:
    """Only what a claim looks at."""
    made = Audit.__new__(Audit)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def near(value: float) -> Interval:
    return Interval(value, value - 0.02, value + 0.02)


@pytest.mark.parametrize(
    ("same", "other", "verdict"),
    [(0.9, 0.2, "supported"), (0.6, 0.2, "partly"), (0.3, 0.3, "refuted")],
)
def test_maps_of_two_models_are_compared_with_those_of_other_faces(same, other, verdict) -> None:
    likeness = [Similarity(near(0.0), near(v), near(v), near(v)) for v in (same, other)]
    agreement = rate(torch.tensor([True, True, False]))
    compared = Comparison("m", 3, *likeness, 0.5, agreement, None, torch.zeros(1, 2, 2))
    audit = audit_with(comparisons=(compared,))
    claim = faces.lipstick_is_makeup(audit, {"lipstick": "taught", "makeup": "refined"})
    assert claim.verdict == verdict
    assert "lipstick is taught and makeup is refined" in claim.measured
    assert "recipes" in claim.measured
    alike = faces.lipstick_is_makeup(audit, {"lipstick": "taught", "makeup": "taught"})
    assert "recipes" not in alike.measured


def test_recipes_are_those_of_the_files() -> None:
    """As docs/faces.md tells."""
    found = {name: faces.recipe(load(name)) for name in ("celeba-lipstick", "celeba-makeup")}
    assert found == {
        "celeba-lipstick": "taught and refined",
        "celeba-makeup": "neither taught nor refined",
    }


@pytest.mark.parametrize(
    ("of_q", "verdict"), [(0.95, "refuted"), (0.99995, "supported"), (0.3, "refuted")]
)
def test_faces_that_are_not_so_sure_refute(of_q, verdict) -> None:
    q = torch.arange(100) % 2
    posterior = torch.stack([1 - q, q], 1) * of_q + torch.stack([q, 1 - q], 1) * (1 - of_q)
    audit = audit_with(
        flips=SimpleNamespace(q=q), after=SimpleNamespace(posterior=posterior.double())
    )
    claim = faces.smiles_reach(audit, rate(torch.ones(5, dtype=torch.bool)), 2.5)
    assert claim.verdict == verdict
    assert "confidence=" in claim.measured


def test_regions_of_a_face_decide() -> None:
    def regions(**density: float) -> tuple[Region, ...]:
        return tuple(Region(name, 0.1, near(value)) for name, value in density.items())

    whole = regions(mouth=2.5, eyes=1.6, cheeks=1.5, face=1.6, background=0.6)
    lips = regions(mouth=9.0, eyes=0.3, cheeks=0.3, face=1.2, background=0.3)
    assert faces.whole_face(audit_with(regions=whole)).verdict == "supported"
    assert faces.whole_face(audit_with(regions=lips)).verdict == "partly"

"""Claims about heatmaps: noise, faithfulness, and the role of ReLU."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from ecinn.attribution.heatmaps import METHODS, Heatmaps
from ecinn.data.mnist import load_mnist
from ecinn.metrics.statistics import Interval
from ecinn.model import Model
from ecinn.pixels import to_pixels
from ecinn.progress import Progress
from ecinn.studies.judges import load_judges, scaled
from ecinn.studies.paper import claims_heatmaps as maps
from ecinn.studies.paper.claim import claim_of
from ecinn.studies.paper.measuring import ExplainedImages
from helpers.builders import random_images, small_model


def noise_of(maps_: dict[str, Tensor]) -> maps.Noise:
    return maps.noise_of({name: Heatmaps(name, m, None, 2) for name, m in maps_.items()})


def ends(share: Interval) -> tuple[float, float, float]:
    return share.mean, share.low, share.high


@pytest.fixture
def smooth_and_rough(generator) -> tuple[Tensor, Tensor]:
    ramp = torch.linspace(-1, 1, 16)
    smooth = (torch.rand((12, 1, 1, 1), generator=generator) + ramp[:, None] * ramp).double()
    return smooth, torch.randn((12, 1, 16, 16), generator=generator).double()


@pytest.mark.slow
def test_smooth_maps_are_less_noisy_than_noise(smooth_and_rough) -> None:
    smooth, rough = smooth_and_rough
    good = noise_of({m: smooth if m == "ecinn" else rough for m in METHODS})
    bad = noise_of({m: rough if m == "ecinn" else smooth for m in METHODS})
    assert claim_of(maps.less_noisy(good)).verdict == "supported"
    control = claim_of(maps.less_noisy(good | {"white noise": bad["ecinn"]}))
    variation = float(bad["ecinn"]["total variation"].mean())
    assert f"| white noise | {variation:.3f} [" in control.table
    assert claim_of(maps.less_noisy(bad)).verdict == "refuted"
    assert claim_of(maps.less_noisy_with_relu(good, bad)).verdict == "supported"
    claim = claim_of(maps.less_noisy_with_relu(good, bad))
    both = (float(noise["deep_lift"]["total variation"].mean()) for noise in (good, bad))
    assert f"| DeepLift | {next(both):.3f} → {next(both):.3f} |" in claim.table
    assert claim_of(maps.less_noisy_with_relu(bad, good)).verdict == "refuted"


def test_relu_is_the_cause_only_if_replacing_it_adds_noise(smooth_and_rough) -> None:
    smooth, rough = smooth_and_rough
    quiet, loud = (noise_of(dict.fromkeys(METHODS, each)) for each in (smooth, rough))
    between = {
        method: {name: (quiet[method][name] + loud[method][name]) / 2 for name in loud[method]}
        for method in loud
    }
    for without, verdict, way in ((loud, "supported", 1.0), (quiet, "refuted", 0.0)):
        twins = {"ReLU": [(0.1, quiet)], "tanh": [(0.1, without)]}
        claim = claim_of(maps.relu_is_the_cause(twins, loud))
        assert claim.verdict == verdict
        assert ends(claim.numbers["way"]["tanh"]) == pytest.approx((way, way, way))
    twins = {"ReLU": [(0.1, quiet)], "tanh": [(0.1, between)], "softplus": [(0.1, quiet)]}
    claim = claim_of(maps.relu_is_the_cause(twins, loud))
    assert ends(claim.numbers["way"]["tanh"]) == pytest.approx((0.5, 0.5, 0.5))
    assert claim.verdict == "partly"


def test_disagreeing_seeds_support_the_relu_claim_only_partly(smooth_and_rough) -> None:
    """Two of three networks go all the way: the mean is most of it, the interval is not."""
    quiet, loud = (noise_of(dict.fromkeys(METHODS, each)) for each in smooth_and_rough)
    twins = {
        "ReLU": [(0.1, quiet)] * 3,
        "tanh": [(0.1, loud), (0.1, quiet), (0.4, loud)],
    }
    claim = claim_of(maps.relu_is_the_cause(twins, loud))
    assert ends(claim.numbers["way"]["tanh"]) == pytest.approx((2 / 3, 0, 1))
    assert claim.numbers["errors"]["tanh"] == pytest.approx(0.2)
    assert "| tanh | 20.0 % |" in claim.table
    assert "misclassify 10.0 % (ReLU), 20.0 % (tanh)" in claim.measured
    assert claim.verdict == "partly"
    assert "75 %" in claim.measured  # of three, all lie on one side of the median with 2/8


def test_twins_differ_only_in_activation_and_are_tested(monkeypatch) -> None:
    trained, train = [], maps.train_twin
    monkeypatch.setattr(
        maps, "train_twin", lambda *a: trained.append((a, train(*a))) or trained[-1][1]
    )
    training, test = random_images(80, 1, 3, 1), random_images(50, 1, 3, 2)
    x = to_pixels(test.images[:4])
    p = test.labels[:4]
    digits = ExplainedImages(small_model(), x, p, (p + 1) % 3, to_pixels(training.images[:30]))
    seen: list[Progress] = []
    twins = maps.relu_twins(
        digits,
        training,
        test,
        networks=2,
        width=4,
        methods=("gradient_shap",),
        observe=seen.append,
    )
    assert [(progress.done, progress.total) for progress in seen] == [(k, 6) for k in range(1, 7)]
    expected = {"ReLU": nn.ReLU, "softplus": nn.Softplus, "tanh": nn.Tanh}
    assert list(twins) == list(expected)
    networks = iter(trained)
    for name, several in twins.items():
        for seed, (error, noise) in enumerate(several):
            (data, _, given, _), network = next(networks)
            assert (len(data), given) == (80, seed)
            with torch.no_grad():
                wrong = network(to_pixels(test.images)).argmax(1) != test.labels
            assert error == pytest.approx(float(wrong.double().mean()))
            kinds = {type(module) for module in network.modules()} & set(expected.values())
            assert kinds == {expected[name]}
            made = digits.maps(network, ["gradient_shap"])["gradient_shap"].maps
            assert torch.equal(
                noise["gradient_shap"]["total variation"],
                noise_of({"gradient_shap": made})["gradient_shap"]["total variation"],
            )
    first = [network.network.head.weight for (_, _, seed, _), network in trained if seed == 0]
    assert not torch.equal(first[0], first[1])


def test_shap_methods_compare_with_twenty_training_images(monkeypatch) -> None:
    asked = {}

    def made(network, x, p, q, method, *, baseline, baselines, batch_size) -> Heatmaps:
        asked.update(baseline=baseline, baselines=baselines)
        return Heatmaps(method, torch.zeros_like(x), None, 2)

    monkeypatch.setattr("ecinn.attribution.heatmaps.heatmaps", made)
    training = to_pixels(random_images(30, 1, 3, 1).images)
    explained = ExplainedImages(
        small_model(), training[:2], torch.tensor([0, 1]), torch.tensor([1, 2]), training
    )
    explained.maps(explained.inn, ["deep_lift"])
    assert torch.equal(asked["baselines"], training[:20])
    torch.testing.assert_close(asked["baseline"], training.sum(0) / 30)


def test_the_judge_reads_pixels_as_it_reads_8_bit_images() -> None:
    images = load_mnist("test").images[:9]
    network = load_judges("mnist").convolutional
    on_pixels = maps.OnPixels(network)(to_pixels(images))
    torch.testing.assert_close(on_pixels, network(scaled(images)), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
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
    explained = ExplainedImages(model, x, p, (p + 1) % 3, x.roll(1, 0))
    signed = explained.maps(explained.inn)["integrated_gradients"].maps
    noise = torch.randn(signed.shape, generator=generator)

    def made(own: Tensor, other: Tensor) -> dict[str, Heatmaps]:
        # ECINNh's order is |h|, the others' −h.
        return {
            m: Heatmaps(m, (-own).clamp(min=0) if m == "ecinn" else other, None, 2)
            for m in METHODS
        }

    good, bad = (
        claim_of(maps.faithful(explained, made(*each), 0))
        for each in ((signed, noise), (noise, signed))
    )
    assert good.verdict in ("supported", "partly")
    assert bad.verdict == "refuted"
    # The classifier's own evidence beats a random order, which noise does not.
    beaten = [int(claim.measured.partition("random order in ")[2][0]) for claim in (good, bad)]
    assert beaten[0] >= 2 > beaten[1]

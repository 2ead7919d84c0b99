"""Claims about heatmaps: noise, faithfulness, and the role of ReLU."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecinn.attribution.heatmaps import METHODS, Heatmaps
from ecinn.data.mnist import load_mnist
from ecinn.metrics.statistics import Interval
from ecinn.model import Model
from ecinn.pixels import to_pixels
from ecinn.progress import Progress
from ecinn.studies.judges import load_judges, scaled
from ecinn.studies.paper import claims_heatmaps as maps
from ecinn.studies.paper.artefact import Context
from ecinn.studies.paper.claim import judgement
from ecinn.studies.paper.measuring import Bench, ExplainedImages, Sample, Sizes
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
    assert judgement(maps.less_noisy(good)).verdict == "supported"
    control = judgement(maps.less_noisy(good | {"white noise": bad["ecinn"]}))
    variation = float(bad["ecinn"]["total variation"].mean())
    assert f"| white noise | {variation:.3f} [" in control.table.markdown()
    assert judgement(maps.less_noisy(bad)).verdict == "refuted"
    assert judgement(maps.less_noisy_with_relu(good, bad)).verdict == "supported"
    claim = judgement(maps.less_noisy_with_relu(good, bad))
    both = (float(noise["deep_lift"]["total variation"].mean()) for noise in (good, bad))
    assert f"| DeepLift | {next(both):.3f} → {next(both):.3f} |" in claim.table.markdown()
    assert judgement(maps.less_noisy_with_relu(bad, good)).verdict == "refuted"


def test_relu_is_the_cause_only_if_replacing_it_adds_noise(smooth_and_rough) -> None:
    smooth, rough = smooth_and_rough
    quiet, loud = (noise_of(dict.fromkeys(METHODS, each)) for each in (smooth, rough))
    between = {
        method: {name: (quiet[method][name] + loud[method][name]) / 2 for name in loud[method]}
        for method in loud
    }
    for without, verdict, way in ((loud, "supported", 1.0), (quiet, "refuted", 0.0)):
        twins = {"ReLU": [(0.1, quiet)], "tanh": [(0.1, without)]}
        claim = judgement(maps.relu_is_the_cause(twins, loud))
        assert claim.verdict == verdict
        assert ends(claim.numbers["way"]["tanh"]) == pytest.approx((way, way, way))
    twins = {"ReLU": [(0.1, quiet)], "tanh": [(0.1, between)], "softplus": [(0.1, quiet)]}
    claim = judgement(maps.relu_is_the_cause(twins, loud))
    assert ends(claim.numbers["way"]["tanh"]) == pytest.approx((0.5, 0.5, 0.5))
    assert claim.verdict == "partly"


def test_disagreeing_seeds_support_the_relu_claim_only_partly(smooth_and_rough) -> None:
    """Two of three networks go all the way: the mean is most of it, the interval is not."""
    quiet, loud = (noise_of(dict.fromkeys(METHODS, each)) for each in smooth_and_rough)
    twins = {
        "ReLU": [(0.1, quiet)] * 3,
        "tanh": [(0.1, loud), (0.1, quiet), (0.4, loud)],
    }
    claim = judgement(maps.relu_is_the_cause(twins, loud))
    assert ends(claim.numbers["way"]["tanh"]) == pytest.approx((2 / 3, 0, 1))
    assert claim.numbers["errors"]["tanh"] == pytest.approx(0.2)
    assert "| tanh | 20.0 % |" in claim.table.markdown()
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
    x = torch.rand((24, 1, 8, 8), generator=generator)
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
        judgement(maps.faithful(model, explained, made(*each), 0))
        for each in ((signed, noise), (noise, signed))
    )
    assert good.verdict in ("supported", "partly")
    assert bad.verdict == "refuted"
    # The classifier's own evidence beats a random order, which noise does not.
    beaten = [int(claim.measured.partition("random order in ")[2][0]) for claim in (good, bad)]
    assert beaten[0] >= 2 > beaten[1]


def looks_at(where: Tensor, sample: Sample, monkeypatch) -> list[Tensor]:
    """Make the model change its mind where one pixel per image is altered; what it was asked."""
    x, rows, asked = to_pixels(sample.images).flatten(1), torch.arange(len(sample.q)), []

    def predict(images: Tensor) -> Tensor:
        asked.append(images)
        same = images.flatten(1)[rows, where] == x[rows, where]
        return F.one_hot(torch.where(same, sample.p, (sample.p + 1) % 10), 10).float()

    monkeypatch.setattr(sample.model, "predict", predict)
    return asked


def doubled(sample: Sample) -> Sample:
    """Enough images for narrow intervals."""
    fields = {name: getattr(sample, name) for name in ("index", "images", "p", "q", "real")}
    twice = {name: torch.cat([values] * 2) for name, values in fields.items()}
    return Sample(**twice, model=sample.model, parts=sample.parts * 2)


def test_pixels_without_change_may_be_altered_if_nothing_looks_at_them(
    sample, monkeypatch
) -> None:
    sample = doubled(sample)
    n, size = len(sample.q), sample.change.abs().sum(1).flatten(1)
    mean = torch.full((1, 28, 28), 0.3)
    asked = looks_at(size.argmax(1), sample, monkeypatch)
    claim = judgement(maps.unchanged_pixels(sample, mean, n, 5))
    assert claim.verdict == "supported"
    for share in ("10%", "25%", "50%"):
        stays = claim.numbers[share]["noise"]
        assert stays["smallest"].mean == 1
        assert stays["largest"].mean == 0
        # A random pixel is altered with this probability.
        assert stays["random"].mean == pytest.approx(1 - int(share[:-1]) / 100, abs=0.15)
    x = to_pixels(sample.images)
    # The first three: a tenth of the pixels with the smallest change, by three replacements.
    noise, constant, permuted = asked[:3]
    for row in range(n):
        chosen = sorted(size[row].argsort()[:78].tolist())
        for images in (noise, constant):
            changed = (images[row] != x[row]).flatten().nonzero()[:, 0].tolist()
            assert changed == chosen
        before, after = x[row].flatten(), permuted[row].flatten()
        assert torch.equal(before[chosen].sort().values, after[chosen].sort().values)
        kept = torch.ones(784, dtype=torch.bool)
        kept[chosen] = False
        assert torch.equal(before[kept], after[kept])
        assert bool((constant[row].flatten()[chosen] == mean.max()).all())
    assert not torch.equal(permuted, x)
    assert 0 <= float(noise.min()) < 0.01
    assert 0.99 < float(noise.max()) < 1


def test_a_classifier_that_looks_at_unchanged_pixels_refutes(
    sample, generator, monkeypatch
) -> None:
    images = torch.randint(256, sample.images.shape, generator=generator).byte()
    sample = dataclasses.replace(sample, images=images)
    n, size = len(sample.q), sample.change.abs().sum(1).flatten(1)
    looks_at(size.argmin(1), sample, monkeypatch)
    claim = judgement(maps.unchanged_pixels(sample, torch.full((1, 28, 28), 0.3), n, 5))
    stays = claim.numbers["25%"]
    assert [stays[kind]["smallest"].mean for kind in ("noise", "mean")] == [0, 0]
    assert stays["permutation"]["smallest"].mean < 0.1 < stays["permutation"]["random"].mean
    assert claim.verdict == "refuted"
    assert "| 25% | noise | 0.0 % [" in claim.table.markdown()


def test_pixels_are_replaced_in_all_channels(generator) -> None:
    x, other = torch.rand((2, 3, 3, 4, 5), generator=generator)
    places, taken = (
        torch.stack([torch.randperm(20, generator=generator)[:7] for _ in range(3)])
        for _ in range(2)
    )
    made = maps.with_pixels(x, places, other, taken)
    expected = x.clone()
    for row in range(3):
        for place, source in zip(places[row].tolist(), taken[row].tolist(), strict=True):
            expected[row, :, place // 5, place % 5] = other[row, :, source // 5, source % 5]
    assert torch.equal(made, expected)


class Seen(Exception):  # noqa: N818
    """Stops a measurement."""


def test_test_digits_are_explained_and_compared_with_training_digits(monkeypatch) -> None:
    context, model, given = Context(seed=6), small_model(dataset="mnist"), []
    sets = {"test": random_images(40, 1, 3, 1), "train": random_images(300, 1, 3, 2)}
    vars(context)["data"] = lambda dataset, split: sets[split]
    bench = Bench(context, Sizes(digits=9, maps=5))

    def stop(images: ExplainedImages, *_: object) -> None:
        given.append(images)
        raise Seen

    monkeypatch.setattr(ExplainedImages, "maps", stop)
    with pytest.raises(Seen):
        next(maps.measure(bench, model))
    (digits,) = given
    index = torch.randperm(40, generator=torch.Generator().manual_seed(6))[:5]
    assert torch.equal(digits.x, to_pixels(sets["test"].images[index]))
    assert torch.equal(digits.p, model.predict(digits.x).argmax(1))
    assert bool((digits.p != digits.q).all())
    compared = torch.randperm(300, generator=torch.Generator().manual_seed(6))[:200]
    assert torch.equal(digits.training, to_pixels(sets["train"].images[compared]))


def test_maps_of_white_noise_are_shown_with_the_methods(monkeypatch) -> None:
    context, given = Context(), {}
    vars(context)["data"] = lambda dataset, split: random_images(40, 1, 3, 1)
    noise = torch.randn(2, 1, 8, 8, dtype=torch.float64)

    def stop(values: maps.Noise) -> None:
        given.update(values)
        raise Seen

    monkeypatch.setattr(ExplainedImages, "maps", lambda *_: {})
    monkeypatch.setattr(ExplainedImages, "white_noise", lambda *_: noise)
    monkeypatch.setattr(maps, "less_noisy", stop)
    with pytest.raises(Seen):
        next(maps.measure(Bench(context, Sizes(digits=9, maps=5)), small_model(dataset="mnist")))
    steps = sum(noise.diff(dim=dim).abs().sum((1, 2, 3)) for dim in (2, 3))
    variation = given["white noise"]["total variation"]
    torch.testing.assert_close(variation, steps / noise.abs().sum((1, 2, 3)))

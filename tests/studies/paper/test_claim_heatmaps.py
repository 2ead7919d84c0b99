"""Claims about heatmaps and faces: who is noisy, what ReLU does, which models look alike."""

import dataclasses
from types import SimpleNamespace

import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecinn.attribution.heatmaps import METHODS, Heatmaps
from ecinn.auditing.measurement import Audit, Comparison, Region, Similarity, audit, rate
from ecinn.data.dataset import Dataset
from ecinn.data.face_regions import REGION_NAMES
from ecinn.data.mnist import load_mnist
from ecinn.metrics.statistics import Interval
from ecinn.model import Model, load
from ecinn.pixels import to_pixels
from ecinn.studies.judges import load_judges, scaled
from ecinn.studies.paper import claim_faces as faces
from ecinn.studies.paper import claim_heatmaps as maps
from ecinn.studies.paper.artefact import Context
from helpers.builders import random_images, small_model


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
    told = maps.less_noisy_with_relu(good, bad)
    both = (float(noise["deep_lift"]["total variation"].mean()) for noise in (good, bad))
    assert f"| DeepLift | {next(both):.3f} → {next(both):.3f} |" in told.detail
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
    assert "| tanh | 20.0 % |" in claim.detail
    assert "err in 10.0 % (ReLU), 20.0 % (tanh)" in claim.measured
    assert claim.verdict == "partly"
    assert "75 %" in claim.measured  # of three, all lie on one side of the median with 2/8


def test_twins_differ_in_their_activation_and_are_read_on_test_images(
    generator, monkeypatch
) -> None:
    monkeypatch.setattr(maps, "GRADIENT_METHODS", ("gradient_shap",))
    trained, train = [], maps._train
    monkeypatch.setattr(
        maps, "_train", lambda *a: trained.append((a, train(*a))) or trained[-1][1]
    )
    training, test = random_images(96, 1, 3, 1), random_images(50, 1, 3, 2)
    x = to_pixels(test.images[:4])
    p = test.labels[:4]
    explained = maps.Explained(small_model(), x, p, (p + 1) % 3, to_pixels(training.images[:30]))
    seen: list[int] = []
    twins = maps.relu_twins(
        explained, training, test, images=80, networks=2, width=4, observe=seen.append
    )
    assert seen == [1, 2, 3, 4, 5, 6]
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
            kinds = {type(each) for each in network.modules()} & set(expected.values())
            assert kinds == {expected[name]}
            made = explained.maps(network, "gradient_shap").maps
            assert torch.equal(
                noise["gradient_shap"]["total variation"],
                noise_of({"gradient_shap": made})["gradient_shap"]["total variation"],
            )
    first = [network.network.head.weight for (_, _, seed, _), network in trained if seed == 0]
    assert not torch.equal(first[0], first[1])


def test_shap_methods_compare_with_twenty_training_images(monkeypatch) -> None:
    asked = {}

    def made(network, x, p, q, method, *, baseline, baselines) -> Heatmaps:
        asked.update(baseline=baseline, baselines=baselines)
        return Heatmaps(method, torch.zeros_like(x), None, 2)

    monkeypatch.setattr(maps, "heatmaps", made)
    training = to_pixels(random_images(30, 1, 3, 1).images)
    explained = maps.Explained(
        small_model(), training[:2], torch.tensor([0, 1]), torch.tensor([1, 2]), training
    )
    explained.maps(explained.inn, "deep_lift")
    assert torch.equal(asked["baselines"], training[:20])
    torch.testing.assert_close(asked["baseline"], training.sum(0) / 30)


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

    good, bad = (
        maps.faithful(explained, made(*each), 0) for each in ((signed, noise), (noise, signed))
    )
    assert good.verdict in ("supported", "partly")
    assert bad.verdict == "refuted"
    # The classifier's own evidence beats a random order, which noise does not.
    beaten = [int(claim.measured.partition("random order in ")[2][0]) for claim in (good, bad)]
    assert beaten[0] >= 2 > beaten[1]


def audit_with(**fields: object) -> Audit:
    """Only what a claim looks at."""
    made = Audit.__new__(Audit)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def near(value: float) -> Interval:
    return Interval(value, value - 0.02, value + 0.02, 32)


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


@pytest.mark.parametrize(
    ("mouth", "face", "background", "verdict"),
    [(2.0, 1.5, 0.4, "supported"), (2.0, 1.5, 0.6, "partly"), (0.9, 0.8, 1.2, "refuted")],
)
def test_a_background_that_stays_changes_half_as_much(mouth, face, background, verdict) -> None:
    density = {"mouth": mouth, "eyes": 1.31, "cheeks": 1.17, "face": face}
    regions = tuple(
        Region(name, 0.1, near(value))
        for name, value in {**density, "background": background}.items()
    )
    overall = SimpleNamespace(change=near(0.043))
    claim = faces.background_stays(audit_with(regions=regions, overall=overall))
    assert claim.verdict == verdict
    assert f"mouth changes {mouth:.2f} [{mouth - 0.02:.2f}, {mouth + 0.02:.2f}]" in claim.measured
    assert "eyes 1.31 [" in claim.measured
    assert f"included, {background:.2f} [" in claim.measured
    assert "0.043 [0.023, 0.063] of pixels" in claim.measured


@pytest.mark.parametrize(
    ("same", "other", "verdict"),
    [(0.6, 0.2, "supported"), (0.4, 0.2, "partly"), (0.9, 0.9, "partly"), (0.3, 0.3, "refuted")],
)
def test_smiles_are_cheekbones_where_maps_are_alike_beyond_other_faces(
    same, other, verdict
) -> None:
    likeness = [Similarity(near(0.0), near(0.0), near(v), near(0.0)) for v in (same, other)]
    agreement = rate(torch.tensor([True, True, False, True]))
    compared = Comparison("m", 4, *likeness, 0.5, agreement, None, torch.zeros(1, 2, 2))
    claim = faces.smile_is_cheekbones(audit_with(comparisons=(compared,)))
    assert claim.verdict == verdict
    assert f"|cos| {same:.2f} [" in claim.measured
    assert "same in 75.0 % [" in claim.measured


def test_shares_in_the_mouth_are_percent_in_words() -> None:
    regions = tuple(Region(name, 0.37, near(1.5)) for name in REGION_NAMES)
    claim = faces.whole_face(audit_with(regions=regions))
    assert claim.measured.startswith("37 % of the change lies in the mouth")
    assert "| mouth | 37.0 % | 1.50 [1.48, 1.52] |" in claim.detail


SPLITS = {"test": 7, "train": 8}
"""With the seeds of their images."""


@pytest.fixture
def four_models(generator) -> Context:
    """Models of faces that differ in where they lead, and labels of which few, half or most."""
    models, labels = {}, {}
    for number, (name, dataset) in enumerate(faces.MODELS.items()):
        model = small_model(3, 2, dataset)
        noise = torch.randn(model.mu_bar.shape, generator=generator)
        model.mu_bar = model.mu_bar + 0.3 * noise
        models[name] = model
        labels[dataset] = (torch.arange(40) % 5 < number + 1).long()
    images = {split: random_images(40, 3, 2, seed).images for split, seed in SPLITS.items()}
    context = Context(seed=3)
    vars(context)["model"] = models.__getitem__
    vars(context)["data"] = lambda dataset, split: Dataset(
        images[split], labels[dataset], ("a", "b")
    )
    return context


def test_labels_are_counted_where_they_are_given(four_models) -> None:
    claim = faces.balanced_labels(four_models)
    counts = [claim.numbers[name].count for name in faces.MODELS]
    assert counts == [8, 16, 24, 32]
    assert "smile 20.0 % [" in claim.measured
    # Of 40 faces, 8 are surely fewer than 45 %, 16 may be as many.
    assert claim.verdict == "partly"


def test_confidence_that_is_asked_for_is_read_from_the_stored_face(four_models) -> None:
    model, images = four_models.model("celeba-smile"), random_images(40, 3, 2, 7).images
    n, q = 12, 1 - model.predict(images).argmax(1)
    given = audit_with(images=images, flips=SimpleNamespace(q=q))
    asked, alpha = faces.sure_when_asked(model, given, n)
    sure, alphas = [], []
    for image, target in zip(images[:n], q.tolist(), strict=False):
        e = model.explain(image, target, confidence=1 - 1e-5)
        read = model.predict(e.stored_convincing[0])[0, target]
        sure.append(float(read) > 1 - 1e-4)
        alphas.append(float(e.alpha))
    assert (asked.count, asked.n) == (sum(sure), n)
    assert alpha == pytest.approx(sum(alphas) / n, rel=1e-3)
    plain = model.explain(images[:n], q[:n, None]).alpha_1
    assert abs(alpha - float(plain.mean())) > 0.1


def test_claims_of_faces_are_of_the_audits_of_their_models(four_models) -> None:
    claims = {claim.name: claim for claim in faces.face_claims(four_models, 10, 4)}
    made = {}
    for name, other in (
        ("celeba-smile", "celeba-cheekbones"),
        ("celeba-lipstick", "celeba-makeup"),
    ):
        data = four_models.data(faces.MODELS[name], "test")
        others = {other: four_models.model(other)}
        made[name] = audit(four_models.model(name), data, others=others, n=10, seed=3)
    smile, lipstick = made.values()
    for name, done in (("background", smile), ("whole-face", lipstick)):
        numbers = claims[name].numbers.get("density", claims[name].numbers)
        assert numbers == {region.name: region.density for region in done.regions}
    for name, done in (("smile-cheekbones", smile), ("lipstick-makeup", lipstick)):
        assert claims[name].numbers["same"] == done.comparisons[0].same
        assert claims[name].numbers["shuffled"] == done.comparisons[0].shuffled
    reached = smile.after.posterior.argmax(1) == smile.flips.q
    assert claims["faces-sure"].numbers["reached"] == rate(reached)
    assert claims["others-miss-it"].numbers["ecinn"] == lipstick.comparisons[0].same.absolute
    assert smile.regions != lipstick.regions


def other_maps(monkeypatch, *given: Tensor) -> list[tuple]:
    """Make the established method give these, model by model; what it was asked for."""
    asked, answers = [], iter(given)

    def made(explained, x, p, q, method, **more) -> Heatmaps:
        asked.append((explained, x, p, q, more))
        return Heatmaps(method, next(answers), torch.zeros(len(x)), 2)

    monkeypatch.setattr(faces, "heatmaps", made)
    return asked


def not_seen(context: Context, n: int, ours: float):
    data = context.data(faces.MODELS["celeba-lipstick"], "test")
    models = {name: context.model(name) for name in ("celeba-lipstick", "celeba-makeup")}
    alike = Similarity(near(0.0), near(0.0), near(ours), near(0.0))
    compared = SimpleNamespace(same=alike)
    index = torch.arange(10)
    lipstick = audit_with(index=index, images=data.images[:10], comparisons=(compared,))
    training = context.data(faces.MODELS["celeba-lipstick"], "train")
    return faces.others_do_not_see(lipstick, training, models, n, 0, lambda *_: None)


def test_established_maps_are_compared_like_ours(four_models, generator, monkeypatch) -> None:
    """|cos| and ranks of two models' maps of a face, and of another face's."""
    a = torch.randn((8, 3, 8, 8), generator=generator)
    b = a + 2 * torch.randn(a.shape, generator=generator)
    b[::2] *= -1
    asked = other_maps(monkeypatch, a, b)
    claim = not_seen(four_models, 8, 0.5)
    for name, (explained, x, p, q, more) in zip(
        ("celeba-lipstick", "celeba-makeup"), asked, strict=True
    ):
        model = four_models.model(name)
        assert explained.mu_bar is model.mu_bar
        assert torch.equal(p, model.predict(x).argmax(1).to(p))
        assert torch.equal(q, 1 - p)
        training = four_models.data(faces.MODELS[name], "train").images
        assert torch.equal(more["baselines"], model.pixels(training[:20]))
    cosine = F.cosine_similarity(a.flatten(1), b.flatten(1)).abs()
    assert claim.numbers["cosine"].mean == pytest.approx(float(cosine.mean()), rel=1e-5)
    for name, other in (("rank", range(8)), ("rank_control", [7, *range(7)])):
        importance = [maps_.abs().sum(1).flatten(1).numpy() for maps_ in (a, b)]
        rho = [
            scipy.stats.spearmanr(importance[0][i], importance[1][j]).statistic
            for i, j in enumerate(other)
        ]
        assert claim.numbers[name].mean == pytest.approx(sum(rho) / 8)


@pytest.mark.parametrize(
    ("same", "ours", "verdict"),
    [(False, 0.8, "supported"), (True, 0.8, "refuted"), (False, 0.02, "partly")],
)
def test_who_sees_it_too_refutes_that_others_do_not(
    four_models, generator, monkeypatch, same, ours, verdict
) -> None:
    a, b = torch.randn((2, 10, 3, 8, 8), generator=generator)
    other_maps(monkeypatch, a, a if same else b)
    claim = not_seen(four_models, 50, ours)
    assert claim.verdict == verdict
    assert "on 10 faces" in claim.measured

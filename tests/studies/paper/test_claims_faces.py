"""Claims about faces: certainty, regions, and models that look alike."""

from types import SimpleNamespace

import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from torch import Tensor

from ecinn.attribution.heatmaps import Heatmaps
from ecinn.auditing.measurement import audit
from ecinn.auditing.result import Audit, Comparison, Region, Similarity
from ecinn.data.dataset import Dataset
from ecinn.data.face_regions import REGION_NAMES
from ecinn.metrics.statistics import Interval, proportion
from ecinn.model import load
from ecinn.studies.paper import claims_faces as faces
from ecinn.studies.paper.artefact import Context
from ecinn.studies.paper.claim import claim_of
from ecinn.studies.paper.measuring import Sizes
from helpers.builders import random_images, small_model


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
    agreement = proportion(torch.tensor([True, True, False]))
    compared = Comparison("m", 3, *likeness, 0.5, agreement, None, torch.zeros(1, 2, 2))
    audit = audit_with(comparisons=(compared,))
    trained = {"lipstick": "distilled", "makeup": "fine-tuned"}
    claim = claim_of(faces.lipstick_is_makeup(audit, trained))
    assert claim.verdict == verdict
    assert "lipstick was distilled and makeup was fine-tuned." in claim.measured
    assert "two recipes" in claim.measured
    alike = claim_of(faces.lipstick_is_makeup(audit, dict.fromkeys(trained, "distilled")))
    assert "two recipes" not in alike.measured


def test_training_stages_are_read_from_the_model_files() -> None:
    """As docs/faces.md tells."""
    found = {name: faces.stages(load(name)) for name in ("celeba-lipstick", "celeba-makeup")}
    assert found == {
        "celeba-lipstick": "distilled from a teacher and fine-tuned",
        "celeba-makeup": "neither distilled nor fine-tuned",
    }


@pytest.mark.parametrize(
    ("of_q", "verdict"), [(0.95, "refuted"), (0.99995, "supported"), (0.3, "refuted")]
)
def test_less_certain_faces_refute_the_claim(of_q, verdict) -> None:
    q = torch.arange(100) % 2
    posterior = torch.stack([1 - q, q], 1) * of_q + torch.stack([q, 1 - q], 1) * (1 - of_q)
    audit = audit_with(
        flips=SimpleNamespace(q=q), after=SimpleNamespace(posterior=posterior.double())
    )
    claim = claim_of(faces.smiles_reach(audit, proportion(torch.ones(5, dtype=torch.bool)), 2.5))
    assert claim.verdict == verdict
    assert "confidence=" in claim.measured


def test_density_of_face_regions_decides() -> None:
    def regions(**density: float) -> tuple[Region, ...]:
        return tuple(Region(name, 0.1, near(value)) for name, value in density.items())

    whole = regions(mouth=2.5, eyes=1.6, cheeks=1.5, face=1.6, background=0.6)
    lips = regions(mouth=9.0, eyes=0.3, cheeks=0.3, face=1.2, background=0.3)
    assert claim_of(faces.whole_face(audit_with(regions=whole))).verdict == "supported"
    assert claim_of(faces.whole_face(audit_with(regions=lips))).verdict == "partly"


@pytest.mark.parametrize(
    ("mouth", "face", "background", "verdict"),
    [(2.0, 1.5, 0.4, "supported"), (2.0, 1.5, 0.6, "partly"), (0.9, 0.8, 1.2, "refuted")],
)
def test_an_unchanged_background_changes_less_than_half(mouth, face, background, verdict) -> None:
    density = {"mouth": mouth, "eyes": 1.31, "cheeks": 1.17, "face": face}
    regions = tuple(
        Region(name, 0.1, near(value))
        for name, value in {**density, "background": background}.items()
    )
    overall = SimpleNamespace(change=near(0.043))
    claim = claim_of(faces.background_stays(audit_with(regions=regions, overall=overall)))
    assert claim.verdict == verdict
    assert f"mouth changes {mouth:.2f} [{mouth - 0.02:.2f}, {mouth + 0.02:.2f}]" in claim.measured
    assert "the eyes 1.31 [" in claim.measured
    assert f"including hair {background:.2f} [" in claim.measured
    assert "0.043 [0.023, 0.063] for pixels" in claim.measured


@pytest.mark.parametrize(
    ("same", "other", "verdict"),
    [(0.6, 0.2, "supported"), (0.4, 0.2, "partly"), (0.9, 0.9, "partly"), (0.3, 0.3, "refuted")],
)
def test_smile_and_cheekbone_maps_are_compared_with_other_faces(same, other, verdict) -> None:
    likeness = [Similarity(near(0.0), near(0.0), near(v), near(0.0)) for v in (same, other)]
    agreement = proportion(torch.tensor([True, True, False, True]))
    compared = Comparison("m", 4, *likeness, 0.5, agreement, None, torch.zeros(1, 2, 2))
    claim = claim_of(faces.smile_is_cheekbones(audit_with(comparisons=(compared,))))
    assert claim.verdict == verdict
    assert f"|cos| is {same:.2f} [" in claim.measured
    assert "same for 75.0 % [" in claim.measured


def test_share_of_the_mouth_is_shown_in_percent() -> None:
    regions = tuple(Region(name, 0.37, near(1.5)) for name in REGION_NAMES)
    claim = claim_of(faces.whole_face(audit_with(regions=regions)))
    assert claim.measured.startswith("37 % of the change lies in the region of the mouth")
    assert "| mouth | 37.0 % | 1.50 [1.48, 1.52] |" in claim.table


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


def test_labels_are_counted_in_the_test_faces(four_models) -> None:
    claim = claim_of(faces.balanced_labels(four_models))
    counts = [round(40 * claim.numbers[name].mean) for name in faces.MODELS]
    assert counts == [8, 16, 24, 32]
    assert "smile 20.0 % [" in claim.measured
    # Of 40 faces, 8 are surely fewer than 45 %, 16 may be as many.
    assert claim.verdict == "partly"


def test_requested_confidence_is_read_from_the_stored_face(four_models) -> None:
    model, images = four_models.model("celeba-smile"), random_images(40, 3, 2, 7).images
    n, q = 12, 1 - model.predict(images).argmax(1)
    given = audit_with(images=images, flips=SimpleNamespace(q=q))
    asked, alpha = faces.sure_when_requested(model, given, n)
    sure, alphas = [], []
    for image, target in zip(images[:n], q.tolist(), strict=False):
        e = model.explain(image, target, confidence=1 - 1e-5)
        read = model.predict(e.stored_convincing[0])[0, target]
        sure.append(float(read) > 1 - 1e-4)
        alphas.append(float(e.alpha))
    assert (asked.mean, asked.n) == (pytest.approx(sum(sure) / n), n)
    assert alpha == pytest.approx(sum(alphas) / n, rel=1e-3)
    plain = model.explain(images[:n], q[:n, None]).alpha_1
    assert abs(alpha - float(plain.mean())) > 0.1


@pytest.mark.slow
def test_face_claims_use_the_audits_of_their_models(four_models) -> None:
    measured = faces.measure(four_models, Sizes(faces=10, face_maps=4))
    claims = {each.name: claim_of(each) for each in measured}
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
    assert claims["faces-sure"].numbers["reached"] == proportion(reached)
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
    return claim_of(faces.others_miss_it(lipstick, training, models, n, 0))


def test_maps_of_an_established_method_are_compared_alike(
    four_models, generator, monkeypatch
) -> None:
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
def test_similar_established_maps_refute_the_claim(
    four_models, generator, monkeypatch, same, ours, verdict
) -> None:
    a, b = torch.randn((2, 10, 3, 8, 8), generator=generator)
    other_maps(monkeypatch, a, a if same else b)
    claim = not_seen(four_models, 50, ours)
    assert claim.verdict == verdict
    assert "on 10 faces" in claim.measured

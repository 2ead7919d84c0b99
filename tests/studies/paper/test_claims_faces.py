"""Claims about faces: certainty, regions, and models that look alike."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from torch import Tensor

from ecinn.attribution.heatmaps import METHODS, Heatmaps
from ecinn.auditing.measurement import audit
from ecinn.auditing.result import Audit, Comparison, Region, Similarity
from ecinn.classifier.recipes import FineTuning
from ecinn.data.celeba import ATTRIBUTES
from ecinn.data.dataset import Dataset
from ecinn.data.face_regions import REGION_NAMES, region_mask
from ecinn.metrics.statistics import Interval, proportion
from ecinn.model import Model
from ecinn.studies.benchmark.face_quality import Realism
from ecinn.studies.paper import claims_faces as faces
from ecinn.studies.paper.artefact import Context
from ecinn.studies.paper.claim import Measurement, entries, judgement
from ecinn.studies.paper.columns import stages
from ecinn.studies.paper.measuring import Bench, ExplainedImages, Sizes
from helpers.builders import random_images, small_model
from helpers.face_judges import random_face_judges
from helpers.paper import count


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
    compared = Comparison("m", 3, *likeness, 0.5, agreement, None, torch.zeros(1, 2, 2), "α₁")
    audit = audit_with(comparisons=(compared,))
    trained = {"lipstick": "distilled", "makeup": "fine-tuned"}
    claim = judgement(faces.lipstick_is_makeup(audit, trained))
    assert claim.verdict == verdict
    assert "lipstick was distilled and makeup was fine-tuned." in claim.measured
    assert "two recipes" in claim.measured
    alike = judgement(faces.lipstick_is_makeup(audit, dict.fromkeys(trained, "distilled")))
    assert "two recipes" not in alike.measured


@pytest.mark.parametrize(
    ("weight", "finetuning", "trained"),
    [
        (0.8, True, "distilled from a teacher and fine-tuned"),
        (0.8, False, "distilled from a teacher"),
        (0.0, True, "fine-tuned"),
        (0.0, False, "neither distilled nor fine-tuned"),
    ],
)
def test_training_stages_are_those_of_the_recipe(weight, finetuning, trained) -> None:
    second = FineTuning(epochs=1, faithfulness=1.0, distillation_weight=1.0)
    model = small_model()
    recipe = replace(
        model.recipe, distillation_weight=weight, finetuning=second if finetuning else None
    )
    assert stages(Model(replace(model.checkpoint, recipe=recipe))) == trained


@pytest.mark.parametrize(
    ("of_q", "verdict"), [(0.95, "refuted"), (0.99995, "supported"), (0.3, "refuted")]
)
def test_less_certain_faces_refute_the_claim(of_q, verdict) -> None:
    q = torch.arange(100) % 2
    posterior = torch.stack([1 - q, q], 1) * of_q + torch.stack([q, 1 - q], 1) * (1 - of_q)
    audit = audit_with(
        flips=SimpleNamespace(q=q), after=SimpleNamespace(posterior=posterior.double())
    )
    claim = judgement(faces.smiles_reach(audit, proportion(torch.ones(5, dtype=torch.bool)), 2.5))
    assert claim.verdict == verdict
    assert "confidence=" in claim.measured


def test_density_of_face_regions_decides() -> None:
    def regions(**density: float) -> tuple[Region, ...]:
        return tuple(Region(name, 0.1, near(value)) for name, value in density.items())

    whole = regions(mouth=2.5, eyes=1.6, cheeks=1.5, face=1.6, background=0.6)
    lips = regions(mouth=9.0, eyes=0.3, cheeks=0.3, face=1.2, background=0.3)
    assert judgement(faces.whole_face(audit_with(regions=whole))).verdict == "supported"
    assert judgement(faces.whole_face(audit_with(regions=lips))).verdict == "partly"


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
    claim = judgement(faces.background_stays(audit_with(regions=regions, overall=overall)))
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
    compared = Comparison("m", 4, *likeness, 0.5, agreement, None, torch.zeros(1, 2, 2), "α₁")
    claim = judgement(faces.smile_is_cheekbones(audit_with(comparisons=(compared,))))
    assert claim.verdict == verdict
    assert f"|cos| is {same:.2f} [" in claim.measured
    assert "same for 75.0 % [" in claim.measured


def test_share_of_the_mouth_is_shown_in_percent() -> None:
    regions = tuple(Region(name, 0.37, near(1.5)) for name in REGION_NAMES)
    claim = judgement(faces.whole_face(audit_with(regions=regions)))
    assert claim.measured.startswith("37 % of the change lies in the region of the mouth")
    assert "| mouth | 37.0 % | 1.50 [1.48, 1.52] |" in claim.table.markdown()


SPLITS = {"test": 7, "train": 8, "validation": 9}
"""With the seeds of their images."""
OPEN = ATTRIBUTES.index("Mouth_Slightly_Open")


@pytest.fixture
def models(generator) -> dict[str, Model]:
    """Models of faces that differ in where they lead, by dataset."""
    made = {}
    for dataset in faces.DATASETS:
        model = small_model(3, 2, dataset)
        noise = torch.randn(model.mu_bar.shape, generator=generator)
        model.mu_bar = model.mu_bar + 0.3 * noise
        recipe = replace(model.recipe, name=dataset.partition("/")[2])
        model.checkpoint = replace(model.checkpoint, recipe=recipe)
        made[dataset] = model
    return made


@pytest.fixture
def context(generator) -> Context:
    """Labels of which few, half or most are 1, and random attributes."""
    images = {split: random_images(40, 3, 2, seed).images for split, seed in SPLITS.items()}
    attributes = torch.randint(2, (40, 40), generator=generator).byte()
    labels = {
        dataset: (torch.arange(40) % 5 < number + 1).long()
        for number, dataset in enumerate(faces.DATASETS)
    }
    context = Context(seed=3)
    vars(context)["data"] = lambda dataset, split: Dataset(
        images[split], labels[dataset], ("a", "b"), attributes
    )
    return context


def test_labels_are_counted_in_the_test_faces(context) -> None:
    claim = judgement(faces.balanced_labels(context))
    counts = [round(40 * claim.numbers[name].mean) for name in faces.DATASETS]
    assert counts == [8, 16, 24, 32]
    assert "smile 20.0 % [" in claim.measured
    # Of 40 faces, 8 are surely fewer than 45 %, 16 may be as many.
    assert claim.verdict == "partly"


def test_requested_confidence_is_that_of_the_stored_face(models) -> None:
    model, images = models[faces.SMILE], random_images(40, 3, 2, 7).images
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
def test_face_claims_use_the_audits_of_their_models(context, models, monkeypatch) -> None:
    monkeypatch.setattr(faces, "face_judges", lambda bench: None)
    bench = Bench(context, Sizes(faces=10, face_maps=4))
    claims = {each.name: judgement(each) for each in faces.measure(bench, models)}
    made = []
    for name, other in ((faces.SMILE, faces.CHEEKBONES), (faces.LIPSTICK, faces.MAKEUP)):
        data, others = context.data(name, "test"), [models[other]]
        made.append(audit(models[name], data, others=others, n=10, seed=3))
    smile, lipstick = made
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
    is_open = context.data(faces.SMILE, "test").attributes[smile.index, OPEN].bool()
    expected = judgement(faces.hard_mouths(smile, is_open, 3))
    assert claims["hard-mouths"].numbers == expected.numbers
    assert claims["faithful"].numbers.keys() == {*METHODS, "random order"}
    assert "over 4 faces" in claims["faithful"].measured


@pytest.mark.parametrize(
    ("given", "judged"),
    [
        (
            (faces.SMILE,),
            {"faces-sure", "background", "hard-mouths", "faithful", "faces-realistic"},
        ),
        ((faces.LIPSTICK,), {"whole-face"}),
        ((faces.CHEEKBONES, faces.MAKEUP), set()),
    ],
)
def test_only_claims_whose_models_are_at_hand_are_measured(
    context, models, monkeypatch, given, judged
) -> None:
    monkeypatch.setattr(faces, "faithful", lambda *_: Measurement("faithful", {}))
    asked = []
    monkeypatch.setattr(
        faces, "unrealistic", lambda *a: asked.append(a) or Measurement("faces-realistic", {})
    )
    monkeypatch.setattr(faces, "face_judges", lambda bench: random_face_judges())
    monkeypatch.setattr(ExplainedImages, "maps", lambda *_: {})
    bench = Bench(context, Sizes(faces=6, face_maps=2))
    measured = faces.measure(bench, {dataset: models[dataset] for dataset in given})
    assert {each.name for each in measured} == judged
    for _, _, reference, _ in asked:
        others = random_images(40, 3, 2, SPLITS["validation"])
        assert torch.equal(reference.images, others.images)
    # As many as the file asks of such a column.
    possible = {n for n, e in entries().items() if e.models and {*e.models} <= {*given}}
    assert possible == judged


def realism(target: str, images: str, *measured: float) -> Realism:
    """Shares inside the manifold, then Fréchet distances, of both judges."""
    shares, distances = (
        dict(zip(("residual", "separable"), map(near, part), strict=True))
        for part in (measured[:2], measured[2:])
    )
    return Realism(target, images, 7, distances, shares)


@pytest.mark.parametrize(
    ("made", "verdict"),
    [
        ((0.5, 0.4, 1.6, 2.6), "supported"),
        ((0.5, 0.79, 1.5, 2.5), "partly"),
        ((0.8, 0.9, 1.4, 2.9), "partly"),
        ((0.8, 0.9, 1.4, 2.51), "refuted"),
    ],
)
def test_faces_outside_the_manifold_or_far_away_are_unrealistic(
    context, models, monkeypatch, made, verdict
) -> None:
    asked = []

    def measured(judges, data, p, counterfactuals, reference, generator) -> tuple[Realism, ...]:
        asked.append((judges, data, p, counterfactuals, reference))
        return tuple(
            realism(target, images, *values)
            for target in data.class_names
            for images, values in (
                ("counterfactuals", made),
                ("real faces", (0.8, 0.8, 1.5, 2.5)),
                ("unchanged", (0.1, 0.1, 9.0, 9.0)),
            )
        )

    monkeypatch.setattr(faces, "measure_realism", measured)
    given, model = random_face_judges(), models[faces.SMILE]
    smile = faces.audited(Bench(context, Sizes(faces=8)), model, None)
    reference = random_images(9, 3, 2, 3)
    claim = judgement(faces.unrealistic(smile, given, reference, 0))
    assert claim.verdict == verdict
    # Intervals are as wide as ± 0.02; there are two targets.
    fewer = 2 * sum(share < 0.76 for share in made[:2])
    farther = 2 * sum(each > real + 0.04 for each, real in zip(made[2:], (1.5, 2.5), strict=True))
    assert f"In {fewer} of 4 comparisons" in claim.measured
    assert f"in {farther} of 4 their Fréchet distance" in " ".join(claim.measured.split())
    ((judges, data, p, counterfactuals, others),) = asked
    assert (judges, others) == (given, reference)
    assert torch.equal(data.images, smile.images)
    assert torch.equal(p, smile.flips.p)
    assert torch.equal(counterfactuals["counterfactuals"], smile.flips.counterfactuals)
    assert claim.table.rows[1][:4] == (smile.class_names[0], "real faces", "7", "1.50")


def turned_faces(p_q: Tensor, size: Tensor, q: Tensor) -> Audit:
    """Faces whose change at the mouth is `size`, and elsewhere something else."""
    change = torch.full((len(q), 3, 64, 64), 0.7)
    change[:, :, region_mask("mouth", 64, 64)] = -size[:, None, None]
    posterior = torch.stack([torch.where(q == 0, p_q, 1 - p_q), torch.where(q == 1, p_q, 1 - p_q)])
    return audit_with(
        images=torch.zeros((len(q), 3, 64, 64), dtype=torch.uint8),
        flips=SimpleNamespace(q=q, change=change),
        after=SimpleNamespace(posterior=posterior.T),
    )


def test_mouths_that_must_open_or_close_are_compared_with_the_others(generator) -> None:
    n = 80
    q, is_open = torch.randint(2, (2, n), generator=generator)
    p_q, size = torch.rand((2, n), generator=generator)
    claim = judgement(faces.hard_mouths(turned_faces(p_q, size, q), is_open.bool(), 0))
    for name, target in (("opened", 1), ("closed", 0)):
        found = claim.numbers[name]
        # A smile needs an open mouth, a frown a closed one.
        wrong = [i for i in range(n) if q[i] == target and is_open[i] != target]
        right = [i for i in range(n) if q[i] == target and is_open[i] == target]
        for group, rows in ((found["wrong"], wrong), (found["right"], right)):
            assert group["reached"].n == len(rows)
            assert count(group["reached"]) == sum(float(p_q[i]) > 0.5 for i in rows)
            assert group["p_q"].mean == pytest.approx(float(p_q[rows].mean()), rel=1e-5)
            assert group["change"].mean == pytest.approx(float(size[rows].mean()), rel=1e-5)
        apart = float(p_q[wrong].mean() - p_q[right].mean())
        assert found["less_sure"].mean == pytest.approx(apart, abs=1e-5)
        apart = float(size[wrong].mean() - size[right].mean())
        assert found["more_change"].mean == pytest.approx(apart, abs=1e-5)


@pytest.mark.parametrize(
    ("sure", "larger", "verdict"),
    [
        ((-0.3, -0.3), (0.1, 0.1), "supported"),
        ((-0.3, 0.0), (0.1, 0.0), "partly"),
        ((0.2, 0.2), (-0.1, -0.1), "refuted"),
    ],
)
def test_hard_mouths_are_less_certain_and_change_more(generator, sure, larger, verdict) -> None:
    n = 200
    q, is_open = torch.arange(n) % 2, torch.arange(n) // 2 % 2
    noise = 0.05 * torch.rand((2, n), generator=generator)
    must_change = q != is_open
    p_q = 0.6 + must_change * torch.tensor(sure)[q] + noise[0]
    size = 0.2 + must_change * torch.tensor(larger)[q] + noise[1]
    claim = judgement(faces.hard_mouths(turned_faces(p_q, size, q), is_open.bool(), 0))
    assert claim.verdict == verdict
    assert [row[:3] for row in claim.table.rows] == [
        ("a smile", "closed", "50"), ("a smile", "open", "50"),
        ("a frown", "open", "50"), ("a frown", "closed", "50"),
    ]  # fmt: skip


def test_a_group_without_faces_is_uncertain() -> None:
    q = torch.ones(6, dtype=torch.long)
    audit = turned_faces(torch.full((6,), 0.9), torch.full((6,), 0.1), q)
    claim = judgement(faces.hard_mouths(audit, torch.zeros(6, dtype=torch.bool), 0))
    assert claim.verdict == "refuted"
    assert claim.numbers["opened"]["right"]["reached"].n == 0
    assert claim.numbers["opened"]["less_sure"].low == -1


def other_maps(monkeypatch, *given: Tensor) -> list[tuple]:
    """Make the established method give these, model by model; what it was asked for."""
    asked, answers = [], iter(given)

    def made(explained, x, p, q, method, **more) -> Heatmaps:
        asked.append((explained, x, p, q, more))
        return Heatmaps(method, next(answers), torch.zeros(len(x)), 2)

    monkeypatch.setattr(faces, "heatmaps", made)
    return asked


def not_seen(context: Context, models: dict[str, Model], n: int, ours: float):
    data = context.data(faces.LIPSTICK, "test")
    models = {name: models[name] for name in (faces.LIPSTICK, faces.MAKEUP)}
    alike = Similarity(near(0.0), near(0.0), near(ours), near(0.0))
    compared = SimpleNamespace(same=alike)
    index = torch.arange(10)
    lipstick = audit_with(index=index, images=data.images[:10], comparisons=(compared,))
    training = context.data(faces.LIPSTICK, "train")
    return judgement(faces.others_miss_it(lipstick, training, models, n, 0))


def test_maps_of_an_established_method_are_compared_alike(
    context, models, generator, monkeypatch
) -> None:
    """|cos| and ranks of two models' maps of a face, and of another face's."""
    a = torch.randn((8, 3, 8, 8), generator=generator)
    b = a + 2 * torch.randn(a.shape, generator=generator)
    b[::2] *= -1
    asked = other_maps(monkeypatch, a, b)
    claim = not_seen(context, models, 8, 0.5)
    for name, (explained, x, p, q, more) in zip(
        (faces.LIPSTICK, faces.MAKEUP), asked, strict=True
    ):
        model = models[name]
        assert explained.mu_bar is model.mu_bar
        assert torch.equal(p, model.predict(x).argmax(1).to(p))
        assert torch.equal(q, 1 - p)
        training = context.data(name, "train").images
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
    context, models, generator, monkeypatch, same, ours, verdict
) -> None:
    a, b = torch.randn((2, 10, 3, 8, 8), generator=generator)
    other_maps(monkeypatch, a, a if same else b)
    claim = not_seen(context, models, 50, ours)
    assert claim.verdict == verdict
    assert "on 10 faces" in claim.measured

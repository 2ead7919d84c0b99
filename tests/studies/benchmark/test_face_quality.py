"""Judgements of faces: counted one by one, and realism by its definition."""

import dataclasses

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor, nn

from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.recipes import CELEBA_ATTRIBUTES
from ecinn.data.dataset import Dataset
from ecinn.flow.network import Architecture, Stage
from ecinn.model import Model
from ecinn.pixels import to_pixels
from ecinn.studies.benchmark.face_quality import (
    JudgePanel,
    convinced,
    measure_realism,
    show_samples,
)
from ecinn.studies.benchmark.faces import TIPPING, ask_panel, change_faces
from ecinn.studies.face_judges import FaceJudges
from ecinn.training.calibration import calibrate
from helpers.builders import randomise, with_default
from helpers.face_judges import random_face_judges

N = 24
NAMES = ("not smiling", "smiling")


def noise(n: int, generator: torch.Generator) -> Dataset:
    images = torch.randint(256, (n, 3, 16, 16), generator=generator, dtype=torch.uint8)
    return Dataset(images, torch.randint(2, (n,), generator=generator), NAMES)


@pytest.fixture
def data(generator: torch.Generator) -> Dataset:
    return noise(N, generator)


@pytest.fixture
def model(data: Dataset) -> Model:
    architecture = Architecture(3, 16, 16, 2, (Stage(1, 8), Stage(1, 8)), dense_width=0)
    recipe = dataclasses.replace(CELEBA_ATTRIBUTES, name="celeba-smile", architecture=architecture)
    weights = randomise(GenerativeClassifier(architecture), scale=0.2).state_dict()
    return Model(calibrate(recipe, data, weights, torch.device("cpu"), {}))


class Linear(nn.Module):
    """Reads two classes from the mean of every channel."""

    def __init__(self, data: Dataset, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = 50 * torch.randn((3, 2), generator=generator)
        self.bias = -(to_pixels(data.images).mean((2, 3)) @ self.weight).median(0).values

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3)) @ self.weight + self.bias


class Varied(FaceJudges):
    """Judges that know nothing, but whose answers vary about one half."""

    def __init__(self, data: Dataset) -> None:
        judges = random_face_judges()
        super().__init__(judges.attributes, judges.settings)
        self.load_state_dict(judges.state_dict())
        self.eval().requires_grad_(requires_grad=False)
        for family, scores in self.scores(data.images).items():
            head = self.networks[family].head
            head.bias -= scores.median(0).values


@pytest.fixture
def panel(data: Dataset, generator: torch.Generator) -> JudgePanel:
    return JudgePanel("Smiling", Varied(data), Linear(data, generator))


@pytest.mark.parametrize("default", [None, 0.8])
def test_faces_are_counted_one_by_one(
    model: Model, data: Dataset, panel: JudgePanel, default: float | None
) -> None:
    """Every network judges the counterfactuals of the faces that it reads as the model does."""
    model = model if default is None else with_default(model, default)
    own = "99 % requested" if default is None else "80 % requested (this model's default)"
    asked = {
        each.images: each
        for each in ask_panel(model, data, change_faces(model, data.images), panel, 0)
    }
    families = ("residual", "separable", "Inception-V3")
    requests = {TIPPING: "alpha_1", "α₁ (the paper's)": "alpha_1", own: default or 0.99}
    assert list(asked) == ["real faces", *requests, "samples at T = 0.7"]
    for kind, confidence in requests.items():
        judged, right, change = dict.fromkeys(families, 0), dict.fromkeys(families, 0), 0.0
        for image in data.images:
            e = model.explain(image[None], confidence=confidence)
            stored = (e.stored_tipping_point if kind == TIPPING else e.stored_convincing)[0]
            change += float((to_pixels(stored) - to_pixels(image)).abs().mean()) / N
            before, after = panel.probabilities(image[None]), panel.probabilities(stored)
            for family in families:
                if (before[family] > 0.5) == (e.p == 1):
                    judged[family] += 1
                    right[family] += int((after[family] > 0.5) == (e.q[0] == 1))
        assert asked[kind].change.mean == pytest.approx(change, rel=1e-4)
        for family, share in asked[kind].shares.items():
            assert 0 < share.n == judged[family] < N
            assert share.mean == pytest.approx(right[family] / judged[family])
    correct = {
        family: sum(int(read[i] == data.labels[i]) for i in range(N)) / N
        for family, read in panel.read(data.images).items()
    }
    real = asked["real faces"]
    assert {family: share.mean for family, share in real.shares.items()} == pytest.approx(correct)
    for each in (real, asked["samples at T = 0.7"]):
        assert (each.change, each.outside) == (None, None)


def test_a_panel_asks_every_network(data: Dataset, panel: JudgePanel) -> None:
    said = panel.probabilities(data.images)
    for family, probability in panel.judges.probabilities(data.images, "Smiling").items():
        assert torch.equal(said[family], probability)
    logits = panel.inception(to_pixels(data.images))
    torch.testing.assert_close(said["Inception-V3"], (logits[:, 1] - logits[:, 0]).sigmoid())
    assert panel.read(data.images)["Inception-V3"].tolist() == logits.argmax(1).tolist()
    assert set(dataclasses.replace(panel, inception=None).read(data.images)) == {
        "residual",
        "separable",
    }


def test_samples_have_both_classes(model: Model, panel: JudgePanel) -> None:
    """The batches are those of `Model.sample` with one seed after another."""
    shown = show_samples(panel, model, 70, 0.3, seed=5)
    assert shown.images == "samples at T = 0.3"
    labels = torch.arange(70) % 2
    parts = [
        model.sample(labels[:50], temperature=0.3, seed=5),
        model.sample(labels[50:], temperature=0.3, seed=6),
    ]
    for family, read in panel.read(torch.cat(parts)).items():
        assert shown.shares[family].mean == pytest.approx(float((read == labels).double().mean()))
        assert shown.shares[family].n == 70


def test_those_that_nobody_judges_have_no_share(data: Dataset, panel: JudgePanel) -> None:
    nobody = dict.fromkeys(panel.read(data.images), torch.zeros(N, dtype=torch.bool))
    shares = convinced(panel, "none", data.images, data.labels, nobody).shares
    assert {(share.mean, share.low, share.high, share.n) for share in shares.values()} == {
        (0.0, 0.0, 1.0, 0)
    }


def test_realism_is_measured_on_equal_numbers(generator: torch.Generator) -> None:
    """Fréchet distance and precision written out with NumPy, on the features of all faces."""
    judges, data, reference = random_face_judges(), noise(90, generator), noise(80, generator)
    changed, p = data.images.flip(2), torch.randint(2, (90,), generator=generator)
    measured = measure_realism(judges, data, p, {"flipped": changed}, reference, generator)
    assert [(each.target, each.images) for each in measured] == [
        (name, kind)
        for name in NAMES
        for kind in ("flipped", "real faces", "unchanged faces of p")
    ]
    for q, results in enumerate((measured[:3], measured[3:])):
        n = min(int((p != q).sum()), int((data.labels == q).sum()))
        assert {each.n for each in results} == {n}
        for family in ("residual", "separable"):
            real = (
                judges.features(reference.images[reference.labels == q])[family].double().numpy()
            )
            distance = np.linalg.norm(real[:, None] - real, axis=2)
            radius = np.sort(distance, axis=1)[:, 3]
            # The larger set is sampled: compare where all of it is used.
            whole = {"flipped": (changed, p != q), "real faces": (data.images, data.labels == q)}
            whole["unchanged faces of p"] = (data.images, p != q)
            for each in results:
                images, rows = whole[each.images]
                if int(rows.sum()) != n:
                    continue
                fake = judges.features(images[rows])[family].double().numpy()
                mean = ((fake.mean(0) - real.mean(0)) ** 2).sum()
                covariances = [np.cov(f, rowvar=False) for f in (fake, real)]
                root = scipy.linalg.sqrtm(covariances[0] @ covariances[1]).real
                frechet = mean + np.trace(covariances[0] + covariances[1] - 2 * root)
                assert each.frechet[family].mean == pytest.approx(frechet, rel=1e-3, abs=1e-6)
                near = np.linalg.norm(fake[:, None] - real, axis=2) <= radius
                assert each.precision[family].mean == pytest.approx(near.any(1).mean())
                assert each.precision[family].n == n


def test_real_faces_are_more_realistic_than_others(monkeypatch, generator) -> None:
    """With mean colours as features, darkened faces are far from the real ones."""

    def colours(judges: FaceJudges, images: Tensor) -> dict[str, Tensor]:
        return {"colours": images.float().mean((2, 3))}

    monkeypatch.setattr(FaceJudges, "features", colours)
    judges, data, reference = random_face_judges(), noise(200, generator), noise(200, generator)
    dark = {"dark": data.images - data.images // 4}
    for_q = measure_realism(judges, data, data.labels, dark, reference, generator)
    for q in range(2):
        dark_ones, real, unchanged = for_q[3 * q : 3 * q + 3]
        assert dark_ones.precision["colours"].mean == 0
        for each in (real, unchanged):
            assert dark_ones.frechet["colours"].low > 50 * each.frechet["colours"].mean
            assert each.precision["colours"].mean > 0.7


def test_too_few_faces_have_no_realism(generator: torch.Generator) -> None:
    judges, data = random_face_judges(), noise(8, generator)
    few = dataclasses.replace(data, labels=torch.zeros(8, dtype=torch.long))
    measured = measure_realism(judges, few, 1 - few.labels, {}, few, generator)
    assert {each.target for each in measured} == {"not smiling"}

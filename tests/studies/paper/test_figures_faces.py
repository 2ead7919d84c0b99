"""Figures 8 and 9, with small random networks instead of the face models."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from ecinn.attribution.heatmaps import METHODS, heatmaps
from ecinn.attribution.scores import ExplainedINN
from ecinn.data.celeba import ATTRIBUTES
from ecinn.data.dataset import Dataset
from ecinn.drawing import pictures
from ecinn.errors import InputError
from ecinn.studies.face_judges import load_face_judges
from ecinn.studies.paper import figures_faces as faces
from ecinn.studies.paper import supplement
from ecinn.studies.paper.artefact import Context
from helpers.builders import small_model

pytestmark = pytest.mark.slow

CNN = faces.Faces._cnn


@pytest.fixture
def context(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> Context:
    """Every model is the small one; labels are what it reads, so that faces can be drawn."""
    model = small_model(3, 2, "celeba/Smiling")
    images = torch.randint(256, (60, 3, 8, 8), generator=generator).to(torch.uint8)
    labels = model.predict(images).argmax(1)
    assert 10 <= int(labels.sum()) <= 50
    data = Dataset(images, labels, ("a", "b"))
    training = torch.randint(256, (230, 3, 8, 8), generator=generator).to(torch.uint8)
    splits = {"test": data, "train": Dataset(training, torch.arange(230) % 2, ("a", "b"))}
    made = Context()
    made.__dict__["model"] = lambda name: model
    made.__dict__["data"] = lambda dataset, split: splits[split]
    monkeypatch.setattr(faces.Faces, "_cnn", other_network)
    return made


def with_inception(context: Context, folder: Path) -> Context:
    given = replace(context, inception=folder)
    given.__dict__.update({k: context.__dict__[k] for k in ("model", "data")})
    return given


def other_network(*_: object) -> nn.Module:
    network = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    return network.eval().requires_grad_(False)  # noqa: FBT003


def shown(figure) -> list[np.ndarray]:
    return [np.asarray(image.get_array()) for image in figure.axes[0].images]


def test_figure_8_has_five_faces_in_each_direction(context: Context) -> None:
    made = faces.figure_8(context)
    rows = made.data["figure-8"]
    assert [row["p"] for row in rows] == 5 * ["a"] + 5 * ["b"]
    assert [row["q"] for row in rows] == 5 * ["b"] + 5 * ["a"]
    arrays, images = shown(made.figures["figure-8"]), context.data("", "test").images
    for array, row in zip(arrays[:10], rows, strict=True):
        assert np.array_equal(array, pictures.image_array(images[row["test_image"]]))
    words = [text.get_text() for text in made.figures["figure-8"].axes[0].texts]
    assert [words.count(f"→ {name}") for name in ("smile", "¬smile")] == [5, 5]


def test_maps_belong_to_the_named_methods(context: Context) -> None:
    made = faces.figure_9(context)
    arrays = shown(made.figures["figure-9a"])
    assert len(arrays) == 4 * 8
    model, data = context.model(""), context.data("", "test")
    draws = torch.Generator().manual_seed(9)
    first = faces.draw_faces(context, 1, draws)[0]
    place = made.data["figure-9"]["celeba-smile"][0]["test_image"]
    assert place == int(first.places[0])
    x = model.pixels(data.images[place])
    p = model.predict(data.images[place]).argmax(1)
    inn, sample = ExplainedINN(model.classifier, model.mu_bar), first.explained.training
    # Two hundred different training faces, in random order.
    training = model.pixels(context.data("", "train").images)
    same = (sample[:, None] == training).flatten(2).all(2)
    found = same.nonzero()[:, 1].tolist()
    assert len(set(found)) == len(found) == 200
    assert found != sorted(found)
    read = ("¬smile", "smile")[int(p)]
    words = [text.get_text() for text in made.figures["figure-9a"].axes[0].texts]
    assert words.count(read) == 1
    assert words[:8] == ["input", "counterf.", *words[2:7], "white noise"]
    assert first.names == [read]
    for array, method in zip(arrays[2:7], METHODS, strict=True):
        how = {"baseline": sample.mean(0), "baselines": sample[:20]}
        expected = heatmaps(inn, x, p, 1 - p, method, **how).maps[0]
        limit = np.percentile(expected.double().mean(0).abs().numpy(), 99.5)
        drawn = pictures.heatmap_array(expected, float(limit)).astype(int)
        assert np.abs(drawn - array).max() <= 2
    noise = torch.randn(x.shape, generator=draws) * (x - sample.mean(0))
    limit = np.percentile(noise[0].double().mean(0).abs().numpy(), 99.5)
    drawn = pictures.heatmap_array(noise[0], float(limit)).astype(int)
    assert np.abs(drawn - arrays[7]).max() <= 2


def test_every_row_shows_a_face_that_all_models_classify_correctly(
    context: Context, generator: torch.Generator
) -> None:
    """Every model has random labels of its own; few faces are right for all four."""
    model, data = context.model(""), context.data("", "test")
    training = context.data("", "train")
    predicted = model.predict(data.images).argmax(1)
    right = torch.rand((4, 60), generator=generator) < 0.6
    labelled = {
        name: replace(data, labels=torch.where(right[row], predicted, 1 - predicted))
        for row, name in enumerate(faces.FACE_MODELS)
    }
    one = Context()
    one.__dict__["data"] = lambda dataset, split: training
    one.__dict__["tested"] = lambda name: (model, labelled[name])
    good = right.all(0).nonzero()[:, 0].tolist()
    assert 2 < len(good) < 20
    numbers = faces.figure_9(one).data["figure-9"]
    places = {row["test_image"] for rows in numbers.values() for row in rows}
    assert len(places) == 1
    assert places <= set(good)
    drawn = faces.draw_faces(one, len(good), generator)
    for label in drawn:
        assert sorted(label.places.tolist()) == good
        assert torch.equal(label.explained.training, drawn[0].explained.training)
    with pytest.raises(InputError, match=f"only {len(good)} of 60"):
        faces.draw_faces(one, len(good) + 1, generator)


def test_another_network_explains_the_same_faces(context) -> None:
    made = faces.figure_9(context)
    inn, cnn = (shown(made.figures[f"figure-9{part}"]) for part in "ab")
    assert len(cnn) == 4 * 6
    for row in range(4):
        assert np.array_equal(inn[8 * row], inn[0])
        assert np.array_equal(cnn[6 * row], inn[0])
        assert not np.array_equal(cnn[6 * row + 1], inn[8 * row + 3])


def test_a_missing_network_names_its_command(context, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(faces.Faces, "_cnn", CNN)
    with pytest.raises(InputError, match="ecinn inception celeba/Smiling --out"):
        faces.figure_9(with_inception(context, tmp_path))


def test_inception_is_loaded_with_the_models_classes(context, tmp_path, monkeypatch) -> None:
    asked = []

    def read(path, device, class_names=None) -> SimpleNamespace:
        asked.append((path, class_names))
        return SimpleNamespace(classifier=other_network())

    monkeypatch.setattr(faces.Faces, "_cnn", CNN)
    monkeypatch.setattr(faces, "load_inception", read)
    (tmp_path / "Smiling.safetensors").touch()
    made = faces.figure_9(with_inception(context, tmp_path))
    assert "on Inception-V3, for the same labels" in made.captions["figure-9b"]
    assert asked == 4 * [(tmp_path / "Smiling.safetensors", ("a", "b"))]


def test_without_inception_a_shipped_judge_reads_the_label(context, monkeypatch) -> None:
    """In the caption, too."""
    monkeypatch.setattr(faces.Faces, "_cnn", CNN)
    judges = load_face_judges()
    network = faces.draw_faces(context, 1, torch.Generator())[0]._cnn()
    x = torch.rand(3, 3, 64, 64)
    smiling = judges.networks["residual"](x)[:, ATTRIBUTES.index("Smiling")]
    assert torch.allclose(network(x).softmax(1)[:, 1], smiling.sigmoid(), atol=1e-6)
    monkeypatch.setattr(faces.Faces, "_cnn", other_network)
    assert "residual network" in faces.figure_9(context).captions["figure-9b"]


def test_the_supplement_has_equally_many_faces_in_both_directions(context, monkeypatch) -> None:
    monkeypatch.setattr(supplement, "FACES", 8)
    made = supplement.figure_8(context)
    numbers, pages = made.data["supplement-8"], made.books["supplement-8"]
    assert list(numbers) == list(faces.FACE_MODELS)
    assert len(pages) == 4
    images = context.data("", "test").images
    for sheets, page in zip(numbers.values(), pages, strict=True):
        assert [[row["p"] + row["q"] for row in sheet] for sheet in sheets] == [
            4 * ["ab"], 4 * ["ba"],
        ]  # fmt: skip
        rows = [row for sheet in sheets for row in sheet]
        assert len({row["test_image"] for row in rows}) == 8
        arrays = shown(page)
        assert len(arrays) == 2 * 4 * 4
        for sheet in range(2):
            for column in range(4):
                row = sheets[sheet][column]
                wanted = pictures.image_array(images[row["test_image"]])
                assert np.array_equal(arrays[16 * sheet + column], wanted)
    own = [row["test_image"] for row in faces.figure_8(context).data["figure-8"]]
    drawn = [row["test_image"] for sheet in numbers["celeba-smile"] for row in sheet]
    assert own[:4] != drawn[:4]


def test_the_supplement_shows_the_same_faces_on_both_networks(
    context, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(supplement, "HEATMAP_FACES", 3)
    shipped = supplement.figure_9(context)
    given = supplement.figure_9(with_inception(context, tmp_path))
    assert given.data == shipped.data
    captions = [made.captions["supplement-9"] for made in (shipped, given)]
    assert "a residual CNN" in captions[0]
    assert "Inception-V3" in captions[1]
    pages = shipped.books["supplement-9"]
    assert len(pages) == 4
    # Input, counterfactual, five methods and white noise; input, four methods and white noise.
    ours, others = ([a for page in pages[part::2] for a in shown(page)] for part in (0, 1))
    assert (len(ours), len(others)) == (3 * 4 * 8, 3 * 4 * 6)
    images = context.data("", "test").images
    for rows in shipped.data["supplement-9"].values():
        for face, row in enumerate(rows):
            wanted = pictures.image_array(images[row["test_image"]])
            for label in range(4 * face, 4 * face + 4):
                assert np.array_equal(ours[8 * label], wanted)
                assert np.array_equal(others[6 * label], wanted)
                assert not np.array_equal(ours[8 * label + 3], others[6 * label + 1])

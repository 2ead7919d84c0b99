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
from ecinn.data.dataset import Dataset
from ecinn.drawing import pictures
from ecinn.errors import InputError
from ecinn.studies.paper import figures_faces as faces
from ecinn.studies.paper import supplement
from ecinn.studies.paper.artefact import Context
from helpers.builders import small_model

pytestmark = pytest.mark.slow


@pytest.fixture
def context(generator: torch.Generator) -> Context:
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
    assert list(made.figures) == ["figure-9a"]
    assert "--inception" in made.captions["figure-9a"]
    arrays = shown(made.figures["figure-9a"])
    assert len(arrays) == 4 * 7
    model, data = context.model(""), context.data("", "test")
    draws = torch.Generator().manual_seed(9)
    first = faces.Faces(context, "celeba-smile", 1, draws)
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
    assert [text.get_text() for text in made.figures["figure-9a"].axes[0].texts].count(read) == 1
    assert first.names == [read]
    for array, method in zip(arrays[2:7], METHODS, strict=True):
        how = {"baseline": sample.mean(0), "baselines": sample[:20]}
        expected = heatmaps(inn, x, p, 1 - p, method, **how).maps[0]
        limit = np.percentile(expected.double().mean(0).abs().numpy(), 99.5)
        drawn = pictures.heatmap_array(expected, float(limit)).astype(int)
        assert np.abs(drawn - array).max() <= 2


def test_inception_explains_the_same_faces(context, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(faces.Faces, "_inception", other_network)
    made = faces.figure_9(with_inception(context, tmp_path))
    inn, cnn = (shown(made.figures[f"figure-9{part}"]) for part in "ab")
    assert len(cnn) == 4 * 5
    for row in range(4):
        assert np.array_equal(cnn[5 * row], inn[7 * row])
        assert not np.array_equal(cnn[5 * row + 1], inn[7 * row + 3])


def test_a_missing_network_names_its_command(context, tmp_path) -> None:
    with pytest.raises(InputError, match="ecinn inception celeba/Smiling --out"):
        faces.figure_9(with_inception(context, tmp_path))


def test_inception_is_loaded_with_the_models_classes(context, tmp_path, monkeypatch) -> None:
    asked = []

    def read(path, device, class_names=None) -> SimpleNamespace:
        asked.append((path, class_names))
        return SimpleNamespace(classifier=other_network())

    monkeypatch.setattr(faces, "load_inception", read)
    (tmp_path / "Smiling.safetensors").touch()
    faces.figure_9(with_inception(context, tmp_path))
    assert asked == 4 * [(tmp_path / "Smiling.safetensors", ("a", "b"))]


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
    monkeypatch.setattr(supplement, "HEATMAP_FACES", 2)
    alone = supplement.figure_9(context)
    assert len(alone.books["supplement-9"]) == 4
    assert list(alone.skipped.values()) == ["inception"]
    monkeypatch.setattr(faces.Faces, "_inception", other_network)
    both = supplement.figure_9(with_inception(context, tmp_path))
    assert not both.skipped
    assert both.data == alone.data
    pages = both.books["supplement-9"]
    assert len(pages) == 8
    for inn, cnn in zip(pages[::2], pages[1::2], strict=True):
        # Input, counterfactual and five methods; input and four.
        ours, others = shown(inn), shown(cnn)
        assert (len(ours), len(others)) == (2 * 7, 2 * 5)
        for row in range(2):
            assert np.array_equal(ours[7 * row], others[5 * row])
            assert not np.array_equal(ours[7 * row + 3], others[5 * row + 1])

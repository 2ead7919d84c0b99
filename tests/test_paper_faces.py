"""Figures 8 and 9 on small random networks in the place of the models of faces."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ecinn import pictures
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.heatmaps import METHODS, ExplainedINN, heatmaps
from ecinn.paper import faces, supplement
from ecinn.paper.artefact import Context
from test_benchmark_heatmaps import small_model


@pytest.fixture
def context(generator: torch.Generator) -> Context:
    """Every model is the small one; labels are what it reads, so that faces can be drawn."""
    model = small_model(3, 2, "celeba/Smiling")
    images = torch.randint(256, (60, 3, 8, 8), generator=generator).to(torch.uint8)
    labels = model.predict(images).argmax(1)
    assert 10 <= int(labels.sum()) <= 50
    data = Dataset(images, labels, ("a", "b"))
    made = Context()
    made.__dict__["model"] = lambda name: model
    made.__dict__["data"] = lambda dataset, split: data
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


def test_five_faces_go_each_way(context: Context) -> None:
    made = faces.FIGURE_8.make(context)
    rows = made.data["figure-8"]
    assert [row["p"] for row in rows] == 5 * ["a"] + 5 * ["b"]
    assert [row["q"] for row in rows] == 5 * ["b"] + 5 * ["a"]
    arrays, images = shown(made.figures["figure-8"]), context.data("", "test").images
    for array, row in zip(arrays[:10], rows, strict=True):
        assert np.array_equal(array, pictures.image_array(images[row["test_image"]]))


def test_maps_are_those_of_the_named_methods(context: Context) -> None:
    made = faces.FIGURE_9.make(context)
    assert list(made.figures) == ["figure-9a"]
    assert "--inception" in made.captions["figure-9a"]
    arrays = shown(made.figures["figure-9a"])
    assert len(arrays) == 4 * 7
    model, data = context.model(""), context.data("", "test")
    draws = torch.Generator().manual_seed(9)
    first = faces.Rows(context, "celeba-smile", 1, draws)
    place = made.data["figure-9"]["celeba-smile"][0]["test_image"]
    assert place == int(first.places[0])
    x = model.pixels(data.images[place])
    p = model.predict(data.images[place]).argmax(1)
    inn, sample = ExplainedINN(model.classifier, model.mu_bar), first.sample
    for array, method in zip(arrays[2:7], METHODS, strict=True):
        how = {"baseline": sample.mean(0), "baselines": sample[:20]}
        expected = heatmaps(inn, x, p, 1 - p, method, **how).maps[0]
        limit = np.percentile(expected.double().mean(0).abs().numpy(), 99.5)
        drawn = pictures.heatmap_array(expected, float(limit)).astype(int)
        assert np.abs(drawn - array).max() <= 2


def test_the_other_network_explains_the_same_faces(context, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(faces, "_inception", other_network)
    made = faces.FIGURE_9.make(with_inception(context, tmp_path))
    inn, cnn = (shown(made.figures[f"figure-9{part}"]) for part in "ab")
    assert len(cnn) == 4 * 5
    for row in range(4):
        assert np.array_equal(cnn[5 * row], inn[7 * row])
        assert not np.array_equal(cnn[5 * row + 1], inn[7 * row + 3])


def test_a_missing_network_is_told_with_its_command(context, tmp_path) -> None:
    with pytest.raises(InputError, match="ecinn inception celeba/Smiling --out"):
        faces.FIGURE_9.make(with_inception(context, tmp_path))


def test_the_supplement_shows_the_same_faces_on_both_networks(
    context, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(supplement, "HEATMAP_FACES", 2)
    (nine,) = [one for one in supplement.SUPPLEMENT if one.name == "supplement-9"]
    alone = nine.make(context)
    assert len(alone.books["supplement-9"]) == 4
    assert list(alone.skipped.values()) == ["inception"]
    monkeypatch.setattr(faces, "_inception", other_network)
    both = nine.make(with_inception(context, tmp_path))
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

"""The models of faces: every figure by another route, pictures whole, one-line failures."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.recipes import CELEBA_ATTRIBUTES
from ecinn.cli import benchmark_models as command
from ecinn.data.dataset import Dataset
from ecinn.drawing import pictures
from ecinn.flow.network import Architecture, Stage
from ecinn.model import Model
from ecinn.pixels import to_pixels
from ecinn.studies.benchmark import faces
from ecinn.studies.benchmark.faces import (
    Convinced,
    convince,
    face_grid,
    face_sheet,
    face_tables,
    measure_faces,
)
from ecinn.training.calibration import calibrate
from helpers.builders import randomise
from helpers.command_line import fails, run

N = 24


@pytest.fixture
def data(generator: torch.Generator) -> Dataset:
    images = torch.randint(256, (N, 3, 16, 16), generator=generator, dtype=torch.uint8)
    return Dataset(images, torch.arange(N) % 2, ("not smiling", "smiling"))


@pytest.fixture
def model(data: Dataset) -> Model:
    architecture = Architecture(3, 16, 16, 2, (Stage(1, 8), Stage(1, 8)), dense_width=0)
    recipe = dataclasses.replace(CELEBA_ATTRIBUTES, name="celeba-smile", architecture=architecture)
    classifier = GenerativeClassifier(architecture)
    randomise(classifier, scale=0.2)
    weights = classifier.state_dict()
    return Model(calibrate(recipe, data, weights, torch.device("cpu"), {}))


def test_figures_are_those_of_single_faces(model: Model, data: Dataset) -> None:
    """One face at a time, through the public explanation."""
    result, sheets = measure_faces(model, data, n=4, seed=3)
    change, log_p, errors = [], [], 0
    for image, label in zip(data.images, data.labels, strict=True):
        e = model.explain(image[None])
        change.append(float((e.convincing[0, 0] - e.x[0]).abs().mean()))
        stored = to_pixels(e.stored_convincing[:, 0])
        log_p.append(float(model.classifier.log_marginal(stored)))
        errors += int(e.p[0] != label)
    assert result.change == pytest.approx(sum(change) / N, rel=1e-4)
    assert list(result.worst) == sorted(range(N), key=lambda i: log_p[i])[:4]
    assert result.evaluation.error == errors / N
    assert result.paper_error == (0.0742, 0.0662)
    assert len(set(result.random)) == 4
    assert result.random != measure_faces(model, data, n=4, seed=4)[0].random
    assert sheets["random"].size == sheets["worst"].size
    for sheet, places, words in (
        (sheets["random"], result.random, "celeba-smile: random test faces"),
        (sheets["worst"], result.worst, "celeba-smile: least likely counterfactuals"),
    ):
        assert sheet == face_sheet(model.explain(data.images[list(places)]), words)


def test_the_table_shows_what_was_measured(model: Model, data: Dataset) -> None:
    result, _ = measure_faces(model, data, n=2)
    result = dataclasses.replace(
        result,
        inception_error=0.0812,
        evaluation=dataclasses.replace(result.evaluation, n=989, error=79 / 989),
    )
    (row,) = face_tables({"celeba-smile": result})[0].rows
    assert row[:5] == ("celeba-smile", "7.99 (6.5 – 9.8)", "7.42", "8.12", "6.62")
    measured = dataclasses.replace(
        result,
        change=0.0234,
        evaluation=dataclasses.replace(
            result.evaluation,
            bits_per_dim=3.4567,
            bits_per_dim_paper=1.2345,
            reached_q=0.91,
            reached_q_corrected=0.995,
            round_trip_error=1.2e-5,
        ),
    )
    (table,) = face_tables({"celeba-smile": measured})
    named = dict(zip(table.head, table.rows[0], strict=True))
    assert (named["bits/dim"], named["in the paper's convention"]) == ("3.457", "1.234")
    assert (named["reached q %"], named["corrected"]) == ("91.00", "99.50")
    assert (named["round trip"], named["mean change"]) == ("1.2e-05", "0.0234")
    alone = dataclasses.replace(result, inception_error=None, paper_error=None)
    (row,) = face_tables({"mine": alone})[0].rows
    assert row[2:5] == ("–", "–", "–")


def test_a_sheet_grows_with_its_faces(model: Model, data: Dataset) -> None:
    two = face_sheet(model.explain(data.images[:2]), "two")
    five = face_sheet(model.explain(data.images[:5]), "five")
    assert five.height == two.height
    assert five.width > two.width + 2 * 112


def test_a_sheet_shows_posteriors_and_warns_of_failures(model: Model, data: Dataset) -> None:
    e = model.explain(data.images[:6])
    certificate = e.convincing_certificate
    failing = certificate.stored_posterior.clone()
    failing[::2] = failing[::2].flip(-1)
    certificate = dataclasses.replace(certificate, stored_posterior=failing)
    e = dataclasses.replace(e, convincing_certificate=certificate)
    sheet, names = face_grid(e, "six"), ("not smiling", "smiling")
    assert sheet.title == "six"
    columns = list(zip(*sheet.rows, strict=True))
    for row, (x, tipping, convincing, heat) in enumerate(columns):
        image = data.images[row]
        posterior = model.predict(image[None])[0]
        p = int(posterior.argmax())
        assert x.caption == f"{names[p]}\n{pictures.percent(float(posterior[p]))}"
        assert np.array_equal(x.array, pictures.image_array(image))
        assert np.array_equal(tipping.array, pictures.image_array(e.stored_tipping_point[row, 0]))
        stored = e.stored_convincing[row, 0]
        assert np.array_equal(convincing.array, pictures.image_array(stored))
        of_q = float(failing[row, 0, 1 - p])
        assert convincing.caption == f"{names[1 - p]}\n{pictures.percent(of_q)}"
        assert convincing.warning == (of_q < 0.5)
        change = (e.convincing - e.x[:, None])[row, 0]
        assert np.array_equal(
            heat.array, pictures.heatmap_array(change, pictures.robust_limit(change))
        )
    assert {column[2].warning for column in columns} == {False, True}


@pytest.fixture
def stored(model: Model, data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of the model's file; its dataset is in memory."""
    monkeypatch.chdir(tmp_path)
    model.save("smile.safetensors")
    monkeypatch.setattr(command, "load_images", lambda dataset, split, celeba: data)
    return "smile.safetensors"


def test_the_command_writes_page_numbers_and_pictures(stored: str, tmp_path: Path) -> None:
    record = {"errors": {"test": 0.25, "validation": 0.5}}
    (tmp_path / "Smiling.json").write_text(json.dumps(record))
    code, stdout, stderr = run(
        "benchmark", "faces", "--models", stored, "--n", 3, "--limit", 12, "--out", tmp_path / "o",
        "--inception", tmp_path,
    )  # fmt: skip
    assert code == 0, stderr
    assert "25.00" in stdout
    numbers = json.loads((tmp_path / "o" / "celeba.json").read_text())
    assert numbers["results"]["celeba-smile"]["evaluation"]["n"] == 12
    assert numbers["results"]["celeba-smile"]["inception_error"] == 0.25
    page = (tmp_path / "o" / "celeba.md").read_text()
    for kind in ("random", "worst"):
        assert f"(celeba-smile-{kind}.webp)" in page
        assert (tmp_path / "o" / f"celeba-smile-{kind}.webp").stat().st_size > 1000
    assert str(tmp_path) not in page
    assert "## On 12 test faces" in page
    assert "no .safetensors in --inception" in stderr


@pytest.mark.parametrize("written", [None, "{", "[]", '{"errors": {}}'])
def test_inception_results_must_be_there(stored: str, tmp_path: Path, written: str | None) -> None:
    if written is not None:
        (tmp_path / "Smiling.json").write_text(written)
    line = fails("benchmark", "faces", "--models", stored, "--inception", tmp_path)
    assert "ecinn inception" in line


def test_digits_are_no_faces(tmp_path: Path) -> None:
    assert "not a model of faces" in fails("benchmark", "faces", "--models", "mnist")


class Linear(nn.Module):
    """Reads two classes from the mean of every channel."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3)) @ self.weight + self.bias


@pytest.fixture
def other(model: Model, data: Dataset, generator: torch.Generator) -> Linear:
    """It agrees with the model on some of the faces only."""
    weight = 50 * torch.randn((3, 2), generator=generator)
    means = to_pixels(data.images).mean((2, 3)) @ weight
    return Linear(weight, -means.median(0).values)


def test_faces_are_counted_one_by_one(
    model: Model,
    data: Dataset,
    other: Linear,
) -> None:
    levels = (None, 0.7, 0.99)
    asked = convince(other, model, data.images, levels=levels, batch_size=5)
    for confidence, obtained in zip(levels, asked, strict=True):
        judged, convinced, change = 0, 0, 0.0
        for image in data.images:
            p = int(model.predict(image[None]).argmax())
            if int(other(to_pixels(image[None])).argmax()) != p:
                continue
            e = model.explain(image[None], 1 - p, confidence=confidence)
            stored = to_pixels(e.stored_convincing[0])
            judged += 1
            convinced += int(other(stored).argmax()) == 1 - p
            change += float((stored - to_pixels(image[None])).abs().mean())
        assert 0 < judged < len(data)
        assert (obtained.judged, obtained.convinced) == (judged, convinced)
        assert obtained.change == pytest.approx(change / judged, rel=1e-4)
        assert obtained.confidence == confidence
    assert asked[1].change < asked[2].change


def test_the_model_itself_is_convinced_and_its_opposite_has_no_say(
    model: Model,
    data: Dataset,
) -> None:
    class Itself(nn.Module):
        sign = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.sign * model.classifier.log_posterior(x)

    itself = Itself()
    (said,) = convince(itself, model, data.images, levels=(0.99,), batch_size=7)
    assert said.judged == said.convinced == len(data)
    itself.sign = -1.0
    (said,) = convince(itself, model, data.images, levels=(0.99,), batch_size=7)
    assert said == Convinced(0.99, 0, 0, 0.0)
    (row,) = convinced_rows(model, data, (said,), None)
    assert row[2:] == ("0", "0.00 (0.0 – 100.0)", "0.0000", "–")


def convinced_rows(model: Model, data: Dataset, convinced, error: float | None):
    result, _ = measure_faces(model, data.first(2), n=1, inception_error=error)
    result = dataclasses.replace(result, convinced=convinced)
    return face_tables({"celeba-smile": result})[1].rows


def test_the_table_has_a_row_per_level(model: Model, data: Dataset) -> None:
    plain = Convinced(None, 200, 160, 0.0226)
    asked = dataclasses.replace(plain, confidence=0.99, convinced=197, change=0.031)
    first, second = convinced_rows(model, data, (plain, asked), 0.1031)
    assert first == ("celeba-smile", "α₁", "200", "80.00 (73.9 – 85.0)", "0.0226", "89.69")
    assert second[1:4] == ("99", "200", "98.50 (95.7 – 99.5)")


def test_the_command_uses_the_network_in_the_inception_folder(
    stored: str, other: Linear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Smiling.json").write_text(json.dumps({"errors": {"test": 0.25}}))
    (tmp_path / "Smiling.safetensors").touch()
    asked = []

    def read(path: Path, device: torch.device, class_names: tuple[str, ...]) -> SimpleNamespace:
        asked.append((path, class_names))
        return SimpleNamespace(classifier=other)

    monkeypatch.setattr(faces, "load_inception", read)
    code, stdout, stderr = run(
        "benchmark", "faces", "--models", stored, "--n", 2, "--out", tmp_path / "o",
        "--inception", tmp_path,
    )  # fmt: skip
    assert code == 0, stderr
    assert asked == [(tmp_path / "Smiling.safetensors", ("not smiling", "smiling"))]
    assert "Who else is convinced" in stdout
    page = (tmp_path / "o" / "celeba.md").read_text()
    assert "| celeba-smile | 99 |" in page
    numbers = json.loads((tmp_path / "o" / "celeba.json").read_text())
    assert len(numbers["results"]["celeba-smile"]["convinced"]) == 2

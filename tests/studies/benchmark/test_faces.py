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
from ecinn.data.celeba import ATTRIBUTES
from ecinn.data.dataset import Dataset
from ecinn.drawing import pictures
from ecinn.flow.network import Architecture, Stage
from ecinn.metrics.statistics import Interval, wilson
from ecinn.model import Model
from ecinn.pixels import to_pixels
from ecinn.studies.benchmark import faces
from ecinn.studies.benchmark.face_quality import Convinced, JudgePanel, Realism
from ecinn.studies.benchmark.faces import (
    face_grid,
    face_sheet,
    face_tables,
    hardest_faces,
    measure_faces,
    pair_grid,
)
from ecinn.studies.face_judges import FaceJudges
from ecinn.training.calibration import calibrate
from helpers.builders import randomise, with_default
from helpers.command_line import fails, run
from helpers.face_judges import random_face_judges

N = 24


@pytest.fixture
def data(generator: torch.Generator) -> Dataset:
    images = torch.randint(256, (N, 3, 16, 16), generator=generator, dtype=torch.uint8)
    attributes = torch.randint(2, (N, 40), generator=generator, dtype=torch.uint8)
    smiling = ATTRIBUTES.index("Smiling")
    labels = attributes[:, smiling].long()
    return Dataset(images, labels, ("not smiling", "smiling"), attributes, smiling)


@pytest.fixture
def model(data: Dataset) -> Model:
    architecture = Architecture(3, 16, 16, 2, (Stage(1, 8), Stage(1, 8)), dense_width=0)
    recipe = dataclasses.replace(CELEBA_ATTRIBUTES, name="celeba-smile", architecture=architecture)
    classifier = GenerativeClassifier(architecture)
    randomise(classifier, scale=0.2)
    weights = classifier.state_dict()
    return Model(calibrate(recipe, data, weights, torch.device("cpu"), {}))


@pytest.fixture
def judges() -> FaceJudges:
    return random_face_judges(3)


@pytest.fixture
def panel(judges: FaceJudges) -> JudgePanel:
    return JudgePanel("Smiling", judges)


@pytest.fixture
def real(data: Dataset) -> Dataset:
    """Other faces, as the validation split."""
    return dataclasses.replace(data, images=data.images.flip(3))


@pytest.mark.parametrize("default", [None, 0.8])
def test_figures_are_those_of_single_faces(
    model: Model, data: Dataset, panel: JudgePanel, real: Dataset, default: float | None
) -> None:
    """One face at a time, through the public explanation, at the model's default."""
    model = model if default is None else with_default(model, default)
    words = "α₁ (the paper's)" if default is None else "80 % requested (this model's default)"
    result, sheets = measure_faces(model, data, panel, real, n=4, seed=3)
    oval = np.array(
        [
            [
                ((y - 0.59) / 0.4) ** 2 + ((x - 0.5) / 0.31) ** 2 < 1
                for x in (np.arange(16) + 0.5) / 16
            ]
            for y in (np.arange(16) + 0.5) / 16
        ]
    )
    change, log_p, outside, errors, hard = [], [], [], 0, {}
    for row, (image, label) in enumerate(zip(data.images, data.labels, strict=True)):
        e = model.explain(image[None])
        stored = to_pixels(e.stored_convincing[:, 0])
        moved = (stored - to_pixels(image[None]))[0].abs().sum(0).numpy()
        change.append(moved.sum() / (3 * 16 * 16))
        outside.append(moved[~oval].sum() / moved.sum())
        log_p.append(float(model.classifier.log_marginal(stored)))
        errors += int(e.p[0] != label)
        closed = data.attributes[row, ATTRIBUTES.index("Mouth_Slightly_Open")] == 0
        if closed and label == 0 and e.p[0] == 0:
            said = panel.judges.probabilities(e.stored_convincing[:, 0], "Smiling")
            hard[row] = sum(float(p) for p in said.values()) / 2
    (judged,) = (each for each in result.convinced if each.images == words)
    for interval, values in ((judged.change, change), (judged.outside, outside)):
        assert (interval.mean, interval.n) == (pytest.approx(np.mean(values), rel=1e-4), N)
        assert interval.half_width == pytest.approx(1.96 * np.std(values) / N**0.5, rel=1e-3)
    assert list(result.worst) == sorted(range(N), key=lambda i: log_p[i])[:4]
    assert list(result.hardest) == sorted(hard, key=lambda i: hard[i])
    assert 2 <= len(hard) < 12
    assert result.evaluation.error == errors / N
    assert result.paper_error == (0.0742, 0.0662)
    assert len(set(result.random)) == 4
    assert result.random != measure_faces(model, data, panel, real, n=4, seed=4)[0].random
    assert sheets["random"].size == sheets["worst"].size
    for sheet, places, title in (
        (sheets["random"], result.random, "celeba-smile: random faces"),
        (sheets["worst"], result.worst, "celeba-smile: least likely counterfactuals"),
    ):
        assert sheet == face_sheet(model.explain(data.images[list(places)]), title)


def test_the_hardest_are_the_least_convincing(data: Dataset, generator: torch.Generator) -> None:
    """Of closed mouths where a mouth has to open, of all faces otherwise; at most forty."""
    many = [torch.cat([each] * 8) for each in (data.images, data.labels, data.attributes)]
    lipstick = ATTRIBUTES.index("Wearing_Lipstick")
    many_faces = Dataset(many[0], many[1], data.class_names, many[2], lipstick)
    p = torch.randint(2, (8 * N,), generator=generator)
    of_q = torch.rand(8 * N, generator=generator)
    expected = sorted(range(8 * N), key=lambda i: float(of_q[i]))
    assert hardest_faces(many_faces, p, of_q).tolist() == expected[:40]
    cheeks = dataclasses.replace(many_faces, attribute=ATTRIBUTES.index("High_Cheekbones"))
    closed = cheeks.attributes[:, ATTRIBUTES.index("Mouth_Slightly_Open")] == 0
    some = [i for i in expected if closed[i] and cheeks.labels[i] == 0 and p[i] == 0]
    assert hardest_faces(cheeks, p, of_q).tolist() == some[:40]


def test_pairs_are_drawn_ten_to_a_row(data: Dataset) -> None:
    of_q = torch.linspace(0.1, 0.9, N)
    grid = pair_grid(data.images, data.images.flip(0), of_q, "pairs")
    assert [len(row) for row in grid.rows] == [10, 10, 10, 10, 4, 4]
    assert [name for name, _ in grid.names] == ["input", "counterfactual"] * 3
    inputs, answers = ([p for row in grid.rows[i::2] for p in row] for i in (0, 1))
    for row in range(N):
        assert np.array_equal(inputs[row].array, pictures.image_array(data.images[row]))
        assert np.array_equal(answers[row].array, pictures.image_array(data.images[N - 1 - row]))
        assert answers[row].caption == pictures.percent(float(of_q[row]))
        assert answers[row].warning == (row < N / 2)


def test_the_table_shows_what_was_measured(
    model: Model, data: Dataset, panel: JudgePanel, real: Dataset
) -> None:
    result, _ = measure_faces(model, data, panel, real, n=2)
    result = dataclasses.replace(
        result,
        inception_error=wilson(80, 985),
        evaluation=dataclasses.replace(result.evaluation, n=989, error=79 / 989),
    )
    (row,) = face_tables({"celeba-smile": result})[0].rows
    inception = "8.12 [6.57, 9.99]"
    assert row[:5] == ("celeba-smile", "7.99 [6.46, 9.84]", "7.42", inception, "6.62")
    measured = dataclasses.replace(
        result,
        evaluation=dataclasses.replace(
            result.evaluation,
            bits_per_dim=3.4567,
            bits_per_dim_half_width=0.0123,
            bits_per_dim_paper=1.2345,
            bits_per_dim_paper_half_width=0.0456,
            reached_q=0.91,
            reached_q_corrected=0.995,
            round_trip_error=1.2e-5,
        ),
        convinced=(
            Convinced("real faces", {"residual": wilson(180, 200), "separable": wilson(9, 10)}),
            Convinced(
                "α₁",
                {"residual": wilson(160, 200), "Inception-V3": wilson(0, 0)},
                Interval(0.0226, 0.0221, 0.0231, 200),
                Interval(0.4321, 0.4121, 0.4521, 200),
            ),
        ),
        realism=(
            Realism(
                "smiling",
                "α₁",
                150,
                {"residual": Interval(1.234, 1.0, 1.468, 150)},
                {"residual": wilson(160, 200)},
            ),
        ),
    )
    table, convinced, realism = face_tables({"celeba-smile": measured})
    named = dict(zip(table.head, table.rows[0], strict=True))
    assert named["bits/dim"] == "3.457 ± 0.012"
    assert named["in the paper's convention"] == "1.234 ± 0.046"
    assert (named["reached q %"], named["corrected"]) == (
        "91.00 [89.06, 92.63]", "99.49 [98.82, 99.78]",
    )  # fmt: skip
    assert named["round trip"] == "1.2e-05"
    first, second = convinced.rows
    assert first[:3] == ("celeba-smile", "real faces", "90.0 [85.1, 93.4]")
    assert first[4:] == ("–", "–", "–")
    assert second[1:5] == ("α₁", "80.0 [73.9, 85.0]", "–", "0.0 [0.0, 100.0]")
    assert second[5:] == ("0.0226 ± 0.0005", "43.2 ± 2.0")
    figures = ("1.234 ± 0.234", "–", "80.0 [73.9, 85.0]", "–")
    assert realism.rows == (("celeba-smile", "smiling", "α₁", "150", *figures),)
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
    assert sheet.names[2] == ("convincing", "as far as\nin the paper\nposterior as stored")
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
def stored(
    model: Model,
    data: Dataset,
    judges: FaceJudges,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """Name of the model's file; its dataset is in memory, its judges beside it."""
    monkeypatch.chdir(tmp_path)
    model.save("smile.safetensors")
    judges.save(Path("judges.safetensors"))
    monkeypatch.setattr(command, "load_images", lambda dataset, split, celeba: data)
    return "smile.safetensors"


def test_the_command_writes_page_numbers_and_pictures(stored: str, tmp_path: Path) -> None:
    record = {"errors": {"test": 0.25, "validation": 0.5}, "images": {"test": 40}}
    (tmp_path / "Smiling.json").write_text(json.dumps(record))
    code, _, stderr = run(
        "benchmark", "faces", "--models", stored, "--n", 3, "--limit", 12, "--out", tmp_path / "o",
        "--inception", tmp_path, "--judges", "judges.safetensors",
    )  # fmt: skip
    assert code == 0, stderr
    assert "25.00 [14.19, 40.19]" in (tmp_path / "o" / "celeba.md").read_text().replace(" ", " ")
    numbers = json.loads((tmp_path / "o" / "celeba.json").read_text())
    result = numbers["results"]["celeba-smile"]
    assert result["evaluation"]["n"] == 12
    assert (result["inception_error"]["mean"], result["inception_error"]["n"]) == (0.25, 40)
    seen = [each["images"] for each in result["convinced"]]
    made = ["tipping points", "α₁ (the paper's)", "99 % requested"]
    assert seen == ["real faces", *made, "samples at T = 0.7"]
    assert set(result["convinced"][0]["shares"]) == {"residual", "separable"}
    page = (tmp_path / "o" / "celeba.md").read_text()
    for kind in ("random", "worst", "hardest"):
        assert f"(celeba-smile-{kind}.webp)" in page
        assert (tmp_path / "o" / f"celeba-smile-{kind}.webp").stat().st_size > 1000
    assert str(tmp_path) not in page
    assert "## On 12 test faces" in page
    assert "no .safetensors in --inception" in stderr


def test_an_earlier_run_chooses_the_hardest(stored: str, tmp_path: Path) -> None:
    options = ("benchmark", "faces", "--models", stored, "--judges", "judges.safetensors")
    (tmp_path / "old.json").write_text('{"results": {"celeba-smile": {"hardest": [7, 2, 5]}}}')
    code, _, stderr = run(*options, "--out", "o", "--hardest", "old.json")
    assert code == 0, stderr
    numbers = json.loads((tmp_path / "o" / "celeba.json").read_text())
    assert numbers["results"]["celeba-smile"]["hardest"] == [7, 2, 5]
    assert "not among these 6" in fails(*options, "--hardest", "old.json", "--limit", 6)
    (tmp_path / "old.json").write_text('{"results": []}')
    assert "ecinn benchmark faces" in fails(*options, "--hardest", "old.json")
    assert "cannot read" in fails(*options, "--hardest", "absent.json")


def test_shipped_judges_take_no_part_in_choices(
    stored: str, data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load(dataset: str, split: str, celeba: Path | None) -> Dataset:
        asked.append(split)
        return data

    monkeypatch.setattr(command, "load_images", load)
    options = ("benchmark", "faces", "--models", stored, "--split", "validation", "--out", "o")
    assert "take no part in choices" in fails(*options)
    assert asked == []
    code, _, stderr = run(*options, "--judges", "judges.safetensors")
    assert code == 0, stderr
    assert asked == ["validation", "train"]
    page = (tmp_path / "o" / "celeba-validation.md").read_text()
    assert f"## On {N} validation faces" in page
    assert "real train faces of q" in page
    assert (tmp_path / "o" / "celeba-smile-validation-hardest.webp").is_file()


@pytest.mark.parametrize("written", [None, "{", "[]", '{"errors": {}}'])
def test_inception_results_must_be_there(stored: str, tmp_path: Path, written: str | None) -> None:
    if written is not None:
        (tmp_path / "Smiling.json").write_text(written)
    options = ("--inception", tmp_path, "--judges", "judges.safetensors")
    line = fails("benchmark", "faces", "--models", stored, *options)
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
def other(data: Dataset, generator: torch.Generator) -> Linear:
    """It agrees with the model on some of the faces only."""
    weight = 50 * torch.randn((3, 2), generator=generator)
    means = to_pixels(data.images).mean((2, 3)) @ weight
    return Linear(weight, -means.median(0).values)


def test_the_command_uses_the_network_in_the_inception_folder(
    stored: str, other: Linear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Smiling.json").write_text(
        json.dumps({"errors": {"test": 0.25}, "images": {"test": 8}})
    )
    (tmp_path / "Smiling.safetensors").touch()
    asked = []

    def read(path: Path, device: torch.device, class_names: tuple[str, ...]) -> SimpleNamespace:
        asked.append((path, class_names))
        return SimpleNamespace(classifier=other)

    monkeypatch.setattr(faces, "load_inception", read)
    code, stdout, stderr = run(
        "benchmark", "faces", "--models", stored, "--n", 2, "--out", tmp_path / "o",
        "--inception", tmp_path, "--judges", "judges.safetensors",
    )  # fmt: skip
    assert code == 0, stderr
    assert asked == [(tmp_path / "Smiling.safetensors", ("not smiling", "smiling"))]
    assert "Who else is convinced" in stdout
    numbers = json.loads((tmp_path / "o" / "celeba.json").read_text())
    for each in numbers["results"]["celeba-smile"]["convinced"]:
        assert set(each["shares"]) == {"residual", "separable", "Inception-V3"}

"""What rounding costs: one more error of the same size, and whether it tells the truth."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ecinn.classifier.checkpoint import Checkpoint, save_checkpoint
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.out_of_distribution import OODDetector
from ecinn.classifier.quantisation import pack, rounded_again, stored_precision, unpack
from ecinn.classifier.recipes import CELEBA_ATTRIBUTES
from ecinn.cli import benchmark_models as command
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.flow.network import Architecture, Stage
from ecinn.model import Model
from ecinn.pixels import to_uint8
from ecinn.studies.benchmark.rounding import (
    Outcome,
    RoundingCost,
    Spread,
    measure_rounding,
    once_more,
    rounding_tables,
    rounds_to,
)
from ecinn.training.evaluation import evaluate
from helpers.builders import randomise
from helpers.command_line import fails, run

DRAWS = 40
VERY_COARSE = 60.0


def network(seed: int, coarse: float | None = None) -> GenerativeClassifier:
    """A random flow; coarse: the largest weight of every last kernel's rows.

    It is a weight of a unit that is always zero, so that it does nothing but widen the steps.
    """
    architecture = Architecture(
        1, 8, 8, 2, (Stage(2, 8),), dense_width=0, pixel_scale=16.0, seed=seed
    )
    classifier = GenerativeClassifier(architecture).eval()
    randomise(classifier, seed)
    weights = classifier.state_dict()
    for name in weights if coarse is not None else ():
        if name.endswith("subnet.7.weight"):
            weights[name][:, 0] = coarse
            for norm in ("4.weight", "4.bias"):
                weights[name.replace("7.weight", norm)][0] = 0.0
    return classifier.requires_grad_(requires_grad=False)


def stored(classifier: GenerativeClassifier, bits: int, name: str = "small") -> Model:
    """The model that a file with so many bits holds."""
    recipe = dataclasses.replace(
        CELEBA_ATTRIBUTES, name=name, architecture=classifier.architecture, stored_bits=bits
    )
    kept = GenerativeClassifier(classifier.architecture).eval()
    kept.load_state_dict(stored_precision(classifier.state_dict(), bits))
    kept.requires_grad_(requires_grad=False)
    return Model(Checkpoint(recipe, kept, kept.mu.clone(), OODDetector((0.0, 1.0)), ("no", "yes")))


def drawn(classifier: GenerativeClassifier, n: int, seed: int = 0) -> Dataset:
    """Images that the classifier draws itself."""
    labels = torch.arange(n) % 2
    x = classifier.sample(labels, torch.Generator().manual_seed(seed))
    return Dataset(to_uint8(x), labels, ("no", "yes"))


def step_of(value: Tensor, bits: int) -> Tensor:
    """The distance between neighbouring numbers, by other means."""
    if bits == 8 and value.ndim > 1:
        largest = value.abs().flatten(1).amax(1) / 127
        return largest.reshape(-1, *[1] * (value.ndim - 1)).expand_as(value)
    return torch.from_numpy(np.spacing(np.abs(value.numpy().astype(np.float16)))).float()


@pytest.mark.parametrize("bits", [16, 8])
def test_an_error_is_uniform_over_one_step(bits: int, generator: torch.Generator) -> None:
    packed = pack(network(1).state_dict(), bits)
    before = unpack(packed)
    errors = []
    for _ in range(DRAWS):
        after = rounded_again(packed, generator)
        assert after.keys() == before.keys()
        for name, value in before.items():
            if ".subnet." not in name:
                assert torch.equal(after[name], value), name
                continue
            error = (after[name] - value) / step_of(value, bits)
            assert after[name].dtype == torch.float32
            # The scale of a row has eight binary digits, a sum in single precision 24.
            assert float(error.abs().max()) <= 0.5 * 1.01, name
            assert float(error.std()) > 0.05, name
            errors.append(error.flatten())
    all_errors = torch.cat(errors).double()
    n = len(all_errors)
    assert n > 10_000
    assert abs(float(all_errors.mean())) < 5 * (1 / 12 / n) ** 0.5
    # The variance of u² is 1/180.
    assert float(all_errors.square().mean()) == pytest.approx(1 / 12, abs=5 * (180 * n) ** -0.5)


@pytest.mark.parametrize("bits", [16, 8])
def test_errors_are_drawn_afresh_and_by_the_generator_alone(bits: int) -> None:
    packed = pack(network(1).state_dict(), bits)
    generator = torch.Generator().manual_seed(5)
    first, second = rounded_again(packed, generator), rounded_again(packed, generator)
    again = rounded_again(packed, generator.manual_seed(5))
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert torch.equal(value, second[name]) == (".subnet." not in name), name


def test_a_row_of_zeros_was_exact(generator: torch.Generator) -> None:
    kernel = torch.tensor([[0.0, 0.0], [0.0, -1.0]])
    after = rounded_again(pack({"a.subnet.0.weight": kernel}, 8), generator)
    assert torch.equal(after["a.subnet.0.weight"][0], kernel[0])
    assert bool((after["a.subnet.0.weight"][1] != kernel[1]).all())


def test_weights_of_32_bits_have_no_error(generator: torch.Generator) -> None:
    weights = network(1).state_dict()
    after = rounded_again(pack(weights, 32), generator)
    assert all(torch.equal(after[name], value) for name, value in weights.items())


@pytest.mark.parametrize("bits", [16, 8])
def test_the_inverse_stays_exact(
    small_architecture: Architecture, bits: int, generator: torch.Generator
) -> None:
    classifier = GenerativeClassifier(small_architecture).eval()
    randomise(classifier.requires_grad_(requires_grad=False))
    x = torch.rand((6, 1, 8, 8), generator=generator)
    before = classifier.encode(x)
    packed = pack(classifier.state_dict(), bits)
    classifier.load_state_dict(rounded_again(packed, generator))
    z = classifier.encode(x)
    assert float((z - before).abs().max()) > 1e-4
    assert torch.allclose(classifier.decode(z), x, atol=1e-5)


@pytest.fixture
def model() -> Model:
    return stored(network(2, VERY_COARSE), 8)


@pytest.fixture
def data(generator: torch.Generator) -> Dataset:
    """Grey noise, of which the model is not sure: some predictions change."""
    images = torch.randint(96, 160, (120, 1, 8, 8), generator=generator, dtype=torch.uint8)
    return Dataset(images, torch.arange(120) % 2, ("no", "yes"))


def test_figures_are_those_of_an_evaluation(model: Model, data: Dataset) -> None:
    result = measure_rounding(model, data, draws=3, seed=4)
    networks = torch.Generator().manual_seed(4 + 1)
    p = model.predict(data.images).argmax(1)
    errors, bits, changed = [], [], []
    for reading in result.draws:
        other = once_more(model, networks)
        expected = evaluate(other, data, seed=4)
        assert reading.error == expected.error
        assert reading.bits_per_dim == pytest.approx(expected.bits_per_dim, rel=1e-6)
        moved = int((other.predict(data.images).argmax(1) != p).sum())
        assert reading.changed == pytest.approx(moved / len(data))
        errors.append(expected.error)
        bits.append(expected.bits_per_dim)
        changed.append(moved / len(data))
    shipped = evaluate(model, data, seed=4)
    assert (result.n, result.bits, result.seed) == (120, 8, 4)
    assert result.error == shipped.error
    assert result.bits_per_dim == pytest.approx(shipped.bits_per_dim, rel=1e-6)
    assert max(changed) > 0
    assert len(set(errors)) > 1
    for spread, values, origin in (
        (result.error_cost, errors, shipped.error),
        (result.bits_per_dim_cost, bits, shipped.bits_per_dim),
        (result.changed, changed, 0.0),
    ):
        assert spread.mean == pytest.approx(float(np.mean(values)) - origin, abs=2e-5)
        assert spread.deviation == pytest.approx(float(np.std(values, ddof=1)), abs=2e-5)


def test_the_result_is_a_function_of_the_seed(model: Model, data: Dataset) -> None:
    state = {name: value.clone() for name, value in model.classifier.state_dict().items()}
    result = measure_rounding(model, data, draws=3, seed=1)
    assert result == measure_rounding(model, data, draws=3, seed=1)
    assert result.draws[:2] == measure_rounding(model, data, draws=2, seed=1).draws
    assert result.draws != measure_rounding(model, data, draws=3, seed=2).draws
    for name, value in model.classifier.state_dict().items():
        assert torch.equal(value, state[name]), name


@pytest.mark.slow
def test_the_estimate_tells_the_truth() -> None:
    """Of images that the unrounded model draws no other weights can know more: a known best.

    There the slope is zero, and what an error of the weights costs is of second order.
    """
    true, estimated = [], []
    for seed in range(4):
        classifier = network(seed, coarse=12.0)
        model, unrounded = stored(classifier, 8), stored(classifier, 32)
        result = measure_rounding(
            model, drawn(classifier, 500, seed), draws=6, seed=seed, unrounded=unrounded
        )
        assert result.unrounded is not None
        true.append(result.bits_per_dim - result.unrounded.bits_per_dim)
        estimated.append(result.bits_per_dim_cost.mean)
        assert true[-1] > 1e-3
        assert 0.25 < estimated[-1] / true[-1] < 4
    assert 0.5 < sum(estimated) / sum(true) < 2


def test_the_truth_is_that_of_the_unrounded_model(model: Model, data: Dataset) -> None:
    unrounded = stored(network(2, VERY_COARSE), 32)
    result = measure_rounding(model, data, draws=2, unrounded=unrounded)
    expected = evaluate(unrounded, data)
    p, other = (each.predict(data.images).argmax(1) for each in (model, unrounded))
    assert result.unrounded is not None
    assert result.unrounded.error == expected.error
    assert result.unrounded.bits_per_dim == pytest.approx(expected.bits_per_dim, rel=1e-6)
    assert result.unrounded.changed == pytest.approx(float((p != other).double().mean()))
    assert result.unrounded.changed > 0


@pytest.mark.parametrize("bits", [16, 8])
def test_a_model_knows_what_it_was_rounded_from(bits: int) -> None:
    origin = network(2)
    rounded, unrounded = stored(origin, bits), stored(origin, 32)
    unrounded.classifier.mu.add_(1)  # It may have been fitted to the unrounded weights.
    assert rounds_to(unrounded, rounded)
    assert not rounds_to(stored(network(3), 32), rounded)
    other_size = GenerativeClassifier(Architecture(1, 8, 8, 2, (Stage(1, 8),), dense_width=0))
    assert not rounds_to(stored(other_size, 32), rounded)
    name = next(name for name in unrounded.classifier.state_dict() if "subnet.3.weight" in name)
    unrounded.classifier.state_dict()[name][0, 0] += 0.1
    assert not rounds_to(unrounded, rounded)


def test_what_cannot_be_measured_is_refused(model: Model, data: Dataset) -> None:
    with pytest.raises(InputError, match="32 bits: it has no rounding to measure"):
        measure_rounding(stored(network(2), 32), data)


def test_tables_show_costs_with_their_sign() -> None:
    result = RoundingCost(
        n=989,
        bits=8,
        error=0.0961,
        bits_per_dim=3.31544,
        draws=(Outcome(0.1, 3.0, 0.0),) * 3,
        error_cost=Spread(-0.0012, 0.0034),
        bits_per_dim_cost=Spread(0.00021, 0.00004),
        changed=Spread(0.0056, 0.0011),
        unrounded=None,
        seed=0,
    )
    (estimates,) = rounding_tables({"a": result}, "test")
    assert "989 test images, 3 draws" in estimates.title
    (row,) = estimates.rows
    assert row == (
        "a", "8", "9.61", "-0.12 ± 0.34", "3.3154", "+0.00021 ± 0.00004", "0.56 ± 0.11",
    )  # fmt: skip
    known = dataclasses.replace(result, unrounded=Outcome(0.0981, 3.3152, 0.004))
    _, truth = rounding_tables({"a": known, "b": result}, "test")
    assert truth.rows == (("a", "9.81", "-0.20", "3.3152", "+0.00024", "0.40"),)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Two models, what the first was rounded from, and one of 32 bits."""
    paths = {}
    for name, seed, bits in (("a", 2, 8), ("b", 3, 16), ("unrounded", 2, 32), ("other", 5, 32)):
        paths[name] = tmp_path / f"{name}.safetensors"
        save_checkpoint(stored(network(seed), bits, name).checkpoint, paths[name])
    return paths


@pytest.fixture
def images(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked = []

    def read(dataset: object, split: str, celeba: Path | None) -> Dataset:
        asked.append(split)
        return data

    monkeypatch.setattr(command, "load_images", read)
    return asked


def test_the_command_measures_several_models(
    files: dict[str, Path], images: list[str], tmp_path: Path
) -> None:
    code, stdout, stderr = run(
        "benchmark", "rounding", "--model", files["a"], "--model", files["b"], "--draws", 2,
        "--limit", 30, "--unrounded", files["unrounded"], "--out", tmp_path / "o",
    )  # fmt: skip
    assert code == 0, stderr
    assert "Measured against the unrounded model" in stdout
    assert images == ["test", "test"]
    numbers = json.loads((tmp_path / "o" / "rounding.json").read_text())
    a, b = numbers["results"]["a"], numbers["results"]["b"]
    assert (a["n"], a["bits"], b["bits"], len(a["draws"])) == (30, 8, 16, 2)
    assert a["unrounded"]["bits_per_dim"] != a["bits_per_dim"]
    assert b["unrounded"] is None
    assert 0 < b["bits_per_dim_cost"]["deviation"] < a["bits_per_dim_cost"]["deviation"]
    page = (tmp_path / "o" / "rounding.md").read_text()
    for name in ("a", "b"):
        assert f"{numbers['record'][name]['model_sha256']}…" in page
    assert "--draws 2 --seed 0 --unrounded FILE --limit 30" in page


def test_every_split_has_files_of_its_own(
    files: dict[str, Path], images: list[str], tmp_path: Path
) -> None:
    given = ("benchmark", "rounding", "--model", files["a"], "--limit", 4, "--out", tmp_path)
    code, stdout, stderr = run(*given, "--split", "validation", "--json")
    assert code == 0, stderr
    assert images == ["validation"]
    written = json.loads((tmp_path / "rounding-validation.json").read_text())
    assert json.loads(stdout) == written
    assert len(written["results"]["a"]["draws"]) == 5
    assert "4 validation images" in (tmp_path / "rounding-validation.md").read_text()
    assert not (tmp_path / "rounding.json").exists()


def test_the_shipped_digits_can_be_measured(tmp_path: Path) -> None:
    code, _, stderr = run(
        "benchmark", "rounding", "--model", "mnist", "--limit", 3, "--draws", 2, "--out", tmp_path
    )
    assert code == 0, stderr
    numbers = json.loads((tmp_path / "rounding.json").read_text())
    result = numbers["results"]["mnist"]
    assert result["bits"] == 8
    assert 0 < result["bits_per_dim_cost"]["deviation"] < 3e-3
    assert "--celeba" not in numbers["record"]["mnist"]["command"]


def test_failures_are_one_line(files: dict[str, Path], images: list[str], tmp_path: Path) -> None:
    def refused(*arguments: object) -> str:
        return fails("benchmark", "rounding", *arguments, "--out", tmp_path / "o")

    a = ("--model", files["a"])
    assert "no rounding to measure" in refused("--model", files["other"])
    assert "a is given twice" in refused(*a, *a)
    assert "itself stored with 8 bits" in refused(*a, "--unrounded", files["a"])
    assert "does not round to a" in refused(*a, "--unrounded", files["other"])
    assert not (tmp_path / "o").exists()

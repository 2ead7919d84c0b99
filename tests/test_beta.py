"""Models at ascending β: what is kept of them, the command, Figure 10."""

import dataclasses
from pathlib import Path

import pytest
import torch
from matplotlib.patches import Rectangle

from conftest import randomise
from ecinn import training
from ecinn.checkpoints import Checkpoint, load_checkpoint, write_tensors
from ecinn.data.dataset import Dataset
from ecinn.data.mnist import load_mnist
from ecinn.errors import InputError
from ecinn.experiments import MNIST_BETA, Experiment
from ecinn.model.classifier import GenerativeClassifier
from ecinn.model.inn import Architecture, Stage
from ecinn.paper import beta_models, style, trade_off
from ecinn.paper.artefact import Context
from ecinn.paper.beta_models import TradeOff
from ecinn.pixels import to_pixels
from ecinn.typicality import Typicality
from test_cli import run

CPU = torch.device("cpu")


@pytest.fixture
def tiny(monkeypatch) -> Experiment:
    """The experiment on a network that trains in a second."""
    architecture = Architecture(1, 28, 28, 10, (Stage(1, 4), Stage(1, 4)), dense_width=8)
    experiment = dataclasses.replace(MNIST_BETA, architecture=architecture, batch_size=32)
    monkeypatch.setattr(beta_models, "MNIST_BETA", experiment)
    return experiment


@pytest.fixture
def test_digits() -> Dataset:
    return load_mnist("test").first(200)


def model(tiny: Experiment, beta: float, seed: int) -> Checkpoint:
    """Random weights, and means as far apart as those of a trained model."""
    experiment = dataclasses.replace(tiny, beta=beta)
    classifier = randomise(GenerativeClassifier(experiment.architecture), seed).eval()
    mu_bar = classifier.mu.detach() * 1.1
    metrics = {"n": 200, "error": 0.1 / beta, "bits_per_dim": beta, "reached_q": 0.5}
    return Checkpoint(
        experiment,
        classifier.requires_grad_(requires_grad=False),
        mu_bar,
        Typicality((-1e9, 1e9)),
        tuple("0123456789"),
        metrics,
        {"training_images": 100},
    )


def result(betas: int = 8) -> TradeOff:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (18, 1, 28, 28), generator=generator, dtype=torch.uint8)
    return TradeOff(
        beta=beta_models.BETAS[:betas],
        error=tuple(0.05 / (k + 1) for k in range(betas)),
        bits_per_dim=tuple(3.0 + 0.1 * k for k in range(betas)),
        reached_q=(1.0,) * betas,
        target=3,
        places=tuple(range(18)),
        training={"epochs": 12, "training_images": 60000, "test_images": 10000},
        images=images,
        counterfactuals=torch.stack([images.flip(0)] * betas),
        reached=torch.ones((betas, 18), dtype=torch.bool),
    )


def test_digits_are_of_every_other_class_and_drawn_by_the_seed(test_digits: Dataset) -> None:
    places = beta_models.draw_digits(test_digits, 0)
    assert test_digits.labels[places].tolist() == 2 * [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert len(places.unique()) == len(places)
    assert torch.equal(places, beta_models.draw_digits(test_digits, 0))
    assert not torch.equal(places, beta_models.draw_digits(test_digits, 1))
    with pytest.raises(InputError, match="more images"):
        beta_models.draw_digits(test_digits.first(10), 0)


def test_counterfactuals_are_the_papers(tiny: Experiment, test_digits: Dataset) -> None:
    """By hand, one by one: equally far from both means at α₀, stored at 4/5 + α₀/2."""
    models = [model(tiny, 4.0, 1), model(tiny, 0.1, 2)]
    places = torch.arange(60)
    compared = beta_models.compare(models, test_digits, places, CPU)
    assert compared.beta == (0.1, 4.0)
    assert compared.error == (1.0, 0.025)
    assert compared.training["training_images"] == 100
    kinds = set()
    for row, checkpoint in enumerate((models[1], models[0])):
        classifier, mu = checkpoint.classifier, checkpoint.classifier.mu
        z = classifier.encode(to_pixels(test_digits.images[places]))
        predicted = torch.cdist(z, mu).argmin(1)
        for index, p in enumerate(predicted.tolist()):
            obtained = compared.counterfactuals[row, index]
            if p == 3:
                kinds.add("read as the target")
                assert torch.equal(obtained, test_digits.images[index])
                continue
            delta = checkpoint.mu_bar[3] - checkpoint.mu_bar[p]
            # ‖z + αΔ − μ_p‖² − ‖z + αΔ − μ_q‖² is linear in α: two values give its zero.
            at = [
                float((z[index] + a * delta - mu[p]).square().sum())
                - float((z[index] + a * delta - mu[3]).square().sum())
                for a in (0.0, 1.0)
            ]
            alpha = 0.8 + 0.5 * at[0] / (at[0] - at[1])
            x = classifier.decode((z[index] + alpha * delta)[None])[0]
            expected = (256 * x).floor().clamp(0, 255)
            assert (obtained.float() - expected).abs().max() <= 1
            read = torch.cdist(classifier.encode(to_pixels(obtained[None])), mu).argmin(1)
            assert bool(compared.reached[row, index]) == (int(read) == 3)
            kinds.add("reached" if compared.reached[row, index] else "not reached")
    assert "read as the target" in kinds
    assert len(kinds) > 1


def test_results_are_kept_in_a_small_file(tmp_path: Path) -> None:
    written = result()
    beta_models.save(written, tmp_path / "t.safetensors")
    assert (tmp_path / "t.safetensors").stat().st_size < 150_000
    read = beta_models.read(tmp_path / "t.safetensors")
    for field in dataclasses.fields(TradeOff):
        before, after = getattr(written, field.name), getattr(read, field.name)
        same = torch.equal(before, after) if isinstance(before, torch.Tensor) else before == after
        assert same, field.name


def test_results_that_are_missing_or_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    for _ in range(2):
        with pytest.raises(InputError, match="ecinn beta") as error:
            beta_models.read(path)
        assert "\n" not in str(error.value)
        write_tensors(path, {"images": torch.zeros(2)}, {"beta": [1.0]})


def test_command_trains_once_and_goes_on(tiny: Experiment, tmp_path: Path, monkeypatch) -> None:
    given = ("beta", "--out", tmp_path, "--epochs", 1, "--limit", 200, "--device", "cpu")
    code, out, err = run(*given, "--beta", 2)
    assert code == 0, err
    assert "β = 2" in out
    one = load_checkpoint(tmp_path / "beta-2")
    assert one.experiment.beta == 2
    assert one.metrics["n"] == 200
    assert not (tmp_path / "beta-2" / training.STATE_FILES[0]).exists()
    # Another β joins; the first is not trained again.
    original, trained = training.train, []

    def watched(settings: Experiment, *arguments: object, **named: object) -> Checkpoint:
        trained.append(settings.beta)
        return original(settings, *arguments, **named)

    monkeypatch.setattr(training, "train", watched)
    code, _, err = run(*given, "--beta", 2, "--beta", 0.5)
    assert code == 0, err
    assert trained == [0.5]
    results = beta_models.read(tmp_path / beta_models.FILE)
    assert results.beta == (0.5, 2.0)
    assert results.error[1] == one.metrics["error"]
    assert results.bits_per_dim[0] != results.bits_per_dim[1]
    assert results.training == {"epochs": 1, "training_images": 200, "test_images": 200}
    code, _, err = run(*given[:-3], 150, "--device", "cpu", "--beta", 2)
    assert code == 2
    assert "other settings" in err
    code, _, err = run(*given, "--beta", -1)
    assert code == 2
    assert err.count("\n") == 1


@pytest.mark.parametrize("part", [0, 1])
def test_figure_shows_every_model_and_marks_what_failed(part: int) -> None:
    shown = result()
    shown.reached[2, 9 * part + 4] = False
    shown.reached[5, 9 * (1 - part) + 1] = False  # not on this page
    figure = trade_off.draw(shown, part)
    axes, error, bits = figure.axes
    words = [text.get_text() for text in axes.texts]
    assert all(rf"$\beta$ = {beta:g}" in words for beta in beta_models.BETAS)
    assert "95.00 % right" in words
    pictures = [image.get_array() for image in axes.get_images()]
    assert len(pictures) == 9
    fourth = shown.images[9 * part + 3, 0].numpy()
    assert (pictures[0][28:56, :28, 0] == fourth).all()
    eighth = shown.counterfactuals[0, 9 * part + 7, 0].numpy()
    assert (pictures[1][56:, 28:56, 0] == eighth).all()
    frames = [
        patch
        for patch in axes.patches
        if isinstance(patch, Rectangle) and patch.get_linewidth() == 0.8
    ]
    assert len(frames) == 1
    left, right, bottom, top = axes.get_images()[3].get_extent()
    (frame,) = frames
    middle = (frame.get_x() + frame.get_width() / 2, frame.get_y() + frame.get_height() / 2)
    assert middle == pytest.approx(((left + right) / 2, (bottom + top) / 2), abs=0.01)
    assert error.lines[0].get_ydata()[0] == pytest.approx(5.0)
    assert bits.lines[0].get_ydata().tolist() == pytest.approx(list(shown.bits_per_dim))
    assert figure.get_size_inches()[0] <= style.TEXT


def test_figure_10_is_made_of_the_kept_results(monkeypatch) -> None:
    monkeypatch.setattr(beta_models, "read", result)
    made = trade_off.FIGURE_10.make(Context())
    assert set(made.figures) == {"figure-10"}
    numbers = made.data["figure-10"]["models"]
    assert [row["beta"] for row in numbers] == list(beta_models.BETAS)
    assert numbers[0]["error"] == 0.05
    (page,) = trade_off.SUPPLEMENT_10.make(Context()).books["supplement-10"]
    first = [image.get_array() for image in made.figures["figure-10"].axes[0].get_images()]
    further = [image.get_array() for image in page.axes[0].get_images()]
    assert not any((a == b).all() for a, b in zip(first, further, strict=True))

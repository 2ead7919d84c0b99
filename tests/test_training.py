"""Training on the CPU: it learns, it survives, it resumes to the same weights."""

import dataclasses
from pathlib import Path

import pytest
import torch

from ecinn import optimisation, training
from ecinn.checkpoints import load_checkpoint
from ecinn.data.augmentation import Augmentation
from ecinn.data.dataset import Dataset
from ecinn.data.mnist import load_mnist
from ecinn.errors import EcinnError, InputError
from ecinn.experiments import MNIST, Experiment, find_experiment
from ecinn.finishing import refit_means
from ecinn.model.inn import Architecture, Stage
from ecinn.training import Progress, TrainingState, train

STATE_FILE = training.STATE_FILES[0]

CPU = torch.device("cpu")


@pytest.fixture
def experiment() -> Experiment:
    """A tiny network with everything switched on that draws random numbers."""
    return dataclasses.replace(
        MNIST,
        architecture=Architecture(
            1, 28, 28, 10, (Stage(1, 8), Stage(2, 8)), dense_width=16, clamp=1.5, dropout=0.1
        ),
        augmentation=Augmentation(shift=1.0, rotate=5.0, share=0.5),
        epochs=3,
        batch_size=32,
        learning_rate=5e-3,
        refinement=None,
    )


@pytest.fixture
def data() -> Dataset:
    return load_mnist("train").first(640)


class InterruptError(Exception):
    """Stands for Ctrl-C, a killed machine, a power cut."""


def test_it_learns_and_reports(experiment: Experiment, data: Dataset, tmp_path: Path) -> None:
    seen: list[Progress] = []
    experiment = dataclasses.replace(experiment, epochs=4)
    checkpoint = train(experiment, data, tmp_path, device=CPU, observe=seen.append)
    assert seen[-1].step == seen[-1].steps == 4 * 20
    assert seen[-1].seconds_left == 0
    assert seen[-1].loss < seen[0].loss - 1
    assert seen[-1].error < 0.6
    assert seen[-1].bits_per_dim < seen[0].bits_per_dim
    assert len(checkpoint.training["curve"]) == 4
    assert load_checkpoint(tmp_path).training == checkpoint.training


def test_resumed_run_ends_at_the_same_weights(
    experiment: Experiment, data: Dataset, tmp_path: Path
) -> None:
    whole = train(experiment, data, tmp_path / "whole", device=CPU)

    def stop_in_second_epoch(progress: Progress) -> None:
        if progress.epoch == 2:
            raise InterruptError

    interrupted = tmp_path / "interrupted"
    with pytest.raises(InterruptError):
        train(
            experiment, data, interrupted, device=CPU, observe=stop_in_second_epoch, save_every=0.0
        )
    torch.rand(17)  # what the process did in between must not matter
    resumed = train(experiment, data, interrupted, device=CPU, resume=True)
    weights = whole.classifier.state_dict()
    for name, value in resumed.classifier.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert torch.equal(resumed.mu_bar, whole.mu_bar)
    assert resumed.typical == whole.typical
    # Guard: the run did depend on its random numbers.
    other = dataclasses.replace(experiment, seed=1)
    another = train(other, data, tmp_path / "other", device=CPU).classifier.state_dict()
    assert not torch.equal(another["mu"], weights["mu"])


def test_the_callers_random_numbers_are_left_alone(experiment, data, tmp_path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    experiment = dataclasses.replace(experiment, epochs=1)
    train(experiment, data, tmp_path, device=CPU)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("rate", [1e4, float("nan")])
def test_a_run_that_breaks_stops_and_keeps_the_last_good_state(
    rate: float, experiment: Experiment, data: Dataset, tmp_path: Path, monkeypatch
) -> None:
    """The learning rate goes wild in the second epoch; the first one's state survives."""
    original = optimisation.schedule
    steps = iter(range(10_000))
    monkeypatch.setattr(
        optimisation, "schedule", lambda done, w: rate if next(steps) >= 20 else original(done, w)
    )
    with pytest.raises(EcinnError, match="last good state") as error:
        train(experiment, data, tmp_path, device=CPU, save_every=0.0)
    assert error.value.exit_code == 1
    state = TrainingState.start(experiment, CPU)
    state.restore(tmp_path / STATE_FILE, experiment)
    assert state.epoch == 1
    assert all(bool(torch.isfinite(p).all()) for p in state.classifier.parameters())


def test_a_folder_with_a_run_is_not_overwritten(experiment, data, tmp_path) -> None:
    experiment = dataclasses.replace(experiment, epochs=2)
    train(experiment, data, tmp_path, device=CPU)
    before = (tmp_path / STATE_FILE).read_bytes()
    with pytest.raises(InputError, match="resume"):
        train(experiment, data, tmp_path, device=CPU)
    other = dataclasses.replace(experiment, learning_rate=1.0)
    with pytest.raises(InputError, match="other settings"):
        train(other, data, tmp_path, device=CPU, resume=True)
    assert (tmp_path / STATE_FILE).read_bytes() == before


def test_average_is_the_exponential_moving_average(experiment, data, tmp_path) -> None:
    """Recomputed from the weights after every step."""
    experiment = dataclasses.replace(experiment, epochs=1, averaging=0.8)
    state = TrainingState.start(experiment, CPU)
    expected = state.average.mu.clone()
    step = optimisation.OptimisationStep(experiment, data, state, CPU)
    order = step.begin_epoch(0)
    for number in range(20):
        step(order[number * 32 : (number + 1) * 32], number / 20, number)
        decay = min(0.8, (1 + number) / (10 + number))
        expected = decay * expected + (1 - decay) * state.classifier.mu.detach()
    torch.testing.assert_close(state.average.mu, expected)
    assert not torch.allclose(state.average.mu, state.classifier.mu)


def test_schedule_rises_then_falls_to_zero() -> None:
    values = [optimisation.schedule(step / 100, 0.1) for step in range(101)]
    assert values[0] == 0
    assert max(values) == pytest.approx(1)
    assert values.index(max(values)) == 10
    assert values[-1] == pytest.approx(0)
    assert values[55] == pytest.approx(0.5)


def test_weight_decay_spares_means_scales_and_shifts(experiment: Experiment) -> None:
    state = TrainingState.start(experiment, CPU)
    decayed, free = state.optimiser.param_groups
    assert decayed["weight_decay"] == experiment.weight_decay
    assert free["weight_decay"] == 0
    assert any(p is state.classifier.mu for p in free["params"])
    assert all(p.ndim > 1 for p in decayed["params"])
    total = len(list(state.classifier.parameters()))
    assert len(decayed["params"]) + len(free["params"]) == total


def test_refitted_means_are_where_the_loss_is_flat(experiment: Experiment) -> None:
    """Nearby means give no smaller loss; the start does give a larger one."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (400,), generator=generator)
    true = 2 * torch.randn((4, 6), generator=generator, dtype=torch.float64)
    z = true[labels] + torch.randn((400, 6), generator=generator, dtype=torch.float64)
    mixture = torch.distributions.Independent

    def loss(mu: torch.Tensor) -> float:
        gaussians = torch.stack(
            [mixture(torch.distributions.Normal(m, 1.0), 1).log_prob(z) for m in mu], 1
        )
        nll = -(gaussians.exp().mean(1)).log().mean() / 6
        cross_entropy = torch.nn.functional.cross_entropy(
            gaussians, labels, label_smoothing=experiment.means_label_smoothing
        )
        beta = experiment.beta
        return float((2 * nll + 2 * beta * cross_entropy) / (1 + beta))

    start = torch.zeros_like(true) + 0.1 * true
    fitted = refit_means(z, labels, start, experiment)
    best = loss(fitted)
    assert best < loss(start) - 0.1
    for _ in range(20):
        step = 0.05 * torch.randn(fitted.shape, generator=generator, dtype=torch.float64)
        assert loss(fitted + step) > best


def test_unknown_experiment_lists_the_known() -> None:
    with pytest.raises(InputError, match="mnist"):
        find_experiment("cifar")

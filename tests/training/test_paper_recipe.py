"""The paper's recipe: SGD with milestones, batch norm and no moving average."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from ecinn.classifier.checkpoint import load_checkpoint
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.recipes import MNIST, MNIST_PAPER, SGD, Recipe
from ecinn.data.dataset import Dataset
from ecinn.data.mnist import load_mnist
from ecinn.errors import InputError, InterruptedRunError
from ecinn.flow import bijections
from ecinn.flow.network import Architecture, Stage, build_inn
from ecinn.pixels import to_pixels
from ecinn.progress import Progress
from ecinn.training.loop import train
from ecinn.training.state import TrainingState
from ecinn.training.step import (
    OptimisationStep,
    batch_loss,
    learning_rate,
    prepare_for_gpu,
)

CPU = torch.device("cpu")


@pytest.fixture
def recipe() -> Recipe:
    """The recipe on a tiny network; the rate falls after the first of three epochs."""
    return dataclasses.replace(
        MNIST_PAPER,
        architecture=dataclasses.replace(
            MNIST_PAPER.architecture, stages=(Stage(1, 8, 0.0), Stage(2, 8, 0.25)), dense_width=16
        ),
        epochs=3,
        batch_size=32,
        sgd=dataclasses.replace(MNIST_PAPER.sgd, milestones=(1 / 3,)),
    )


@pytest.fixture(scope="module")
def data() -> Dataset:
    return load_mnist("train").first(160)


def test_a_step_is_gradient_descent_with_momentum(recipe: Recipe, data: Dataset) -> None:
    """By hand: v ← 0.9 v + g + λw, w ← w − ηv, also of norms; μ ← μ − 3ηg; fixed scales stay."""
    recipe = dataclasses.replace(recipe, weight_decay=0.05, gradient_clip=0.7)
    state = TrainingState.start(recipe, CPU)
    step = OptimisationStep(recipe, data, state, CPU)
    x, labels = to_pixels(data.images[:32]), data.labels[:32]
    step._batch_loss = lambda: batch_loss(state.classifier, x, labels, recipe)
    twin = copy.deepcopy(state.classifier).train()
    velocity = {name: torch.zeros_like(p) for name, p in twin.named_parameters()}
    clipped = []
    for epoch, rate in ((0, 0.07), (0, 0.07), (1, 0.007)):
        order = step.begin_epoch(epoch)
        torch.manual_seed(7)  # dropout
        step(order[:32], epoch / 3, 0)
        torch.manual_seed(7)
        twin.zero_grad()
        batch_loss(twin, x, labels, recipe).loss.backward()
        gradients = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
        norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
        clipped.append(bool(norm > 0.7))
        with torch.no_grad():
            for name, parameter in twin.named_parameters():
                if name not in gradients:
                    continue
                gradient = gradients[name] * min(1.0, float(0.7 / norm))
                if name == "mu":
                    parameter -= 3 * rate * gradient
                    continue
                velocity[name] = 0.9 * velocity[name] + gradient + 0.05 * parameter
                parameter -= rate * velocity[name]
    assert any(clipped)
    for (name, obtained), expected in zip(
        state.classifier.named_parameters(), twin.parameters(), strict=True
    ):
        torch.testing.assert_close(obtained, expected, rtol=1e-4, atol=1e-5, msg=name)
    fixed = state.classifier.inn.bijections[2].bijections[1].log_scale
    torch.testing.assert_close(fixed.exp(), torch.full((4,), 0.8))


def test_the_rate_falls_to_a_tenth_after_each_milestone() -> None:
    steps = 453  # in an epoch; the paper divides after 50 of 60
    for epoch, expected in ((0, 0.07), (49, 0.07), (50, 0.007), (59, 0.007)):
        done = epoch * steps / (60 * steps)
        assert learning_rate(MNIST_PAPER, done) == pytest.approx(expected)
    assert learning_rate(MNIST_PAPER, (50 * steps - 1) / (60 * steps)) == 0.07
    twice = dataclasses.replace(MNIST_PAPER, sgd=SGD((2 / 6, 4 / 6)))
    rates = [learning_rate(twice, epoch / 6) for epoch in range(6)]
    assert rates == pytest.approx([0.07, 0.07, 0.007, 0.007, 0.0007, 0.0007])
    assert learning_rate(MNIST, 0.55) == pytest.approx(MNIST.learning_rate / 2)
    for wrong in (0.0, 1.0, 50.0):
        with pytest.raises(InputError, match="fractions of the run"):
            SGD((wrong,))


def test_the_stored_model_is_the_last_one_with_its_statistics(
    recipe: Recipe, data: Dataset, tmp_path: Path
) -> None:
    """No average; BatchNorm's mean is that of the last batch, 0.999 parts of it."""
    state = TrainingState.start(recipe, CPU)
    step = OptimisationStep(recipe, data, state, CPU)
    norm = next(m for m in state.classifier.modules() if isinstance(m, nn.BatchNorm2d))
    seen: list[torch.Tensor] = []
    norm.register_forward_pre_hook(lambda module, given: seen.append(given[0].mean((0, 2, 3))))
    order = step.begin_epoch(0)
    for number in range(3):
        step(order[32 * number : 32 * (number + 1)], 0.0, number)
    expected = 0.999 * seen[2] + 0.001 * (0.999 * seen[1] + 0.001 * 0.999 * seen[0])
    torch.testing.assert_close(norm.running_mean, expected)
    kept, last = state.average.state_dict(), state.classifier.state_dict()
    assert all(torch.equal(kept[name], last[name]) for name in last)
    checkpoint = train(recipe, data, tmp_path, device=CPU)
    stored = load_checkpoint(tmp_path).classifier.state_dict()
    resumable = TrainingState.start(recipe, CPU)
    resumable.restore(tmp_path / "state.safetensors", recipe)
    for name, value in resumable.classifier.state_dict().items():
        assert torch.equal(stored[name], value), name
        assert torch.equal(checkpoint.classifier.state_dict()[name], value), name


def test_resumed_run_ends_at_the_same_weights(
    recipe: Recipe, data: Dataset, tmp_path: Path
) -> None:
    whole = train(recipe, data, tmp_path / "whole", device=CPU)

    def stop_in_second_epoch(progress: Progress) -> None:
        if progress.figures["epoch"] == 2:
            raise KeyboardInterrupt

    stopped = tmp_path / "stopped"
    with pytest.raises(InterruptedRunError):
        train(recipe, data, stopped, device=CPU, observe=stop_in_second_epoch, save_every=0.0)
    state = TrainingState.start(recipe, CPU)
    state.restore(stopped / "state.safetensors", recipe)
    assert state.epoch == 1
    assert any("momentum_buffer" in name for name in state.tensors())
    resumed = train(recipe, data, stopped, device=CPU, resume=True)
    weights = whole.classifier.state_dict()
    for name, value in resumed.classifier.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert torch.equal(resumed.mu_bar, whole.mu_bar)


def test_dropout_may_differ_between_stages() -> None:
    def shares(architecture: Architecture) -> list[float]:
        modules = build_inn(architecture).modules()
        return [m.p for m in modules if isinstance(m, nn.Dropout | nn.Dropout2d)]

    recipe = shares(MNIST_PAPER.architecture)
    assert recipe == [0.25] * 24 + [0.5] * 2
    alike = Architecture(1, 8, 8, 2, (Stage(1, 4), Stage(1, 4)), dense_width=4, dropout=0.3)
    assert shares(alike) == [0.3] * 4


def test_nothing_follows_the_downsampling_of_the_recipe(recipe: Recipe) -> None:
    """Its first half comes out as it went in, squeezed; elsewhere channels are mixed."""
    x = torch.randn((2, 4, 14, 14), generator=torch.Generator().manual_seed(0))
    squeezed = x[:, :2].reshape(2, 2, 7, 2, 7, 2).permute(0, 1, 3, 5, 2, 4).reshape(2, 8, 7, 7)
    plain = dataclasses.replace(recipe.architecture, channel_scale=None)
    for architecture, same in ((recipe.architecture, True), (plain, False)):
        (downsampling,) = [
            layer
            for layer in build_inn(architecture).bijections
            if isinstance(layer, bijections.Chain)
            and isinstance(layer.bijections[0], bijections.DownsamplingCoupling)
        ]
        with torch.no_grad():
            y, _ = downsampling(x)
            torch.testing.assert_close(downsampling.inverse(y), x, rtol=1e-4, atol=1e-4)
        assert torch.equal(y[:, :8], squeezed) is same


@torch.no_grad()
def test_clamp_and_means_of_the_recipe() -> None:
    """Log-scales of a dense coupling go to ±2, of others to ±0.7; means are about 5 apart."""
    classifier = GenerativeClassifier(MNIST_PAPER.architecture)
    limits: dict[bool, set[float]] = {True: set(), False: set()}
    for coupling in classifier.modules():
        if isinstance(coupling, bijections.Coupling):
            dense = isinstance(coupling.subnet[0], nn.Linear)
            last = coupling.subnet[-1]
            nn.init.zeros_(last.weight)
            nn.init.constant_(last.bias, 1e4)
            shape = (1, coupling.split[0]) if dense else (1, coupling.split[0], 4, 4)
            scale, _ = coupling.eval()._scale_and_shift(torch.zeros(shape))
            limits[dense].add(round(float(scale.max()), 4))
    assert limits == {True: {2.0}, False: {0.7}}
    apart = torch.pdist(classifier.mu)
    assert apart.mean() == pytest.approx(5.0, rel=0.02)
    assert apart.std() < 0.3
    usual = GenerativeClassifier(dataclasses.replace(MNIST.architecture, stages=(Stage(1, 4),)))
    assert torch.pdist(usual.mu).mean() == pytest.approx(6.0, rel=0.02)


def test_a_random_start_is_no_identity_and_keeps_the_spread(generator: torch.Generator) -> None:
    """With the fixed scale of 0.8, twenty couplings neither grow nor shrink what they pass on."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        subnets = [
            bijections.convolutional_subnet(4, 8, 32, norm="batch", start_at_zero=False)
            for _ in range(20)
        ]
    chain = bijections.Chain(
        layer
        for subnet in subnets
        for layer in (
            bijections.Coupling(8, subnet, 0.7),
            bijections.ChannelMix(8, generator, 0.8),
        )
    ).train()
    x = torch.randn((16, 8, 7, 7), generator=generator)
    with torch.no_grad():
        y, _ = chain(x)
    assert 0.5 < float(y.std()) < 1.5
    assert float((y - x).abs().mean()) > 0.5


def test_models_of_before_have_none_of_it() -> None:
    """What a file does not say is what it was before the setting came."""
    recipe = load_checkpoint("mnist").recipe
    assert recipe.sgd is None
    assert recipe.architecture.channel_scale is None
    assert recipe.architecture.dense_clamp is None
    assert recipe.architecture.class_distance == 6.0
    assert recipe.architecture.stages[0].dropout is None


@pytest.mark.parametrize("full", [MNIST, MNIST_PAPER], ids=lambda recipe: recipe.name)
def test_subnets_run_in_the_precision_of_the_recipe(full: Recipe, recipe: Recipe) -> None:
    classifier = GenerativeClassifier(recipe.architecture)
    prepare_for_gpu(classifier, full)
    couplings = [each for each in classifier.modules() if isinstance(each, bijections.Coupling)]
    assert couplings
    assert {each.half_precision for each in couplings} == {full is MNIST}

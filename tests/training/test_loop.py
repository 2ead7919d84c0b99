"""Training on the CPU: it learns, survives interruptions and resumes to the same weights."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ecinn import equations
from ecinn.classifier.checkpoint import Checkpoint, load_checkpoint
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.out_of_distribution import OODDetector
from ecinn.classifier.recipes import MNIST, RECIPES, FineTuning, Recipe, find_recipe
from ecinn.classifier.tensor_files import read_tensors
from ecinn.data.augmentation import Augmentation
from ecinn.data.dataset import Dataset
from ecinn.data.mnist import load_mnist
from ecinn.errors import EcinnError, InputError, InterruptedRunError
from ecinn.flow.network import Architecture, Stage
from ecinn.model import load
from ecinn.pixels import to_pixels, to_uint8
from ecinn.progress import Progress
from ecinn.training import loop as training
from ecinn.training import step as optimisation
from ecinn.training.calibration import refit_means
from ecinn.training.evaluation import evaluate
from ecinn.training.finetuning import (
    Critic,
    FineTuningState,
    FineTuningStep,
    critic_loss,
    second_stage,
    straight_through_8_bit,
)
from ecinn.training.loop import train
from ecinn.training.state import TrainingState
from helpers.builders import randomise

STATE_FILE = training.STATE_FILES[0]

CPU = torch.device("cpu")


@pytest.fixture
def recipe() -> Recipe:
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
        finetuning=None,
    )


@pytest.fixture(scope="module")
def data() -> Dataset:
    return load_mnist("train").first(640)


class InterruptError(Exception):
    """Stands for Ctrl-C, a killed machine, a power cut."""


@pytest.mark.slow
def test_it_learns_and_reports(recipe: Recipe, data: Dataset, tmp_path: Path) -> None:
    seen: list[Progress] = []
    recipe = dataclasses.replace(recipe, epochs=4)
    checkpoint = train(recipe, data, tmp_path, device=CPU, observe=seen.append)
    assert {progress.task for progress in seen} == {"training"}
    assert seen[-1].done == seen[-1].total == 4 * 20
    first, last = seen[0].figures, seen[-1].figures
    assert last["loss"] < first["loss"] - 1
    assert last["error"] < 0.6
    assert last["bits_per_dim"] < first["bits_per_dim"]
    assert (last["epoch"], last["epochs"]) == (4, 4)
    assert last["images_per_second"] > 0
    assert len(checkpoint.training["curve"]) == 4
    assert load_checkpoint(tmp_path).training == checkpoint.training


@pytest.mark.slow
def test_resumed_run_ends_at_the_same_weights(
    recipe: Recipe, data: Dataset, tmp_path: Path
) -> None:
    data = data.first(256)
    whole = train(recipe, data, tmp_path / "whole", device=CPU)

    def stop_in_second_epoch(progress: Progress) -> None:
        if progress.figures["epoch"] == 2:
            raise InterruptError

    interrupted = tmp_path / "interrupted"
    with pytest.raises(InterruptError):
        train(recipe, data, interrupted, device=CPU, observe=stop_in_second_epoch, save_every=0.0)
    with pytest.raises(InputError, match="was started with"):
        train(recipe, data.first(len(data) // 2), interrupted, device=CPU, resume=True)
    torch.rand(17)  # what the process did in between must not matter
    resumed = train(recipe, data, interrupted, device=CPU, resume=True)
    weights = whole.classifier.state_dict()
    for name, value in resumed.classifier.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert torch.equal(resumed.mu_bar, whole.mu_bar)
    assert resumed.ood == whole.ood
    # Guard: the run did depend on its random numbers.
    other = dataclasses.replace(recipe, seed=1)
    another = train(other, data, tmp_path / "other", device=CPU).classifier.state_dict()
    assert not torch.equal(another["mu"], weights["mu"])


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["training", "fine-tuning"])
def test_ctrl_c_keeps_the_last_finished_epoch(
    stage: str, recipe: Recipe, data: Dataset, tmp_path: Path
) -> None:
    """Although the last state on disk is older: `save_every` never comes due."""
    data = data.first(128)
    if stage == "fine-tuning":
        recipe = dataclasses.replace(recipe, epochs=1, finetuning=FineTuning(3, 3.0, 1.0, 0.1))
    whole = train(recipe, data, tmp_path / "whole", device=CPU)

    def press_ctrl_c(progress: Progress) -> None:
        if progress.task == stage and progress.figures["epoch"] == 3:
            raise KeyboardInterrupt

    stopped = tmp_path / "stopped"
    options = {"device": CPU, "save_every": 1e9}
    with pytest.raises(InterruptedRunError, match="--resume") as error:
        train(recipe, data, stopped, observe=press_ctrl_c, **options)
    assert error.value.exit_code == 130
    name = training.STATE_FILES[stage == "fine-tuning"]
    assert read_tensors(stopped / name)[1]["epoch"] == 2
    resumed = train(recipe, data, stopped, resume=True, **options).classifier.state_dict()
    for name, value in whole.classifier.state_dict().items():
        assert torch.equal(resumed[name], value), name


def test_ctrl_c_in_the_first_epoch_leaves_nothing(recipe, data, tmp_path) -> None:
    def press_ctrl_c(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError, match="start again"):
        train(recipe, data, tmp_path / "run", device=CPU, observe=press_ctrl_c)
    assert not (tmp_path / "run").exists()


def test_the_model_is_written_with_its_metrics(recipe, data, tmp_path) -> None:
    recipe = dataclasses.replace(recipe, epochs=1)
    test = load_mnist("test").first(60)
    folder = tmp_path / "run"
    seen: list[Progress] = []

    def observe(progress: Progress) -> None:
        assert not (folder / "model.safetensors").exists()
        seen.append(progress)

    checkpoint = train(recipe, data.first(64), folder, test=test, device=CPU, observe=observe)
    loaded = load_checkpoint(folder)
    assert loaded.metrics == checkpoint.metrics
    assert loaded.metrics == dataclasses.asdict(evaluate(load(folder, "cpu"), test))
    assert (seen[-1].task, seen[-1].done, seen[-1].total) == ("mnist: evaluating", 60, 60)


def test_names_and_strings_are_accepted(recipe, data, tmp_path, monkeypatch) -> None:
    data = data.first(64)
    monkeypatch.setitem(RECIPES, "tiny", dataclasses.replace(recipe, epochs=1))
    first = train("tiny", data, str(tmp_path / "first"), device="cpu")
    again = train("tiny", data, tmp_path / "again", init_from=str(tmp_path / "first"))
    assert again.training["init_from"] == first.recipe.name


def test_options_that_exclude_each_other_are_refused(recipe, data, tmp_path) -> None:
    model = untrained(recipe, data)
    tuned = dataclasses.replace(recipe, finetuning=FineTuning(1, 1.0, 1.0, 0.1))
    with pytest.raises(InputError, match="no fine-tuning"):
        train(recipe, data, tmp_path, refine_from=model)
    with pytest.raises(InputError, match="choose one"):
        train(tuned, data, tmp_path, refine_from=model, init_from=model)
    with pytest.raises(InputError, match="leave one out"):
        train(tuned, data, tmp_path, refine_from=model, resume=True)


def test_the_callers_random_numbers_are_left_alone(recipe, data, tmp_path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    recipe = dataclasses.replace(recipe, epochs=1)
    train(recipe, data.first(64), tmp_path, device=CPU)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1e4, float("nan")])
def test_a_run_that_breaks_stops_and_keeps_the_last_good_state(
    rate: float, recipe: Recipe, data: Dataset, tmp_path: Path, monkeypatch
) -> None:
    """The learning rate goes wild in the second epoch; the first one's state survives."""
    original = optimisation.cosine_schedule
    steps = iter(range(10_000))
    monkeypatch.setattr(
        optimisation,
        "cosine_schedule",
        lambda done, w: rate if next(steps) >= 20 else original(done, w),
    )
    with pytest.raises(EcinnError, match="last good state") as error:
        train(recipe, data, tmp_path, device=CPU, save_every=0.0)
    assert error.value.exit_code == 1
    state = TrainingState.start(recipe, CPU)
    state.restore(tmp_path / STATE_FILE, recipe)
    assert state.epoch == 1
    assert all(bool(torch.isfinite(p).all()) for p in state.classifier.parameters())


def test_a_folder_with_a_run_is_not_overwritten(recipe, data, tmp_path) -> None:
    recipe, data = dataclasses.replace(recipe, epochs=2), data.first(64)
    train(recipe, data, tmp_path, device=CPU)
    before = (tmp_path / STATE_FILE).read_bytes()
    with pytest.raises(InputError, match="resume"):
        train(recipe, data, tmp_path, device=CPU)
    other = dataclasses.replace(recipe, learning_rate=1.0)
    with pytest.raises(InputError, match="other settings"):
        train(other, data, tmp_path, device=CPU, resume=True)
    assert (tmp_path / STATE_FILE).read_bytes() == before


def test_average_is_the_exponential_moving_average(recipe, data, tmp_path) -> None:
    """Recomputed from the weights after every step."""
    recipe = dataclasses.replace(recipe, epochs=1, ema_decay=0.8)
    state = TrainingState.start(recipe, CPU)
    expected = state.average.mu.clone()
    step = optimisation.OptimisationStep(recipe, data, state, CPU)
    order = step.begin_epoch(0)
    for number in range(20):
        step(order[number * 32 : (number + 1) * 32], number / 20, number)
        decay = min(0.8, (1 + number) / (10 + number))
        expected = decay * expected + (1 - decay) * state.classifier.mu.detach()
    torch.testing.assert_close(state.average.mu, expected)
    assert not torch.allclose(state.average.mu, state.classifier.mu)


def test_schedule_rises_then_falls_to_zero() -> None:
    values = [optimisation.cosine_schedule(step / 100, 0.1) for step in range(101)]
    assert values[0] == 0
    assert max(values) == pytest.approx(1)
    assert values.index(max(values)) == 10
    assert values[-1] == pytest.approx(0)
    assert values[55] == pytest.approx(0.5)


def test_weight_decay_spares_means_scales_and_shifts(recipe: Recipe) -> None:
    state = TrainingState.start(recipe, CPU)
    decayed, free = state.optimiser.param_groups
    assert decayed["weight_decay"] == recipe.weight_decay
    assert free["weight_decay"] == 0
    assert any(p is state.classifier.mu for p in free["params"])
    assert all(p.ndim > 1 for p in decayed["params"])
    total = len(list(state.classifier.parameters()))
    assert len(decayed["params"]) + len(free["params"]) == total


def test_refitted_means_are_where_the_loss_is_flat(recipe: Recipe) -> None:
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
            gaussians, labels, label_smoothing=recipe.refit_label_smoothing
        )
        beta = recipe.beta
        return float((2 * nll + 2 * beta * cross_entropy) / (1 + beta))

    start = torch.zeros_like(true) + 0.1 * true
    fitted = refit_means(z, labels, start, recipe)
    best = loss(fitted)
    assert best < loss(start) - 0.1
    for _ in range(20):
        step = 0.05 * torch.randn(fitted.shape, generator=generator, dtype=torch.float64)
        assert loss(fitted + step) > best


def test_an_unknown_recipe_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match="mnist"):
        find_recipe("cifar")


@pytest.fixture
def refined(recipe: Recipe) -> Recipe:
    finetuning = FineTuning(epochs=2, proximity=3.0, faithfulness=1.0, realism=0.1)
    return dataclasses.replace(recipe, epochs=1, batch_size=64, finetuning=finetuning)


@pytest.mark.parametrize(
    ("proximity", "faithfulness", "realism"), [(2.0, 0.0, 0.0), (0.0, 3.0, 0.0), (0.0, 0.0, 0.7)]
)
def test_counterfactual_loss_is_distance_divergence_and_the_critics_view(
    proximity: float, faithfulness: float, realism: float, refined: Recipe, data: Dataset
) -> None:
    """Each term by hand: absolute values, Σ p log p/q over 8-bit images, the critic's scores."""
    settings = FineTuning(2, proximity, faithfulness, realism)
    step = refinement_step(dataclasses.replace(refined, finetuning=settings), data)
    classifier, mu = step.state.classifier, step.state.classifier.mu.detach()
    with torch.no_grad():
        first = step._batch_loss()
        q = torch.arange(64) % 10
        z_hat = first.z + 0.5 * torch.randn(first.z.shape, generator=step.generator)
        x_hat = classifier.decode(z_hat).clamp(0, 1)
        loss = float(step._counterfactual_loss(first.x, z_hat, x_hat, q, 12))
        asked = (-0.5 * torch.cdist(z_hat, mu).square()).softmax(1).double()
        stored = classifier.encode(to_pixels(to_uint8(x_hat)))
        obtained = (-0.5 * torch.cdist(stored, mu).square()).softmax(1).double()
        expected = proximity * float((x_hat - first.x).abs().mean())
        divergence = (asked * (asked.log() - obtained.log())).nan_to_num(0.0).sum(1).mean()
        expected += faithfulness * float(divergence)
        expected -= realism * float(step.state.critic(x_hat[:12], q[:12]).mean())
    assert loss == pytest.approx(expected, rel=2e-3, abs=1e-5)
    assert abs(loss) > 1e-4


@pytest.mark.slow
def test_second_stage_resumes_to_the_same_weights(
    refined: Recipe, data: Dataset, tmp_path: Path
) -> None:
    data = data.first(256)
    whole = train(refined, data, tmp_path / "whole", device=CPU)
    epochs = iter(range(100))

    def stop_in_last_epoch(progress: Progress) -> None:
        if next(epochs) == 2:  # one report an epoch: first stage, finetuning, finetuning
            raise InterruptError

    interrupted = tmp_path / "interrupted"
    with pytest.raises(InterruptError):
        train(refined, data, interrupted, device=CPU, observe=stop_in_last_epoch, save_every=0.0)
    assert not (interrupted / training.MODEL_FILE).exists()
    torch.rand(5)
    resumed = train(refined, data, interrupted, device=CPU, resume=True)
    assert resumed.recipe == refined
    assert load_checkpoint(interrupted).recipe == refined
    weights = whole.classifier.state_dict()
    for name, value in resumed.classifier.state_dict().items():
        assert torch.equal(value, weights[name]), name
    first = load_checkpoint(interrupted / training.FIRST_STAGE_FILE).classifier.state_dict()
    assert not torch.equal(first["mu"], weights["mu"])


def test_fine_tuning_a_model_of_another_architecture_is_refused(refined, data, tmp_path) -> None:
    other = dataclasses.replace(refined, architecture=MNIST.architecture)
    with pytest.raises(InputError, match="its architecture differs"):
        train(refined, data, tmp_path, device=CPU, refine_from=untrained(other, data))


def untrained(recipe: Recipe, data: Dataset) -> Checkpoint:
    classifier = GenerativeClassifier(recipe.architecture).eval()
    mu = classifier.mu.detach()
    return Checkpoint(recipe, classifier, mu, OODDetector((0.0, 1.0)), data.class_names)


def refinement_step(refined: Recipe, data: Dataset) -> FineTuningStep:
    stage = second_stage(refined)
    state = FineTuningState.refine(untrained(refined, data), stage, CPU)
    randomise(state.classifier)
    step = FineTuningStep(stage, data, state, CPU)
    step.begin_epoch(0)
    return step


@pytest.mark.parametrize("apart", [1.0, 2.0])
def test_half_of_a_batch_goes_to_alpha_1_and_half_to_confidences_between_p_and_q(
    apart: float, refined: Recipe, data: Dataset
) -> None:
    """Also where the measured means are further apart than the model's."""
    step = refinement_step(refined, data)
    mu = step.state.classifier.mu.detach()
    step.state.means.mu_bar.copy_(apart * mu)
    p = torch.arange(40) % 10
    q = step._other_class(p)
    assert (q != p).all()
    assert len(q.unique()) == 10
    noise = torch.randn((40, mu.shape[1]), generator=torch.Generator().manual_seed(1))
    z_hat, convincing = step._counterfactual_latents(mu[p] + 0.1 * noise, p, q)
    assert convincing == 20
    log_odds = (equations.log_posterior(z_hat, mu)).detach()
    odds = log_odds.gather(1, q[:, None]) - log_odds.gather(1, p[:, None])
    confidence = odds.squeeze(1).sigmoid()
    # α₁ ≈ 1.05 or 0.93: beyond the mean of q in both cases.
    assert (confidence[:20] > 0.999).all()
    asked = confidence[20:]
    assert 0.009 < asked.min() < 0.3
    assert 0.7 < asked.max() < 0.991


def test_refinement_decodes_what_it_encoded(refined: Recipe, data: Dataset) -> None:
    """Dropout would make the inverse another network's."""
    assert refined.architecture.dropout > 0
    classifier = refinement_step(refined, data).state.classifier
    x = to_pixels(data.images[:8])
    with torch.no_grad():
        torch.testing.assert_close(classifier.decode(classifier.encode(x)), x, atol=1e-4, rtol=0)


def test_running_means_follow_the_batch(refined: Recipe, data: Dataset) -> None:
    step = refinement_step(refined, data)
    before = step.state.means.mu_bar.clone()
    z = torch.randn((30, before.shape[1]), generator=torch.Generator().manual_seed(2))
    label = torch.arange(30) % 3
    step._update_means(z, label)
    after = step.state.means.mu_bar
    for k in range(3):
        expected = 0.98 * before[k] + 0.02 * z[label == k].mean(0)
        torch.testing.assert_close(after[k], expected)
    assert torch.equal(after[3:], before[3:])  # classes without an image stay


def test_stored_values_are_8_bit_and_pass_the_gradient(uniform) -> None:
    x = uniform(2, 1, 3, 3).float().requires_grad_()
    stored = straight_through_8_bit(x)
    assert torch.equal(stored.detach() * 256 - 0.5, (x.detach() * 256).floor())
    stored.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.slow
def test_critic_learns_to_tell_real_from_other(generator: torch.Generator) -> None:
    """Class k is bright in row k; counterfactuals are flat."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        critic = Critic((1, 8, 8), 4)
    optimiser = torch.optim.Adam(critic.parameters(), 1e-3)
    label = torch.arange(64) % 4
    for _ in range(60):
        real = 0.1 * torch.rand((64, 1, 8, 8), generator=generator)
        real[torch.arange(64), 0, label] += 0.8
        flat = 0.3 + 0.1 * torch.rand((32, 1, 8, 8), generator=generator)
        loss = critic_loss(critic, real, label, flat, (label + 1) % 4, 0.01)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        score = critic(real, label)
        assert score.min() > 0
        assert critic(flat, label[:32]).max() < 0
        assert critic(real, (label + 1) % 4).max() < 0


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 64, 64), (2, 12, 20)])
def test_critic_takes_any_shape(shape: tuple[int, int, int]) -> None:
    assert Critic(shape, 3)(torch.zeros(2, *shape), torch.tensor([0, 2])).shape == (2,)


def test_data_that_does_not_fit_is_refused(recipe, data, tmp_path) -> None:
    def refuse(says: str, **changes: Tensor) -> None:
        other = copy.copy(data)
        for name, value in changes.items():
            object.__setattr__(other, name, value)  # past the check of types, as outside of tests
        with pytest.raises(InputError, match=says):
            train(recipe, other, tmp_path / "run", device=torch.device("cpu"))
        assert not (tmp_path / "run").exists()

    refuse("8-bit", images=data.images.float() / 255)
    refuse("needs images of", images=data.images[:, :, :-2])
    refuse("labels go from", labels=data.labels + 1)

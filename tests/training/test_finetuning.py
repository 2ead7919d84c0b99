"""Fine-tuning for counterfactuals: the loss, its counterfactuals, and resuming."""

import dataclasses
from pathlib import Path

import pytest
import torch

from ecinn import equations
from ecinn.classifier.checkpoint import Checkpoint, load_checkpoint
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.out_of_distribution import OODDetector
from ecinn.classifier.recipes import MNIST, FineTuning, Recipe
from ecinn.data.augmentation import Augmentation
from ecinn.data.dataset import Dataset
from ecinn.data.face_crop import CELEBA_CROP
from ecinn.data.face_regions import region_mask
from ecinn.data.mnist import load_mnist
from ecinn.errors import InputError, InterruptedRunError
from ecinn.flow.network import Architecture, Stage
from ecinn.pixels import to_pixels, to_uint8
from ecinn.progress import Progress
from ecinn.training import loop as training
from ecinn.training.critic import Critic, critic_losses
from ecinn.training.finetuning import FineTuningStep, second_stage, straight_through_8_bit
from ecinn.training.loop import train
from ecinn.training.state import TrainingState
from helpers.builders import RowTeacher, randomise

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data() -> Dataset:
    return load_mnist("train").first(256)


@pytest.fixture
def refined() -> Recipe:
    return dataclasses.replace(
        MNIST,
        architecture=Architecture(
            1, 28, 28, 10, (Stage(1, 8), Stage(2, 8)), dense_width=16, clamp=1.5, dropout=0.1
        ),
        augmentation=Augmentation(shift=1.0, rotate=5.0, share=0.5),
        epochs=1,
        batch_size=64,
        learning_rate=5e-3,
        finetuning=FineTuning(2, faithfulness=1.0, distillation_weight=0.5, batch_size=64),
        mnist_framing=False,  # without the shape score, which takes longer than the training
    )


def untrained(recipe: Recipe, data: Dataset) -> Checkpoint:
    classifier = GenerativeClassifier(recipe.architecture).eval()
    mu = classifier.mu.detach().clone()
    return Checkpoint(recipe, classifier, mu, OODDetector((0.0, 1.0)), data.class_names)


def finetuning_step(refined: Recipe, data: Dataset, tau: float = 0.4) -> FineTuningStep:
    stage = dataclasses.replace(second_stage(refined), tau=tau)
    state = TrainingState.start(stage, CPU)
    randomise(state.classifier)
    state.classifier.tau.fill_(tau)
    state.teacher = RowTeacher()
    step = FineTuningStep(stage, data, state, CPU)
    step.begin_epoch(0)
    return step


@pytest.mark.parametrize(
    ("faithfulness", "distillation", "proximity", "background"),
    [
        (3.0, 0.0, 0.0, 1.0),
        (0.0, 2.0, 0.0, 1.0),
        (0.0, 0.0, 4.0, 1.0),
        (0.0, 0.0, 4.0, 6.0),
        (1.0, 0.5, 2.0, 0.5),
    ],
)
def test_the_loss_is_divergence_and_change_of_one_half_and_cross_entropy_of_the_other(
    faithfulness: float,
    distillation: float,
    proximity: float,
    background: float,
    refined: Recipe,
    data: Dataset,
) -> None:
    """Each term by hand: posteriors by distances, Σ p log p/q, −Σ t log q, over 8-bit images."""
    settings = FineTuning(
        2, faithfulness, distillation, 64, proximity=proximity, background=background
    )
    refined = dataclasses.replace(refined, finetuning=settings, face_crop=CELEBA_CROP)
    step = finetuning_step(refined, data)
    classifier = step.state.classifier
    mu, tau = classifier.mu.detach(), 0.4
    step.load_batch(torch.arange(64))
    seen = []
    latents = step._counterfactual_latents
    step._counterfactual_latents = lambda *given: seen.append(latents(*given)) or seen[0]
    x = to_pixels(data.images[:64])
    loss = float(step._counterfactual_loss(x, classifier.encode(x)).detach())
    with torch.no_grad():
        x_hat = to_pixels(to_uint8(classifier.decode(seen[0])))
        stored = classifier.encode(x_hat)
        asked, obtained = (
            (-0.5 * tau * torch.cdist(each.double(), mu.double()).square()).softmax(1)
            for each in (seen[0], stored)
        )
        divergence = (asked * (asked.log() - obtained.log()))[:32].sum(1).mean()
        answer = RowTeacher()(x_hat).softmax(1)[32:]
        cross_entropy = -(answer * obtained[32:].log()).sum(1).mean()
        change = (classifier.decode(seen[0][:32]) - x[:32]).abs().mean((0, 1))
        # Weights that are 1 on average, as many times larger where no pixel is in the oval.
        inside = region_mask("face", 28, 28)
        in_face = 784 / (int(inside.sum()) + background * int((~inside).sum()))
        change = in_face * (change[inside].sum() + background * change[~inside].sum()) / 784
    expected = faithfulness * float(divergence) + distillation * float(cross_entropy)
    expected += proximity * float(change)
    assert loss == pytest.approx(expected, rel=5e-3, abs=1e-5)
    assert abs(loss) > 1e-4


def test_no_gradient_passes_through_the_teacher_or_its_pictures(refined, data) -> None:
    """The gradient of distillation is that of a fixed set of labelled pictures."""
    settings = FineTuning(2, 0.0, 1.0, batch_size=64)
    step = finetuning_step(dataclasses.replace(refined, finetuning=settings), data)
    classifier = step.state.classifier
    step.load_batch(torch.arange(64))
    seen = []
    latents = step._counterfactual_latents
    step._counterfactual_latents = lambda *given: seen.append(latents(*given)) or seen[0]
    x = to_pixels(data.images[:64])
    z = classifier.encode(x)
    weights = [p for p in classifier.parameters() if p.requires_grad]
    ours = torch.autograd.grad(step._counterfactual_loss(x, z), weights, allow_unused=True)
    with torch.no_grad():
        x_hat = to_pixels(to_uint8(classifier.decode(seen[0][32:])))
    posterior = equations.log_posterior(classifier.encode(x_hat), classifier.mu, classifier.tau)
    loss = -(RowTeacher()(x_hat).softmax(1) * posterior).sum(1).mean()
    by_hand = torch.autograd.grad(loss, weights, allow_unused=True)
    compared = 0
    for one, other in zip(ours, by_hand, strict=True):
        if other is not None and other.abs().max() > 0:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
            compared += 1
    assert compared > 20


def test_every_second_image_goes_to_alpha_1_and_the_others_to_confidences(refined, data) -> None:
    settings = dataclasses.replace(refined.finetuning, batch_size=400)
    images = data.select(torch.arange(400) % len(data))
    step = finetuning_step(dataclasses.replace(refined, finetuning=settings), images)
    mu = step.state.classifier.mu.detach()
    p = torch.arange(400) % 10
    q = step._other_class(p)
    assert (q != p).all()
    assert len(q.unique()) == 10
    noise = torch.randn((400, mu.shape[1]), generator=torch.Generator().manual_seed(1))
    z = mu[p] + 0.1 * noise
    step.generator.manual_seed(2)
    z_hat = step._counterfactual_latents(z, mu[p], mu[q])
    delta = mu[q] - mu[p]
    alpha = ((z_hat - z) * delta).sum(1) / delta.square().sum(1)
    alpha_0 = equations.tipping_point_alpha(z, delta, mu[p], mu[q])
    torch.testing.assert_close(alpha[::2], 0.8 + alpha_0[::2] / 2, rtol=1e-3, atol=1e-4)
    log_posterior = equations.log_posterior(z_hat, mu, 0.4)
    odds = log_posterior.gather(1, q[:, None]) - log_posterior.gather(1, p[:, None])
    asked = odds.squeeze(1).sigmoid()[1::2]
    drawn = torch.rand(400, generator=step.generator.manual_seed(2))[1::2]
    torch.testing.assert_close(asked, 0.01 + 0.98 * drawn, rtol=0, atol=1e-3)
    assert drawn.min() < 0.02
    assert drawn.max() > 0.98


def test_counterfactuals_of_misread_images_stay_near_the_classes(refined, data) -> None:
    """α₀ stays within 0.1 to 1, so α₁ within 0.85 to 1.3; other α stay within 0 to 1.2."""
    settings = dataclasses.replace(refined.finetuning, batch_size=800)
    images = data.select(torch.arange(800) % len(data))
    step = finetuning_step(dataclasses.replace(refined, finetuning=settings), images)
    mu = step.state.classifier.mu.detach()
    p, q = torch.tensor([0, 0, 3, 3] * 200), torch.tensor([4, 4, 1, 1] * 200)
    delta = mu[q] - mu[p]
    beyond = mu[p] + torch.tensor([3.0, 3.0, -4.0, -4.0] * 200)[:, None] * delta
    moved = step._counterfactual_latents(beyond, mu[p], mu[q]) - beyond
    alpha = (moved * delta).sum(1) / delta.square().sum(1)
    torch.testing.assert_close(alpha[::2], torch.tensor([0.85, 1.3] * 200))
    step.state.classifier.tau.fill_(1e-6)
    moved = step._counterfactual_latents(beyond, mu[p], mu[q]) - beyond
    alpha = (moved * delta).sum(1) / delta.square().sum(1)
    torch.testing.assert_close(alpha[1::2].min(), torch.tensor(0.0), rtol=0, atol=1e-5)
    torch.testing.assert_close(alpha[1::2].max(), torch.tensor(1.2))


def test_faithfulness_learns_through_the_decoder(refined, data) -> None:
    """Its gradient is that of finite differences, with the rounding errors held fixed."""
    settings = FineTuning(2, 1.0, 0.0, batch_size=8)
    step = finetuning_step(dataclasses.replace(refined, finetuning=settings), data)
    classifier = step.state.classifier.double()
    step.load_batch(torch.arange(8))
    seen = []
    latents = step._counterfactual_latents
    step._counterfactual_latents = lambda *given: seen.append(latents(*given)) or seen[0]
    x = to_pixels(data.images[:8]).double()
    z = classifier.encode(x)
    weights = [p for p in classifier.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(3)
    direction = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in weights]
    loss = step._counterfactual_loss(x, z)
    gradient = torch.autograd.grad(loss, weights, allow_unused=True)
    ours = sum(
        float((g * d).sum()) for g, d in zip(gradient, direction, strict=True) if g is not None
    )
    z_hat = seen[0][:4]
    with torch.no_grad():
        x_hat = classifier.decode(z_hat)
        error = to_pixels(to_uint8(x_hat)) - x_hat

    def divergence(distance: float) -> float:
        with torch.no_grad():
            torch._foreach_add_(weights, direction, alpha=distance)
            z_stored = classifier.encode(classifier.decode(z_hat) + error)
            torch._foreach_add_(weights, direction, alpha=-distance)
        asked, obtained = (
            (-0.5 * classifier.tau * torch.cdist(each, classifier.mu).square()).softmax(1)
            for each in (z_hat, z_stored)
        )
        return float((asked * (asked / obtained).log()).sum(1).mean())

    numeric = (divergence(1e-6) - divergence(-1e-6)) / 2e-6
    assert ours == pytest.approx(numeric, rel=1e-2)
    assert float(loss.detach()) == pytest.approx(divergence(0.0), rel=1e-4)


def test_proximity_learns_through_encoder_and_decoder(refined, data) -> None:
    """Its gradient is that of finite differences of |f⁻¹(f(x) + αΔ) − x|, with αΔ held fixed."""
    settings = FineTuning(2, 0.0, 0.0, proximity=1.0, batch_size=8)
    step = finetuning_step(dataclasses.replace(refined, finetuning=settings), data)
    classifier = step.state.classifier.double()
    step.load_batch(torch.arange(8))
    seen = []
    latents = step._counterfactual_latents
    step._counterfactual_latents = lambda *given: seen.append(latents(*given)) or seen[0]
    x = to_pixels(data.images[:8]).double()
    z = classifier.encode(x)
    weights = [p for p in classifier.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(5)
    direction = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in weights]
    gradient = torch.autograd.grad(step._counterfactual_loss(x, z), weights, allow_unused=True)
    ours = sum(
        float((g * d).sum()) for g, d in zip(gradient, direction, strict=True) if g is not None
    )
    moved = (seen[0] - z)[:4].detach()

    def change(distance: float) -> float:
        with torch.no_grad():
            torch._foreach_add_(weights, direction, alpha=distance)
            x_hat = classifier.decode(classifier.encode(x[:4]) + moved)
            torch._foreach_add_(weights, direction, alpha=-distance)
        return float((x_hat - x[:4]).abs().mean())

    numeric = (change(1e-7) - change(-1e-7)) / 2e-7
    assert ours == pytest.approx(numeric, rel=1e-2)
    assert abs(ours) > 1e-3


def with_critic(step: FineTuningStep, rate: float) -> Critic:
    """Add a random critic that learns with this rate."""
    step.state.add_critic(step.recipe, CPU)
    critic = randomise(step.state.critic, seed=4)
    for group in step.state.critic_optimiser.param_groups:
        group["lr"].fill_(rate)
    return critic


def test_the_critic_losses_are_two_hinges_and_the_squared_slope(uniform) -> None:
    """Against slopes by finite differences, and margins by hand."""
    critic = randomise(Critic(1, 10, 9, 3), seed=2).double()
    real, made = uniform(5, 1, 10, 9), uniform(4, 1, 10, 9)
    y, y_hat = torch.tensor([0, 2, 1, 2, 0]), torch.tensor([1, 1, 0, 2])
    of_real, of_made = critic_losses(critic, real, y, made, y_hat)
    with torch.no_grad():
        nudges = 1e-5 * torch.eye(90, dtype=torch.double).reshape(90, 1, 1, 10, 9)
        slopes = torch.stack(
            [(critic(real + nudge, y) - critic(real - nudge, y)) / 2e-5 for nudge in nudges]
        )
        above = [max(0.0, 1 - float(score)) for score in critic(real, y)]
        below = [max(0.0, 1 + float(score)) for score in critic(made, y_hat)]
    assert 0 < max(above) != max(below) > 0
    penalty = 0.1 * slopes.square().sum(0)
    torch.testing.assert_close(of_real.detach(), torch.tensor(above).double() + penalty)
    torch.testing.assert_close(of_made.detach(), torch.tensor(below).double())


def test_the_critic_knows_the_class() -> None:
    critic = randomise(Critic(3, 16, 16, 2), seed=3)
    x = torch.rand((4, 3, 16, 16), generator=torch.Generator().manual_seed(0))
    h = critic.features(2 * x - 1)
    for label in (0, 1):
        by_hand = h @ (critic.score.weight[0] + critic.classes.weight[label] / 16)
        scores = critic(x, torch.full((4,), label))
        torch.testing.assert_close(scores, by_hand + critic.score.bias)


def test_the_critic_learns_to_tell_counterfactuals_from_real_images(refined, data) -> None:
    settings = FineTuning(2, 0.0, 0.0, realism=1.0, batch_size=64)
    step = finetuning_step(dataclasses.replace(refined, finetuning=settings), data)
    critic = with_critic(step, 1e-3)
    seen = []
    criticise = step._criticise
    step._criticise = lambda *given: seen.append(given) or criticise(*given)
    step.load_batch(torch.arange(64))
    x = to_pixels(data.images[:64])
    z = step.state.classifier.encode(x)
    gaps = []
    for _ in range(12):
        step._counterfactual_loss(x, z)
        real, y, made, y_hat = seen[-1]
        with torch.no_grad():
            gaps.append(float(critic(real, y).mean() - critic(made, y_hat).mean()))
    assert gaps[-1] > gaps[0] + 0.5
    assert torch.equal(real, x[32:])
    assert torch.equal(y, data.labels[32:64])
    assert (y_hat != data.labels[:32]).any()


def test_realism_is_the_score_of_the_requested_class_through_the_whole_flow(refined, data) -> None:
    """Its gradient is that of finite differences, with the critic and αΔ held fixed."""
    settings = FineTuning(2, 0.0, 0.0, realism=3.0, batch_size=8)
    step = finetuning_step(dataclasses.replace(refined, finetuning=settings), data)
    classifier = step.state.classifier.double()
    critic = with_critic(step, 0.0).double()
    step.load_batch(torch.arange(8))
    seen = []
    latents = step._counterfactual_latents
    step._counterfactual_latents = lambda *given: seen.append(latents(*given)) or seen[0]
    x = to_pixels(data.images[:8]).double()
    z = classifier.encode(x)
    weights = [p for p in classifier.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(5)
    direction = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in weights]
    loss = step._counterfactual_loss(x, z)
    gradient = torch.autograd.grad(loss, weights, allow_unused=True)
    ours = sum(
        float((g * d).sum()) for g, d in zip(gradient, direction, strict=True) if g is not None
    )
    z_hat = seen[0][:4].detach()
    moved = z_hat - z[:4].detach()
    requested = torch.cdist(z_hat, classifier.mu.detach()).argmin(1)
    with torch.no_grad():
        x_hat = classifier.decode(z_hat)
        rounding = to_pixels(to_uint8(x_hat)) - x_hat

    def score(distance: float) -> float:
        with torch.no_grad():
            torch._foreach_add_(weights, direction, alpha=distance)
            x_hat = classifier.decode(classifier.encode(x[:4]) + moved)
            torch._foreach_add_(weights, direction, alpha=-distance)
            return -3 * float(critic(x_hat + rounding, requested).mean())

    assert float(loss.detach()) == pytest.approx(score(0.0), rel=1e-6)
    numeric = (score(1e-7) - score(-1e-7)) / 2e-7
    assert ours == pytest.approx(numeric, rel=1e-2)
    assert abs(ours) > 1e-3


def test_the_teacher_is_asked_about_what_the_maker_makes(refined, data) -> None:
    """The maker's own latents, means and decoder give these pictures; the model learns them."""
    settings = FineTuning(2, 0.0, 1.0, rounds=1, batch_size=64)
    step = finetuning_step(dataclasses.replace(refined, finetuning=settings), data)
    maker = step.state.maker = randomise(GenerativeClassifier(refined.architecture), seed=9).eval()
    asked = []
    step._ask_teacher = lambda x: (asked.append(x), RowTeacher()(x).softmax(1))[1]
    step.load_batch(torch.arange(64))
    x = to_pixels(data.images[:64])
    state = step.generator.get_state()
    loss = float(step._counterfactual_loss(x, step.state.classifier.encode(x)).detach())
    step.generator.set_state(state)
    p = data.labels[:64]
    q = step._other_class(p)
    with torch.no_grad():
        z_hat = step._counterfactual_latents(maker.encode(x), maker.mu[p], maker.mu[q])
        expected = to_pixels(to_uint8(maker.decode(z_hat)))[32:]
        assert torch.equal(asked[0], expected)
        log_posterior = step.state.classifier.log_posterior(expected)
    answer = RowTeacher()(expected).softmax(1)
    assert loss == pytest.approx(float(-(answer * log_posterior).sum(1).mean()), rel=1e-4)


def test_the_maker_is_the_average_at_the_start_of_each_round(refined, data) -> None:
    settings = FineTuning(5, 0.0, 1.0, rounds=2, batch_size=64)
    step = finetuning_step(dataclasses.replace(refined, finetuning=settings), data)
    step.state.maker = GenerativeClassifier(refined.architecture)
    renewed = []
    for epoch in range(5):
        with torch.no_grad():
            step.state.average.mu.fill_(float(epoch))
        step.begin_epoch(epoch)
        renewed.append(float(step.state.maker.mu[0, 0].detach()))
    assert renewed == [0, 0, 0, 3, 3]


def test_a_step_adds_both_losses_and_moves_the_means(refined, data) -> None:
    step = finetuning_step(refined, data)
    losses, first = [], []
    batch_loss = step._batch_loss
    step._batch_loss = lambda: first.append(batch_loss()) or first[0]
    step._counterfactual_loss = lambda x, z: 5 + 0 * z.sum()
    step._descend = losses.append
    before = step.state.classifier.mu.clone()
    step(torch.arange(64), 0.5, 1)
    torch.testing.assert_close(losses, [first[0].loss + 5])
    for label in range(10):
        mean = first[0].z[data.labels[:64] == label].mean(0)
        expected = 0.98 * before[label] + 0.02 * mean
        torch.testing.assert_close(step.state.classifier.mu[label], expected)


def test_fine_tuning_starts_from_the_model_with_the_recipes_tau(
    refined, data, tmp_path, monkeypatch
) -> None:
    model = untrained(refined, data)
    randomise(model.classifier).tau.fill_(5.0)
    seen = {}

    class Stop(FineTuningStep):
        def __init__(self, recipe, data, state, *_) -> None:
            seen.update((name, value.clone()) for name, value in state.tensors().items())
            raise KeyboardInterrupt

    monkeypatch.setattr(training, "FineTuningStep", Stop)
    with pytest.raises(InterruptedRunError):
        train(refined, data, tmp_path, device=CPU, refine_from=model, teacher=RowTeacher())
    expected = model.classifier.state_dict() | {"tau": torch.tensor(refined.tau)}
    for network in ("classifier", "average"):
        for name, value in expected.items():
            torch.testing.assert_close(seen[f"{network}.{name}"], value)


def test_fine_tuning_has_its_own_settings(refined: Recipe) -> None:
    settings = FineTuning(7, 1.0, 1.0, batch_size=9, learning_rate=0.3, ema_decay=0.5)
    stage = second_stage(dataclasses.replace(refined, finetuning=settings))
    found = (stage.epochs, stage.batch_size, stage.learning_rate, stage.ema_decay)
    assert found == (7, 9, 0.3, 0.5)
    assert stage.tau == refined.tau


def test_fine_tuning_decodes_what_it_encoded(refined: Recipe, data: Dataset) -> None:
    """Dropout would make the inverse another network's."""
    assert refined.architecture.dropout > 0
    classifier = finetuning_step(refined, data).state.classifier
    x = to_pixels(data.images[:8])
    with torch.no_grad():
        torch.testing.assert_close(classifier.decode(classifier.encode(x)), x, atol=1e-4, rtol=0)


def test_stored_values_are_8_bit_and_pass_the_gradient(uniform) -> None:
    x = uniform(2, 1, 3, 3).float().requires_grad_()
    stored = straight_through_8_bit(x)
    assert torch.equal(stored.detach() * 256 - 0.5, (x.detach() * 256).floor())
    stored.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "realism"), [(0, 0.0), (1, 0.5)])
def test_fine_tuning_resumes_to_the_same_weights(
    rounds, realism, refined, data, tmp_path: Path
) -> None:
    settings = dataclasses.replace(refined.finetuning, rounds=rounds, realism=realism)
    refined = dataclasses.replace(refined, finetuning=settings)
    whole = train(refined, data, tmp_path / "whole", device=CPU, teacher=RowTeacher())
    epochs = iter(range(100))

    def stop_in_last_epoch(progress: Progress) -> None:
        if next(epochs) == 2:  # one report an epoch: first stage, fine-tuning, fine-tuning
            raise RuntimeError("power cut")

    interrupted = tmp_path / "interrupted"
    with pytest.raises(RuntimeError, match="power cut"):
        train(
            refined,
            data,
            interrupted,
            device=CPU,
            teacher=RowTeacher(),
            observe=stop_in_last_epoch,
            save_every=0.0,
        )
    assert not (interrupted / training.MODEL_FILE).exists()
    torch.rand(5)
    resumed = train(refined, data, interrupted, device=CPU, teacher=RowTeacher(), resume=True)
    assert resumed.recipe == refined
    assert load_checkpoint(interrupted).recipe == refined
    weights = whole.classifier.state_dict()
    for name, value in resumed.classifier.state_dict().items():
        assert torch.equal(value, weights[name]), name
    first = load_checkpoint(interrupted / training.FIRST_STAGE_FILE)
    assert not torch.equal(first.classifier.mu, weights["mu"])
    assert first.recipe == dataclasses.replace(refined, finetuning=None)


def test_fine_tuning_a_model_of_another_architecture_is_refused(refined, data, tmp_path) -> None:
    other = dataclasses.replace(refined, architecture=MNIST.architecture)
    model = untrained(other, data)
    with pytest.raises(InputError, match="its architecture differs"):
        train(refined, data, tmp_path, device=CPU, refine_from=model, teacher=RowTeacher())


def test_fine_tuning_needs_two_images_in_a_batch(refined, data, tmp_path) -> None:
    settings = dataclasses.replace(refined.finetuning, batch_size=1)
    single = dataclasses.replace(refined, finetuning=settings)
    with pytest.raises(InputError, match="at least 2 images"):
        train(single, data, tmp_path, device=CPU, teacher=RowTeacher())


def test_an_odd_batch_is_split_into_unequal_halves(refined, data) -> None:
    """Of three images one is asked for a posterior, and the teacher is asked about two."""
    settings = FineTuning(1, 1.0, 1.0, batch_size=3, realism=1.0)
    step = finetuning_step(dataclasses.replace(refined, finetuning=settings), data)
    with_critic(step, 1e-4)
    asked = []
    step._ask_teacher = lambda x: (asked.append(len(x)), RowTeacher()(x).softmax(1))[1]
    step.load_batch(torch.arange(3))
    x = to_pixels(data.images[:3])
    z = step.state.classifier.encode(x)
    assert torch.isfinite(step._counterfactual_loss(x, z).detach())
    assert asked == [2]


def test_only_aligned_faces_have_a_background(refined: Recipe) -> None:
    settings = dataclasses.replace(refined.finetuning, background=4.0)
    with pytest.raises(InputError, match="mnist is not a face model: background must be 1"):
        dataclasses.replace(refined, finetuning=settings)
    faces = dataclasses.replace(refined, finetuning=settings, face_crop=CELEBA_CROP)
    assert faces.finetuning.background == 4.0

"""Fine-tuning for counterfactuals: distillation on the path from a teacher."""

import dataclasses
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ecinn import equations
from ecinn.classifier.checkpoint import Checkpoint
from ecinn.classifier.recipes import FineTuning, Recipe
from ecinn.pixels import Images, Labels, to_pixels, to_uint8
from ecinn.training.state import TrainingState
from ecinn.training.step import OptimisationStep, cosine_schedule

CRITIC_WIDTH = 48
CRITIC_FEATURES = 256
HIGHEST_CONFIDENCE = 0.99
"""Random confidences lie between one minus this and this."""


class Critic(nn.Module):
    """D(x, y) = w·h(x) + e_y·h(x)/√d: high for real images x of class y.

    A projection discriminator with convolutional features h.
    """

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        layers: list[nn.Module] = []
        filters = CRITIC_WIDTH
        while min(height, width) > 8:
            layers += [nn.Conv2d(channels, filters, 5, stride=2, padding=2), nn.LeakyReLU(0.2)]
            height, width = (height + 1) // 2, (width + 1) // 2
            channels, filters = filters, min(2 * filters, 192)
        layers += [nn.Conv2d(channels, 128, 3, padding=1), nn.LeakyReLU(0.2), nn.Flatten()]
        layers += [nn.Linear(128 * height * width, CRITIC_FEATURES), nn.LeakyReLU(0.2)]
        self.features = nn.Sequential(*layers)
        self.score = nn.Linear(CRITIC_FEATURES, 1)
        self.classes = nn.Embedding(classes, CRITIC_FEATURES)

    def forward(self, x: Images, label: Labels) -> Float[Tensor, " batch"]:
        """D(x, y)."""
        h = self.features(x)
        projection = (h * self.classes(label)).sum(1) / CRITIC_FEATURES**0.5
        score: Tensor = self.score(h)[:, 0] + projection
        return score


@dataclass
class FineTuningState(TrainingState):
    """The state of the second stage, with a critic."""

    critic: Critic = field(kw_only=True)
    critic_optimiser: torch.optim.Adam = field(kw_only=True)

    @classmethod
    def refine(
        cls, model: Checkpoint, stage: Recipe, device: torch.device, attributes: int = 0
    ) -> "FineTuningState":
        """Return the state that starts from a model, with a new critic."""
        assert stage.finetuning is not None
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(stage.seed)
            critic = Critic(model.classifier.image_shape, stage.architecture.classes).to(device)
        critic_optimiser = torch.optim.Adam(
            critic.parameters(),
            torch.tensor(stage.finetuning.critic_learning_rate, device=device),
            betas=(0.5, 0.99),  # low momentum, as is usual for adversarial training
            fused=True,
            capturable=device.type == "cuda",
        )
        first = TrainingState.start(stage, device, attributes)
        for network in (first.classifier, first.average):
            network.load_state_dict(model.classifier.state_dict() | {"tau": network.tau})
        return cls(**vars(first), critic=critic, critic_optimiser=critic_optimiser)


def second_stage(recipe: Recipe) -> Recipe:
    """Return the settings of fine-tuning as a recipe."""
    assert recipe.finetuning is not None
    return dataclasses.replace(
        recipe,
        epochs=recipe.finetuning.epochs,
        batch_size=recipe.finetuning.batch_size,
        learning_rate=recipe.finetuning.learning_rate,
        ema_decay=recipe.finetuning.ema_decay,
    )


class FineTuningStep(OptimisationStep):
    """A step of the first stage on a batch and on what a teacher says of its counterfactuals.

    The counterfactuals are pictures like any others to the loss: no gradient passes through the
    decoder or through the teacher, which is only asked. Because the network is invertible,
    a classifier that agrees with the teacher on the path decodes to pictures that convince it.
    """

    stage = "fine-tuning"
    inverts = True
    state: FineTuningState

    @property
    def settings(self) -> FineTuning:
        """The settings of this stage."""
        assert self.recipe.finetuning is not None
        return self.recipe.finetuning

    def __call__(self, batch: Int[Tensor, " batch"], done: float, number: int) -> None:
        """Take a step; the critic follows the classifier's schedule, but without a warm-up."""
        rate = self.settings.critic_learning_rate
        if done > self.recipe.warm_up:
            rate *= cosine_schedule(done, self.recipe.warm_up)
        for group in self.state.critic_optimiser.param_groups:
            group["lr"].fill_(rate)
        super().__call__(batch, done, number)

    def _step(self) -> None:
        s = self.settings
        first = self._batch_loss()
        p = self.labels[self.batch]
        q = self._other_class(p)
        convincing = (len(p) + 1) // 2
        mu, tau = self.state.classifier.mu.detach(), self.state.classifier.tau
        if s.through:
            z_hat = self._latents(first.z, p, q)
            decoded = self.state.classifier.decode(z_hat).clamp(0, 1)
            x_hat = straight_through_8_bit(decoded)
        else:
            z_hat = self._latents(first.z.detach(), p, q)
            x_hat = self._stored(z_hat)
        z_stored, _ = self.state.classifier.encode_with_log_det(x_hat)
        log_posterior = equations.log_posterior(z_stored, mu, tau)
        answer = self._answer(x_hat.detach())
        cross = -(answer * log_posterior).sum(1)
        distillation = cross[:convincing].mean() if s.only_convincing else cross.mean()
        requested = equations.log_posterior(z_hat, mu, tau).detach()
        faithfulness = F.kl_div(log_posterior, requested, reduction="batchmean", log_target=True)
        loss = first.loss + s.distillation * distillation + s.faithfulness * faithfulness
        if s.realism:
            loss = (
                loss - s.realism * self.state.critic(decoded[:convincing], q[:convincing]).mean()
            )
        self._descend(loss)
        if s.realism:
            real, made = first.x.clamp(0, 1), decoded[:convincing].detach()
            loss = critic_loss(self.state.critic, real, p, made, q, s.gradient_penalty)
            self.state.critic_optimiser.zero_grad(set_to_none=True)
            loss.backward()
            self.state.critic_optimiser.step()
        self._update_means(first.z)
        self._update_average(first.figures)

    def _other_class(self, p: Labels) -> Labels:
        classes = len(self.state.classifier.mu)
        offset = torch.randint(1, classes, p.shape, generator=self.generator, device=self.device)
        return (p + offset) % classes

    def _latents(
        self, z: Float[Tensor, "batch dim"], p: Labels, q: Labels
    ) -> Float[Tensor, "batch dim"]:
        """Return z + αΔ: the first half at α₁, the rest at random confidences."""
        mu, tau = self.state.classifier.mu.detach(), self.state.classifier.tau
        delta = equations.latent_direction(mu, p, q)
        alpha_0 = equations.tipping_point_alpha(z.detach(), delta, mu[p], mu[q]).clamp(0.1, 1.0)
        confidence = torch.rand(p.shape, generator=self.generator, device=self.device)
        confidence = confidence * (2 * HIGHEST_CONFIDENCE - 1) + (1 - HIGHEST_CONFIDENCE)
        # Considering p and q only, the log-odds grow by τ‖Δ‖² along α.
        rate = tau * delta.square().sum(1)
        confident = (alpha_0 + torch.logit(confidence) / rate).clamp(0.0, 1.2)
        convincing = torch.arange(len(p), device=self.device) < (len(p) + 1) // 2
        alpha = torch.where(convincing, equations.convincing_alpha(alpha_0), confident)
        return equations.corrected_latent(z, alpha, delta)

    @torch.no_grad()
    def _stored(self, z_hat: Float[Tensor, "batch dim"]) -> Images:
        """Decode, and round to 8 bits."""
        return to_pixels(to_uint8(self.state.classifier.decode(z_hat)))

    @torch.no_grad()
    def _answer(self, x: Images) -> Float[Tensor, "batch classes"]:
        """Return the teacher's probability of every class."""
        assert self.state.teacher is not None
        return self._class_probabilities(self.state.teacher(x).to(x.dtype))


def straight_through_8_bit(x: Images) -> Images:
    """Round x to 8 bits, with the gradient of the identity."""
    return x + (to_pixels(to_uint8(x)) - x).detach()


def critic_loss(
    critic: Critic,
    real: Images,
    label: Labels,
    x_hat: Float[Tensor, "some channels height width"],
    q: Labels,
    penalty: float,
) -> Float[Tensor, ""]:
    """Hinge loss: real images above 1; counterfactuals and images of other classes below −1."""
    real = real.detach().requires_grad_()
    score = critic(real, label)
    (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
    return (
        F.relu(1 - score).mean()
        + F.relu(1 + critic(x_hat, q[: len(x_hat)])).mean()
        + 0.5 * F.relu(1 + critic(real.detach(), q)).mean()
        + penalty * slope.square().flatten(1).sum(1).mean()
    )

"""Second training stage: fine-tune the quality of counterfactuals against a critic."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

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

MEANS_WEIGHT = 0.02
"""Weight of a batch's mean latents in their moving average μ̄."""
HIGHEST_CONFIDENCE = 0.99
"""Random confidences lie between one minus this and this."""
CRITIC_WIDTH = 48
CRITIC_FEATURES = 256


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


class RunningMeans(nn.Module):
    """Moving average μ̄ of the mean latent of every class."""

    def __init__(self, mu_bar: Tensor) -> None:
        super().__init__()
        self.mu_bar = nn.Buffer(mu_bar.clone())


@dataclass
class FineTuningState(TrainingState):
    """The state of the second stage, with a critic and the running means."""

    critic: Critic = field(kw_only=True)
    critic_optimiser: torch.optim.Adam = field(kw_only=True)
    means: RunningMeans = field(kw_only=True)

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
            network.load_state_dict(model.classifier.state_dict())
        means = RunningMeans(model.mu_bar).to(device)
        return cls(**vars(first), critic=critic, critic_optimiser=critic_optimiser, means=means)

    @staticmethod
    def comparable(settings: dict[str, Any]) -> dict[str, Any]:
        """Return the settings that a resumed run must share: all but the number of epochs."""
        return settings | {"epochs": 0, "finetuning": settings["finetuning"] | {"epochs": 0}}


def second_stage(recipe: Recipe) -> Recipe:
    """Return the settings of the second stage as a recipe."""
    assert recipe.finetuning is not None
    return dataclasses.replace(
        recipe,
        epochs=recipe.finetuning.epochs,
        learning_rate=recipe.finetuning.learning_rate,
        ema_decay=recipe.finetuning.ema_decay,
    )


class FineTuningStep(OptimisationStep):
    """A step of the first stage plus the loss of counterfactuals, and a step of the critic."""

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
        first = self._batch_loss()
        p = self.labels[self.batch]
        self._update_means(first.z, p)
        q = self._other_class(p)
        z_hat, convincing = self._counterfactual_latents(first.z, p, q)
        x_hat = self.state.classifier.decode(z_hat).clamp(0, 1)
        self._descend(first.loss + self._counterfactual_loss(first.x, z_hat, x_hat, q, convincing))
        real, made = first.x.clamp(0, 1), x_hat[:convincing].detach()
        loss = critic_loss(self.state.critic, real, p, made, q, self.settings.gradient_penalty)
        self.state.critic_optimiser.zero_grad(set_to_none=True)
        loss.backward()
        self.state.critic_optimiser.step()
        self._update_average(first.figures)

    @torch.no_grad()
    def _update_means(self, z: Float[Tensor, "batch dim"], label: Labels) -> None:
        """μ̄ ← (1 − w)μ̄ + w·m for the classes in this batch, with mean latents m."""
        mu_bar: Tensor = self.state.means.mu_bar
        member = F.one_hot(label, len(mu_bar)).to(z.dtype)
        count = member.sum(0)[:, None]
        batch_means = member.T @ z / count.clamp(min=1)
        present = (count > 0).to(z.dtype)
        mu_bar += MEANS_WEIGHT * present * (batch_means - mu_bar)

    def _other_class(self, p: Labels) -> Labels:
        classes = len(self.state.means.mu_bar)
        offset = torch.randint(1, classes, p.shape, generator=self.generator, device=self.device)
        return (p + offset) % classes

    def _counterfactual_latents(
        self, z: Float[Tensor, "batch dim"], p: Labels, q: Labels
    ) -> tuple[Float[Tensor, "batch dim"], int]:
        """Return z + αΔ, and the number of rows at α₁; the rest request random confidences."""
        mu = self.state.classifier.mu
        with torch.no_grad():
            delta = equations.latent_direction(self.state.means.mu_bar, p, q)
            alpha_0 = equations.tipping_point_alpha(z, delta, mu[p], mu[q]).clamp(0.1, 1.0)
            confidence = torch.rand(p.shape, generator=self.generator, device=self.device)
            confidence = confidence * (2 * HIGHEST_CONFIDENCE - 1) + (1 - HIGHEST_CONFIDENCE)
            # Considering p and q only, the log-odds grow by wᵀΔ along α.
            w, _ = equations.decision_boundary(mu[p], mu[q])
            confident = (alpha_0 + torch.logit(confidence) / (w * delta).sum(1)).clamp(0.0, 1.2)
            convincing = (len(p) + 1) // 2
            alpha = torch.where(
                torch.arange(len(p), device=self.device) < convincing,
                equations.convincing_alpha(alpha_0),
                confident,
            )
        return equations.corrected_latent(z, alpha, delta), convincing

    def _counterfactual_loss(
        self,
        x: Images,
        z_hat: Float[Tensor, "batch dim"],
        x_hat: Images,
        q: Labels,
        convincing: int,
    ) -> Float[Tensor, ""]:
        mu = self.state.classifier.mu
        z_stored, _ = self.state.classifier.encode_with_log_det(straight_through_8_bit(x_hat))
        faithfulness = F.kl_div(
            equations.log_posterior(z_stored, mu),
            equations.log_posterior(z_hat, mu).detach(),
            reduction="batchmean",
            log_target=True,
        )
        realism = -self.state.critic(x_hat[:convincing], q[:convincing]).mean()
        loss: Tensor = (
            self.settings.proximity * (x_hat - x).abs().mean()
            + self.settings.faithfulness * faithfulness
            + self.settings.realism * realism
        )
        return loss


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

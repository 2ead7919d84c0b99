"""The second stage of training: counterfactuals that are near, real and read as was asked."""

import dataclasses

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ecinn import equations
from ecinn.classifier.recipes import Recipe
from ecinn.data.dataset import Dataset
from ecinn.pixels import to_pixels, to_uint8
from ecinn.training.critic import Critic
from ecinn.training.state import FineTuningState
from ecinn.training.step import BatchLoss, OptimisationStep, schedule

MEANS_FOLLOW = 0.02
"""Share by which the running class means move to those of a batch."""
HIGHEST_CONFIDENCE = 0.99
"""Random confidences are drawn between this and its counterpart."""

Images = Float[Tensor, "batch channels height width"]
Counterfactuals = Float[Tensor, "some channels height width"]
"""Those at α₁: the first of a batch."""
Labels = Int[Tensor, " batch"]


def second_stage(recipe: Recipe) -> Recipe:
    """The settings of the second stage, as those of an recipe."""
    assert recipe.finetuning is not None
    return dataclasses.replace(
        recipe,
        epochs=recipe.finetuning.epochs,
        learning_rate=recipe.finetuning.learning_rate,
        ema_decay=recipe.finetuning.ema_decay,
    )


class FineTuningStep(OptimisationStep):
    """A step of the first stage with the counterfactuals' loss added, and a step of the critic."""

    stage = "refining"
    inverts = True

    def __init__(
        self, stage: Recipe, data: Dataset, state: FineTuningState, device: torch.device
    ) -> None:
        self.refined = state
        assert stage.finetuning is not None
        self.settings = stage.finetuning
        super().__init__(stage, data, state, device)

    def _set_mode(self) -> None:
        """Without dropout: encode and decode must be each other's inverse."""
        super()._set_mode()
        for module in self.state.classifier.modules():
            if isinstance(module, nn.Dropout | nn.Dropout2d):
                module.eval()

    def __call__(self, batch: Int[Tensor, " batch"], done: float, number: int) -> None:
        """Take a step; the critic slows down with the classifier but starts at once."""
        rate = self.settings.critic_learning_rate
        if done > self.recipe.warm_up:
            rate *= schedule(done, self.recipe.warm_up)
        for group in self.refined.critic_optimiser.param_groups:
            group["lr"].fill_(rate)
        super().__call__(batch, done, number)

    def _step(self) -> None:
        first = self._batch_loss()
        p = self.labels[self.batch]
        self._follow_means(first.z, p)
        q = self._other_class(p)
        z_hat, convincing = self._corrected_latents(first.z, p, q)
        x_hat = self.state.classifier.decode(z_hat).clamp(0, 1)
        self._descend(first.loss + self._counterfactual_loss(first, z_hat, x_hat, q, convincing))
        self._train_critic(first.x.clamp(0, 1), p, x_hat[:convincing].detach(), q)
        self._follow(first.figures)

    @torch.no_grad()
    def _follow_means(self, z: Float[Tensor, "batch dim"], label: Labels) -> None:
        """μ̄ moves towards the mean latents of this batch."""
        member = F.one_hot(label, len(self.refined.means.mu_bar)).to(z.dtype)
        count = member.sum(0)[:, None]
        batch_means = member.T @ z / count.clamp(min=1)
        there = (count > 0).to(z.dtype)
        mu_bar = self.refined.means.mu_bar
        mu_bar += MEANS_FOLLOW * there * (batch_means - mu_bar)

    def _other_class(self, p: Labels) -> Labels:
        classes = len(self.refined.means.mu_bar)
        offset = torch.randint(1, classes, p.shape, generator=self.generator, device=self.device)
        return (p + offset) % classes

    def _corrected_latents(
        self, z: Float[Tensor, "batch dim"], p: Labels, q: Labels
    ) -> tuple[Float[Tensor, "batch dim"], int]:
        """z + αΔ, and how many of the first are at α₁; the others ask for a random confidence."""
        mu = self.state.classifier.mu
        with torch.no_grad():
            delta = equations.latent_direction(self.refined.means.mu_bar, p, q)
            alpha_0 = equations.tipping_point_alpha(z, delta, mu[p], mu[q]).clamp(0.1, 1.0)
            asked = torch.rand(p.shape, generator=self.generator, device=self.device)
            asked = asked * (2 * HIGHEST_CONFIDENCE - 1) + (1 - HIGHEST_CONFIDENCE)
            # Between p and q alone: the log-odds grow by wᵀΔ along α.
            w, _ = equations.decision_boundary(mu[p], mu[q])
            confident = (alpha_0 + torch.logit(asked) / (w * delta).sum(1)).clamp(0.0, 1.2)
            convincing = (len(p) + 1) // 2
            alpha = torch.where(
                torch.arange(len(p), device=self.device) < convincing,
                equations.convincing_alpha(alpha_0),
                confident,
            )
        return equations.corrected_latent(z, alpha, delta), convincing

    def _counterfactual_loss(
        self,
        first: BatchLoss,
        z_hat: Float[Tensor, "batch dim"],
        x_hat: Images,
        q: Labels,
        convincing: int,
    ) -> Float[Tensor, ""]:
        mu = self.state.classifier.mu
        z_stored, _ = self.state.classifier.encode_with_log_det(_as_stored(x_hat))
        faithfulness = F.kl_div(
            equations.log_posterior(z_stored, mu),
            equations.log_posterior(z_hat, mu).detach(),
            reduction="batchmean",
            log_target=True,
        )
        realism = -self.refined.critic(x_hat[:convincing], q[:convincing]).mean()
        loss: Tensor = (
            self.settings.proximity * (x_hat - first.x).abs().mean()
            + self.settings.faithfulness * faithfulness
            + self.settings.realism * realism
        )
        return loss

    def _train_critic(
        self, real: Images, label: Labels, x_hat: Counterfactuals, q: Labels
    ) -> None:
        loss = critic_loss(
            self.refined.critic, real, label, x_hat, q, self.settings.gradient_penalty
        )
        self.refined.critic_optimiser.zero_grad(set_to_none=True)
        loss.backward()
        self.refined.critic_optimiser.step()


def _as_stored(x: Images) -> Images:
    """The values an 8-bit file would give back, with the gradient of x itself."""
    return x + (to_pixels(to_uint8(x)) - x).detach()


def critic_loss(
    critic: Critic,
    real: Images,
    label: Labels,
    x_hat: Counterfactuals,
    q: Labels,
    penalty: float,
) -> Float[Tensor, ""]:
    """Hinge: real images above 1; counterfactuals, and real images of another class, below −1."""
    real = real.detach().requires_grad_()
    score = critic(real, label)
    (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
    return (
        F.relu(1 - score).mean()
        + F.relu(1 + critic(x_hat, q[: len(x_hat)])).mean()
        + 0.5 * F.relu(1 + critic(real.detach(), q)).mean()
        + penalty * slope.square().flatten(1).sum(1).mean()
    )

"""Fine-tuning for counterfactuals: distillation on the path between classes."""

import dataclasses
import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ecinn import equations
from ecinn.blackbox.classifier import BlackBox
from ecinn.classifier.recipes import FineTuning, Recipe
from ecinn.data.dataset import Dataset
from ecinn.data.face_regions import region_mask
from ecinn.pixels import Images, Labels, StoredImages, to_pixels, to_uint8
from ecinn.training.critic import critic_losses
from ecinn.training.step import OptimisationStep

HIGHEST_CONFIDENCE = 0.99
"""Random confidences lie between one minus this and this."""


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


class BlackBoxTeacher(nn.Module):
    """Use a black-box classifier as a teacher; returns log-probabilities.

    `FineTuningStep` uses its answers one step later, so that the step itself never waits for it
    and can be captured as a CUDA graph.
    """

    identity: Tensor

    def __init__(self, black_box: BlackBox, identity: Tensor) -> None:
        """Take any tensor that identifies the classifier, such as its answers on the data."""
        super().__init__()
        self.black_box = black_box
        self.register_buffer("identity", identity)

    def forward(self, x: Images) -> Float[Tensor, "batch classes"]:
        """Return log-probabilities of the 8-bit images that these pixels are."""
        return self.black_box.predict(to_uint8(x)).to(x).clamp(min=1e-9).log()


class FineTuningStep(OptimisationStep):
    """A step of the first stage, which also learns from counterfactuals of its batch.

    Each image is moved towards a random class, at α₁ or to a random confidence, decoded and
    rounded to 8 bits. One half of the batch learns to be classified as requested in spite of the
    rounding, to change little, and to look real to a critic that is trained in the same steps;
    its gradient passes through the decoder. On the other half the classifier learns what a teacher
    says. To the loss these are pictures like any others: no gradient passes through the decoder or
    the teacher, which is only asked. As the network is invertible, a classifier that agrees with
    the teacher on the path decodes to pictures that convince it. With rounds, an earlier average
    of the network makes the pictures for the teacher. A black box is asked after each step, and
    its answers are learned in the next one.
    """

    stage = "fine-tuning"
    inverts = True

    def prepare(self, data: Dataset) -> None:
        """Weigh the pixels, and find out whether the teacher answers one step later."""
        weights = pixel_weights(self.settings.background, *data.images.shape[2:])
        self.pixel_weights = weights.to(self.device)
        self.late = isinstance(self.state.teacher, BlackBoxTeacher)
        if self.late:
            assert self.answers is not None
            # An epoch starts with images whose answers are known, so that a resumed one repeats.
            self.known = data.images[: self.batch_size - self.batch_size // 2].to(self.device)
            self.known_answers = self.answers[: len(self.known)]
            self.asked, self.answer = self.known.clone(), self.known_answers.clone()

    def begin_epoch(self, epoch: int) -> Int[Tensor, " images"]:
        """Seed the random generators and return the order of the images."""
        if self.late:
            self.asked.copy_(self.known)
            self.answer.copy_(self.known_answers)
        maker, rounds = self.state.maker, self.settings.rounds
        if maker is not None and epoch % math.ceil(self.recipe.epochs / rounds) == 0:
            maker.load_state_dict(self.state.average.state_dict())
        return super().begin_epoch(epoch)

    def __call__(self, batch: Int[Tensor, " batch"], done: float, number: int) -> None:
        """Take a step; then ask a black box about the counterfactuals that it made."""
        super().__call__(batch, done, number)
        if self.late:
            self.answer.copy_(self._ask_teacher(to_pixels(self.asked)))

    @property
    def settings(self) -> FineTuning:
        """The settings of this stage."""
        assert self.recipe.finetuning is not None
        return self.recipe.finetuning

    def _step(self) -> None:
        first = self._batch_loss()
        self._descend(self.share * first.loss + self._counterfactual_loss(first.x, first.z))
        self._update_means(first.z)
        self._update_average(first.figures)

    def _counterfactual_loss(self, x: Images, z: Float[Tensor, "batch dim"]) -> Float[Tensor, ""]:
        """Return faithfulness, proximity and realism of one half, distillation of the other."""
        classifier, half = self.state.classifier, self.half
        maker = self.state.maker or classifier
        p = self.labels[self.own_batch]
        q = self._other_class(p)
        with torch.no_grad():
            start = z if maker is classifier else torch.cat([z[:half], maker.encode(x[half:])])
            mu_p, mu_q = (torch.cat([classifier.mu[y[:half]], maker.mu[y[half:]]]) for y in (p, q))
            z_hat = self._counterfactual_latents(start, mu_p, mu_q)
            made = to_uint8(maker.decode(z_hat[half:]))
            read, answer = self._answered(made)
            requested = equations.log_posterior(z_hat[:half], classifier.mu, classifier.tau)
        loss = x.new_zeros(())
        z_hat = z_hat[:half]
        if self.settings.proximity or self.settings.realism:
            # α and Δ are constants; the gradient passes through encoder and decoder.
            z_hat = z[:half] + (z_hat - z[:half].detach())
        # Means over either half of the batch; other processes add the rest.
        whole = self.batch_size // 2
        if self.settings.faithfulness or self.settings.proximity or self.settings.realism:
            x_hat = classifier.decode(z_hat)
            change = (self.pixel_weights * (x_hat - x[:half]).abs()).flatten(1).mean(1)
            loss = self.settings.proximity * change.sum() / whole
        if self.settings.realism:
            real, shown = x[half:], straight_through_8_bit(x_hat)
            scores = self._criticise(real, p[half:], shown, requested.argmax(1))
            loss = loss - self.settings.realism * scores.sum() / whole
        if self.settings.faithfulness:
            read = torch.cat([read, straight_through_8_bit(x_hat)])
        z_stored, _ = classifier.encode_with_log_det(read.to(x.dtype))
        obtained = equations.log_posterior(z_stored, classifier.mu, classifier.tau)
        distillation = -(answer * obtained[: len(answer)]).sum() / (self.batch_size - whole)
        loss = loss + self.settings.distillation_weight * distillation
        if self.settings.faithfulness:
            faithfulness = F.kl_div(
                obtained[len(answer) :], requested, reduction="sum", log_target=True
            )
            loss = loss + self.settings.faithfulness * faithfulness / whole
        return loss

    def _criticise(
        self,
        real: Images,
        y: Labels,
        x_hat: Float[Tensor, "half channels height width"],
        y_hat: Int[Tensor, " half"],
    ) -> Float[Tensor, " half"]:
        """Train the critic for a step; return its scores of the counterfactuals."""
        critic, optimiser = self.state.critic, self.state.critic_optimiser
        assert critic is not None
        assert optimiser is not None
        real = to_pixels(to_uint8(real)).to(real.dtype)
        critic.requires_grad_(requires_grad=True)
        of_real, of_made = critic_losses(critic, real, y, x_hat, y_hat)
        whole = self.batch_size // 2
        (of_real.sum() / (self.batch_size - whole) + of_made.sum() / whole).backward()
        self.ranks.sum_(*(w.grad for w in critic.parameters() if w.grad is not None))
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        critic.requires_grad_(requires_grad=False)
        scores: Tensor = critic(x_hat, y_hat)
        return scores

    def _set_learning_rate(self, rate: float) -> None:
        super()._set_learning_rate(rate)
        if self.state.critic_optimiser is not None:
            for group in self.state.critic_optimiser.param_groups:
                group["lr"].fill_(rate * group["lr_factor"])

    def _other_class(self, p: Labels) -> Labels:
        classes = len(self.state.classifier.mu)
        shape = (self.batch_size,)
        offset = torch.randint(1, classes, shape, generator=self.generator, device=self.device)
        return (p + self._own(offset)) % classes

    @torch.no_grad()
    def _counterfactual_latents(
        self,
        z: Float[Tensor, "batch dim"],
        mu_p: Float[Tensor, "batch dim"],
        mu_q: Float[Tensor, "batch dim"],
    ) -> Float[Tensor, "batch dim"]:
        """Return z + αΔ: at α₁ in every second row, at a random confidence in the others."""
        delta = mu_q - mu_p
        alpha_0 = equations.tipping_point_alpha(z, delta, mu_p, mu_q).clamp(0.1, 1.0)
        draws = torch.rand((self.batch_size,), generator=self.generator, device=self.device)
        confidence = self._own(draws) * (2 * HIGHEST_CONFIDENCE - 1) + (1 - HIGHEST_CONFIDENCE)
        # Considering p and q only, the log-odds grow by τ‖Δ‖² along α.
        slope = self.state.classifier.tau * delta.square().sum(1)
        confident = (alpha_0 + torch.logit(confidence) / slope).clamp(0.0, 1.2)
        convincing = self.rows % 2 == 0
        alpha = torch.where(convincing, equations.convincing_alpha(alpha_0), confident)
        return equations.corrected_latent(z, alpha, delta)

    def _answered(self, made: StoredImages) -> tuple[Images, Float[Tensor, "batch classes"]]:
        """Return images and the teacher's answers: these, or those that a black box has read."""
        if not self.late:
            return to_pixels(made), self._ask_teacher(to_pixels(made))
        asked, answer = to_pixels(self.asked), self.answer.clone()
        self.asked.copy_(made)
        return asked, answer

    def _ask_teacher(self, x: Images) -> Float[Tensor, "batch classes"]:
        """Return the teacher's probability of every class."""
        assert self.state.teacher is not None
        return self._class_probabilities(self.state.teacher(x).to(x.dtype))


def pixel_weights(background: float, height: int, width: int) -> Float[Tensor, "height width"]:
    """Return weights of mean 1 that are `background` times as large outside an aligned face."""
    outside = region_mask("background", height, width)
    weights = torch.where(outside, background, 1.0)
    return weights / weights.mean()


def straight_through_8_bit(x: Images) -> Images:
    """Round x to 8 bits, with the gradient of the identity."""
    return x + (to_pixels(to_uint8(x)) - x).detach()

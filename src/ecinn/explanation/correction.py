"""Counterfactuals whose stored image is not read as was asked: α corrected, decoded again."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ecinn import equations
from ecinn.explanation.protocol import InvertibleClassifier
from ecinn.explanation.result import Images, PerPair, PerPairImages
from ecinn.pixels import to_pixels, to_uint8

TOLERANCE = 0.05
"""How far from the asked confidence a stored image may be."""
FURTHER = (0.1, 0.2, 0.3, 0.4, 0.5, -0.1, -0.2, -0.3)
"""Where q is looked for when α₁ did not reach it, as distances from α₁."""
MOST_CORRECTIONS = len(FURTHER)


@dataclass(frozen=True)
class Line:
    """z + αΔ, and the class it leads to."""

    z: Float[Tensor, "batch targets dim"]
    delta: Float[Tensor, "batch targets dim"]
    q: Int[Tensor, "batch targets"]


@dataclass(frozen=True)
class Ends:
    """The convincing counterfactuals, as they stand."""

    alpha: PerPair
    image: PerPairImages
    posterior: Float[Tensor, "batch targets classes"]
    stored_posterior: Float[Tensor, "batch targets classes"] | None
    corrections: Int[Tensor, "batch targets"]

    @property
    def verdict(self) -> Float[Tensor, "batch targets classes"]:
        """What the classifier says: of the stored image where it was read."""
        return self.posterior if self.stored_posterior is None else self.stored_posterior


def correct_alpha(
    classifier: InvertibleClassifier,
    line: Line,
    ends: Ends,
    confidence: float | None,
    reachable: Bool[Tensor, "batch targets"],
) -> Ends:
    """Where a stored image is not read as was asked, step α and decode again, the best kept.

    Every correction is one decode and one encode, of these images alone.
    """
    assert ends.stored_posterior is not None
    mu, q = classifier.mu, line.q
    best = {
        "alpha": ends.alpha.clone(),
        "image": ends.image.clone(),
        "posterior": ends.posterior.clone(),
        "stored_posterior": ends.stored_posterior.clone(),
        "corrections": ends.corrections.clone(),
    }
    best_miss = shortfall(ends.stored_posterior, q, confidence)
    # Where the search stands: usually, but not always, at the best so far.
    at, obtained = ends.alpha.clone(), ends.stored_posterior.clone()
    scale = torch.ones_like(at)
    for number in range(MOST_CORRECTIONS):
        which = (best_miss > 0) & reachable
        if not bool(which.any()):
            break
        z, delta, target = line.z[which], line.delta[which], q[which]
        if confidence is None:
            tried = ends.alpha[which] + FURTHER[number]
        else:
            step = _newton_step(z, delta, mu, target, at[which], obtained[which], confidence)
            tried = at[which] + scale[which] * step
        z_hat = equations.corrected_latent(z, tried, delta)
        image = classifier.decode(z_hat)
        at[which], obtained[which] = tried, stored_posterior(classifier, image)
        miss = shortfall(obtained, q, confidence)
        best["corrections"][which] += 1
        better = which & (miss < best_miss)
        inside = better[which]
        best["alpha"][better] = at[better]
        best["image"][better] = image[inside]
        best["posterior"][better] = equations.log_posterior(z_hat[inside], mu).exp()
        best["stored_posterior"][better] = obtained[better]
        # Far out an image may be less of q, not more: back to the best, and the other way.
        q_loses = miss >= 1
        astray = which & ((miss > best_miss + 0.01) | (q_loses & ~better))
        at = torch.where(astray, best["alpha"], at)
        obtained = torch.where(astray[..., None], best["stored_posterior"], obtained)
        # What rounding does is not smooth, so steps become smaller; on the way back, larger.
        factor = torch.where(better & (scale < 0), 1.5, 0.8)
        scale = scale * torch.where(astray, -0.5, factor)
        best_miss = torch.where(better, miss, best_miss)
    return Ends(**best)


def shortfall(
    obtained: Float[Tensor, "batch targets classes"],
    q: Int[Tensor, "batch targets"],
    confidence: float | None,
) -> PerPair:
    """How far the stored image is from what was asked; 0 where it is near enough."""
    of_q = obtained.gather(-1, q[..., None]).squeeze(-1)
    behind = obtained.amax(-1) - of_q
    if confidence is None:
        return behind
    miss = (of_q - confidence).abs()
    miss = torch.where(miss <= TOLERANCE, 0.0, miss)
    # A confidence above one half also asks for q to win; one below does not.
    return miss if confidence <= 0.5 else miss + (behind > 0)


def _newton_step(
    z: Float[Tensor, "pairs dim"],
    delta: Float[Tensor, "pairs dim"],
    mu: Float[Tensor, "classes dim"],
    q: Int[Tensor, " pairs"],
    alpha: Float[Tensor, " pairs"],
    obtained: Float[Tensor, "pairs classes"],
    confidence: float,
) -> Float[Tensor, " pairs"]:
    """Towards the asked log-odds of q, from those obtained, along their slope in latent space."""
    own = q[:, None]
    logits = equations.linear_logits(equations.corrected_latent(z, alpha, delta), mu)
    others = logits.scatter(1, own, -math.inf).softmax(1)
    rise = delta @ mu.T
    slope = rise.gather(1, own).squeeze(1) - (others * rise).sum(1)
    of_q = obtained.gather(1, own).squeeze(1).clamp(1e-6, 1 - 1e-6)
    asked = math.log(confidence / (1 - confidence))
    return ((asked - torch.logit(of_q)) / slope).clamp(-0.25, 0.25)


def stored_posterior(
    classifier: InvertibleClassifier, x_hat: Images
) -> Float[Tensor, "batch classes"]:
    """p(y) of the 8-bit images that would be stored."""
    z, _ = classifier.encode_with_log_det(to_pixels(to_uint8(x_hat)).to(x_hat.dtype))
    return equations.log_posterior(z, classifier.mu).exp()

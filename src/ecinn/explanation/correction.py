"""Correct α where the stored 8-bit image is not classified as requested."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ecinn import equations
from ecinn.explanation.protocol import InvertibleClassifier
from ecinn.explanation.reading import Reading, stored_posterior

TOLERANCE = 0.05
"""Largest accepted distance of the stored image's p(q) from the requested confidence."""
OFFSETS = (0.1, 0.2, 0.3, 0.4, 0.5, -0.1, -0.2, -0.3)
"""Offsets from α₁ that are tried, in this order, where α₁ does not reach q."""
MAX_CORRECTIONS = len(OFFSETS)
MAX_STEP = 0.25
"""Largest Newton step in α: far out, the posterior is too flat for its slope to be trusted."""
WAY_BACK = -0.5
"""Scale of the next step after one that led away from the target."""
RETURNING, SLOWING = 1.5, 0.8
"""Growth of the scale while returning helps, and decay otherwise, as rounding is not smooth."""

PerPair = Float[Tensor, "batch targets"]


@dataclass(frozen=True)
class Line:
    """The line z + αΔ and the class it leads to."""

    z: Float[Tensor, "batch targets dim"]
    delta: Float[Tensor, "batch targets dim"]
    q: Int[Tensor, "batch targets"]


@dataclass(frozen=True)
class Ends(Reading):
    """The counterfactuals at the end of every line, with their posteriors."""

    alpha: PerPair
    image: Float[Tensor, "batch targets channels height width"]
    corrections: Int[Tensor, "batch targets"]


def correct_alpha(
    classifier: InvertibleClassifier,
    line: Line,
    ends: Ends,
    confidence: float | None,
    reachable: Bool[Tensor, "batch targets"],
) -> Ends:
    """Step α where a stored image misses the request, decode again, and keep the best.

    Every correction costs one decode and one encode, of these images only.
    """
    assert ends.stored_posterior is not None
    mu, tau, q = classifier.mu, classifier.tau, line.q
    best = {
        "alpha": ends.alpha.clone(),
        "image": ends.image.clone(),
        "posterior": ends.posterior.clone(),
        "stored_posterior": ends.stored_posterior.clone(),
        "corrections": ends.corrections.clone(),
    }
    best_miss = shortfall(ends.stored_posterior, q, confidence)
    # The current position of the search, which is usually, but not always, the best so far.
    at, obtained = ends.alpha.clone(), ends.stored_posterior.clone()
    scale = torch.ones_like(at)
    for number in range(MAX_CORRECTIONS):
        missed = (best_miss > 0) & reachable
        if not bool(missed.any()):
            break
        z, delta, target = line.z[missed], line.delta[missed], q[missed]
        if confidence is None:
            tried = ends.alpha[missed] + OFFSETS[number]
        else:
            step = newton_step(z, delta, mu, tau, target, at[missed], obtained[missed], confidence)
            tried = at[missed] + scale[missed] * step
        z_hat = equations.corrected_latent(z, tried, delta)
        image = classifier.decode(z_hat)
        at[missed], obtained[missed] = tried, stored_posterior(classifier, image)
        miss = shortfall(obtained, q, confidence)
        best["corrections"][missed] += 1
        better = missed & (miss < best_miss)
        kept = better[missed]
        best["alpha"][better] = at[better]
        best["image"][better] = image[kept]
        best["posterior"][better] = equations.log_posterior(z_hat[kept], mu, tau).exp()
        best["stored_posterior"][better] = obtained[better]
        # Far out an image may look less like q: go back to the best, and step the other way.
        q_loses = miss >= 1
        astray = missed & ((miss > best_miss + 0.01) | (q_loses & ~better))
        at = torch.where(astray, best["alpha"], at)
        obtained = torch.where(astray[..., None], best["stored_posterior"], obtained)
        factor = torch.where(better & (scale < 0), RETURNING, SLOWING)
        scale = scale * torch.where(astray, WAY_BACK, factor)
        best_miss = torch.where(better, miss, best_miss)
    return Ends(**best)


def shortfall(
    obtained: Float[Tensor, "batch targets classes"],
    q: Int[Tensor, "batch targets"],
    confidence: float | None,
) -> PerPair:
    """Distance of the stored image's posterior from the request; 0 if within the tolerance."""
    p_q = obtained.gather(-1, q[..., None]).squeeze(-1)
    behind = obtained.amax(-1) - p_q
    if confidence is None:
        return behind
    miss = (p_q - confidence).abs()
    miss = torch.where(miss <= TOLERANCE, 0.0, miss)
    # A confidence above one half also requires that q wins; a lower one does not.
    return miss if confidence <= 0.5 else miss + (behind > 0)


def newton_step(
    z: Float[Tensor, "pairs dim"],
    delta: Float[Tensor, "pairs dim"],
    mu: Float[Tensor, "classes dim"],
    tau: equations.Tau,
    q: Int[Tensor, " pairs"],
    alpha: Float[Tensor, " pairs"],
    obtained: Float[Tensor, "pairs classes"],
    confidence: float,
) -> Float[Tensor, " pairs"]:
    """(logit c − logit p(q)) / (d logit p(q) / dα), the slope taken in latent space, clamped."""
    target = q[:, None]
    logits = tau * equations.linear_logits(equations.corrected_latent(z, alpha, delta), mu)
    others = logits.scatter(1, target, -math.inf).softmax(1)
    rise = tau * (delta @ mu.T)
    slope = rise.gather(1, target).squeeze(1) - (others * rise).sum(1)
    p_q = obtained.gather(1, target).squeeze(1).clamp(1e-6, 1 - 1e-6)
    requested = math.log(confidence / (1 - confidence))
    return ((requested - torch.logit(p_q)) / slope).clamp(-MAX_STEP, MAX_STEP)

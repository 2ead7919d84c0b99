"""The paper's equations, one pure function each."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

Tau = Float[Tensor, ""] | float

FARTHEST_ALPHA = 100.0
"""Limit of the search for α; at α = 1 the mean of one class has moved to that of the other."""
POINTS = 15
"""Values of α that a round of this search tries at once: four bits a round."""
TAKEN_BACK = 0.5
"""ρ of the bent direction: the share of the way from z to the mean of its class that is added.
Chosen on held-out clothes (docs/your-classifier.md)."""


def log_likelihood(
    z: Float[Tensor, "batch dim"],
    log_det: Float[Tensor, " batch"],
    mu: Float[Tensor, "classes dim"],
) -> Float[Tensor, "batch classes"]:
    """Eq. 1: log p(x|y) = log N(f(x); μ_y, 1) + log |det J|, for every class y."""
    squared_norm = z.square().sum(1, keepdim=True)
    normaliser = 0.5 * z.shape[1] * math.log(2 * math.pi)
    return linear_logits(z, mu) - 0.5 * squared_norm - normaliser + log_det[:, None]


def linear_logits(
    z: Float[Tensor, "*batch dim"], mu: Float[Tensor, "classes dim"]
) -> Float[Tensor, "*batch classes"]:
    """Eq. 2 without the terms all classes share: −½‖z − μ_y‖² + ½‖z‖² = z·μ_y − ½‖μ_y‖².

    Linear in z, and in float32 far more accurate than the difference of squared distances.
    """
    return z @ mu.T - 0.5 * mu.square().sum(1)


def relative_logits(
    z: Float[Tensor, "*batch dim"], mu: Float[Tensor, "classes dim"]
) -> Float[Tensor, "*batch classes"]:
    """`linear_logits` about the centre c of the means: z − c and μ_y − c have the same distance.

    What the means have in common cancels before it costs digits: face models, whose means are 17
    from zero and 0.7 from each other, have posteriors that are 250 times more accurate.
    """
    centre = mu.mean(0)
    return linear_logits(z - centre, mu - centre)


def predicted_class(
    z: Float[Tensor, "*batch dim"], mu: Float[Tensor, "classes dim"]
) -> Int[Tensor, "*batch"]:
    """C(x): the class with the highest posterior, which is that of the nearest mean."""
    return relative_logits(z, mu).argmax(-1)


def log_posterior(
    z: Float[Tensor, "*batch dim"], mu: Float[Tensor, "classes dim"], tau: Tau
) -> Float[Tensor, "*batch classes"]:
    """log softmax τ(z·μ_y − ½‖μ_y‖²). Eq. 2 is τ = 1: p(y|x) under a uniform prior.

    Ours: τ, the inverse temperature of temperature scaling, fitted on held-out images. It changes
    how confident the classifier is, but neither its predictions nor its decision boundaries, so
    α₀ and α₁ do not depend on it.
    """
    return (tau * relative_logits(z, mu)).log_softmax(-1)


def latent_direction(
    mu_bar: Float[Tensor, "classes dim"], p: Int[Tensor, "*batch"], q: Int[Tensor, "*batch"]
) -> Float[Tensor, "*batch dim"]:
    """Δ = μ̄_q − μ̄_p, between measured means of training latents."""
    return mu_bar[q] - mu_bar[p]


def bent_direction(
    z: Float[Tensor, "*batch dim"],
    mu_bar: Float[Tensor, "classes dim"],
    p: Int[Tensor, "*batch"],
    q: Int[Tensor, "*batch"],
    instead: Float[Tensor, "*batch classes"],
) -> Float[Tensor, "*batch dim"]:
    """Δ′ ∝ Δ + (μ̄_q − Σ_y w_y μ̄_y) + ρ(μ̄_p − z), scaled to ‖Δ‖; Δ itself where w = 0.

    Ours, for a classifier that is not the flow: w_y is how much it sees of class y instead of q
    along Δ. Δ′ also leads away from these classes, and reduces what sets the image apart from its
    class.
    """
    delta = latent_direction(mu_bar, p, q)
    bent = delta + mu_bar[q] - instead @ mu_bar + TAKEN_BACK * (mu_bar[p] - z)
    bent = bent * (delta.norm(dim=-1, keepdim=True) / bent.norm(dim=-1, keepdim=True))
    return torch.where(instead.any(-1, keepdim=True), bent, delta)


def decision_boundary(
    mu_p: Float[Tensor, "*batch dim"], mu_q: Float[Tensor, "*batch dim"]
) -> tuple[Float[Tensor, "*batch dim"], Float[Tensor, "*batch"]]:
    """Eq. 5: the hyperplane wᵀz + b = 0 on which p and q are equally likely."""
    w = mu_q - mu_p
    b = -((mu_p + mu_q) / 2 * w).sum(-1)
    return w, b


def tipping_point_alpha(
    z: Float[Tensor, "*batch dim"],
    delta: Float[Tensor, "*batch dim"],
    mu_p: Float[Tensor, "*batch dim"],
    mu_q: Float[Tensor, "*batch dim"],
) -> Float[Tensor, "*batch"]:
    """Eqs. 6–8: α₀ = −(wᵀz + b) / wᵀΔ, where the line z + αΔ meets the decision boundary."""
    w, b = decision_boundary(mu_p, mu_q)
    return -((w * z).sum(-1) + b) / (w * delta).sum(-1)


def convincing_alpha(alpha_0: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Section 3.3: α₁ = 4/5 + α₀/2, the paper's heuristic."""
    return 0.8 + 0.5 * alpha_0


def confident_alpha(
    z: Float[Tensor, "*batch dim"],
    delta: Float[Tensor, "*batch dim"],
    mu: Float[Tensor, "classes dim"],
    tau: Tau,
    q: Int[Tensor, "*batch"],
    confidence: Float[Tensor, "*batch"] | float,
) -> tuple[Float[Tensor, "*batch"], Bool[Tensor, "*batch"]]:
    """Ours: the α at which p(q|z + αΔ) equals the requested confidence, and if one exists.

    Along the line the logits are linear in α, so log p(q) = a_q + αb_q − log Σ exp(a + αb) is
    concave: it rises to a single maximum and falls beyond it. If even the maximum is too low,
    the result is the α of the maximum; if the line leads away from q, it is 0. Everything
    happens in latent space, without the network.
    """
    start = (tau * relative_logits(z, mu)).double()
    slope = (tau * (delta @ (mu - mu.mean(0)).T)).double()
    own = q[..., None]
    # Log-odds of every class against q. Their exponentials sum to 1/c at the confidence c.
    start, slope = start - start.gather(-1, own), slope - slope.gather(-1, own)
    asked = torch.as_tensor(confidence, dtype=start.dtype, device=start.device).expand(q.shape)
    if len(mu) == 2:
        other = (1 - q)[..., None]
        rate = slope.gather(-1, other).squeeze(-1)
        alpha = (-torch.logit(asked) - start.gather(-1, other).squeeze(-1)) / rate
        # With a slope of zero or above, the line does not approach q.
        reachable = (rate < 0) & (alpha.abs() <= FARTHEST_ALPHA)
        return torch.where(reachable, alpha, 0.0).to(z.dtype), reachable

    # Several α per line: the dimension before the classes.
    start, slope, least = start[..., None, :], slope[..., None, :], asked.log()[..., None]

    def log_posterior_of_q(alpha: Tensor) -> Tensor:
        return -(start + alpha[..., None] * slope).logsumexp(-1)

    def still_rises(alpha: Tensor) -> Tensor:
        return ((start + alpha[..., None] * slope).softmax(-1) * slope).sum(-1) < 0

    low, high = -torch.full_like(asked, FARTHEST_ALPHA), torch.full_like(asked, FARTHEST_ALPHA)
    highest = bisect(still_rises, low, high, POINTS)
    alpha = bisect(lambda alpha: log_posterior_of_q(alpha) < least, low, highest, POINTS)
    # A maximum at the lower end of the bracket: the line leads away from q.
    away = ~still_rises(low[..., None])[..., 0]
    reachable = ~away & (log_posterior_of_q(highest[..., None]) >= least)[..., 0]
    best = torch.where(away, 0.0, highest)
    return torch.where(reachable, alpha, best).to(z.dtype), reachable


def departing_alpha(
    z: Float[Tensor, "*batch dim"],
    delta: Float[Tensor, "*batch dim"],
    mu: Float[Tensor, "classes dim"],
    tau: Tau,
    p: Int[Tensor, "*batch"],
    confidence: Float[Tensor, "*batch"] | float,
) -> tuple[Float[Tensor, "*batch"], Bool[Tensor, "*batch"]]:
    """Ours: the α at which p(p|z + αΔ), while falling, equals the requested confidence.

    Along −Δ the class p is the target, and −α is the α that makes it that confident.
    """
    alpha, reachable = confident_alpha(z, -delta, mu, tau, p, confidence)
    return -alpha, reachable


def bisect(
    too_low: Callable[[Float[Tensor, "*batch points"]], Bool[Tensor, "*batch points"]],
    low: Float[Tensor, "*batch"],
    high: Float[Tensor, "*batch"],
    points: int = 1,
) -> Float[Tensor, "*batch"]:
    """Find where `too_low` turns false between low and high, to the last bit.

    Every round divides the interval at this many points at once: more of them take fewer rounds.
    """
    places = torch.arange(1, points + 1, dtype=low.dtype, device=low.device)
    for _ in range(math.ceil(70 / math.log2(points + 1))):
        part = (high - low) / (points + 1)
        below = too_low(low[..., None] + part[..., None] * places).sum(-1)
        low, high = low + below * part, low + (below + 1) * part
    return (low + high) / 2


def corrected_latent(
    z: Float[Tensor, "*batch dim"],
    alpha: Float[Tensor, "*batch"],
    delta: Float[Tensor, "*batch dim"],
) -> Float[Tensor, "*batch dim"]:
    """Eq. 3, inside f⁻¹: z + αΔ."""
    return z + alpha[..., None] * delta


def heatmap(x: Float[Tensor, "*image"], x_hat: Float[Tensor, "*image"]) -> Float[Tensor, "*image"]:
    """Eq. 4: h(x, q) = x̂ − x. The paper leaves α open; explanations use α₁."""
    return x_hat - x


def information_bottleneck_loss(
    nll: Float[Tensor, ""], cross_entropy: Float[Tensor, ""], beta: float
) -> Float[Tensor, ""]:
    """Eq. 9, as IB-INN trains it: 2/(1+β) · −log p(x)/dim + 2β/(1+β) · −log p(y|x)."""
    return (2 * nll + 2 * beta * cross_entropy) / (1 + beta)


def log_marginal(
    log_p_x_given_y: Float[Tensor, "batch classes"],
) -> Float[Tensor, " batch"]:
    """log p(x) = log 1/K Σ_y p(x|y)."""
    return log_p_x_given_y.logsumexp(1) - math.log(log_p_x_given_y.shape[1])


def bits_per_dim(log_p_x: Float[Tensor, " batch"], dim: int) -> Float[Tensor, " batch"]:
    """−log₂ p(x)/dim + 8: the exact code length of an 8-bit image with pixels in [0, 1]."""
    return -log_p_x / (dim * math.log(2)) + 8


def paper_bits_per_dim(exact: float, scale: float) -> float:
    """Table 1's convention: exact − log₂ 2π + log₂ γ, with the pixel scaling γ before the flow.

    IB-INN's evaluation omits γ and has the wrong sign on the Gaussian's ½ log 2π.
    """
    return exact - math.log2(2 * math.pi) + math.log2(scale)


def smoothed_cross_entropy(
    log_p_y: Float[Tensor, "batch classes"], label: Int[Tensor, " batch"], smoothing: float
) -> Float[Tensor, ""]:
    """−E log p(y|x), with labels that are uniform with probability `smoothing`."""
    right = F.nll_loss(log_p_y, label)
    uniform = -log_p_y.mean()
    return torch.lerp(right, uniform, smoothing)

"""Calibration: turn trained weights into a model with statistics of the clean training images."""

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ecinn import equations
from ecinn.classifier.checkpoint import Checkpoint
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.out_of_distribution import (
    FALSE_ALARM_RATE,
    FAR_RATE,
    POSE_IMAGES,
    OODDetector,
    Shape,
    band_energies,
    fit_distance,
    fit_log_p,
    fit_pose,
    fit_texture,
)
from ecinn.classifier.quantisation import stored_precision
from ecinn.classifier.recipes import Recipe
from ecinn.data.augmentation import misplace
from ecinn.data.dataset import Dataset
from ecinn.data.pen import SIDE, draw_shapes, page_pens, random_pens, redraw
from ecinn.explanation.counterfactual import class_means
from ecinn.flow.network import latent_frequencies
from ecinn.flow.precision import exact_convolutions
from ecinn.pixels import StoredImages, to_pixels
from ecinn.training.shape import fit_shape

PART = 500
"""Images or latents that are processed at once."""
LATENTS_LIMIT = 2**28
"""Bytes of latents that are kept in memory, or a quarter of the free memory of a GPU if that is
more; other latents are computed again for every statistic."""
OOD_IMAGES = 200_000
"""Largest number of training images, drawn at random, that the OOD detector is fitted to: in
expectation, 200 of them lie beyond either end of the range of log p(x)."""
SHAPE_IMAGES = 10_000
"""Largest number of digits that the shape score is fitted to, besides as many that are drawn again
and twice as many other shapes."""


@torch.no_grad()
def calibrate(
    recipe: Recipe,
    data: Dataset,
    weights: Mapping[str, Tensor],
    device: torch.device,
    training: Mapping[str, object],
    held_out: Dataset | None = None,
    ood: OODDetector | None = None,
) -> Checkpoint:
    """Measure μ̄ and fit the OOD detector on clean training images, with the weights as stored.

    Tied class means become μ̄; the temperature, and with two classes a common shift of the means,
    is fitted on held-out images, if there are any, to another classifier's answers or to labels.
    A balanced recipe has no shift: it would favour the larger class.

    Args:
        ood: detector of the same weights with fewer bits; None fits one.
    """
    classifier = GenerativeClassifier(recipe.architecture).to(device).eval()
    classifier.load_state_dict(stored_precision(weights, recipe.stored_bits))
    latents = _Latents(classifier, data.images, device)
    if recipe.tied:
        parts = data.labels.to(device).split(PART)
        classifier.mu.copy_(label_means(latents.z(), parts, classifier.mu))
    mu_bar = class_means(latents.z(), classifier.mu)
    reference = None if held_out is None else _Latents(classifier, held_out.images, device)
    if recipe.tied:
        classifier.mu.copy_(mu_bar)
        if held_out is not None and reference is not None:
            targets = held_out.answers
            if targets is None:
                targets = F.one_hot(held_out.labels, len(mu_bar)).float()
            targets, scaling = targets.to(device), None
            if len(mu_bar) == 2 and not recipe.balanced:
                scaling = platt_scaling(reference.z(), targets, mu_bar)
            tau, shift = scaling or (fit_tau(reference.z(), targets, mu_bar), 0.0)
            classifier.tau.fill_(tau)
            classifier.mu.copy_(mu_bar + shift)
    if len(data) > OOD_IMAGES:
        generator = torch.Generator().manual_seed(recipe.seed)
        drawn = torch.randperm(len(data), generator=generator)[:OOD_IMAGES]
        latents = _Latents(classifier, data.images, device, drawn.sort().values)
    return Checkpoint(
        recipe=recipe,
        mu_bar=mu_bar.cpu(),
        ood=ood or _fit_detector(recipe, mu_bar, data.images, latents, reference),
        classifier=classifier.requires_grad_(requires_grad=False).cpu(),
        class_names=data.class_names,
        training=training,
    )


def _new_scores(
    recipe: Recipe,
    mu_bar: Float[Tensor, "classes dim"],
    images: StoredImages,
    held_out: "_Latents",
) -> tuple[float, Shape | None]:
    """Fit the scores of models with fully connected couplings: distance, and shape of digits."""
    shape = _shape(recipe, images, held_out) if _reads_digits(recipe) else None
    mu, rate = held_out.classifier.mu, FAR_RATE if shape is None else FALSE_ALARM_RATE
    squares = [
        (z - mu_bar[equations.predicted_class(z, mu)]).square().sum(1) for z in held_out.z()
    ]
    return fit_distance(torch.cat(squares), rate), shape


def _reads_digits(recipe: Recipe) -> bool:
    net = recipe.architecture
    return recipe.mnist_framing and (net.channels, net.height, net.width) == (1, SIDE, SIDE)


def _shape(recipe: Recipe, images: StoredImages, held_out: "_Latents") -> Shape:
    """Fit the shape score to digits, digits drawn again, and drawings that are no digits."""
    generator = torch.Generator().manual_seed(recipe.seed)
    chosen = torch.randperm(len(images), generator=generator)[:SHAPE_IMAGES].sort().values
    digits = images[chosen.to(images.device)].cpu()
    again = redraw(digits, random_pens(len(digits), generator))
    others = draw_shapes(2 * len(digits), generator)
    same_pen = redraw(held_out.images.cpu(), page_pens(len(held_out.images)))

    def latents(*kinds: StoredImages) -> Tensor:
        every = _Latents(held_out.classifier, torch.cat(kinds), held_out.device)
        return torch.cat([z.cpu() for z in every.z()])

    unseen = torch.cat([*(z.cpu() for z in held_out.z()), latents(same_pen)])
    return fit_shape(latents(digits, again), latents(others), unseen, generator)


def _fit_detector(
    recipe: Recipe,
    mu_bar: Float[Tensor, "classes dim"],
    images: StoredImages,
    latents: "_Latents",
    held_out: "_Latents | None",
) -> OODDetector:
    """Fit all scores of the recipe to latents of the training images.

    Distance and the limit of the shape are fitted to held-out images if there are any: training
    images are nearer to their classes.
    """
    classifier, frequency = latents.classifier, latent_frequencies(recipe.architecture)
    frequency = None if frequency is None else frequency.to(mu_bar.device)
    log_p, energies = [], []
    for z, log_det in latents:
        log_p.append(equations.log_marginal(equations.log_likelihood(z, log_det, classifier.mu)))
        if frequency is not None:
            own = mu_bar[equations.predicted_class(z, classifier.mu)]
            energies.append(band_energies(z - own, frequency))
    texture = pose = distance = shape = None
    if frequency is not None:
        texture = fit_texture(torch.cat(energies), frequency)
    else:
        distance, shape = _new_scores(recipe, mu_bar, images, held_out or latents)
    if recipe.aligned:
        generator = torch.Generator().manual_seed(recipe.seed)
        few = images[: min(POSE_IMAGES, len(images) // 2)]
        fitted, misplaced = (
            torch.cat(list(_Latents(classifier, some, mu_bar.device).z()))
            for some in (few, misplace(few, generator))
        )
        others = (
            z[(rows >= len(few)).to(z.device)]
            for z, rows in zip(latents.z(), latents.rows.split(PART), strict=True)
        )
        pose = fit_pose(fitted, misplaced, others)
    detector = OODDetector(fit_log_p(torch.cat(log_p)), texture, pose, distance, shape)
    return detector.to(torch.device("cpu"))


class _Latents:
    """Latents and log-determinants of images, in parts; few are kept, many are computed again.

    Args:
        rows: of the images; None takes all of them.
    """

    def __init__(
        self,
        classifier: GenerativeClassifier,
        images: StoredImages,
        device: torch.device,
        rows: Int[Tensor, " rows"] | None = None,
    ) -> None:
        self.classifier, self.images, self.device = classifier, images, device
        self.rows = torch.arange(len(images)) if rows is None else rows
        limit = LATENTS_LIMIT
        if device.type == "cuda":
            limit = max(limit, torch.cuda.mem_get_info(device)[0] // 4)
        self.few = 4 * len(self.rows) * classifier.architecture.dim <= limit
        self.kept: list[tuple[Tensor, Tensor]] = []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.kept:
            yield from self.kept
            return
        parts = []
        for rows in self.rows.split(PART):
            images = self.images[rows.to(self.images.device)].to(self.device)
            with exact_convolutions():
                part = self.classifier.encode_with_log_det(to_pixels(images))
            parts += [part] if self.few else []
            yield part
        self.kept = parts

    def z(self) -> Iterator[Tensor]:
        """Yield the latents only."""
        return (z for z, _ in self)


def label_means(
    latents: Iterable[Tensor], labels: Iterable[Tensor], mu: Float[Tensor, "classes dim"]
) -> Float[Tensor, "classes dim"]:
    """Return the mean latent of every class, from parts of the images; zero if it has none."""
    total = torch.zeros_like(mu, dtype=torch.float64)
    count = torch.zeros(len(mu), dtype=torch.float64, device=mu.device)
    for z, own in zip(latents, labels, strict=True):
        total.index_add_(0, own, z.double())
        count += torch.bincount(own, minlength=len(mu))
    return (total / count.clamp(min=1)[:, None]).to(mu.dtype)


def fit_tau(
    latents: Iterable[Tensor],
    targets: Float[Tensor, "batch classes"],
    mu: Float[Tensor, "classes dim"],
) -> Float[Tensor, ""]:
    """Return the inverse temperature τ that minimises the cross-entropy on held-out images.

    Targets, labels or probabilities, are smoothed by 1/(n + 2), as in Platt scaling: n correct
    predictions do not justify certainty. The cross-entropy is convex in τ, so its slope is zero
    at one place.
    """
    logits = torch.cat([equations.linear_logits(z, mu).double() for z in latents])
    logits = logits - logits.mean(1, keepdim=True)
    own = (targets.to(logits) * logits).sum(1)
    # Mean logit under the smoothed targets: the logits of a row add up to zero.
    expected = (1 - len(mu) / (len(mu) - 1) / (len(logits) + 2)) * own

    def too_low(log_tau: Tensor) -> Tensor:
        posterior = (log_tau.exp() * logits).softmax(1)
        return ((posterior * logits).sum(1) - expected).mean()[None] < 0

    low, high = (torch.full_like(own[0], limit) for limit in (-20.0, 20.0))
    return equations.bisect(too_low, low, high).exp().to(mu.dtype)


def platt_scaling(
    latents: Iterable[Tensor],
    targets: Float[Tensor, "batch 2"],
    mu: Float[Tensor, "2 dim"],
) -> tuple[Float[Tensor, ""], Float[Tensor, " dim"]] | None:
    """Return the τ and the common shift s of two means that minimise the held-out cross-entropy.

    Platt (1999) fits a slope and an intercept, τl + b, to log-odds l: here l = (z − c)·w, with
    c the centre of the means and w their difference. Means μ + s with s = −b w/(τ‖w‖²) have these
    log-odds, so the nearest mean is still the prediction. Targets are those of `fit_tau`.

    Returns:
        None if the boundary would not lie between the two means: then only τ can be fitted.
    """
    w = (mu[1] - mu[0]).double()
    log_odds = torch.cat([(z.double() - mu.double().mean(0)) @ w for z in latents])
    target = targets[:, 1].double()
    target = torch.lerp(target, 1 - target, 1 / (len(target) + 2))
    low, high = (torch.full_like(w[0], limit) for limit in (-20.0, 20.0))

    def surplus(scaled: Tensor, weight: Tensor | float = 1.0) -> Tensor:
        """Slope of the cross-entropy with respect to the intercept, or to the slope."""
        return ((scaled.sigmoid() - target) * weight).mean()

    def intercept(tau: Tensor) -> Tensor:
        """Return the best intercept for this τ."""
        scaled = tau * log_odds
        reach = 20 + scaled.abs().max()
        return equations.bisect(lambda b: surplus(scaled + b)[None] < 0, -reach, reach)

    def too_low(log_tau: Tensor) -> Tensor:
        tau = log_tau.exp()
        return surplus(tau * log_odds + intercept(tau), log_odds)[None] < 0

    tau = equations.bisect(too_low, low, high).exp()
    part = -intercept(tau) / (tau * w.square().sum())
    return (tau.to(mu.dtype), (part * w).to(mu.dtype)) if part.abs() < 0.5 else None

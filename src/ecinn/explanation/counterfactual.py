"""ECINN: counterfactuals with one encode and one decode, and a certificate for each."""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ecinn import equations
from ecinn.classifier.out_of_distribution import OODDetector
from ecinn.errors import InputError
from ecinn.explanation.correction import Ends, Line, correct_alpha, shortfall, stored_posterior
from ecinn.explanation.path import CounterfactualPath, PerPairSteps
from ecinn.explanation.protocol import InvertibleClassifier
from ecinn.explanation.result import Certificate, Explanation, Images, PerPair
from ecinn.pixels import clamped_share

MOST_STEPS = 1000
MOST_PICTURES = 20_000
"""Of all paths together, so that a slip of the finger does not fill the memory."""

Targets = int | Sequence[int] | Literal["all"] | Int[Tensor, "batch targets"]


def class_means(
    latents: Iterable[Tensor], mu: Float[Tensor, "classes dim"]
) -> Float[Tensor, "classes dim"]:
    """μ̄_j, the mean latent of all training images *predicted* as class j (Section 3.3)."""
    total = torch.zeros_like(mu, dtype=torch.float64)
    count = torch.zeros(len(mu), dtype=torch.float64, device=mu.device)
    for z in latents:
        predicted = equations.log_posterior(z, mu).argmax(1)
        total.index_add_(0, predicted, z.double())
        count += torch.bincount(predicted, minlength=len(mu))
    if not count.all():
        never = ", ".join(str(int(label)) for label in (count == 0).nonzero())
        raise InputError(f"no training image is predicted as class {never}: train for longer")
    return (total / count[:, None]).to(mu.dtype)


def resolve_targets(
    target: Targets, p: Int[Tensor, " batch"], classes: int, names: Sequence[str] | None = None
) -> Int[Tensor, "batch targets"]:
    """The target classes of every image: one, several, one row per image, or "all" but p."""
    names = names or [str(label) for label in range(classes)]
    if isinstance(target, str):
        if target != "all":
            raise InputError(f"target is a class, several classes or 'all', not {target!r}")
        every = torch.arange(classes, device=p.device).expand(len(p), classes)
        return every[every != p[:, None]].reshape(len(p), classes - 1)
    if isinstance(target, int):
        target = [target]
    q = torch.as_tensor(target, device=p.device)
    if q.ndim == 1:
        q = q.expand(len(p), -1)
    if q.ndim != 2 or len(q) != len(p) or not q.shape[1] or q.is_floating_point():
        raise InputError(
            f"targets of {len(p)} images are whole numbers of shape (images, targets), "
            f"not {tuple(q.shape)}"
        )
    if bool(((q < 0) | (q >= classes)).any()):
        wrong = int(q[(q < 0) | (q >= classes)][0])
        raise InputError(
            f"target {wrong} is out of range: this model's classes are 0 to {classes - 1}"
        )
    same = (q == p[:, None]).any(1)
    if bool(same.any()):
        index = int(same.nonzero()[0])
        which = f"image {index}" if len(p) > 1 else "the image"
        raise InputError(
            f"{which} is already predicted as {names[int(p[index])]}: "
            "choose another target, or 'all' for every other class"
        )
    return q.long()


def counterfactual(
    classifier: InvertibleClassifier,
    mu_bar: Float[Tensor, "classes dim"],
    x: Images,
    q: Int[Tensor, " batch"],
) -> Images:
    """Eq. 3 at α₁ and nothing else: x̂ = f⁻¹(f(x) + α₁Δ), in two network evaluations."""
    z, _ = classifier.encode_with_log_det(x)
    p = equations.log_posterior(z, classifier.mu).argmax(1)
    return classifier.decode(convincing_latent(z, classifier.mu, mu_bar, p, q))


def convincing_latent(
    z: Float[Tensor, "batch dim"],
    mu: Float[Tensor, "classes dim"],
    mu_bar: Float[Tensor, "classes dim"],
    p: Int[Tensor, " batch"],
    q: Int[Tensor, " batch"],
) -> Float[Tensor, "batch dim"]:
    """z + α₁Δ, in closed form."""
    delta = equations.latent_direction(mu_bar, p, q)
    alpha_0 = equations.tipping_point_alpha(z, delta, mu[p], mu[q])
    return equations.corrected_latent(z, equations.convincing_alpha(alpha_0), delta)


def explain(
    classifier: InvertibleClassifier,
    mu_bar: Float[Tensor, "classes dim"],
    x: Images,
    target: Targets,
    *,
    confidence: float | None = None,
    path: int | Sequence[float] | None = None,
    check: bool = True,
    correct: bool = False,
    ood: OODDetector | None = None,
    class_names: Sequence[str] | None = None,
) -> Explanation:
    """Explain every image against every target with one encode and one decode.

    Args:
        confidence: the convincing counterfactual is where p(q) is this, instead of at α₁.
        path: also give the path: at these α, or at so many from x to the convincing one.
        check: encode the stored 8-bit images once more, so that certificates speak of them.
        correct: and where a stored image is not read as was asked, correct α and try again.
        ood: what is usual of the training images, so that others can be told.
    """
    if confidence is not None and not (isinstance(confidence, float) and 0 < confidence < 1):
        raise InputError(f"a confidence lies above 0 and below 1 (0.9 is 90 %), not {confidence}")
    mu = classifier.mu
    classes = len(mu)
    names = tuple(class_names or (str(label) for label in range(classes)))
    z, log_det = classifier.encode_with_log_det(x)
    log_posterior = equations.log_posterior(z, mu)
    p = log_posterior.argmax(1)
    q = resolve_targets(target, p, classes, names)

    # Everything from here to the decode is closed form in latent space.
    from_class = p[:, None].expand_as(q)
    z_line = z[:, None].expand(*q.shape, -1)
    delta = equations.latent_direction(mu_bar, from_class, q)
    alpha_0 = equations.tipping_point_alpha(z_line, delta, mu[from_class], mu[q])
    alpha_1 = equations.convincing_alpha(alpha_0)
    alpha, reachable = alpha_1, torch.ones_like(q, dtype=torch.bool)
    if confidence is not None:
        alpha, reachable = equations.confident_alpha(z_line, delta, mu, q, confidence)
    steps = _steps(path, alpha)
    line = Line(z_line, delta, q)
    every_alpha = torch.cat([alpha_0[..., None], alpha[..., None], steps], -1)
    check = check or correct
    again, (x_hat, posterior, stored) = _decode(classifier, z, line, every_alpha, check=check)

    end = Ends(alpha, x_hat[:, :, 1], posterior[:, :, 1], _at(stored, 1), torch.zeros_like(q))
    points = Points(
        x_hat[:, :, 2:], posterior[:, :, 2:], None if stored is None else stored[:, :, 2:]
    )
    passes = 3 if check else 2
    if correct:
        end = correct_alpha(classifier, line, end, confidence, reachable)
        if isinstance(path, int) and bool(end.corrections.any()):
            # The way ends elsewhere now.
            steps = _steps(path, end.alpha)
            _, points = _decode(classifier, z[:0], line, steps, check=True)
            passes += 2
    log_p = equations.log_marginal(equations.log_likelihood(z, log_det, mu))
    tipping_point = x_hat[:, :, 0]
    return Explanation(
        x=x,
        p=p,
        q=q,
        posterior=log_posterior.exp(),
        alpha_0=alpha_0,
        alpha_1=alpha_1,
        alpha=end.alpha,
        tipping_point=tipping_point,
        convincing=end.image,
        tipping_certificate=Certificate(
            posterior[:, :, 0], _at(stored, 0), clamped_share(tipping_point), q
        ),
        convincing_certificate=Certificate(
            end.posterior, end.stored_posterior, clamped_share(end.image), q
        ),
        path=None if path is None else CounterfactualPath(steps, *points, p, q, names),
        third_class=_third_class(posterior[:, :, 0], from_class, q),
        round_trip_error=(again - x).abs().flatten(1).amax(1),
        log_p=log_p,
        out_of_distribution=None if ood is None else ood.flags(z, z - mu_bar[p], log_p),
        confidence=confidence,
        reachable=reachable,
        as_asked=shortfall(end.verdict, q, confidence) == 0,
        corrections=end.corrections,
        passes=passes,
        class_names=names,
    )


def _steps(alphas: int | Sequence[float] | None, end: PerPair) -> PerPairSteps:
    """The α of a path: as given, or so many from 0 to the end."""
    if alphas is None:
        return end.new_zeros((*end.shape, 0))
    count = alphas if isinstance(alphas, int) else len(alphas)
    if count * end.numel() > MOST_PICTURES:
        raise InputError(
            f"a path of {count} steps for {end.numel()} counterfactuals is more than "
            f"{MOST_PICTURES} pictures at once: take fewer images, targets or steps"
        )
    if isinstance(alphas, int):
        if not 2 <= alphas <= MOST_STEPS:
            raise InputError(f"a path has 2 to {MOST_STEPS} steps, not {alphas}")
        return end[..., None] * torch.linspace(0, 1, alphas, dtype=end.dtype, device=end.device)
    given = torch.as_tensor(alphas, dtype=end.dtype, device=end.device)
    if given.ndim != 1 or not 1 <= len(given) <= MOST_STEPS or not bool(given.isfinite().all()):
        raise InputError(f"alphas are 1 to {MOST_STEPS} finite numbers, or how many to take")
    return given.expand(*end.shape, -1)


class Points(NamedTuple):
    """Points on the lines: images, what the classifier says of them, and of them stored."""

    image: Float[Tensor, "batch targets points channels height width"]
    posterior: Float[Tensor, "batch targets points classes"]
    stored_posterior: Float[Tensor, "batch targets points classes"] | None


def _decode(
    classifier: InvertibleClassifier,
    z: Float[Tensor, "some dim"],
    line: Line,
    alpha: PerPairSteps,
    *,
    check: bool,
) -> tuple[Tensor, Points]:
    """z and all the points z + αΔ, decoded in one call; verified in another."""
    places = (*alpha.shape, -1)
    z_hat = equations.corrected_latent(
        line.z[:, :, None].expand(places), alpha, line.delta[:, :, None].expand(places)
    )
    decoded = classifier.decode(torch.cat([z, z_hat.flatten(0, 2)]))
    x_hat = decoded[len(z) :]
    posterior = equations.log_posterior(z_hat, classifier.mu).exp()
    stored = stored_posterior(classifier, x_hat).reshape(posterior.shape) if check else None
    image = x_hat.reshape(*alpha.shape, *x_hat.shape[1:])
    return decoded[: len(z)], Points(image, posterior, stored)


def _at(stored: Tensor | None, place: int) -> Tensor | None:
    return None if stored is None else stored[:, :, place]


def _third_class(
    posterior: Float[Tensor, "batch targets classes"],
    p: Int[Tensor, "batch targets"],
    q: Int[Tensor, "batch targets"],
) -> Int[Tensor, "batch targets"]:
    """The winner where it is neither p nor q (which tie), else −1."""
    pair = torch.stack([p, q], -1)
    others = posterior.scatter(-1, pair, -1.0)
    best, winner = others.max(-1)
    tied = posterior.gather(-1, pair).amax(-1)
    return torch.where(best > tied, winner, -1)

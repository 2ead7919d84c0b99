"""ECINN: counterfactuals with one encode and one decode, and a certificate for each."""

import math
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ecinn import equations
from ecinn.errors import InputError
from ecinn.explanation import Certificate, Explanation, Images
from ecinn.pixels import clamped_share, to_pixels, to_uint8

Targets = int | Sequence[int] | Literal["all"] | Int[Tensor, "batch targets"]


@runtime_checkable
class InvertibleClassifier(Protocol):
    """All that ECINN asks of a network."""

    @property
    def mu(self) -> Tensor:
        """Class means in latent space, "classes dim"."""

    def encode_with_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """z = f(x), "batch dim", and log |det ∂z/∂x|, "batch"."""

    def decode(self, z: Tensor) -> Tensor:
        """x = f⁻¹(z)."""


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
    mu = classifier.mu
    p = equations.log_posterior(z, mu).argmax(1)
    delta = equations.latent_direction(mu_bar, p, q)
    alpha_0 = equations.tipping_point_alpha(z, delta, mu[p], mu[q])
    return classifier.decode(
        equations.corrected_latent(z, equations.convincing_alpha(alpha_0), delta)
    )


def explain(
    classifier: InvertibleClassifier,
    mu_bar: Float[Tensor, "classes dim"],
    x: Images,
    target: Targets,
    *,
    verify: bool = True,
    typical: tuple[float, float] | None = None,
    class_names: Sequence[str] | None = None,
) -> Explanation:
    """Explain every image against every target with one encode and one decode.

    Args:
        verify: encode the stored 8-bit images once more, so that certificates speak of them.
        typical: the range of log p(x) that counts as typical of the training data.
    """
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
    z_tipping = equations.corrected_latent(z_line, alpha_0, delta)
    z_convincing = equations.corrected_latent(z_line, alpha_1, delta)

    decoded = classifier.decode(
        torch.cat([z, z_tipping.flatten(0, 1), z_convincing.flatten(0, 1)])
    )
    again, tipping_point, convincing = decoded.split([len(x), q.numel(), q.numel()])
    tipping_point = tipping_point.reshape(*q.shape, *x.shape[1:])
    convincing = convincing.reshape(*q.shape, *x.shape[1:])

    stored_tipping = stored_convincing = None
    if verify:
        both = to_pixels(to_uint8(torch.cat([tipping_point, convincing]).flatten(0, 1)))
        stored_z, _ = classifier.encode_with_log_det(both.to(x.dtype))
        stored = equations.log_posterior(stored_z, mu).exp().reshape(2, *q.shape, classes)
        stored_tipping, stored_convincing = stored

    tipping_posterior = equations.log_posterior(z_tipping, mu)
    log_p = equations.log_marginal(equations.log_likelihood(z, log_det, mu))
    return Explanation(
        x=x,
        p=p,
        q=q,
        posterior=log_posterior.exp(),
        alpha_0=alpha_0,
        alpha_1=alpha_1,
        tipping_point=tipping_point,
        convincing=convincing,
        tipping_certificate=Certificate(
            tipping_posterior.exp(), stored_tipping, clamped_share(tipping_point), q
        ),
        convincing_certificate=Certificate(
            equations.log_posterior(z_convincing, mu).exp(),
            stored_convincing,
            clamped_share(convincing),
            q,
        ),
        third_class=_third_class(tipping_posterior, from_class, q),
        round_trip_error=(again - x).abs().flatten(1).amax(1),
        log_p=log_p,
        typical=None if typical is None else (log_p >= typical[0]) & (log_p <= typical[1]),
        passes=3 if verify else 2,
        class_names=names,
    )


def _third_class(
    log_posterior: Float[Tensor, "batch targets classes"],
    p: Int[Tensor, "batch targets"],
    q: Int[Tensor, "batch targets"],
) -> Int[Tensor, "batch targets"]:
    """The winner where it is neither p nor q (which tie), else −1."""
    pair = torch.stack([p, q], -1)
    others = log_posterior.scatter(-1, pair, -math.inf)
    best, winner = others.max(-1)
    tied = log_posterior.gather(-1, pair).amax(-1)
    return torch.where(best > tied, winner, -1)

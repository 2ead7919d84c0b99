"""ECINN: counterfactuals with one encode and one decode, and a certificate for each."""

import numbers
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ecinn import equations
from ecinn.classifier.out_of_distribution import OODDetector
from ecinn.errors import InputError
from ecinn.explanation.correction import (
    Line,
    LineSearch,
    PerPair,
    Points,
    correct_alpha,
    shortfall,
)
from ecinn.explanation.path import CounterfactualPath, PerPairSteps
from ecinn.explanation.protocol import InvertibleClassifier, Reader
from ecinn.explanation.reading import Reading, stored_posterior
from ecinn.explanation.result import (
    ALPHA_1,
    Certificate,
    Confidence,
    Explanation,
    Verification,
)
from ecinn.explanation.targets import Targets, given_targets, number, skip_predicted
from ecinn.explanation.verification import verify
from ecinn.pixels import Images, clamped_share, to_uint8

MAX_STEPS = 1000
MAX_PICTURES = 20_000
"""Limit on the images of all paths together, which guards against running out of memory."""


def class_means(
    latents: Iterable[Tensor], mu: Float[Tensor, "classes dim"]
) -> Float[Tensor, "classes dim"]:
    """μ̄_j, the mean latent of all training images *predicted* as class j (Section 3.3)."""
    total = torch.zeros_like(mu, dtype=torch.float64)
    count = torch.zeros(len(mu), dtype=torch.float64, device=mu.device)
    for z in latents:
        predicted = equations.predicted_class(z, mu)
        total.index_add_(0, predicted, z.double())
        count += torch.bincount(predicted, minlength=len(mu))
    if not count.all():
        never = ", ".join(str(int(label)) for label in (count == 0).nonzero())
        raise InputError(f"no training image is predicted as class {never}: train for longer")
    return (total / count[:, None]).to(mu.dtype)


def counterfactual(
    classifier: InvertibleClassifier,
    mu_bar: Float[Tensor, "classes dim"],
    x: Images,
    q: Int[Tensor, " batch"],
) -> Images:
    """Eq. 3 at α₁ and nothing else: x̂ = f⁻¹(f(x) + α₁Δ), in two network evaluations."""
    z, _ = classifier.encode_with_log_det(x)
    p = equations.predicted_class(z, classifier.mu)
    return classifier.decode(convincing_latent(classifier, mu_bar, z, p, q))


def convincing_latent(
    classifier: InvertibleClassifier,
    mu_bar: Float[Tensor, "classes dim"],
    z: Float[Tensor, "batch dim"],
    p: Int[Tensor, " batch"],
    q: Int[Tensor, " batch"],
    confidence: Confidence = ALPHA_1,
) -> Float[Tensor, "batch dim"]:
    """z + αΔ, at α₁ or where p(q) is the confidence."""
    mu, delta = classifier.mu, equations.latent_direction(mu_bar, p, q)
    if confidence == ALPHA_1:
        alpha_0 = equations.tipping_point_alpha(z, delta, mu[p], mu[q])
        alpha = equations.convincing_alpha(alpha_0)
    else:
        alpha, _ = equations.confident_alpha(z, delta, mu, classifier.tau, q, confidence)
    return equations.corrected_latent(z, alpha, delta)


class Known(NamedTuple):
    """Latents and log-determinants of images, and the reader's answers, if there is a reader."""

    z: Float[Tensor, "batch dim"]
    log_det: Float[Tensor, " batch"]
    answers: Float[Tensor, "batch classes"] | None = None


def explain(
    classifier: InvertibleClassifier,
    mu_bar: Float[Tensor, "classes dim"],
    x: Images,
    target: Targets,
    *,
    confidence: Confidence = ALPHA_1,
    path: int | Sequence[float] | None = None,
    check: bool = True,
    correct: bool = False,
    ood: OODDetector | None = None,
    class_names: Sequence[str] | None = None,
    reader: Reader | None = None,
    known: Known | None = None,
) -> Explanation:
    """Explain every image against every target with one encode and one decode.

    Images that are already predicted as one of their targets are skipped and reported, unless
    no image is left.

    Args:
        confidence: the p(q) of the convincing counterfactual, or "alpha_1", the paper's α₁.
        path: also return the path, at these α, or at this many from x to the counterfactual.
        check: encode the stored 8-bit images once more, so that certificates are about them.
        correct: correct α until the stored image is classified as requested, and α₀ until the
            stored tipping point is a tie; implies `check`.
        ood: flags images that are out of distribution.
        reader: the classifier to explain, if `classifier` is its student: p is what the reader
            says, and α is corrected until it reads the stored images as requested.
        known: latents, log-determinants and answers of x, if they have been computed already.
    """
    confidence = checked_confidence(confidence)
    wanted = None if confidence == ALPHA_1 else confidence
    mu, tau, check = classifier.mu, classifier.tau, check or correct
    classes = len(mu)
    names = tuple(class_names or (str(label) for label in range(classes)))
    if not x.is_floating_point():
        raise InputError("x must be float pixels in [0, 1]: use `ecinn.pixels.to_pixels` on uint8")
    if mu_bar.shape != mu.shape or len(names) != classes:
        raise InputError(
            f"the classifier has {classes} class means of shape {tuple(mu.shape)}, but mu_bar is "
            f"of shape {tuple(mu_bar.shape)} and there are {len(names)} class names"
        )
    z, log_det = classifier.encode_with_log_det(x) if known is None else known[:2]
    predicted = equations.predicted_class(z, mu)
    if reader is not None:
        answers = None if known is None else known.answers
        read = (reader.predict(to_uint8(x)) if answers is None else answers).to(z)
        predicted = read.argmax(1)
    q = given_targets(target, predicted, classes)
    explained, skipped = skip_predicted(q, predicted, names)
    x, z, log_det, p, q = (each[explained] for each in (x, z, log_det, predicted, q))
    log_posterior = equations.log_posterior(z, mu, tau)

    # Everything from here to the decode is closed form in latent space.
    from_class = p[:, None].expand_as(q)
    z_line = z[:, None].expand(*q.shape, -1)
    delta = equations.latent_direction(mu_bar, from_class, q)
    alpha_0 = equations.tipping_point_alpha(z_line, delta, mu[from_class], mu[q])
    alpha_1 = equations.convincing_alpha(alpha_0)
    alpha, reachable = alpha_1, torch.ones_like(q, dtype=torch.bool)
    if wanted is not None:
        alpha, reachable = equations.confident_alpha(z_line, delta, mu, tau, q, wanted)
    line, plain = Line(z_line, delta, q), torch.stack([alpha, alpha_0], -1)
    steps = _steps(path, alpha)
    passes, search, verified = 3 if check or reader is not None else 2, None, None
    if reader is not None:
        original = read[explained].repeat_interleave(q.shape[1], 0)
        guesses = (alpha_0.flatten(), alpha.flatten())
        verified = verify(classifier, mu_bar, line.flat(), original, *guesses, reader, wanted)
        search, line = verified.search, verified.line.unflatten(q.shape)
        ends = _found(classifier, line, search, own=False)
        steps = _steps(path, ends.alpha[..., 0])
        decoded, points = _decode(classifier, z, line, steps, check=check)
    elif correct:
        decoded, points = _decode(classifier, z, line, plain, check=True)
        original = log_posterior.exp().repeat_interleave(q.shape[1], 0)
        pairs = (line.flat(), original, from_class.flatten())
        search = correct_alpha(classifier, *pairs, wanted, reachable.flatten(), points.flat())
        ends = _found(classifier, line, search, own=True)
        steps = _steps(path, ends.alpha[..., 0])
        if path is not None:  # it ends at the corrected counterfactual
            _, points = _decode(classifier, z[:0], line, steps, check=True)
            passes += 2
    else:
        decoded, points = _decode(classifier, z, line, torch.cat([plain, steps], -1), check=check)
        ends, points = points.at(slice(2)), points.at(slice(2, None))
    end, tipping = ends.at(0), ends.at(1)
    log_p = equations.log_marginal(equations.log_likelihood(z, log_det, mu))
    said = (None, None)
    if verified is not None:
        found = (verified.search.end, verified.search.tipping_point)
        said = tuple(best.answer.unflatten(0, q.shape) for best in found)
    convincing_certificate = _certificate(end, q, said[0])
    tipping_certificate = _certificate(tipping, q, said[1])
    # Without correction, p and q tie before rounding.
    tied = tipping_certificate.verdict if search else tipping.reading.posterior
    return Explanation(
        x=x,
        p=p,
        q=q,
        posterior=log_posterior.exp(),
        alpha_0=tipping.alpha,
        alpha_1=alpha_1,
        alpha=end.alpha,
        tipping_point=tipping.image,
        convincing=end.image,
        tipping_certificate=tipping_certificate,
        convincing_certificate=convincing_certificate,
        path=None if path is None else _as_path(points, p, q, names),
        third_class=_third_class(tied, from_class, q),
        round_trip_error=(decoded - x).abs().flatten(1).amax(1),
        log_p=log_p,
        out_of_distribution=None if ood is None else ood.flags(z, z - mu_bar[p], log_p),
        confidence=confidence,
        reachable=reachable,
        as_requested=shortfall(convincing_certificate.verdict, q, wanted) == 0,
        corrections=torch.zeros_like(q) if search is None else search.corrections.reshape(q.shape),
        passes=passes,
        corrected=correct,
        class_names=names,
        indices=explained,
        skipped=skipped,
        verification=None
        if verified is None or reader is None
        else Verification(
            reader.name,
            read[explained],
            verified.uncorrected.unflatten(0, q.shape),
            queries=verified.search.asked.reshape(q.shape),
            tied=verified.tied.reshape(q.shape),
            instead=verified.instead.unflatten(0, q.shape),
        ),
    )


def checked_confidence(confidence: Any) -> Confidence:  # noqa: ANN401
    """Accept "alpha_1" and any real number in (0, 1), also NumPy's and tensors."""
    confidence = number(confidence)
    if isinstance(confidence, str) and confidence == ALPHA_1:
        return ALPHA_1
    real = isinstance(confidence, numbers.Real) and not isinstance(confidence, bool)
    if not real or not 0 < float(confidence) < 1:
        raise InputError(
            "a confidence lies above 0 and below 1 (0.9 is 90 %), or is 'alpha_1', "
            f"not {confidence!r}"
        )
    return float(confidence)


def _steps(path: int | Sequence[float] | None, end: PerPair) -> PerPairSteps:
    """The α of a path: those given, or this many from 0 to the end."""
    if path is None:
        return end.new_zeros((*end.shape, 0))
    path = number(path)
    if isinstance(path, str | float):
        raise InputError(f"path must be a number of steps or values of alpha, not {path!r}")
    count = path if isinstance(path, int) else len(path)
    if count * end.numel() > MAX_PICTURES:
        raise InputError(
            f"a path of {count} steps for {end.numel()} counterfactuals is more than "
            f"{MAX_PICTURES} pictures at once: take fewer images, targets or steps"
        )
    if isinstance(path, int):
        if not 2 <= path <= MAX_STEPS:
            raise InputError(f"a path has 2 to {MAX_STEPS} steps, not {path}")
        return end[..., None] * torch.linspace(0, 1, path, dtype=end.dtype, device=end.device)
    given = torch.as_tensor(path, dtype=end.dtype, device=end.device)
    if given.ndim != 1 or not 1 <= len(given) <= MAX_STEPS or not bool(given.isfinite().all()):
        raise InputError(
            f"path must be a number of steps, or 1 to {MAX_STEPS} finite values of alpha"
        )
    return given.expand(*end.shape, -1)


class _Points(NamedTuple):
    """Decoded points on the lines, and their posteriors."""

    alpha: Float[Tensor, "batch targets *points"]
    image: Float[Tensor, "batch targets *points channels height width"]
    reading: Reading

    def at(self, place: int | slice) -> "_Points":
        """Select one point of every line, or several."""
        posterior, stored = self.reading.posterior, self.reading.stored_posterior
        stored = None if stored is None else stored[:, :, place]
        reading = Reading(posterior[:, :, place], stored)
        return _Points(self.alpha[:, :, place], self.image[:, :, place], reading)

    def flat(self) -> Points:
        """Flatten images and targets into one dimension, with the stored posteriors as answers."""
        stored = self.reading.stored_posterior
        assert stored is not None
        return Points(self.alpha.flatten(0, 1), self.image.flatten(0, 1), stored.flatten(0, 1))


def _decode(
    classifier: InvertibleClassifier,
    z: Float[Tensor, "some dim"],
    line: Line,
    alpha: PerPairSteps,
    *,
    check: bool,
) -> tuple[Tensor, _Points]:
    """Decode z and all points z + αΔ in one call, and check what would be stored in another."""
    z_hat = line.points(alpha)
    decoded = classifier.decode(torch.cat([z, z_hat.flatten(0, 2)]))
    x_hat = decoded[len(z) :]
    posterior = equations.log_posterior(z_hat, classifier.mu, classifier.tau).exp()
    stored = None
    if check and len(x_hat):
        stored = stored_posterior(classifier, x_hat).reshape(posterior.shape)
    image = x_hat.reshape(*alpha.shape, *x_hat.shape[1:])
    return decoded[: len(z)], _Points(alpha, image, Reading(posterior, stored))


def _found(
    classifier: InvertibleClassifier, line: Line, search: LineSearch, *, own: bool
) -> _Points:
    """Counterfactuals and tipping points that a search found, as they were asked about.

    Args:
        own: the answers are the model's own; else its posteriors are evaluated.
    """
    best, shape = (search.end, search.tipping_point), line.q.shape
    alpha, image, stored = (
        torch.stack([getattr(each, name).unflatten(0, shape) for each in best], 2)
        for name in ("alpha", "image", "answer")
    )
    if not own:
        stored = stored_posterior(classifier, image.flatten(0, 2)).reshape(stored.shape)
    posterior = equations.log_posterior(line.points(alpha), classifier.mu, classifier.tau).exp()
    return _Points(alpha, image, Reading(posterior, stored))


def _certificate(
    points: _Points, q: Int[Tensor, "batch targets"], answer: Tensor | None
) -> Certificate:
    return Certificate(
        points.reading.posterior,
        points.reading.stored_posterior,
        clamped=clamped_share(points.image),
        q=q,
        answer=answer,
    )


def _as_path(
    points: _Points,
    p: Int[Tensor, " batch"],
    q: Int[Tensor, "batch targets"],
    names: tuple[str, ...],
) -> CounterfactualPath:
    posterior, stored = points.reading.posterior, points.reading.stored_posterior
    return CounterfactualPath(
        posterior, stored, alphas=points.alpha, images=points.image, p=p, q=q, class_names=names
    )


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

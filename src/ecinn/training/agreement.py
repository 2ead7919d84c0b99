"""Compare a student with the classifier it was distilled from, on data and along paths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ecinn import equations
from ecinn.explanation.correction import TOLERANCE
from ecinn.explanation.protocol import Reader
from ecinn.explanation.reading import stored_posterior
from ecinn.explanation.result import ALPHA_1, Confidence, Explanation, join
from ecinn.metrics.counterfactuals import confidence_consistency
from ecinn.metrics.statistics import Interval, bootstrap_interval, proportion
from ecinn.model import Model
from ecinn.pixels import Labels, StoredImages, to_uint8
from ecinn.progress import Observer, counter, ignore
from ecinn.training.evaluation import random_offsets

ASKED = (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
"""Confidences that are requested, each of a part of the images."""
QUERIES_PER_IMAGE = 20
"""Upper bound on queries per image in `measure_agreement`: 2 for the image, 1 on its path, 16 for
counterfactuals, 1 spare."""

ENOUGH_AGREEMENT = 0.8
"""Smallest share of equal predictions with which a student speaks for its classifier. Our choice:
in the controls, audits of students with 56 and 63 % missed a shortcut, one with 85 % did not."""
EXAMPLES = 10

Answers = Float[Tensor, "batch classes"]


@dataclass(frozen=True)
class ClassifierAccuracy:
    """A classifier on labelled images."""

    accuracy: Interval
    chance: float
    """Accuracy of answers that are as frequent and do not depend on the image."""
    better_order: tuple[int, ...] | None
    """For every class, the output that means it, if another order explains far more answers."""
    reordered: float
    """The accuracy with that order."""

    @property
    def above_chance(self) -> bool:
        """True if the accuracy is significantly better than chance."""
        return self.accuracy.low > self.chance


def classifier_accuracy(answers: Answers, labels: Labels) -> ClassifierAccuracy:
    """Compare answers with labels; find out if the outputs are in another order.

    The order is assigned greedily: the largest number of images of a class with one answer first.
    It is reported if it gets more than half of the wrong answers right, beyond chance.
    """
    classes, given = answers.shape[1], answers.argmax(1)
    counts = torch.bincount(labels * classes + given, minlength=classes**2).double()
    counts = counts.reshape(classes, classes)
    n = counts.sum()
    order = torch.full((classes,), -1)
    left = counts.clone()
    for _ in range(classes):
        label, answer = divmod(int(left.argmax()), classes)
        order[label] = answer
        left[label], left[:, answer] = -1, -1
    accuracy = proportion(given == labels)
    chance = float((counts.sum(0) * counts.sum(1)).sum() / n**2)
    reordered = float(counts[torch.arange(classes), order].sum() / n)
    better = reordered - accuracy.mean > max(0.5 * (1 - accuracy.mean), 0.05)
    return ClassifierAccuracy(
        accuracy, chance, tuple(order.tolist()) if better else None, reordered
    )


@dataclass(frozen=True)
class Agreement:
    """How well a student speaks for its classifier, on images that neither learned from."""

    classifier: str
    images: int
    agreement: Interval
    """Share of images that both predict alike."""
    by_class: Mapping[str, Interval]
    """The same, by the class that the classifier predicts."""
    difference: Interval
    """Mean absolute difference of their probabilities, over classes and images."""
    path_difference: Interval
    """The same on 8-bit images at random points of paths to random classes."""
    requested: str
    """What was requested of the counterfactuals, in words: the student's default."""
    flipped: Interval
    """Share of counterfactuals, at the student's α, that the classifier reads as the target."""
    flipped_after: Interval
    """The same after correcting α on the classifier's answers."""
    not_explained: Interval
    """Share of counterfactuals that it does not read as requested even then, or only far outside
    (`Explanation.explained`)."""
    sure: Interval
    """Share of unchanged images that the classifier predicts with at least the requested
    confidence: where it is low, few counterfactuals can reach that confidence."""
    correlation: Interval
    """Pearson's r of requested confidences and the classifier's, at the student's α."""
    correlation_after: Interval
    """The same after correction."""
    within_after: Interval
    """Share of requested confidences that the classifier confirms within 0.05."""
    queries_per_counterfactual: Interval
    report_queries: int
    """Queries of this comparison, besides the answers on the images."""
    random: Explanation
    worst: Explanation
    """Counterfactuals to which the classifier gives the lowest p(q)."""

    def to_dict(self) -> dict[str, Any]:
        """Return every number as plain Python values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["by_class"] = {name: vars(share) for name, share in self.by_class.items()}
        return {
            name: vars(value) if isinstance(value, Interval) else value
            for name, value in values.items()
            if not isinstance(value, Explanation)
        }

    @property
    def caution(self) -> str:
        """Warning that the student agrees with the classifier too rarely; empty if it does not."""
        if self.agreement.mean >= ENOUGH_AGREEMENT:
            return ""
        return (
            f"Take care: the student agrees with {self.classifier} too rarely to show what it "
            "looks at. Train it longer, on more images, or without the layers of another model."
        )

    def sentences(self) -> tuple[str, ...]:
        """Return the results as sentences."""
        return (
            f"student and {self.classifier} agree on {_share(self.agreement)} of "
            f"{self.images:,} held-out images",
            f"their probabilities differ by {self.difference.mean:.4f} on average on these, and "
            f"by {self.path_difference.mean:.4f} along paths",
            f"counterfactuals, {self.requested}, that {self.classifier} reads as the target: "
            f"{_share(self.flipped)}, corrected {_share(self.flipped_after)}",
            f"not explained: {_share(self.not_explained)} of {self.not_explained.n:,}; "
            f"{self.classifier} predicts {_share(self.sure)} of the unchanged images with the "
            "requested confidence",
            f"requested and obtained confidence: r {_number(self.correlation)}, corrected "
            f"{_number(self.correlation_after)}, {_share(self.within_after)} within 0.05",
            f"{self.queries_per_counterfactual.mean:.1f} queries per counterfactual",
            *filter(None, [self.caution]),
        )


@torch.inference_mode()
def measure_agreement(
    student: Model,
    reader: Reader,
    images: StoredImages,
    answers: Answers,
    *,
    n: int = 300,
    seed: int = 0,
    confidence: Confidence | None = None,
    asked: Sequence[float] = ASKED,
    observe: Observer = ignore,
) -> Agreement:
    """Compare both on all images, whose answers are known, and on the paths of the first n.

    Args:
        confidence: of the counterfactuals that should flip the classifier; None for the default.
        asked: confidences to request; image i is moved to confidence i modulo their number.
    """
    generator = torch.Generator().manual_seed(seed)
    posterior = torch.cat([student.predict(part).cpu() for part in images.split(500)])
    same = posterior.argmax(1) == answers.argmax(1)
    by_class = {
        name: proportion(same[answers.argmax(1) == label])
        for label, name in enumerate(student.class_names)
    }
    n = min(n, len(images))
    verified = Model(student.checkpoint, student.device, reader)
    offsets = random_offsets(n, answers.shape[1], seed)
    q = ((answers[:n].argmax(1) + offsets) % answers.shape[1])[:, None]
    report = counter(observe, "comparing with the classifier", 2 * n)
    flips = verified.explain(images[:n], q, confidence=confidence)
    report(n)
    requests = [
        (c, verified.explain(images[i : n : len(asked)], q[i :: len(asked)], confidence=c))
        for i, c in enumerate(asked[:n])
    ]
    report(2 * n)
    between = _path_difference(student, reader, flips, generator)
    wanted = torch.cat([torch.full((len(e), 1), level) for level, e in requests])
    before, after = (
        confidence_consistency(
            wanted,
            torch.cat([_of_q(e, which) for _, e in requests]),
            torch.ones_like(wanted, dtype=torch.bool),
            generator=generator,
        )
        for which in ("before", "after")
    )
    first = _answers(flips, "before").argmax(2) == flips.q
    corrected = flips.convincing_certificate.reached.cpu()
    # Fewer than n if the reader answers differently each time, and now predicts q.
    drawn = torch.randperm(len(flips), generator=generator)[:EXAMPLES]
    worst = _of_q(flips, "after")[:, 0].argsort(stable=True)[:EXAMPLES]
    queries = torch.cat([_queries(e) for e in (flips, *(e for _, e in requests))])
    difference = (posterior - answers).abs().mean(1)
    lowest = 0.0 if flips.confidence == ALPHA_1 else float(flips.confidence) - TOLERANCE
    return Agreement(
        classifier=reader.name,
        images=len(images),
        agreement=proportion(same),
        by_class=by_class,
        difference=bootstrap_interval(difference, generator=generator),
        path_difference=bootstrap_interval(between, generator=generator),
        requested=flips.requested,
        flipped=proportion(first.cpu().flatten()),
        flipped_after=proportion(corrected.flatten()),
        not_explained=proportion(~_explained(flips)),
        sure=proportion(answers.amax(1) >= lowest),
        correlation=before.correlation,
        correlation_after=after.correlation,
        within_after=after.within,
        queries_per_counterfactual=bootstrap_interval(queries.double(), generator=generator),
        report_queries=int(queries.sum()) + 3 * n,
        random=join([flips[row] for row in drawn.tolist()]),
        worst=join([flips[row] for row in worst.tolist()]),
    )


def _answers(e: Explanation, which: str) -> Float[Tensor, "batch 1 classes"]:
    assert e.verification is not None
    return e.verification.uncorrected if which == "before" else e.convincing_certificate.verdict


def _of_q(e: Explanation, which: str) -> Float[Tensor, "batch 1"]:
    return _answers(e, which).gather(2, e.q[..., None])[..., 0].cpu()


def _explained(e: Explanation) -> Bool[Tensor, " pairs"]:
    assert e.explained is not None
    return e.explained.flatten().cpu()


def _queries(e: Explanation) -> Int[Tensor, " pairs"]:
    assert e.verification is not None
    return e.verification.queries.flatten().cpu()


def _path_difference(
    student: Model, reader: Reader, e: Explanation, generator: torch.Generator
) -> Float[Tensor, " batch"]:
    """|p_student − p_classifier| at a random point between every image and its counterfactual."""
    z, _ = student.encode_with_log_det(e.x)
    delta = e.direction(z[:, None], student.mu_bar)[:, 0]
    alpha = e.alpha[:, 0] * torch.rand(len(e), generator=generator).to(e.alpha)
    differences = []
    for rows in torch.arange(len(e)).split(100):
        x_hat = student.decode(equations.corrected_latent(z[rows], alpha[rows], delta[rows]))
        said = stored_posterior(student, x_hat).cpu()
        differences.append((said - reader.predict(to_uint8(x_hat))).abs().mean(1))
    return torch.cat(differences)


def _share(share: Interval) -> str:
    return f"{100 * share.mean:.1f} % ({100 * share.low:.1f} to {100 * share.high:.1f})"


def _number(value: Interval) -> str:
    return f"{value.mean:.3f} ({value.low:.3f} to {value.high:.3f})"

"""Verify counterfactuals on the classifier that the model is a student of, and correct them."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ecinn import equations
from ecinn.explanation.correction import (
    FLOOR,
    STEPS,
    UNDECIDED,
    Answers,
    Line,
    LineSearch,
    Rows,
)
from ecinn.explanation.protocol import InvertibleClassifier, Reader
from ecinn.pixels import Images, to_uint8

MAX_QUERIES = 8
"""Pictures that the reader is asked about for every image and target, besides the image."""
STRAIGHT = 3
"""Queries along Δ. If none of the answers reaches the request, the remaining queries are spent
along a bent direction. Chosen on held-out clothes (docs/your-classifier.md)."""

Alphas = Float[Tensor, " pairs"]


@dataclass(frozen=True)
class Verified:
    """Result of verifying all pairs, flattened into one dimension."""

    search: LineSearch
    line: Line
    """With the direction, bent or not."""
    instead: Answers
    """What the reader saw instead of q, where the direction is bent; all 0 where it is Δ."""

    @property
    def uncorrected(self) -> Answers:
        """The reader's answer at the first α, which is the student's."""
        return self.search.answers[:, 1]

    @property
    def tied(self) -> Bool[Tensor, " pairs"]:
        """True where the reader is undecided between p and q at the tipping point."""
        return self.search.tipping_point.miss <= UNDECIDED


def verify(
    student: InvertibleClassifier,
    mu_bar: Float[Tensor, "classes dim"],
    line: Line,
    original: Answers,
    alpha_0: Alphas,
    alpha: Alphas,
    reader: Reader,
    confidence: float | None,
) -> Verified:
    """Ask the reader about stored points of every line until it answers as requested.

    Where none of the first `STRAIGHT` answers reaches the request, the direction is bent away from
    what the reader saw instead of q, and the search starts again with the remaining queries. The
    better of the two results is kept.

    Args:
        original: the reader's answers on the images; p is their largest.
        alpha_0: where the student is undecided between p and q.
        alpha: where the student fulfils the request.
    """
    p, q, instead = original.argmax(1), line.q, torch.zeros_like(original)
    found = LineSearch(original, p, q, confidence)
    _ask_reader(found, student, line, alpha_0, alpha, reader, MAX_QUERIES, STRAIGHT)
    rows = found.stopped.nonzero()[:, 0]
    if len(rows):
        seen = besides(found.end.answer[rows], q[rows])
        z, delta = line.z[rows], line.delta.clone()
        bent = Line(z, equations.bent_direction(z, mu_bar, p[rows], q[rows], seen), q[rows])
        again = LineSearch(original[rows], p[rows], q[rows], confidence)
        guesses = _student_alphas(student, bent, p[rows], confidence)
        _ask_reader(again, student, bent, *guesses, reader, MAX_QUERIES - STRAIGHT)
        better = again.end.miss < found.end.miss[rows]
        found.replace(rows, better, again)
        delta[rows[better]], instead[rows[better]] = bent.delta[better], seen[better]
        line = Line(line.z, delta, q)
    return Verified(found, line, instead)


def _ask_reader(
    search: LineSearch,
    student: InvertibleClassifier,
    line: Line,
    alpha_0: Alphas,
    alpha: Alphas,
    reader: Reader,
    queries: int,
    stop_after: int | None = None,
) -> None:
    def ask(rows: Rows, alpha: Float[Tensor, " rows"]) -> tuple[Images, Answers]:
        image = student.decode(line.at(rows, alpha))
        return image, reader.predict(to_uint8(image)).to(line.z)

    # The student may see q already where the reader sees p: start towards q all the same.
    alpha = torch.where(alpha > 0, alpha, STEPS[1])
    search.run(ask, queries, guesses=torch.stack([alpha, alpha_0]), stop_after=stop_after)


def besides(
    answer: Float[Tensor, "pairs classes"], q: Int[Tensor, " pairs"]
) -> Float[Tensor, "pairs classes"]:
    """p(y) / (1 − p(q)) of every class but q, and 0 for q."""
    others = answer.clamp(min=FLOOR).scatter(1, q[:, None], 0.0)
    return others / others.sum(1, keepdim=True)


def _student_alphas(
    student: InvertibleClassifier, line: Line, p: Int[Tensor, " pairs"], confidence: float | None
) -> tuple[Alphas, Alphas]:
    """Return the α at which the student is undecided between p and q, and that of the request."""
    mu, (z, delta, q) = student.mu, (line.z, line.delta, line.q)
    alpha_0 = equations.tipping_point_alpha(z, delta, mu[p], mu[q])
    if confidence is None:
        return alpha_0, equations.convincing_alpha(alpha_0)
    return alpha_0, equations.confident_alpha(z, delta, mu, student.tau, q, confidence)[0]

"""Verify counterfactuals on another classifier: correct α by bisection on its answers."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ecinn import equations
from ecinn.explanation.correction import TOLERANCE, Ends, Line, PerPair, shortfall
from ecinn.explanation.protocol import InvertibleClassifier, Reader
from ecinn.explanation.reading import stored_posterior
from ecinn.pixels import to_uint8

MAX_QUERIES = 8
"""Pictures that the reader is asked about for every image and target, besides the image."""
RESERVED = 1
"""Of these, the queries that are kept for the tipping point."""
STRAIGHT = 3
"""Queries along Δ. If none of the answers reaches the request, the remaining queries are spent
along a bent direction. Chosen on held-out clothes (docs/your-classifier.md)."""
NEAREST_END = 0.1
"""Smallest share of a bracket between a new point and its ends."""
GOLDEN = 0.382
"""Golden-section ratio: a new point lies this share of an interval away from its better end."""
STEPS = (0.1, 0.5)
"""First smallest, and largest step in α beyond the last point, as long as there is no bracket;
the smallest doubles every time."""
TORN = math.log((0.5 + TOLERANCE) / (0.5 - TOLERANCE))
"""Largest log-odds of q against p at a tipping point: between the two, 45 to 55 %."""
SEEN = 0.01
"""Smallest probability of p and q together at a tipping point."""
FLOOR = 1e-7
"""Smallest probability of which a logarithm is taken."""

Answers = Float[Tensor, "batch targets classes"]


@dataclass(frozen=True)
class Verified:
    """Tipping points and counterfactuals as the reader reads them."""

    tipping: Ends
    convincing: Ends
    tipping_answer: Answers
    answer: Answers
    uncorrected: Answers
    """The reader's answer at the first α, which is the student's."""
    queries: Int[Tensor, "batch targets"]
    tied: Bool[Tensor, "batch targets"]
    """True where the reader is torn between p and q at the tipping point."""
    instead: Answers
    """What the reader saw instead of q, where the direction is bent; all 0 where it is Δ."""
    delta: Float[Tensor, "batch targets dim"]
    """The direction, bent or not."""


def verify(
    student: InvertibleClassifier,
    mu_bar: Float[Tensor, "classes dim"],
    line: Line,
    original: Float[Tensor, "batch classes"],
    alpha_0: PerPair,
    alpha: PerPair,
    reader: Reader,
    confidence: float | None,
) -> Verified:
    """Ask the reader about stored points of every line until it answers as requested.

    Where none of the first `STRAIGHT` answers reaches the request, the direction is bent away from
    what the reader saw instead of q, and the search starts again with the remaining queries. The
    better of the two results is kept.

    Args:
        original: the reader's answers on the images; p is their largest.
        alpha_0: where the student is torn between p and q.
        alpha: where the student fulfils the request.
    """
    shape, targets = line.q.shape, line.q.shape[1]
    z, delta, q = (each.flatten(0, 1) for each in (line.z, line.delta, line.q))
    original = original.repeat_interleave(targets, 0).to(z)
    instead = torch.zeros_like(original)
    found = _search(
        student, z, delta, q, original, alpha_0.flatten(), alpha.flatten(), reader, confidence,
        stop_after=STRAIGHT,
    )  # fmt: skip
    uncorrected = found.first
    rows = found.stopped.nonzero()[:, 0]
    if len(rows):
        p, seen = original[rows].argmax(1), besides(found.end.answer[rows], q[rows])
        bent = equations.bent_direction(z[rows], mu_bar, p, q[rows], seen)
        guesses = _student_alphas(student, z[rows], bent, p, q[rows], confidence)
        again = _search(
            student, z[rows], bent, q[rows], original[rows], *guesses, reader, confidence,
            queries=MAX_QUERIES - STRAIGHT,
        )  # fmt: skip
        better = again.end.miss < found.end.miss[rows]
        delta, kept = delta.clone(), rows[better]
        delta[kept], instead[kept] = bent[better], seen[better]
        found.replace(rows, better, again)
    best = _read_by_student(student, z, delta, (found.tip, found.end))
    tipping, convincing = (
        Ends(*(part.unflatten(0, shape) for part in (*reading, each.alpha, each.image, steps)))
        for reading, each, steps in zip(
            best, (found.tip, found.end), (torch.zeros_like(q), found.corrections), strict=True
        )
    )
    return Verified(
        tipping,
        convincing,
        tipping_answer=found.tip.answer.unflatten(0, shape),
        answer=found.end.answer.unflatten(0, shape),
        uncorrected=uncorrected.unflatten(0, shape),
        queries=found.asked.unflatten(0, shape),
        tied=(found.tip.miss <= TORN).unflatten(0, shape),
        instead=instead.unflatten(0, shape),
        delta=delta.unflatten(0, shape),
    )


def besides(
    answer: Float[Tensor, "pairs classes"], q: Int[Tensor, " pairs"]
) -> Float[Tensor, "pairs classes"]:
    """p(y) / (1 − p(q)) of every class but q, and 0 for q."""
    others = answer.clamp(min=FLOOR).scatter(1, q[:, None], 0.0)
    return others / others.sum(1, keepdim=True)


def _student_alphas(
    student: InvertibleClassifier,
    z: Float[Tensor, "pairs dim"],
    delta: Float[Tensor, "pairs dim"],
    p: Int[Tensor, " pairs"],
    q: Int[Tensor, " pairs"],
    confidence: float | None,
) -> tuple[Float[Tensor, " pairs"], Float[Tensor, " pairs"]]:
    """Return the α at which the student is torn between p and q, and that of the request."""
    alpha_0 = equations.tipping_point_alpha(z, delta, student.mu[p], student.mu[q])
    if confidence is None:
        return alpha_0, equations.convincing_alpha(alpha_0)
    return alpha_0, equations.confident_alpha(z, delta, student.mu, student.tau, q, confidence)[0]


@dataclass
class _Found:
    """The result of a search along one line for every pair."""

    end: "_Best"
    tip: "_Best"
    first: Float[Tensor, "pairs classes"]
    """The answer to the first query."""
    asked: Int[Tensor, " pairs"]
    corrections: Int[Tensor, " pairs"]
    stopped: Bool[Tensor, " pairs"]
    """True where the search stopped early, because no answer had reached the request."""

    def replace(
        self, rows: Int[Tensor, " rows"], better: Bool[Tensor, " rows"], other: "_Found"
    ) -> None:
        """Add the queries of another search of these rows; take its result where it is better."""
        self.asked[rows] += other.asked
        self.corrections[rows] += 1 + other.corrections
        for mine, its in ((self.end, other.end), (self.tip, other.tip)):
            for name in ("miss", "alpha", "image", "answer"):
                getattr(mine, name)[rows[better]] = getattr(its, name)[better]


def _search(
    student: InvertibleClassifier,
    z: Float[Tensor, "pairs dim"],
    delta: Float[Tensor, "pairs dim"],
    q: Int[Tensor, " pairs"],
    original: Float[Tensor, "pairs classes"],
    first_tip: Float[Tensor, " pairs"],
    first_end: Float[Tensor, " pairs"],
    reader: Reader,
    confidence: float | None,
    queries: int = MAX_QUERIES,
    stop_after: int | None = None,
) -> _Found:
    """Search all lines z + αΔ together, one query each at a time.

    First α is corrected until the reader answers q, or gives q the confidence; the queries that
    are left are spent on the point at which the reader is torn between p and q. Every answer
    narrows both brackets. Where all points fail, the best of them is kept.

    Args:
        stop_after: queries after which a line is given up if no answer has reached the request.
    """
    p = original.argmax(1)
    # The student may see q already where the reader sees p: start towards q all the same.
    first_end = torch.where(first_end > 0, first_end, STEPS[1])
    # Column 0 is the image itself, whose answer is known.
    alphas = z.new_zeros((len(q), 1 + queries))
    answers = z.new_zeros((*alphas.shape, original.shape[1]))
    answers[:, 0] = original
    asked, corrections = torch.zeros_like(q), torch.zeros_like(q)
    fulfilled, torn, tip_tried, stopped = (torch.zeros_like(q, dtype=torch.bool) for _ in range(4))
    end, tip = _Best(original), _Best(original)
    for number in range(queries):
        if number == stop_after:
            margins = request_margin(answers[:, : number + 1], q, confidence)
            stopped = ~fulfilled & (margins < 0).all(1)
        for_tip = fulfilled | (number >= queries - RESERVED)
        rows = (~torch.where(for_tip, torn, fulfilled) & ~stopped).nonzero()[:, 0]
        if not len(rows):
            break
        tips = for_tip[rows]
        margins = torch.where(
            tips[:, None],
            tie_margin(answers[rows, : number + 1], p[rows], q[rows]),
            request_margin(answers[rows, : number + 1], q[rows], confidence),
        )
        guess = torch.where(tips, first_tip[rows], first_end[rows])
        untried = torch.where(tips, ~tip_tried[rows], torch.full_like(tips, number == 0))
        at = next_alpha(alphas[rows, : number + 1], margins, torch.where(untried, guess, math.nan))
        image = student.decode(equations.corrected_latent(z[rows], at, delta[rows]))
        answer = reader.predict(to_uint8(image)).to(z)
        alphas[rows, number + 1], answers[rows, number + 1] = at, answer
        asked[rows] += 1
        corrections[rows] += (~tips & (number > 0)).long()
        tip_tried[rows] |= tips
        miss = shortfall(answer[:, None], q[rows, None], confidence)[:, 0]
        end.update(rows, miss, at, image, answer)
        tie = tie_margin(answer[:, None], p[rows], q[rows])[:, 0].abs()
        tip.update(rows, tie, at, image, answer)
        fulfilled, torn = end.miss == 0, tip.miss <= TORN
    return _Found(end, tip, answers[:, 1], asked, corrections, stopped)


class _Best:
    """The best point of every line so far, and by how much it misses the request."""

    def __init__(self, original: Float[Tensor, "pairs classes"]) -> None:
        self.answer = original.clone()
        self.miss = torch.full_like(original[:, 0], math.inf)
        self.alpha = torch.zeros_like(original[:, 0])
        self.image = original.new_zeros(0)

    def update(
        self,
        rows: Int[Tensor, " rows"],
        miss: Float[Tensor, " rows"],
        alpha: Float[Tensor, " rows"],
        image: Float[Tensor, "rows channels height width"],
        answer: Float[Tensor, "rows classes"],
    ) -> None:
        """Keep these points where they miss by less."""
        if not len(self.image):  # the first query asks about every line
            self.image = torch.zeros_like(image)
        better = miss < self.miss[rows]
        kept = rows[better]
        self.miss[kept], self.alpha[kept] = miss[better], alpha[better]
        self.image[kept], self.answer[kept] = image[better], answer[better]


def _read_by_student(
    student: InvertibleClassifier,
    z: Float[Tensor, "pairs dim"],
    delta: Float[Tensor, "pairs dim"],
    best: tuple[_Best, ...],
) -> list[tuple[Tensor, Tensor]]:
    """Return the student's posteriors before and after rounding to 8 bits, in one evaluation."""
    stored = stored_posterior(student, torch.cat([each.image for each in best]))
    z_hats = [equations.corrected_latent(z, each.alpha, delta) for each in best]
    return [
        (equations.log_posterior(z_hat, student.mu, student.tau).exp(), part)
        for z_hat, part in zip(z_hats, stored.split(len(z)), strict=True)
    ]


def request_margin(
    answers: Float[Tensor, "pairs points classes"],
    q: Int[Tensor, " pairs"],
    confidence: float | None,
) -> Float[Tensor, "pairs points"]:
    """logit p(q) − logit c, or without a confidence log p(q) − log p of the best other class."""
    own = q[:, None, None].expand(*answers.shape[:2], 1)
    p_q = answers.gather(2, own).squeeze(2)
    if confidence is None:
        other = answers.scatter(2, own, -math.inf).amax(2)
        return _log(p_q) - _log(other)
    return _log(p_q) - _log(1 - p_q) - math.log(confidence / (1 - confidence))


def tie_margin(
    answers: Float[Tensor, "pairs points classes"],
    p: Int[Tensor, " pairs"],
    q: Int[Tensor, " pairs"],
) -> Float[Tensor, "pairs points"]:
    """log p(q) − log p(p): 0 where the reader is torn between the two.

    Where other classes leave them less than `SEEN`, it sees neither: that is no tie.
    """
    pair = torch.stack([p, q], 1)[:, None].expand(*answers.shape[:2], 2)
    of_p, of_q = answers.gather(2, pair).unbind(2)
    return torch.where(of_p + of_q >= SEEN, _log(of_q) - _log(of_p), math.log(FLOOR))


def next_alpha(
    alphas: Float[Tensor, "pairs points"],
    margins: Float[Tensor, "pairs points"],
    guess: Float[Tensor, " pairs"],
) -> Float[Tensor, " pairs"]:
    """Return the next α to ask about, given points in the order in which they were asked.

    Between the first point whose margin is not negative and the last one before it, the margin is
    interpolated, which finds its zero at once where log-odds are linear in α, as a flow's are.
    Elsewhere the Illinois rule keeps one end from staying for long: each time that an end stays,
    its margin counts half. A guess inside the bracket goes first; nan is no guess. Without a
    bracket, α grows by the step that the slope so far suggests, until the margin falls: then its
    maximum is enclosed, by the golden section of the longer side.
    """
    above = margins >= 0
    high = torch.where(above, alphas, math.inf).amin(1)
    low = torch.where(~above & (alphas < high[:, None]), alphas, -math.inf).amax(1)
    margin_high = torch.where(alphas == high[:, None], margins, -math.inf).amax(1)
    margin_low = torch.where(alphas == low[:, None], margins, math.inf).amin(1)
    # How many of the last points lie on the side of the last one, besides itself.
    stays = (above == above[:, -1:]).flip(1).cumprod(1).sum(1) - 1
    stale = 0.5**stays
    margin_high = torch.where(above[:, -1], margin_high, stale * margin_high)
    margin_low = torch.where(above[:, -1], stale * margin_low, margin_low)
    share = (margin_low / (margin_low - margin_high)).clamp(NEAREST_END, 1 - NEAREST_END)
    between = low + share * (high - low)
    step = (margin_low * low / (margins[:, 0] - margin_low)).nan_to_num(math.inf)
    smallest = min(STEPS[0] * 2 ** (alphas.shape[1] - 2), STEPS[1])
    onwards = low + torch.where(step > 0, step, math.inf).clamp(smallest, STEPS[1])
    best = alphas.gather(1, margins.argmax(1, keepdim=True))
    left = torch.where(alphas < best, alphas, -math.inf).amax(1)
    right = torch.where(alphas > best, alphas, math.inf).amin(1)
    best = best[:, 0]
    side = torch.where(right - best > best - left, right, left)
    onwards = torch.where(left.isinf() | right.isinf(), onwards, torch.lerp(best, side, GOLDEN))
    outside = torch.where(high.isinf(), onwards, high - STEPS[1])
    proposed = torch.where(high.isinf() | low.isinf(), outside, between)
    return torch.where((guess > low) & (guess < high), guess, proposed)


def _log(probability: Tensor) -> Tensor:
    return probability.clamp(min=FLOOR).log()

"""Correct α until a reader of the stored 8-bit images answers as requested.

The reader is the model itself, or the classifier that it is a student of (`verification.py`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ecinn import equations
from ecinn.explanation.protocol import InvertibleClassifier
from ecinn.explanation.reading import stored_posterior
from ecinn.pixels import Images

TOLERANCE = 0.05
"""Largest accepted distance of the stored image's p(q) from the requested confidence."""
MAX_CORRECTIONS = 8
"""Largest number of corrections of α; α₀ gets those that are left, and one or two more."""
RESERVED = 1
"""Queries that are kept for the tipping point."""
NEAREST_END = 0.1
"""Smallest share of a bracket between a new point and its ends."""
GOLDEN = 0.382
"""Golden-section ratio: a new point lies this share of an interval away from its better end."""
STEPS = (0.1, 0.5)
"""First smallest, and largest step in α beyond the last point, as long as there is no bracket;
the smallest doubles every time."""
UNDECIDED = math.log((0.5 + TOLERANCE) / (0.5 - TOLERANCE))
"""Largest log-odds of q against p at a tipping point: between the two, 45 to 55 %."""
SEEN = 0.01
"""Smallest probability of p and q together at a tipping point."""
FLOOR = 1e-7
"""Smallest probability of which a logarithm is taken."""

PerPair = Float[Tensor, "batch targets"]
Answers = Float[Tensor, "pairs classes"]
Rows = Int[Tensor, " rows"]
Ask = Callable[[Rows, Float[Tensor, " rows"]], tuple[Images, Answers]]
"""Decode the points at these α of these lines; return the images and the reader's answers."""


class Points(NamedTuple):
    """Decoded points of lines, and what the reader answers about them."""

    alpha: Float[Tensor, " pairs *points"]
    image: Float[Tensor, "pairs *points channels height width"]
    answer: Float[Tensor, "pairs *points classes"]

    def at(self, place: Any) -> "Points":  # noqa: ANN401
        """Index every tensor."""
        return Points(*(each[place] for each in self))


@dataclass(frozen=True)
class Line:
    """The line z + αΔ and the class it leads to."""

    z: Float[Tensor, "*batch dim"]
    delta: Float[Tensor, "*batch dim"]
    q: Int[Tensor, "*batch"]

    def at(self, rows: Rows, alpha: Float[Tensor, " rows"]) -> Float[Tensor, "rows dim"]:
        """z + αΔ of these lines."""
        return equations.corrected_latent(self.z[rows], alpha, self.delta[rows])

    def points(self, alpha: Float[Tensor, "*batch points"]) -> Float[Tensor, "*batch points dim"]:
        """z + αΔ at several α of every line."""
        places = (*alpha.shape, -1)
        z, delta = self.z[..., None, :].expand(places), self.delta[..., None, :].expand(places)
        return equations.corrected_latent(z, alpha, delta)

    def flat(self) -> "Line":
        """Flatten images and targets into one dimension."""
        return Line(self.z.flatten(0, -2), self.delta.flatten(0, -2), self.q.flatten())

    def unflatten(self, shape: torch.Size) -> "Line":
        """Undo `flat`."""
        z, delta = self.z.unflatten(0, shape), self.delta.unflatten(0, shape)
        return Line(z, delta, self.q.reshape(shape))


class Best:
    """The best point of every line so far, and by how much it misses the request."""

    def __init__(self, original: Answers) -> None:
        self.answer = original.clone()
        self.miss = torch.full_like(original[:, 0], math.inf)
        self.alpha = torch.zeros_like(original[:, 0])
        self.image = original.new_zeros(0)

    def update(self, rows: Rows, miss: Float[Tensor, " rows"], points: Points) -> None:
        """Keep these points where they miss by less."""
        if not len(self.image):  # the first points are on every line
            self.image = torch.zeros_like(points.image)
        better = miss < self.miss[rows]
        self.miss[rows[better]] = miss[better]
        self.put(rows[better], points.at(better))

    def put(self, rows: Rows, points: Points) -> None:
        """Replace the points of these lines."""
        self.alpha[rows], self.image[rows], self.answer[rows] = points


class LineSearch:
    """Search lines z + αΔ together, one query each at a time, for two points.

    First α is corrected until the reader answers q, or gives q the confidence; the queries that
    are left are spent on the tipping point, at which it is undecided between p and q. Every answer
    narrows both brackets. Where all points fail, the best of them is kept.

    Args:
        original: the reader's answers on the images themselves, where α = 0.
    """

    def __init__(
        self,
        original: Answers,
        p: Int[Tensor, " pairs"],
        q: Int[Tensor, " pairs"],
        confidence: float | None,
    ) -> None:
        self.p, self.q, self.confidence = p, q, confidence
        self.alphas = original.new_zeros((len(q), 1))
        self.answers = original[:, None]
        self.end, self.tipping_point = Best(original), Best(original)
        self.asked, self.corrections = torch.zeros_like(q), torch.zeros_like(q)
        self.stopped = torch.zeros_like(q, dtype=torch.bool)
        self.settled = torch.zeros_like(q, dtype=torch.bool)
        """True where only the tipping point is searched for."""

    def run(
        self,
        ask: Ask,
        queries: int,
        *,
        guesses: Float[Tensor, "points pairs"],
        tipping: bool = True,
        stop_after: int | None = None,
    ) -> None:
        """Ask about points of all lines that are not yet as requested.

        Args:
            guesses: α of counterfactual and tipping point, which are asked about first.
            tipping: search for the tipping point too.
            stop_after: queries after which a line is given up if no answer fulfils the request.
        """
        guesses = guesses.clone()
        for number in range(queries):
            if number == stop_after:
                margins = request_margin(self.answers, self.q, self.confidence)
                self.stopped = ~self._fulfilled & (margins < 0).all(1)
            last = tipping and number >= queries - RESERVED
            for_tip = self._fulfilled | last
            open_tip = (self.tipping_point.miss > UNDECIDED) & tipping
            rows = torch.where(for_tip, open_tip, ~self._fulfilled) & ~self.stopped
            rows = rows.nonzero()[:, 0]
            if not len(rows):
                break
            tips = for_tip[rows]
            guess = guesses[tips.long(), rows]
            guesses[tips.long(), rows] = math.nan
            p, q, answers = self.p[rows], self.q[rows], self.answers[rows]
            margins = torch.where(
                tips[:, None],
                tie_margin(answers, p, q),
                request_margin(answers, q, self.confidence),
            )
            alpha = next_alpha(self.alphas[rows], margins, guess)
            self._add(rows, Points(alpha, *ask(rows, alpha)))
            self.asked[rows] += 1
            self.corrections[rows] += (alpha != guess).long()

    def _add(self, rows: Rows, points: Points) -> None:
        """Add a point of each of these lines, which must be all that are still searched."""
        self.consider(rows, points)
        column = self.answers.new_zeros((len(self.q), 1, self.answers.shape[2]))
        column[rows, 0] = points.answer
        self.answers = torch.cat([self.answers, column], 1)
        self.alphas = torch.cat([self.alphas, self.alphas.new_zeros((len(self.q), 1))], 1)
        self.alphas[rows, -1] = points.alpha

    def consider(self, rows: Rows, points: Points) -> None:
        """Keep these points where they are the best so far."""
        miss = shortfall(points.answer, self.q[rows], self.confidence)
        self.end.update(rows, miss, points)
        tie = tie_margin(points.answer[:, None], self.p[rows], self.q[rows])[:, 0].abs()
        self.tipping_point.update(rows, tie, points)

    def replace(self, rows: Rows, better: Bool[Tensor, " rows"], other: "LineSearch") -> None:
        """Add the queries of another search of these rows; take its result where it is better."""
        self.asked[rows] += other.asked
        self.corrections[rows] += 1 + other.corrections
        for mine, its in ((self.end, other.end), (self.tipping_point, other.tipping_point)):
            mine.miss[rows[better]] = its.miss[better]
            mine.put(rows[better], Points(its.alpha, its.image, its.answer).at(better))

    @property
    def _fulfilled(self) -> Bool[Tensor, " pairs"]:
        return (self.end.miss == 0) | self.settled


def correct_alpha(
    classifier: InvertibleClassifier,
    line: Line,
    original: Answers,
    p: Int[Tensor, " pairs"],
    confidence: float | None,
    reachable: Bool[Tensor, " pairs"],
    first: Points,
) -> LineSearch:
    """Search until the model classifies its own stored images as requested.

    Every correction costs one decode and one encode, of these images only.

    Args:
        original: the posteriors of the images themselves.
        reachable: where the confidence exists on the line; elsewhere α stays.
        first: the counterfactuals and the tipping points, which are evaluated already; without
            the latter, no tipping points are searched for.
    """

    def ask(rows: Rows, alpha: Float[Tensor, " rows"]) -> tuple[Images, Answers]:
        known = alpha[:, None] == first.alpha[rows]
        _, image, answer = first.at((rows, known.long().argmax(1)))
        new = (~known.any(1)).nonzero()[:, 0]
        if len(new):
            image[new] = classifier.decode(line.at(rows[new], alpha[new]))
            answer[new] = stored_posterior(classifier, image[new])
        return image, answer

    search = LineSearch(original, p, line.q, confidence)
    search.settled = ~reachable
    places = first.alpha.shape[1]
    queries = places + MAX_CORRECTIONS
    search.run(ask, queries, guesses=first.alpha.T, tipping=places > 1)
    # The search leaves out a first tipping point outside of its bracket, which may be the best.
    everywhere = torch.arange(len(p), device=p.device)
    for place in range(places):
        search.consider(everywhere, first.at((everywhere, place)))
    search.end.put(everywhere[~reachable], first.at((~reachable, 0)))
    return search


def shortfall(
    obtained: Float[Tensor, "*batch classes"], q: Int[Tensor, "*batch"], confidence: float | None
) -> Float[Tensor, "*batch"]:
    """Distance of the stored image's posterior from the request; 0 if within the tolerance."""
    p_q = obtained.gather(-1, q[..., None]).squeeze(-1)
    behind = obtained.amax(-1) - p_q
    if confidence is None:
        return behind
    miss = (p_q - confidence).abs()
    miss = torch.where(miss <= TOLERANCE, 0.0, miss)
    # A confidence above one half also requires that q wins; a lower one does not.
    return miss if confidence <= 0.5 else miss + (behind > 0)


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
    """log p(q) − log p(p): 0 where the reader is undecided between the two.

    Where p(p) + p(q) < `SEEN`, other classes win: that is no tie.
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

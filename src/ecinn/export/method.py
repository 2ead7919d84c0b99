"""The method between f and f⁻¹ as ONNX nodes: the closed form of `ecinn.equations`, in float32."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ecinn.classifier.out_of_distribution import SHAPE_BITS, OODDetector, Shape, Texture
from ecinn.classifier.quantisation import pack
from ecinn.equations import FARTHEST_ALPHA
from ecinn.export.flow import array, as_float
from ecinn.export.graph import FLOAT, Graph, Name
from ecinn.model import Model

POINTS, ROUNDS = 255, 4
"""Values of α that a round of the search tries at once, and rounds: 32 bits together."""
_LAST = np.array([-1])
_FIRST = np.array([1])


class Reading(NamedTuple):
    """What a latent says about its image."""

    logits: Name
    p: Name
    posterior: Name
    log_p: Name
    out_of_distribution: Name


class Line(NamedTuple):
    """Points on z + αΔ."""

    delta: Name
    alpha_0: Name
    alpha_1: Name
    alpha: Name
    reachable: Name


class MethodWriter:
    """Adds the method to a graph, with a model's class means."""

    def __init__(self, graph: Graph, model: Model) -> None:
        self._op = graph.op
        self._ops = graph.ops
        self._mu_bar = array(model.mu_bar)
        self._tau = float(model.tau)
        self._ood: OODDetector = model.ood
        self._classes, self._dim = self._mu_bar.shape
        mu, mu_bar = (array(means.double()) for means in (model.mu, model.mu_bar))
        # Means without what they have in common, which would cost digits of the differences.
        self._centre, halves = mu.mean(0), 0.5 * np.square(mu).sum(1)
        self._relative_mu = mu - self._centre
        self._relative_halves = halves - halves.mean()
        self._mean_half = float(halves.mean())
        self._products = (mu_bar - mu_bar.mean(0)) @ self._relative_mu.T
        """μ̄ μᵀ of these means: with it, Δ·μ needs no latent."""
        # wᵀΔ = (μ_q − μ_p)·(μ̄_q − μ̄_p). On the diagonal Δ = 0, and any α leads nowhere.
        own, across = np.diag(self._products), self._products + self._products.T
        self._steepness = own[:, None] + own - across
        np.fill_diagonal(self._steepness, 1.0)

    def read(self, z: Name, log_det: Name) -> Reading:
        """Eqs. 1 and 2: prediction, posterior, log p(x), and OOD flags."""
        products = self._op("MatMul", z, as_float(self._relative_mu.T))
        logits = self._op("Sub", products, as_float(self._relative_halves))
        p = self._op("ArgMax", logits, axis=1, keepdims=0)
        posterior = self._op("Softmax", self._op("Mul", logits, self._tau), axis=1)
        # Σ_y p(x|y): what the logits left out is z·centre − ½‖z‖² and constants.
        mixture = self._op("ReduceLogSumExp", logits, _FIRST, keepdims=0)
        rest = self._op("Sub", as_float(self._centre), self._op("Mul", z, 0.5))
        shared = self._op("ReduceSum", self._op("Mul", z, rest), _FIRST, keepdims=0)
        normaliser = 0.5 * self._dim * math.log(2 * math.pi) + math.log(self._classes)
        log_p = self._op("Sum", mixture, shared, log_det)
        log_p = self._op("Sub", log_p, self._mean_half + normaliser)
        return Reading(logits, p, posterior, log_p, self._flags(z, p, log_p))

    def _flags(self, z: Name, p: Name, log_p: Name) -> Name:
        """Return the flags of `OODDetector`, a column for each reason."""
        low, high = self._ood.log_p
        too_low = self._op("Less", log_p, float(low))
        unlikely = self._op("Or", too_low, self._op("Greater", log_p, float(high)))
        never = self._op("Xor", unlikely, unlikely)
        texture, pose = self._ood.texture, self._ood.pose
        rough = never if texture is None else self._is_rough(texture, z, p)
        turned = never
        if pose is not None:
            turned = self._op("Less", self._op("MatMul", z, array(pose.weight)), float(pose.limit))
        far = never if self._ood.distance is None else self._is_far(self._ood.distance, z, p)
        odd = never if self._ood.shape is None else self._is_odd(self._ood.shape, z)
        flags = (unlikely, rough, turned, far, odd)
        columns = [self._op("Unsqueeze", flag, _FIRST) for flag in flags]
        return self._op("Concat", *columns, axis=1)

    def _residual(self, z: Name, p: Name) -> Name:
        return self._op("Sub", z, self._op("Gather", self._mu_bar, p))

    def _is_far(self, limit: float, z: Name, p: Name) -> Name:
        """Compare ‖z − μ̄_p‖² with its limit."""
        residual = self._residual(z, p)
        squares = self._op("Mul", residual, residual)
        return self._op("Greater", self._op("ReduceSum", squares, _FIRST, keepdims=0), limit)

    def _is_odd(self, shape: Shape, z: Name) -> Name:
        """Compare the score of `Shape` with its limit; its weights are written as stored."""
        stored = pack({"weight": shape.weight.cpu()}, SHAPE_BITS, rounded="")
        scale = array(stored["weight.scale"].float())[:, None]
        weight = self._op("Mul", self._op("Cast", array(stored["weight"]), to=FLOAT), scale)
        hidden = self._op("Gemm", z, weight, array(shape.bias), transB=1)
        score = self._op("MatMul", self._op("Relu", hidden), array(shape.out))
        return self._op("Greater", score, float(shape.limit))

    def _is_rough(self, texture: Texture, z: Name, p: Name) -> Name:
        """Compare the distance of `Texture` with its limit; latents are sorted by frequency."""
        residual = self._residual(z, p)
        sizes = np.bincount(array(texture.frequency))
        means = [
            self._op("ReduceMean", self._op("Mul", band, band), _FIRST, keepdims=1)
            for band in self._ops("Split", residual, sizes, outputs=len(sizes), axis=1)
        ]
        energies = self._op("Log", self._op("Max", self._op("Concat", *means, axis=1), 1e-12))
        centred = self._op("Sub", energies, array(texture.mean))
        white = self._op("MatMul", centred, array(texture.whitening).T)
        distance = self._op("ReduceSum", self._op("Mul", white, white), _FIRST, keepdims=0)
        return self._op("Greater", distance, float(texture.limit))

    def line(self, reading: Reading, target: Name, confidence: Name) -> Line:
        """Return the direction and α₀, α₁ and the requested α; α₁ where none is requested."""
        p, logits = reading.p, reading.logits
        delta = self._difference(self._mu_bar, target, p)
        own = self._op("Unsqueeze", target, _FIRST)
        logit_q = self._op("GatherElements", logits, own, axis=1)
        logit_p = self._op("ReduceMax", logits, _FIRST, keepdims=1)
        pair = self._op("Add", self._op("Mul", p, np.array(self._classes)), target)
        ahead = self._op("Squeeze", self._op("Sub", logit_p, logit_q), _FIRST)
        steepness = self._op("Gather", as_float(self._steepness.flatten()), pair)
        alpha_0 = self._op("Div", ahead, steepness)
        alpha_1 = self._op("Add", self._op("Mul", alpha_0, 0.5), 0.8)

        requested = self._op("Greater", confidence, 0.0)
        wanted = self._op("Where", requested, confidence, 0.5)
        # At the confidence c, the odds of all other classes together are (1 − c) / c.
        odds = self._op("Log", self._op("Div", self._op("Sub", 1.0, wanted), wanted))
        start = self._op("Mul", self._op("Sub", logits, logit_q), self._tau)
        rise = self._difference(as_float(self._products), target, p)
        rise_of_q = self._op("GatherElements", rise, own, axis=1)
        slope = self._op("Mul", self._op("Sub", rise, rise_of_q), self._tau)
        search = self._two_classes if self._classes == 2 else self._search
        alpha, reachable = search(start, slope, own, odds)
        return Line(
            delta,
            alpha_0,
            alpha_1,
            self._op("Where", requested, alpha, alpha_1),
            self._op("Or", reachable, self._op("Not", requested)),
        )

    def _difference(self, rows: np.ndarray, of: Name, minus: Name) -> Name:
        return self._op("Sub", self._op("Gather", rows, of), self._op("Gather", rows, minus))

    def _two_classes(self, start: Name, slope: Name, own: Name, odds: Name) -> tuple[Name, Name]:
        """Solve start + α slope = odds; the entries of q itself are zero."""
        offset = self._op("ReduceSum", start, _FIRST, keepdims=0)
        rate = self._op("ReduceSum", slope, _FIRST, keepdims=0)
        falls = self._op("Less", rate, 0.0)
        divisor = self._op("Where", falls, rate, -1.0)
        alpha = self._op("Div", self._op("Sub", odds, offset), divisor)
        near = self._op("LessOrEqual", self._op("Abs", alpha), FARTHEST_ALPHA)
        reachable = self._op("And", falls, near)
        return self._op("Where", reachable, alpha, 0.0), reachable

    def _search(self, start: Name, slope: Name, own: Name, odds: Name) -> tuple[Name, Name]:
        """Search as `confident_alpha` does, on the log-odds of the other classes together.

        Without q's own term, float32 is precise also for confidences close to 1.
        """
        is_q = self._op("Equal", own, np.arange(self._classes))
        start = self._op("Unsqueeze", self._op("Where", is_q, -1e30, start), _FIRST)
        slope = self._op("Unsqueeze", slope, _FIRST)
        wanted = self._op("Unsqueeze", odds, _FIRST)

        def others(alpha: Name) -> Name:
            far = self._op("Mul", self._op("Unsqueeze", alpha, _LAST), slope)
            return self._op("Add", start, far)

        def log_odds(alpha: Name) -> Name:
            return self._op("ReduceLogSumExp", others(alpha), _LAST, keepdims=0)

        def still_falls(alpha: Name) -> Name:
            weighted = self._op("Mul", self._op("Softmax", others(alpha), axis=-1), slope)
            return self._op("Less", self._op("ReduceSum", weighted, _LAST, keepdims=0), 0.0)

        low, high = (np.array([end], np.float32) for end in (-FARTHEST_ALPHA, FARTHEST_ALPHA))
        lowest = self._op("Identity", low[None])
        best = self._bisect(still_falls, self._op("Identity", low), self._op("Identity", high))
        alpha = self._bisect(
            lambda alpha: self._op("Greater", log_odds(alpha), wanted),
            self._op("Identity", low),
            best,
        )
        towards = self._op("Squeeze", still_falls(lowest), _FIRST)
        at_best = self._op("Squeeze", log_odds(self._op("Unsqueeze", best, _FIRST)), _FIRST)
        reachable = self._op("And", towards, self._op("LessOrEqual", at_best, odds))
        closest = self._op("Where", towards, best, 0.0)
        return self._op("Where", reachable, alpha, closest), reachable

    def _bisect(self, too_low: Callable[[Name], Name], low: Name, high: Name) -> Name:
        """Find where `too_low` turns false, trying many points in every round."""
        places = np.arange(1, POINTS + 1, dtype=np.float32)
        part = self._op("Div", self._op("Sub", high, low), float(POINTS + 1))
        for _ in range(ROUNDS):
            steps = self._op("Mul", self._op("Unsqueeze", part, _FIRST), places)
            points = self._op("Add", self._op("Unsqueeze", low, _FIRST), steps)
            below = self._op("Cast", too_low(points), to=FLOAT)
            count = self._op("ReduceSum", below, _LAST, keepdims=0)
            low = self._op("Add", low, self._op("Mul", count, part))
            width, part = part, self._op("Div", part, float(POINTS + 1))
        return self._op("Add", low, self._op("Mul", width, 0.5))

    def points(self, z: Name, line: Line) -> Name:
        """Eq. 3: z + α₀Δ of all images, then z + αΔ."""
        moved = []
        for alpha in (line.alpha_0, line.alpha):
            step = self._op("Mul", self._op("Unsqueeze", alpha, _FIRST), line.delta)
            moved.append(self._op("Add", z, step))
        return self._op("Concat", *moved, axis=0)

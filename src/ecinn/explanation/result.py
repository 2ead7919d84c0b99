"""What ECINN answers, as data and as a picture."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int, UInt8
from PIL import Image
from torch import Tensor

from ecinn import equations
from ecinn.classifier.out_of_distribution import REASONS
from ecinn.drawing import pictures
from ecinn.explanation.path import CounterfactualPath
from ecinn.pixels import to_uint8

Images = Float[Tensor, "batch channels height width"]
PerPair = Float[Tensor, "batch targets"]
PerPairImages = Float[Tensor, "batch targets channels height width"]


@dataclass(frozen=True)
class Counterfactuals:
    """What any method of counterfactuals answers: an image for every image and target."""

    x: Images
    p: Int[Tensor, " batch"]
    q: Int[Tensor, "batch targets"]
    images: PerPairImages
    """x̂ as the method gives it, before it is clamped and rounded to 8 bits."""
    passes: Int[Tensor, "batch targets"]
    """Network evaluations it took; forward, inverse and backward count one each."""
    failed: Bool[Tensor, "batch targets"]
    """Where the method itself found nothing; the image is then the best it had."""

    @property
    def stored(self) -> UInt8[Tensor, "batch targets channels height width"]:
        """The counterfactuals as 8-bit images."""
        return to_uint8(self.images)


@dataclass(frozen=True)
class Certificate:
    """What is known about one kind of counterfactual, for every image and target."""

    posterior: Float[Tensor, "batch targets classes"]
    """p(y|x̂) of the counterfactual as computed, before it is rounded to 8 bits."""
    stored_posterior: Float[Tensor, "batch targets classes"] | None
    """p(y) of the stored 8-bit image, from a forward pass of its own; None if not verified."""
    clamped: PerPair
    """Share of pixels outside [0, 1] that had to be clamped to store the image."""
    q: Int[Tensor, "batch targets"]

    @property
    def verdict(self) -> Float[Tensor, "batch targets classes"]:
        """The best that is known of p(y): of the stored image where it was verified."""
        return self.posterior if self.stored_posterior is None else self.stored_posterior

    @property
    def winner(self) -> Int[Tensor, "batch targets"]:
        """The class that the classifier says."""
        return self.verdict.argmax(-1)

    @property
    def reached(self) -> Bool[Tensor, "batch targets"]:
        """Whether q is what the classifier says."""
        return self.winner == self.q


@dataclass(frozen=True)
class Explanation:
    """Why each image x is p and not q: both counterfactuals, their heatmap, their certificates."""

    x: Images
    p: Int[Tensor, " batch"]
    q: Int[Tensor, "batch targets"]
    posterior: Float[Tensor, "batch classes"]
    """p(y|x) of the input."""
    alpha_0: PerPair
    alpha_1: PerPair
    """The paper's 4/5 + α₀/2."""
    alpha: PerPair
    """Where the convincing counterfactual is: α₁, or where the asked confidence is obtained."""
    tipping_point: PerPairImages
    convincing: PerPairImages
    tipping_certificate: Certificate
    convincing_certificate: Certificate
    third_class: Int[Tensor, "batch targets"]
    """The class that wins at the tipping point where neither p nor q does, else −1."""
    round_trip_error: Float[Tensor, " batch"]
    """max |x − f⁻¹(f(x))| in pixels of [0, 1]."""
    log_p: Float[Tensor, " batch"]
    """log p(x) of the input, pixels in [0, 1]."""
    out_of_distribution: Bool[Tensor, "batch reasons"] | None
    """For every one of `REASONS`, whether it calls the input unlike the training images; None if
    what they are like is not known."""
    confidence: float | None
    """The p(q) that was asked for; None for α₁."""
    reachable: Bool[Tensor, "batch targets"]
    """Whether that confidence can be had on the line; where not, the highest is what is given."""
    as_asked: Bool[Tensor, "batch targets"]
    """Whether the classifier says what was asked: q, and where a confidence was asked for, that
    within 0.05 (q need not win at one half or less)."""
    corrections: Int[Tensor, "batch targets"]
    """How often α was corrected because the stored image was not read as was asked."""
    path: CounterfactualPath | None
    """The way from x to the counterfactual, where it was asked for."""
    passes: int
    """Network evaluations, each of whole batches: encode, decode, and one to verify. Every
    correction of a pair takes two further ones."""
    class_names: tuple[str, ...]

    @property
    def typical(self) -> Bool[Tensor, " batch"] | None:
        """Whether the input is like nearly all training images."""
        return None if self.out_of_distribution is None else ~self.out_of_distribution.any(1)

    def reasons(self, row: int) -> tuple[str, ...]:
        """What makes an input unlike the training images."""
        if self.out_of_distribution is None:
            return ()
        return tuple(
            r for r, yes in zip(REASONS, self.out_of_distribution[row], strict=True) if yes
        )

    @property
    def heatmap(self) -> PerPairImages:
        """Eq. 4 at α: what the convincing counterfactual adds (positive) and takes away."""
        return equations.heatmap(self.x[:, None].expand_as(self.convincing), self.convincing)

    @property
    def stored_tipping_point(self) -> UInt8[Tensor, "batch targets channels height width"]:
        """The tipping points as 8-bit images."""
        return to_uint8(self.tipping_point)

    @property
    def stored_convincing(self) -> UInt8[Tensor, "batch targets channels height width"]:
        """The convincing counterfactuals as 8-bit images."""
        return to_uint8(self.convincing)

    def picture(self, index: int | None = None) -> Image.Image:
        """Input, tipping point, convincing counterfactual and heatmap; a column per target.

        Args:
            index: which image; by default all of them, one sheet below the other.
        """
        rows = range(len(self.x)) if index is None else [index]
        tile = pictures.tile_for(self.x.shape[-1])
        sheets = [pictures.draw(self._sheet(row), tile) for row in rows]
        return pictures.below_each_other(sheets)

    def _sheet(self, row: int) -> pictures.Sheet:
        source = int(self.p[row])
        name = self.class_names[source]
        reasons = ", ".join(self.reasons(row))
        caution = f"Caution: unlike the pictures the model was trained on ({reasons})."
        other = f"“{self.class_names[int(self.q[row, 0])]}”" if self.q.shape[1] == 1 else "…"
        end = ("convincing", "read as the other")
        if self.confidence is not None:
            end = ("as asked", f"{100 * self.confidence:g} % of the other")
        return pictures.Sheet(
            title=f"Why is this “{name}”, and not {other}?",
            caution=caution if reasons else "",
            rows=(
                ("input", f"{name}  {pictures.percent(float(self.posterior[row, source]))}"),
                ("tipping point", f"“{name}” and the other\ntie, but for rounding"),
                end,
                (
                    "heatmap",
                    "red: light added\nblue: taken away\n"
                    f"full colour: ±{100 * self._limit(row):.2g} %\nbelow it: alpha",
                ),
            ),
            columns=tuple(self._column(row, column) for column in range(self.q.shape[1])),
        )

    def _column(self, row: int, column: int) -> tuple[pictures.Cell, ...]:
        name, q = self.class_names, int(self.q[row, column])
        limit = self._limit(row)
        alphas = f"tips {self.alpha_0[row, column]:.2f}, ends {self.alpha[row, column]:.2f}"
        shown = int(self.convincing_certificate.winner[row, column])
        missed = shown != q
        if self.confidence is not None:
            shown, missed = q, not bool(self.as_asked[row, column])
        share = float(self.convincing_certificate.verdict[row, column, shown])
        return (
            pictures.Cell(pictures.image_array(to_uint8(self.x[row])), f"to {name[q]}"),
            pictures.Cell(
                pictures.image_array(self.stored_tipping_point[row, column]),
                *self._tie(row, column),
            ),
            pictures.Cell(
                pictures.image_array(self.stored_convincing[row, column]),
                f"{name[shown]}  {pictures.percent(share)}",
                missed,
            ),
            pictures.Cell(pictures.heatmap_array(self.heatmap[row, column], limit), alphas),
        )

    def _limit(self, row: int) -> float:
        """What gets full colour: one scale for all targets, so that the maps can be compared."""
        return max(pictures.robust_limit(heatmap) for heatmap in self.heatmap[row])

    def _tie(self, row: int, column: int) -> tuple[str, bool]:
        """Both probabilities at the tipping point, or the third class that wins there."""
        verdict = self.tipping_certificate.verdict[row, column]
        third = int(self.third_class[row, column])
        if third >= 0:
            return f"here {self.class_names[third]} wins", True
        pair = (int(self.p[row]), int(self.q[row, column]))
        return "  ".join(f"{self.class_names[y]}: {100 * verdict[y]:.0f} %" for y in pair), False

    def _repr_png_(self) -> bytes:
        return pictures.png_bytes(self.picture())

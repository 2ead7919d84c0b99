"""An explanation: counterfactuals, heatmaps and certificates of a batch of images."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from jaxtyping import Bool, Float, Int, UInt8
from PIL import Image
from torch import Tensor

from ecinn import equations
from ecinn.classifier.out_of_distribution import REASONS
from ecinn.drawing import pictures
from ecinn.explanation.path import CounterfactualPath
from ecinn.explanation.reading import Reading
from ecinn.pixels import Images, to_uint8

Confidence = float | Literal["alpha_1"]
"""Where the convincing counterfactual lies: at this p(q), or at the paper's α₁."""
ALPHA_1: Final = "alpha_1"

FARTHEST = 3.0
"""Largest α of an answer that counts as explained; α = 1 is the distance between class means."""

PerPair = Float[Tensor, "batch targets"]
PerPairImages = Float[Tensor, "batch targets channels height width"]
PerPairStored = UInt8[Tensor, "batch targets channels height width"]


@dataclass(frozen=True)
class Certificate(Reading):
    """Posteriors of one kind of counterfactual, before and after storing, and what was clamped."""

    clamped: PerPair
    """Share of pixels outside [0, 1], which were clamped to store the image."""
    q: Int[Tensor, "batch targets"]
    answer: Float[Tensor, "batch targets classes"] | None = None
    """Probabilities of the stored image by the classifier that the model is a student of; None if
    there is none, or if it was not asked."""

    @property
    def verdict(self) -> Float[Tensor, "batch targets classes"]:
        """The classifier's answer if it was asked, else the model's own verdict."""
        return super().verdict if self.answer is None else self.answer

    @property
    def winner(self) -> Int[Tensor, "batch targets"]:
        """The predicted class."""
        return self.verdict.argmax(-1)

    @property
    def reached(self) -> Bool[Tensor, "batch targets"]:
        """True where q is the predicted class."""
        return self.winner == self.q


@dataclass(frozen=True)
class Verification:
    """What the explained classifier was asked and answered; the model is its student.

    Its answers on tipping points and counterfactuals are in their certificates.
    """

    classifier: str
    """Its name."""
    posterior: Float[Tensor, "batch classes"]
    """Its probabilities of the input; p is the largest."""
    uncorrected: Float[Tensor, "batch targets classes"]
    """Its probabilities of the counterfactual at the student's α, before any correction."""
    queries: Int[Tensor, "batch targets"]
    """Pictures that it was asked about, besides the input."""
    tied: Bool[Tensor, "batch targets"]
    """True where it is undecided between p and q at the tipping point. Elsewhere the tipping point
    is the picture nearest to a tie, of those that it was asked about."""
    instead: Float[Tensor, "batch targets classes"]
    """Probabilities of the classes that it saw instead of q, where the direction is bent away from
    them (`equations.bent_direction`). All 0 where the direction is Δ."""

    @property
    def bent(self) -> Bool[Tensor, "batch targets"]:
        """True where the direction is bent."""
        return self.instead.any(-1)


@dataclass(frozen=True)
class Skipped:
    """An image that was left out of an explanation, with the reason."""

    index: int
    """Position among the given images."""
    source: str | None
    reason: str


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """Why each image x is p and not q: counterfactuals, heatmaps and their certificates.

    Behaves like a sequence of explanations of single images: `len(e)`, `e[0]`, `e[2:5]` and
    iteration work, and `==` compares all values.
    """

    x: Images
    p: Int[Tensor, " batch"]
    q: Int[Tensor, "batch targets"]
    posterior: Float[Tensor, "batch classes"]
    """p(y|x) of the input."""
    alpha_0: PerPair
    """α of the tipping point: where p and q tie before rounding to 8 bits or, if corrected, where
    the stored image is nearest to a tie."""
    alpha_1: PerPair
    """The paper's 4/5 + α₀/2."""
    alpha: PerPair
    """α of the convincing counterfactual: α₁, or the α that gives the requested confidence, or the
    corrected one."""
    tipping_point: PerPairImages
    convincing: PerPairImages
    tipping_certificate: Certificate
    convincing_certificate: Certificate
    third_class: Int[Tensor, "batch targets"]
    """The class that wins at the tipping point if it is neither p nor q, else −1."""
    round_trip_error: Float[Tensor, " batch"]
    """max |x − f⁻¹(f(x))| in pixels of [0, 1]."""
    log_p: Float[Tensor, " batch"]
    """log p(x) of the input, pixels in [0, 1]."""
    out_of_distribution: Bool[Tensor, "batch reasons"] | None
    """For each of `REASONS`, true where it flags the input; None without an OOD detector."""
    confidence: Confidence
    """The requested p(q), or "alpha_1"."""
    reachable: Bool[Tensor, "batch targets"]
    """True where that confidence exists on the line; elsewhere α is that of the highest p(q)."""
    as_requested: Bool[Tensor, "batch targets"]
    """True where the verdict fulfils the request: q wins, and its probability is within 0.05 of
    the requested confidence, if one is requested (then q need not win at one half or less)."""
    corrections: Int[Tensor, "batch targets"]
    """Number of times α or α₀ was corrected."""
    path: CounterfactualPath | None
    """The path from x to the counterfactual, if requested."""
    passes: int
    """Network evaluations of the whole batch: encode, decode, and one for the check; two more for
    a path that is corrected. Every correction of a pair takes two more."""
    class_names: tuple[str, ...]
    indices: Int[Tensor, " batch"]
    """Position of each image among the given ones, of which some may have been skipped."""
    skipped: tuple[Skipped, ...] = ()
    """Images that are already predicted as a target."""
    model: str | None = None
    confidence_by_default: bool = False
    """True if nobody requested `confidence`: it is the model's own default."""
    sources: tuple[str | None, ...] = ()
    """The full path of each image that came from a file; empty if none did."""
    remarks: tuple[tuple[str, ...], ...] = ()
    """Changes made to each image to read it, such as inverting or resizing; empty if none."""
    verification: Verification | None = None
    """The answers of the classifier that the model is a student of, if it was asked. Then p,
    verdicts, α₀ and `as_requested` are about that classifier, and not about the student."""
    corrected: bool = False
    """True if α and α₀ were corrected wherever a stored image was not as requested."""
    planted: bool = False
    """True if a mark planted in the picture is the class, as FakeMNIST's dot is: its classes are
    labels, not what the picture shows, and a change of 1 is the natural scale of heatmaps."""

    @property
    def reading(self) -> Float[Tensor, "batch classes"]:
        """Probabilities of the input, by the classifier if it was asked, else by the model."""
        return self.posterior if self.verification is None else self.verification.posterior

    @property
    def explained(self) -> Bool[Tensor, "batch targets"] | None:
        """True where the classifier reads the stored image as requested; None: not asked.

        Only up to α = `FARTHEST`: a student that learned nothing is never sure of q and goes far
        beyond all classes, where a classifier may say anything, q included.
        """
        return None if self.verification is None else self.as_requested & (self.alpha <= FARTHEST)

    def direction(
        self, z: Float[Tensor, "batch targets dim"], mu_bar: Float[Tensor, "classes dim"]
    ) -> Float[Tensor, "batch targets dim"]:
        """Return Δ of every pair, or the bent direction on which its counterfactual lies."""
        p = self.p[:, None].expand_as(self.q)
        if self.verification is None:
            return equations.latent_direction(mu_bar, p, self.q)
        return equations.bent_direction(z, mu_bar, p, self.q, self.verification.instead)

    @property
    def typical(self) -> Bool[Tensor, " batch"] | None:
        """True where the OOD detector flags nothing."""
        return None if self.out_of_distribution is None else ~self.out_of_distribution.any(1)

    @property
    def requested(self) -> str:
        """The request in words, such as "90 % requested" or "α₁ (the paper's)"."""
        return request_in_words(self.confidence, by_default=self.confidence_by_default)

    def named(self, label: int) -> str:
        """Return the name of a class, such as "8", "smiling" or, if it is planted, "label 8"."""
        return f"label {self.class_names[label]}" if self.planted else self.class_names[label]

    def reasons(self, index: int) -> tuple[str, ...]:
        """Reasons why an input is out of distribution; empty if it is not."""
        if self.out_of_distribution is None:
            return ()
        flags = self.out_of_distribution[index].tolist()
        # Files of older versions have fewer reasons.
        return tuple(reason for reason, flag in zip(REASONS, flags, strict=False) if flag)

    @property
    def notes(self) -> tuple[tuple[str, ...], ...]:
        """For each image: what was done to read it, and what a reader should be warned of."""
        from ecinn.explanation.files import notes

        return tuple(notes(self, index) for index in range(len(self)))

    @property
    def heatmap(self) -> PerPairImages:
        """Eq. 4 at α: what the convincing counterfactual adds (positive) and removes."""
        return equations.heatmap(self.x[:, None].expand_as(self.convincing), self.convincing)

    def heatmap_limit(self, index: int) -> float:
        """The value drawn in full colour: one scale for all targets, so that maps compare.

        It is 1 for planted marks, so that faint strokes look faint beside a mark that appears.
        """
        if self.planted:
            return 1.0
        return max(pictures.robust_limit(heatmap) for heatmap in self.heatmap[index])

    @property
    def stored_tipping_point(self) -> PerPairStored:
        """The tipping points as 8-bit images."""
        return to_uint8(self.tipping_point)

    @property
    def stored_convincing(self) -> PerPairStored:
        """The convincing counterfactuals as 8-bit images."""
        return to_uint8(self.convincing)

    def picture(self, index: int | None = None) -> Image.Image:
        """Draw input, tipping point, counterfactual and heatmap, one column per target.

        Args:
            index: which image; by default all of them, one sheet below the other.
        """
        from ecinn.drawing.grid import draw
        from ecinn.explanation.sheet import explanation_sheet, with_scale

        rows = range(len(self)) if index is None else [index]
        tile = pictures.tile_for(self.x.shape[-1])
        return pictures.below_each_other(
            [
                with_scale(draw(explanation_sheet(self, row), tile), self.heatmap_limit(row))
                for row in rows
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return every number as plain Python values: the JSON of the command line and the API."""
        from ecinn.explanation.files import to_dict

        return to_dict(self)

    def save(self, folder: str | Path, *, film: str | None = None) -> dict[str, Any]:
        """Write pictures, `explanation.json` and `explanation.safetensors` into a folder.

        Args:
            film: "gif" or "webp" to write the path as a film; needs an explanation with a path.

        Returns:
            The contents of the JSON file: `to_dict()` with the names of all files.
        """
        from ecinn.explanation.files import save

        return save(self, Path(folder), film)

    @staticmethod
    def load(folder: str | Path) -> "Explanation":
        """Read an explanation that `save` wrote; equal to the saved one."""
        from ecinn.explanation.files import load

        return load(Path(folder))

    def cpu(self) -> "Explanation":
        """Return a copy in the memory of the CPU."""
        return dataclasses.replace(self, **_map_fields(self, _on_cpu))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int | slice) -> "Explanation":
        rows = range(len(self))[index]
        chosen = [rows] if isinstance(rows, int) else list(rows)
        selected = {
            field.name: _rows(getattr(self, field.name), chosen)
            for field in dataclasses.fields(self)
        }
        for name in ("sources", "remarks"):
            values = getattr(self, name)
            selected[name] = tuple(values[row] for row in chosen) if values else ()
        return Explanation(**selected)

    def __iter__(self) -> Iterator["Explanation"]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Explanation) and _equal(self, other)

    def __repr__(self) -> str:
        images = "image" if len(self) == 1 else "images"
        lines = [f"Explanation of {len(self)} {images}" + (f" by {self.model}" * bool(self.model))]
        names = self.class_names
        for index in range(len(self)):
            p, ends = int(self.p[index]), []
            for target, q in enumerate(self.q[index].tolist()):
                share = float(self.convincing_certificate.verdict[index, target, q])
                ends.append(f"{names[q]} ({pictures.percent(share)})")
            source = Path(self.sources[index] or "").name if self.sources else ""
            head = f"  {source or int(self.indices[index])}: {names[p]}"
            sure = pictures.percent(float(self.reading[index, p]))
            lines.append(f"{head} ({sure}) → {', '.join(ends)}")
        lines += [f"  {skipped.index}: skipped, {skipped.reason}" for skipped in self.skipped]
        return "\n".join(lines)

    def _repr_png_(self) -> bytes:
        return pictures.png_bytes(self.picture())


def request_in_words(confidence: Confidence, *, by_default: bool = False) -> str:
    """Say where the convincing counterfactual lies.

    >>> request_in_words("alpha_1")
    "α₁ (the paper's)"
    >>> request_in_words(0.99, by_default=True)
    "99 % requested (this model's default)"
    """
    if confidence == ALPHA_1:
        return "α₁ (the paper's)"
    return f"{100 * confidence:g} % requested" + " (this model's default)" * by_default


def join(parts: Sequence[Explanation]) -> Explanation:
    """Concatenate explanations of the same model, options and number of targets."""
    if len(parts) == 1:
        return parts[0]
    joined = {
        field.name: _concatenate([getattr(part, field.name) for part in parts])
        for field in dataclasses.fields(Explanation)
    }
    joined["passes"] = max(part.passes for part in parts)
    for name in ("skipped", "sources", "remarks"):
        joined[name] = tuple(value for part in parts for value in getattr(part, name))
    return Explanation(**joined)


def _rows(value: Any, rows: list[int]) -> Any:  # noqa: ANN401
    """Select rows of every tensor inside."""
    if isinstance(value, Tensor):
        return value[rows]
    if isinstance(value, Reading | Verification):
        return dataclasses.replace(value, **_map_fields(value, lambda v: _rows(v, rows)))
    return value


def _concatenate(values: list[Any]) -> Any:  # noqa: ANN401
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(values)
    if isinstance(first, Reading | Verification):
        names = [field.name for field in dataclasses.fields(first)]
        parts = {name: _concatenate([getattr(v, name) for v in values]) for name in names}
        return dataclasses.replace(first, **parts)
    return first


def _on_cpu(value: Any) -> Any:  # noqa: ANN401
    """Copy every tensor inside to the CPU."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, Reading | Verification):
        return dataclasses.replace(value, **_map_fields(value, _on_cpu))
    return value


def _map_fields(value: Reading | Verification | Explanation, function: Any) -> Mapping[str, Any]:  # noqa: ANN401
    return {f.name: function(getattr(value, f.name)) for f in dataclasses.fields(value)}


def _equal(a: Any, b: Any) -> bool:  # noqa: ANN401
    """Compare tensors by value, dataclasses field by field."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())
    if isinstance(a, Reading | Verification | Explanation) and type(a) is type(b):
        return all(_equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return type(a) is type(b) and bool(a == b)

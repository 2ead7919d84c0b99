"""What rounding the weights costs, from a rounded model alone: what one more such error does.

A stored weight is w₀ + e₁, where e₁ is about uniform over one step. Where e₂ is drawn afresh and
of the same size, L(w₀ + e₁ + e₂) − L(w₀ + e₁) has the mean ½ tr(H Σ) to second order, and so has
L(w₀ + e₁) − L(w₀) over all e₁ that there could have been. That one e₁ happened differs from the
mean by about as much as one draw of e₂ does: the standard deviation over the draws.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from ecinn import equations
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.quantisation import pack, rounded_again
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.flow.precision import exact_convolutions
from ecinn.model import Model
from ecinn.pixels import dequantise, to_pixels
from ecinn.studies.benchmark.tables import Table, percent

BATCH = 50


@dataclass(frozen=True)
class Reading:
    """Another network of the same kind on the same images."""

    error: float
    bits_per_dim: float
    changed: float
    """Share of images that it reads as another class than the rounded model does."""


@dataclass(frozen=True)
class Spread:
    """Over the draws."""

    mean: float
    deviation: float
    """Of one draw: the square root of the unbiased variance."""


@dataclass(frozen=True)
class RoundingCost:
    """One model on the images of one split; a cost is positive where rounding makes it worse."""

    n: int
    bits: int
    """Of a stored weight."""
    error: float
    """Of the model as it is stored, and so is `bits_per_dim`."""
    bits_per_dim: float
    """As in `Evaluation`; the same dequantisation noise for all that is compared."""
    draws: tuple[Reading, ...]
    """Of the model rounded once more, every time with other errors."""
    error_cost: Spread
    """Estimated: error of a draw minus that of the stored model."""
    bits_per_dim_cost: Spread
    """Estimated, likewise."""
    changed: Spread
    """Estimated share of predictions that rounding changed."""
    unrounded: Reading | None
    """The truth, where the unrounded model is at hand."""
    seed: int


def require_rounded(model: Model) -> None:
    """Weights of 32 bits are as they were trained."""
    recipe = model.checkpoint.recipe
    if recipe.stored_bits == 32:
        raise InputError(
            f"{recipe.name} is stored with 32 bits: nothing was rounded, so there is nothing "
            "to measure"
        )


def rounds_to(unrounded: Model, model: Model) -> bool:
    """Whether these weights, rounded, are the subnets of that model."""
    one, other = unrounded.checkpoint, model.checkpoint
    if one.recipe.architecture != other.recipe.architecture:
        return False
    stored = _packed(other.classifier, other.recipe.stored_bits)
    again = _packed(one.classifier, other.recipe.stored_bits)
    rounded = [name for name, value in stored.items() if value.dtype in (torch.int8, torch.half)]
    return all(torch.equal(stored[name], again[name]) for name in rounded)


def measure_rounding(
    model: Model,
    data: Dataset,
    *,
    draws: int = 5,
    seed: int = 0,
    unrounded: Model | None = None,
    observe: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> RoundingCost:
    """Read the images with the model as stored, rounded once more, and unrounded if given."""
    require_rounded(model)
    if draws < 2:
        raise InputError(f"a standard deviation takes two draws or more, not {draws}")
    name = model.checkpoint.recipe.name

    def read(one: Model, what: str) -> tuple[Int[Tensor, " images"], float]:
        words = f"{name}: {what}"
        return _read(one, data, seed, lambda done: observe(words, done, len(data)))

    labels = data.labels
    predicted, bits_per_dim = read(model, "as stored")

    def compared(one: Model, what: str) -> Reading:
        other, other_bits = read(one, what)
        return Reading(_share(other != labels), other_bits, _share(other != predicted))

    # Not the seed of the pixels' noise, or the weights' errors would be the same numbers.
    generator = torch.Generator().manual_seed(seed + 1)
    readings = tuple(
        compared(once_more(model, generator), f"draw {draw} of {draws}")
        for draw in range(1, draws + 1)
    )
    error = _share(predicted != labels)
    return RoundingCost(
        n=len(data),
        bits=model.checkpoint.recipe.stored_bits,
        error=error,
        bits_per_dim=bits_per_dim,
        draws=readings,
        error_cost=_spread([reading.error - error for reading in readings]),
        bits_per_dim_cost=_spread([reading.bits_per_dim - bits_per_dim for reading in readings]),
        changed=_spread([reading.changed for reading in readings]),
        unrounded=None if unrounded is None else compared(unrounded, "unrounded"),
        seed=seed,
    )


def once_more(model: Model, generator: torch.Generator) -> Model:
    """The model with another rounding error on top of the one that it has; all else is shared."""
    checkpoint = model.checkpoint
    packed = _packed(checkpoint.classifier, checkpoint.recipe.stored_bits)
    classifier = GenerativeClassifier(checkpoint.recipe.architecture).eval()
    classifier.load_state_dict(rounded_again(packed, generator))
    classifier.requires_grad_(requires_grad=False)
    return Model(replace(checkpoint, classifier=classifier), model.device)


def _packed(classifier: GenerativeClassifier, bits: int) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in pack(classifier.state_dict(), bits).items()}


@torch.inference_mode()
def _read(
    model: Model, data: Dataset, seed: int, observe: Callable[[int], None]
) -> tuple[Int[Tensor, " images"], float]:
    """Predictions of the clean images, and their exact bits/dim."""
    generator = torch.Generator(model.device).manual_seed(seed)
    predicted, bits = [], 0.0
    for start in range(0, len(data), BATCH):
        images = data.images[start : start + BATCH].to(model.device)
        with exact_convolutions():
            predicted.append(model.classifier.predict(to_pixels(images)).cpu())
            log_p = model.classifier.log_marginal(dequantise(images, generator))
        per_image = equations.bits_per_dim(log_p.double(), model.classifier.architecture.dim)
        bits += float(per_image.sum())
        observe(start + len(images))
    return torch.cat(predicted), bits / len(data)


def _share(which: Tensor) -> float:
    return float(which.double().mean())


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.fmean(values), statistics.stdev(values))


def rounding_tables(results: dict[str, RoundingCost], split: str) -> list[Table]:
    """The estimates, a row per model; and the truth beside them where it is known."""
    n = max(result.n for result in results.values())
    draws = max(len(result.draws) for result in results.values())
    estimates = Table(
        title=f"Estimated from the rounded model: {n:,} {split} images, {draws} draws",
        head=(
            "model",
            "bits a weight",
            "error %, as stored",
            "cost of rounding, points",
            "bits/dim, as stored",
            "cost of rounding",
            "predictions changed %",
        ),
        rows=tuple(
            (
                name,
                str(result.bits),
                percent(result.error),
                _with_deviation(result.error_cost, 2, 100.0),
                f"{result.bits_per_dim:.4f}",
                _with_deviation(result.bits_per_dim_cost, 5),
                _with_deviation(result.changed, 2, 100.0, sign=""),
            )
            for name, result in results.items()
        ),
        notes=(
            "An estimate: what one more error of the size that rounding makes does to the stored "
            "model, mean ± standard deviation of one draw. To second order the mean is what "
            "rounding costs on average; what the one error that happened did cost may be a "
            "deviation or two away. Class means are not fitted again: where they were fitted "
            "after rounding, as those of digits, the estimate is rather too high.",
        ),
    )
    known = {name: r.unrounded for name, r in results.items() if r.unrounded is not None}
    if not known:
        return [estimates]
    truth = Table(
        title="Measured against the unrounded model",
        head=(
            "model",
            "error %, unrounded",
            "cost of rounding, points",
            "bits/dim, unrounded",
            "cost of rounding",
            "predictions changed %",
        ),
        rows=tuple(
            (
                name,
                percent(before.error),
                f"{100 * (results[name].error - before.error):+.2f}",
                f"{before.bits_per_dim:.4f}",
                f"{results[name].bits_per_dim - before.bits_per_dim:+.5f}",
                percent(before.changed),
            )
            for name, before in known.items()
        ),
    )
    return [estimates, truth]


def _with_deviation(spread: Spread, digits: int, factor: float = 1.0, *, sign: str = "+") -> str:
    mean, deviation = factor * spread.mean, factor * spread.deviation
    return f"{mean:{sign}.{digits}f} ± {deviation:.{digits}f}"

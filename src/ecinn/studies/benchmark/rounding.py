"""Estimate the cost of rounding the weights from the rounded model alone.

A stored weight is w₀ + e₁, where e₁ is about uniform over one step. With a new error e₂ of the
same size, L(w₀ + e₁ + e₂) − L(w₀ + e₁) has the mean ½ tr(H Σ) to second order, and so has
L(w₀ + e₁) − L(w₀) over all possible e₁. The one e₁ that happened deviates from that mean about as
much as one draw of e₂ does: by the standard deviation over the draws.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ecinn import equations
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.quantisation import pack, rounded_again
from ecinn.data.dataset import Dataset
from ecinn.drawing.table import Table, percent
from ecinn.errors import InputError
from ecinn.model import Model
from ecinn.pixels import Labels, dequantise
from ecinn.progress import Observer, counter, ignore
from ecinn.studies.benchmark.quality import log_density
from ecinn.studies.benchmark.record import note

BATCH = 50


@dataclass(frozen=True)
class Outcome:
    """Another network of the same architecture on the same images."""

    error: float
    bits_per_dim: float
    changed: float
    """Share of images that it classifies differently from the stored model."""


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over the draws."""

    mean: float
    deviation: float
    """Standard deviation of one draw, from the unbiased variance."""

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Measure two or more values."""
        return cls(statistics.fmean(values), statistics.stdev(values))

    def text(self, digits: int, factor: float = 1.0, sign: str = "+") -> str:
        """Format mean ± deviation."""
        return f"{factor * self.mean:{sign}.{digits}f} ± {factor * self.deviation:.{digits}f}"


@dataclass(frozen=True)
class RoundingCost:
    """One model on the images of one split; costs are positive where rounding does harm."""

    n: int
    bits: int
    """Bits of a stored weight."""
    error: float
    """Error of the stored model; so is `bits_per_dim`."""
    bits_per_dim: float
    """As in `Evaluation`, with the same dequantisation noise for all networks."""
    draws: tuple[Outcome, ...]
    """The model rounded once more, each time with new errors."""
    error_cost: Spread
    """Estimate: error of a draw minus that of the stored model."""
    bits_per_dim_cost: Spread
    """Estimate, likewise."""
    changed: Spread
    """Estimated share of predictions changed by rounding."""
    unrounded: Outcome | None
    """Measured on the unrounded model, if given."""
    seed: int


def require_rounded(model: Model) -> None:
    """Raise an error if the weights are stored with 32 bits, as they were trained."""
    if model.recipe.stored_bits == 32:
        raise InputError(f"{model.name} is stored with 32 bits: it has no rounding to measure")


def rounds_to(unrounded: Model, model: Model) -> bool:
    """Return True if these weights, when rounded, are those of the model's subnets."""
    if unrounded.recipe.architecture != model.recipe.architecture:
        return False
    stored, again = (_packed(each, model.recipe.stored_bits) for each in (model, unrounded))
    rounded = [name for name, value in stored.items() if value.dtype in (torch.int8, torch.half)]
    return all(torch.equal(stored[name], again[name]) for name in rounded)


def match_unrounded(given: Mapping[Path, Model], models: Mapping[str, Model]) -> dict[str, Model]:
    """Return unrounded models, given by file, under the names of the models they round to."""
    matched = {}
    for file, model in given.items():
        name, bits = file.name, model.recipe.stored_bits
        if bits != 32:
            raise InputError(
                f"--unrounded {name} is itself stored with {bits} bits: "
                "give the unrounded.safetensors of `ecinn train`"
            )
        labels = [label for label, rounded in models.items() if rounds_to(model, rounded)]
        if not labels:
            raise InputError(
                f"--unrounded {name} does not round to {' or '.join(models)}: "
                "give the unrounded.safetensors of the same run"
            )
        matched[labels[0]] = model
    return matched


def measure_rounding(
    model: Model,
    data: Dataset,
    *,
    draws: int = 5,
    seed: int = 0,
    unrounded: Model | None = None,
    observe: Observer = ignore,
) -> RoundingCost:
    """Classify the images by the stored model, by models rounded once more, and unrounded."""
    require_rounded(model)
    labels = data.labels

    def measure(network: Model, task: str) -> tuple[Labels, float]:
        count = counter(observe, f"{model.name}: {task}", len(data))
        return _predictions_and_bits(network, data, seed, count)

    predicted, bits_per_dim = measure(model, "as stored")

    def compared(network: Model, task: str) -> Outcome:
        other, other_bits = measure(network, task)
        return Outcome(_share(other != labels), other_bits, _share(other != predicted))

    # Not the seed of the dequantisation noise, which would repeat its random numbers.
    generator = torch.Generator().manual_seed(seed + 1)
    outcomes = tuple(
        compared(once_more(model, generator), f"draw {draw} of {draws}")
        for draw in range(1, draws + 1)
    )
    error = _share(predicted != labels)
    return RoundingCost(
        n=len(data),
        bits=model.recipe.stored_bits,
        error=error,
        bits_per_dim=bits_per_dim,
        draws=outcomes,
        error_cost=Spread.of([draw.error - error for draw in outcomes]),
        bits_per_dim_cost=Spread.of([draw.bits_per_dim - bits_per_dim for draw in outcomes]),
        changed=Spread.of([draw.changed for draw in outcomes]),
        unrounded=None if unrounded is None else compared(unrounded, "unrounded"),
        seed=seed,
    )


def once_more(model: Model, generator: torch.Generator) -> Model:
    """Return the model with a new rounding error on top of the one it has."""
    packed = _packed(model, model.recipe.stored_bits)
    classifier = GenerativeClassifier(model.recipe.architecture).eval()
    classifier.load_state_dict(rounded_again(packed, generator))
    classifier.requires_grad_(requires_grad=False)
    return Model(replace(model.checkpoint, classifier=classifier), model.device)


def _packed(model: Model, bits: int) -> dict[str, Tensor]:
    weights = model.checkpoint.classifier.state_dict()
    return {name: value.cpu() for name, value in pack(weights, bits).items()}


@torch.inference_mode()
def _predictions_and_bits(
    model: Model, data: Dataset, seed: int, count: Callable[[int], None]
) -> tuple[Labels, float]:
    """Return predictions of the clean images and their mean exact bits/dim."""
    generator = torch.Generator(model.device).manual_seed(seed)
    predicted, bits = [], 0.0
    for start in range(0, len(data), BATCH):
        images = data.images[start : start + BATCH].to(model.device)
        predicted.append(model.predict(images).argmax(1).cpu())
        log_p = log_density(model, dequantise(images, generator)).double()
        bits += float(equations.bits_per_dim(log_p, model.mu.shape[1]).sum())
        count(start + len(images))
    return torch.cat(predicted), bits / len(data)


def _share(condition: Tensor) -> float:
    return float(condition.double().mean())


def rounding_tables(results: Mapping[str, RoundingCost], split: str) -> list[Table]:
    """Lay out the estimates, and the measured costs where unrounded models are given."""
    n = max(result.n for result in results.values())
    draws = max(len(result.draws) for result in results.values())
    tables = [
        Table.of(
            f"Estimated from the rounded model: {n:,} {split} images, {draws} draws",
            [
                {
                    "model": name,
                    "bits per weight": str(result.bits),
                    "error %, as stored": percent(result.error),
                    "cost of rounding, points": result.error_cost.text(2, 100.0),
                    "bits/dim, as stored": f"{result.bits_per_dim:.4f}",
                    "cost in bits/dim": result.bits_per_dim_cost.text(5),
                    "predictions changed %": result.changed.text(2, 100.0, sign=""),
                }
                for name, result in results.items()
            ],
            [note("rounding", "estimates")],
        )
    ]
    unrounded = {name: r.unrounded for name, r in results.items() if r.unrounded is not None}
    if unrounded:
        measured = [
            {
                "model": name,
                "error %, unrounded": percent(before.error),
                "cost of rounding, points": f"{100 * (results[name].error - before.error):+.2f}",
                "bits/dim, unrounded": f"{before.bits_per_dim:.4f}",
                "cost in bits/dim": f"{results[name].bits_per_dim - before.bits_per_dim:+.5f}",
                "predictions changed %": percent(before.changed),
            }
            for name, before in unrounded.items()
        ]
        tables.append(Table.of("Measured against the unrounded model", measured))
    return tables

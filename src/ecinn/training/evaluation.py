"""Evaluate a model on images that it was not trained on."""

from collections import defaultdict
from dataclasses import asdict, dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from ecinn import equations
from ecinn.classifier.checkpoint import Checkpoint
from ecinn.data.dataset import Dataset
from ecinn.flow.precision import exact_convolutions
from ecinn.metrics.calibration import calibration_error, calibration_error_by_chance
from ecinn.metrics.statistics import normal_interval
from ecinn.model import Model
from ecinn.pixels import dequantise, to_pixels
from ecinn.progress import Observer, counter, ignore


@dataclass(frozen=True)
class Evaluation:
    """Metrics of a model: means over n images, shares between 0 and 1."""

    model: str
    n: int
    error: float
    """Share of images whose predicted class is not their label."""
    calibration_error: float
    """Expected calibration error: mean distance of confidence and accuracy in 15 bins."""
    calibration_error_by_chance: float
    """The same of a perfectly calibrated model with these confidences: what noise adds."""
    bits_per_dim: float
    """−log₂ p of the 8-bit image per dimension, with one draw of uniform dequantisation noise per
    image."""
    bits_per_dim_half_width: float
    """Half of the 95 % interval of that mean."""
    bits_per_dim_noisy: float
    """The same with the Gaussian noise of training."""
    bits_per_dim_paper: float
    """Table 1's convention: noise-free images, and a constant is left out."""
    bits_per_dim_paper_half_width: float
    """Half of the 95 % interval of that mean."""
    reached_q: float
    """Share of α₁ counterfactuals whose stored 8-bit image is classified as the target; one
    uniformly random target per image."""
    reached_q_corrected: float
    """The same with α corrected where the stored image is not classified as the target."""
    passes_corrected: float
    """Network evaluations per counterfactual: 3, and 2 for every correction of those that miss."""
    tipping_third_class: float
    """Share of tipping points at which a third class has the highest posterior."""
    round_trip_error: float
    """Largest |x − f⁻¹(f(x))| over all images and pixels."""
    typical: float
    """Share of images that are not flagged as out-of-distribution."""
    seed: int


@torch.inference_mode()
def evaluate(
    model: Model,
    data: Dataset,
    *,
    seed: int = 0,
    batch_size: int = 250,
    observe: Observer = ignore,
) -> Evaluation:
    """Measure a model on clean 8-bit images; the seed draws targets and dequantisation noise."""
    model = model.student
    report = counter(observe, f"{model.recipe.name}: evaluating", len(data))
    generator = torch.Generator(model.device).manual_seed(seed)
    noise, architecture = model.recipe.noise, model.classifier.architecture
    offsets = random_offsets(len(data), len(model.class_names), seed)
    sums: defaultdict[str, float] = defaultdict(float)
    bits: dict[str, list[Tensor]] = {"bits_per_dim": [], "bits_per_dim_paper": []}
    confidences, correct = [], []
    round_trip = 0.0
    for start in range(0, len(data), batch_size):
        part = slice(start, start + batch_size)
        images = data.images[part].to(model.device)
        with exact_convolutions():
            z = model.classifier.encode(to_pixels(images))
            log_p = noisy_log_p = model.classifier.log_marginal(dequantise(images, generator))
            if noise:
                noisy_log_p = model.classifier.log_marginal(dequantise(images, generator, noise))
        log_posterior = equations.log_posterior(z, model.mu, model.tau)
        confidences.append(log_posterior.max(1).values.exp().cpu())
        predicted = equations.predicted_class(z, model.mu)
        correct.append(predicted.cpu() == data.labels[part].cpu())
        q = (predicted + offsets[part].to(model.device)) % len(model.class_names)
        explanation = model.explain(images, q[:, None], confidence="alpha_1")
        reached = explanation.convincing_certificate.reached[:, 0]
        corrected, corrections = reached.clone(), torch.zeros_like(q)
        if not bool(reached.all()):
            again = model.explain(
                images[~reached], q[~reached, None], confidence="alpha_1", correct=True
            )
            missed = (~reached).nonzero()[:, 0][again.indices]
            corrected[missed] = again.convincing_certificate.reached[:, 0]
            corrections[missed] = again.corrections[:, 0]
        assert explanation.typical is not None
        measured = {
            "error": explanation.p != data.labels[part].to(model.device),
            "bits_per_dim": equations.bits_per_dim(log_p, architecture.dim),
            "bits_per_dim_noisy": equations.bits_per_dim(noisy_log_p, architecture.dim),
            "bits_per_dim_paper": equations.bits_per_dim(explanation.log_p, architecture.dim),
            "reached_q": reached,
            "reached_q_corrected": corrected,
            "passes_corrected": corrections,
            "tipping_third_class": explanation.third_class >= 0,
            "typical": explanation.typical,
        }
        for name, values in measured.items():
            sums[name] += float(values.sum())
        for name, parts in bits.items():
            parts.append(measured[name].cpu())
        round_trip = max(round_trip, float(explanation.round_trip_error.max()))
        report(min(start + batch_size, len(data)))
    means = {name: total / len(data) for name, total in sums.items()}
    means["bits_per_dim_paper"] = equations.paper_bits_per_dim(
        means["bits_per_dim_paper"], architecture.pixel_scale
    )
    means |= {
        f"{name}_half_width": normal_interval(torch.cat(parts)).half_width
        for name, parts in bits.items()
    }
    means["passes_corrected"] = 3 + 2 * means["passes_corrected"]
    confidence = torch.cat(confidences)
    chance = calibration_error_by_chance(confidence, generator=torch.Generator().manual_seed(seed))
    return Evaluation(
        model=model.recipe.name,
        n=len(data),
        calibration_error=calibration_error(confidence, torch.cat(correct)),
        calibration_error_by_chance=chance.mean,
        round_trip_error=round_trip,
        seed=seed,
        **means,
    )


def random_offsets(n: int, classes: int, seed: int) -> Int[Tensor, " images"]:
    """Draw q − p modulo K uniformly from 1 to K − 1, so that q is never p."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, classes, (n,), generator=generator)


def with_metrics(
    checkpoint: Checkpoint, test: Dataset, device: torch.device, observe: Observer = ignore
) -> Checkpoint:
    """Return the checkpoint with its evaluation on the test images."""
    evaluation = evaluate(Model(checkpoint, device), test, observe=observe)
    checkpoint.classifier.cpu()  # the model moved it to the device
    return replace(checkpoint, metrics=asdict(evaluation))

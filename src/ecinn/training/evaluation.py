"""How good a model is on images it was not trained on."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from ecinn import equations
from ecinn.data.dataset import Dataset
from ecinn.flow.precision import exact_convolutions
from ecinn.model import Model
from ecinn.pixels import dequantise, to_pixels


@dataclass(frozen=True)
class Evaluation:
    """Shares are fractions of one; what is counted per image is averaged over all n."""

    model: str
    n: int
    error: float
    """Share of images whose prediction is not their label."""
    bits_per_dim: float
    """−log₂ p of the 8-bit image per dimension, an exact code length: one draw of uniform
    dequantisation noise per image."""
    bits_per_dim_noisy: float
    """The same with the Gaussian noise of training added."""
    bits_per_dim_paper: float
    """Table 1's convention: noise-free images and a constant left out (see the README)."""
    reached_q: float
    """Share of α₁ counterfactuals whose stored 8-bit image is read as their target: one
    uniformly random target per image."""
    reached_q_corrected: float
    """The same where α is corrected until the stored image is read as its target."""
    passes_corrected: float
    """Network evaluations per counterfactual that this takes: 3, and 2 for every correction."""
    tipping_third_class: float
    """Share of tipping points at which a third class wins over both."""
    round_trip_error: float
    """Largest |x − f⁻¹(f(x))| over all images and pixels, in units of [0, 1]."""
    typical: float
    """Share of images that nothing calls unlike the training images."""
    seed: int


@torch.inference_mode()
def evaluate(
    model: Model,
    data: Dataset,
    *,
    seed: int = 0,
    batch_size: int = 250,
    observe: Callable[[int], None] = lambda done: None,
) -> Evaluation:
    """Measure everything on clean 8-bit images."""
    generator = torch.Generator(model.device).manual_seed(seed)
    errors = reached = reached_verified = corrections = third = typical = 0
    bits = noisy_bits = noise_free_bits = round_trip = 0.0
    noise = model.checkpoint.recipe.noise
    dim = model.classifier.architecture.dim
    offsets = random_offsets(len(data), len(model.class_names), seed)
    for start in range(0, len(data), batch_size):
        part = slice(start, start + batch_size)
        images = data.images[part].to(model.device)
        label = data.labels[part].to(model.device)
        with exact_convolutions():
            predicted = model.classifier.predict(to_pixels(images))
            log_p = model.classifier.log_marginal(dequantise(images, generator))
            noisy_log_p = log_p
            if noise:
                noisy_log_p = model.classifier.log_marginal(dequantise(images, generator, noise))
        q = (predicted + offsets[part].to(model.device)) % len(model.class_names)
        explanation = model.explain(images, q[:, None], correct=True)
        errors += int((explanation.p != label).sum())
        # At α₁ only what was not reached is corrected.
        now_reached = explanation.convincing_certificate.reached
        reached += int((now_reached & (explanation.corrections == 0)).sum())
        reached_verified += int(now_reached.sum())
        corrections += int(explanation.corrections.sum())
        third += int((explanation.third_class >= 0).sum())
        round_trip = max(round_trip, float(explanation.round_trip_error.max()))
        bits += float(equations.bits_per_dim(log_p, dim).sum())
        noisy_bits += float(equations.bits_per_dim(noisy_log_p, dim).sum())
        noise_free_bits += float(equations.bits_per_dim(explanation.log_p, dim).sum())
        assert explanation.typical is not None
        typical += int(explanation.typical.sum())
        observe(min(start + batch_size, len(data)))
    n = len(data)
    return Evaluation(
        model=model.checkpoint.recipe.name,
        n=n,
        error=errors / n,
        bits_per_dim=bits / n,
        bits_per_dim_noisy=noisy_bits / n,
        bits_per_dim_paper=equations.paper_bits_per_dim(
            noise_free_bits / n, model.classifier.architecture.pixel_scale
        ),
        reached_q=reached / n,
        reached_q_corrected=reached_verified / n,
        passes_corrected=3 + 2 * corrections / n,
        tipping_third_class=third / n,
        round_trip_error=round_trip,
        typical=typical / n,
        seed=seed,
    )


def random_offsets(n: int, classes: int, seed: int) -> Int[Tensor, " images"]:
    """q − p modulo K, uniform over the other classes; never zero, so q is never p."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, classes, (n,), generator=generator)

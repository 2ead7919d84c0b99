"""Heatmaps of ECINN and of four gradient methods, signed and per pair of classes."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ecinn import equations
from ecinn.attribution import gradients
from ecinn.attribution.scores import ExplainedINN, PairScore
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.errors import InputError
from ecinn.explanation.counterfactual import convincing_latent
from ecinn.explanation.protocol import InvertibleClassifier
from ecinn.flow.precision import exact_convolutions
from ecinn.model import ImagesLike, Model
from ecinn.pixels import Images, Labels

HeatmapMethod = Literal[
    "ecinn", "integrated_gradients", "deep_lift", "deep_lift_shap", "gradient_shap"
]
METHODS: tuple[HeatmapMethod, ...] = get_args(HeatmapMethod)
BATCH_SIZE = 32
"""Images that go through the network with gradients at once: about 3 GB for faces of 64×64."""
_TOLERANCE = 0.5
"""Distance from [0, 1] that noise may add to a pixel."""


@dataclass(frozen=True)
class HeatmapSettings:
    """Settings of the gradient methods."""

    steps: int = 50
    """Steps of Integrated Gradients; Captum's default."""
    baselines: int = 20
    """Training images that both SHAP methods compare with; our choice: two of every digit."""
    samples: int = 20
    """Samples of GradientSHAP, each one point and one baseline; our choice: as many as
    DeepLiftSHAP uses, because Captum's default of 5 gives a noisy map."""
    noise: float = 0.0
    """Standard deviation that GradientSHAP adds to pixels in [0, 1]; Captum's default. A flow is a
    density: at 0.09, as in Captum's examples, x is no longer an image it knows."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        if min(self.steps, self.samples) < 1 or self.baselines < 2 or not self.noise >= 0:
            raise InputError("steps and samples are at least 1, baselines 2 and noise 0")


DEFAULTS = HeatmapSettings()


@dataclass(frozen=True)
class Heatmaps:
    """A signed map of every image: positive pixels are evidence for q and against p.

    ECINN's maps show what must change (lighter where positive); the other methods show what the
    present pixels contribute, compared with a baseline.
    """

    method: HeatmapMethod
    maps: Images
    output_change: Float[Tensor, " batch"] | None
    """F(x) − F(baseline) of the attributed score F, averaged over baselines; None for ECINN."""
    passes: int
    """Network evaluations per map; forward, inverse and backward count one each. `output_change`
    takes one forward pass more per image and per baseline."""

    @property
    def convergence_delta(self) -> Float[Tensor, " batch"] | None:
        """Σ map − (F(x) − F(baseline)): 0 if the map accounts for the whole change."""
        if self.output_change is None:
            return None
        return self.maps.flatten(1).sum(1) - self.output_change


@dataclass(frozen=True)
class Attribution(Heatmaps):
    """Heatmaps together with the classes that they compare."""

    p: Labels
    """Predicted class of every image."""
    q: Labels
    """Target class of every image."""


def attribute(
    model: Model | nn.Module,
    images: ImagesLike,
    target: int | str | Sequence[int | str] | Labels,
    method: HeatmapMethod = "ecinn",
    *,
    p: int | Sequence[int] | Labels | None = None,
    baselines: ImagesLike | None = None,
    settings: HeatmapSettings = DEFAULTS,
    generator: torch.Generator | None = None,
    batch_size: int = BATCH_SIZE,
) -> Attribution:
    """Attribute the decision for the predicted class p and against the target q to pixels.

    Args:
        model: the result of `ecinn.load`, or any network from pixels in [0, 1] to class scores.
        images: images of any kind for a `Model`; pixels as a float tensor for other networks.
        target: a class for all images or for every image; a `Model` also takes class names.
        method: one of `METHODS`; "ecinn" needs a `Model`.
        p: classes to explain instead of the predicted ones.
        baselines: training images. Integrated Gradients and DeepLift compare with their mean, or
            with black if None; the SHAP methods draw from them.
        generator: source of random draws; by default seeded with 0, so that maps are repeatable.
        batch_size: images that go through the network with gradients at once.
    """
    explained: ExplainedINN | nn.Module
    if isinstance(model, Model):
        explained = ExplainedINN(model.classifier, model.mu_bar)
        x = model.pixels(images)
        compared = None if baselines is None else model.pixels(baselines)
        target = model.targets(target)
        if p is None:
            p = model.predict(x).argmax(1)
    elif isinstance(images, Tensor) and isinstance(baselines, Tensor | None):
        explained, x, compared = _require_network(model), images, baselines
        _require_pixels(x)
        if p is None:
            p = gradients.class_scores(explained, x, BATCH_SIZE).argmax(1)
    else:
        raise InputError("only models of ecinn.load take other images than a tensor of pixels")
    if isinstance(target, str):
        raise InputError(f"give the number of a target class, not {target!r}")
    labels = [torch.as_tensor(given, device=x.device) for given in (p, target)]
    p, q = (label if label.ndim else label.expand(len(x)) for label in labels)
    mean = None if compared is None else compared.mean(0)
    made = heatmaps(
        explained, x, p, q, method, baseline=mean, baselines=compared,
        settings=settings, generator=generator, batch_size=batch_size,
    )  # fmt: skip
    return Attribution(made.method, made.maps, made.output_change, made.passes, p, q)


def heatmaps(
    explained: ExplainedINN | nn.Module,
    x: Images,
    p: Labels,
    q: Labels,
    method: HeatmapMethod,
    *,
    baseline: Float[Tensor, "channels height width"] | None = None,
    baselines: Float[Tensor, "count channels height width"] | None = None,
    settings: HeatmapSettings = DEFAULTS,
    generator: torch.Generator | None = None,
    batch_size: int = BATCH_SIZE,
) -> Heatmaps:
    """Attribute as `attribute` does, for given p and q of every image.

    DeepLift has rules only for non-linearities that are modules (`nn.ReLU`, not `F.relu`), each
    used once; elsewhere it takes the plain gradient. `convergence_delta` shows the difference.

    Args:
        baseline: reference of Integrated Gradients and DeepLift; black by default.
        baselines: training images that the SHAP methods draw from.
        batch_size: images that go through the network with gradients at once, baselines included.
    """
    if method not in METHODS:
        raise InputError(f"method is one of {', '.join(METHODS)}, not {method!r}")
    if batch_size < 2:
        raise InputError(f"batch_size must be 2 or more, not {batch_size}")
    _require_pairs(x, p, q)
    if isinstance(explained, ExplainedINN):
        shape = tuple(explained.classifier.image_shape)
        if x.shape[1:] != shape:
            raise InputError(f"this model reads images of shape {shape}, not {tuple(x.shape[1:])}")
        if method == "ecinn":
            return ecinn_heatmaps(explained.classifier, explained.mu_bar, x, p, q)
        score = explained.score
    else:
        score = PairScore(_require_network(explained))
        if method == "ecinn":
            raise InputError("ECINN needs an invertible network: choose another method")
    generator = generator or torch.Generator().manual_seed(0)
    chosen = _baselines(x, method, baseline, baselines, settings.baselines, generator)
    # An INN runs in exact arithmetic; other networks run as they always do.
    inn = isinstance(explained, ExplainedINN)
    # Copies made outside the caller's inference mode can take part in gradients.
    with (
        exact_convolutions() if inn else contextlib.nullcontext(),
        torch.inference_mode(mode=False),
        torch.enable_grad(),
    ):
        x, p, q, chosen = (t.detach().clone() for t in (x, p.long(), q.long(), chosen))
        index = torch.arange(len(chosen), device=x.device).expand(len(x), -1)
        if method == "gradient_shap":
            shape, device = (len(x), settings.samples), generator.device
            index = torch.randint(len(chosen), shape, generator=generator, device=device).to(p)
        comparison = gradients.Comparison(score, x, p, q, chosen, index, batch_size)
        change = comparison.output_change()  # first, because it checks the network
        if method == "integrated_gradients":
            maps = gradients.integrated_gradients(comparison, settings.steps)
            passes = 2 * settings.steps
        elif method == "gradient_shap":
            maps = gradients.gradient_shap(comparison, settings.noise, generator)
            passes = 2 * settings.samples
        else:
            # Forward and backward, both of x and of its baseline.
            maps, passes = gradients.deep_lift(comparison), 4 * index.shape[1]
    return Heatmaps(method, maps.detach(), change, passes)


def ecinn_heatmaps(
    classifier: InvertibleClassifier,
    mu_bar: Float[Tensor, "classes dim"],
    x: Images,
    p: Labels,
    q: Labels,
) -> Heatmaps:
    """Eq. 4 at α₁: h(x, q) = f⁻¹(f(x) + α₁Δ) − x, one encode and one decode."""
    _require_pairs(x, p, q)
    gradients.require_classes(len(classifier.mu), p, q)
    with exact_convolutions(), torch.no_grad():
        z, _ = classifier.encode_with_log_det(x)
        x_hat = classifier.decode(convincing_latent(classifier, mu_bar, z, p, q))
        return Heatmaps("ecinn", equations.heatmap(x, x_hat), None, 2)


def _baselines(
    x: Images,
    method: HeatmapMethod,
    baseline: Tensor | None,
    baselines: Tensor | None,
    count: int,
    generator: torch.Generator,
) -> Float[Tensor, "baselines channels height width"]:
    """Return one image for Integrated Gradients and DeepLift, random ones for the SHAP methods."""
    if method in ("integrated_gradients", "deep_lift"):
        chosen = torch.zeros_like(x[:1]) if baseline is None else baseline[None]
    elif baselines is None or len(baselines) < 2:
        raise InputError(f"{method} compares with training images: give 2 baselines or more")
    else:
        order = torch.randperm(len(baselines), generator=generator, device=generator.device)
        chosen = baselines[order[:count].to(baselines.device)]
    if chosen.shape[1:] != x.shape[1:]:
        raise InputError(f"a baseline must have the images' shape, {tuple(x.shape[1:])}")
    return chosen.to(x)


def _require_network(network: object) -> nn.Module:
    if isinstance(network, nn.Module) and not isinstance(network, GenerativeClassifier):
        return network
    raise InputError(
        "give the result of ecinn.load, an ExplainedINN with class means, or a torch.nn.Module "
        "of class scores"
    )


def _require_pixels(x: Tensor) -> None:
    if x.ndim == 4 and not len(x):
        raise InputError("no images were given")
    if x.ndim != 4 or not x.is_floating_point():
        shape = "(images, channels, height, width)"
        raise InputError(f"x must be floats of shape {shape}, not {x.dtype} of {tuple(x.shape)}")
    if not -_TOLERANCE <= float(x.min()) <= float(x.max()) <= 1 + _TOLERANCE:
        raise InputError(f"pixels must lie in [0, 1], not up to {float(x.abs().max()):.3g}")


def _require_pairs(x: Tensor, p: Tensor, q: Tensor) -> None:
    _require_pixels(x)
    if p.shape != (len(x),) or q.shape != (len(x),):
        raise InputError(f"p and q must be one class for each of the {len(x)} images")
    if bool((p == q).any()):
        row = int((p == q).nonzero()[0])
        raise InputError(f"image {row} is already of the target class: choose another target")

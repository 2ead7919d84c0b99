"""Heatmaps: ECINN's and four gradient methods', signed and per pair of classes, one signature."""

import contextlib
import copy
import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ecinn import equations
from ecinn.attribution.scores import Classes, ExplainedINN, Explainer, PairScore
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.errors import InputError
from ecinn.explanation.counterfactual import convincing_latent
from ecinn.explanation.protocol import InvertibleClassifier
from ecinn.explanation.result import Images
from ecinn.flow.precision import exact_convolutions

HeatmapMethod = Literal[
    "ecinn", "integrated_gradients", "deep_lift", "deep_lift_shap", "gradient_shap"
]
METHODS: tuple[HeatmapMethod, ...] = get_args(HeatmapMethod)
BATCH_SIZE = 32
"""Images at once through the network with gradients: some 3 GB for faces of 64×64."""

_BEYOND = 0.5
"""What noise may add to a pixel."""

_NON_LINEAR = (nn.ReLU, nn.ELU, nn.LeakyReLU, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softmax)
_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
"""What DeepLift has rules for."""
_Attribute = Callable[[Tensor, Tensor], Tensor]
"""Maps, from row numbers of images and of baselines."""


@dataclass(frozen=True)
class HeatmapSettings:
    """What the gradient methods are run with."""

    steps: int = 50
    """Of Integrated Gradients; Captum's default."""
    baselines: int = 20
    """Training images that both SHAP methods compare with; ours: two of every digit."""
    samples: int = 20
    """Of GradientSHAP, one point and one baseline each; ours: as many as DeepLiftSHAP takes,
    where Captum's default of 5 leaves the map to chance."""
    noise: float = 0.0
    """Standard deviation added to x by GradientSHAP, in pixels of [0, 1]; Captum's default. A flow
    is a density: at 0.09, as in Captum's examples, x is no longer an image it knows."""

    def __post_init__(self) -> None:
        """Refuse what cannot be run."""
        if self.steps < 1 or self.samples < 1:
            raise InputError("steps and samples are 1 or more")
        if self.baselines < 2:
            raise InputError("a SHAP method takes 2 baselines or more; for one there is deep_lift")
        if not self.noise >= 0:
            raise InputError(f"noise is 0 or more, not {self.noise}")


DEFAULTS = HeatmapSettings()


@dataclass(frozen=True)
class Heatmaps:
    """A signed map of every image: where it is positive, it speaks for q and against p.

    ECINN's says what must change (lighter where positive); the others' say what the pixels as
    they are contribute, against a baseline.
    """

    method: HeatmapMethod
    maps: Images
    output_change: Float[Tensor, " batch"] | None
    """F(x) − F(baseline), the mean over baselines, of the F that is attributed; None for ECINN."""
    passes: int
    """Network evaluations per map; forward, inverse and backward count one each, on one image.
    `output_change` takes one forward more per image and per baseline."""

    @property
    def convergence_delta(self) -> Float[Tensor, " batch"] | None:
        """Σ map − (F(x) − F(baseline)): 0 where the map accounts for the whole change."""
        if self.output_change is None:
            return None
        return self.maps.flatten(1).sum(1) - self.output_change


def heatmaps(
    explained: ExplainedINN | Explainer | nn.Module,
    x: Images,
    p: Classes | int,
    q: Classes | int,
    method: HeatmapMethod,
    *,
    baseline: Float[Tensor, "channels height width"] | None = None,
    baselines: Float[Tensor, "count channels height width"] | None = None,
    settings: HeatmapSettings = DEFAULTS,
    generator: torch.Generator | None = None,
    batch_size: int = BATCH_SIZE,
) -> Heatmaps:
    """Why each image x is p and not q, pixel by pixel, by any of `METHODS`.

    DeepLift sees only the non-linearities that are modules (`nn.ReLU`, not `F.relu`), each used
    once; through all others it takes the plain gradient. The convergence delta tells.

    Args:
        explained: an INN, or any network from pixels of [0, 1] to class scores.
        p, q: the classes of every image, or one for all.
        baseline: what Integrated Gradients and DeepLift compare with; black by default.
        baselines: training images that the SHAP methods draw from.
        generator: what they draw with; by default seeded with 0, so that maps can be repeated.
        batch_size: images at once through the network with gradients, DeepLift's baselines too.
    """
    if method not in METHODS:
        raise InputError(f"method is one of {', '.join(METHODS)}, not {method!r}")
    if not isinstance(explained, ExplainedINN | nn.Module):
        if not isinstance(explained, Explainer):
            raise InputError("give what ecinn.load gives, or a torch.nn.Module of class scores")
        explained = ExplainedINN(explained.classifier, explained.mu_bar)
    p, q = (_of_all(each, x) for each in (p, q))
    _check_pairs(x, p, q)
    if isinstance(explained, ExplainedINN) and x.shape[1:] != explained.classifier.image_shape:
        shape = tuple(explained.classifier.image_shape)
        raise InputError(f"this model reads images of shape {shape}, not {tuple(x.shape[1:])}")
    if method == "ecinn":
        if not isinstance(explained, ExplainedINN):
            raise InputError(
                "ECINN needs an inverse, which this network lacks: choose another method"
            )
        return ecinn_heatmaps(explained.classifier, explained.mu_bar, x, p, q)
    score = _score(explained)
    if batch_size < 2:
        raise InputError(f"batch_size is 2 or more, not {batch_size}")
    generator = generator or torch.Generator().manual_seed(0)
    stack = _baselines(x, method, baseline, baselines, settings.baselines, generator)
    # A network without an inverse is run as it always is; an INN exactly.
    is_inn = isinstance(explained, ExplainedINN)
    precisely = exact_convolutions() if is_inn else contextlib.nullcontext()
    # Copies made outside of the caller's inference mode can take part in gradients.
    with precisely, torch.inference_mode(mode=False), torch.enable_grad():
        x, p, q, stack = (t.detach().clone() for t in (x, p.long(), q.long(), stack))
        index = torch.arange(len(stack), device=x.device).expand(len(x), -1)
        if method == "gradient_shap":
            shape, device = (len(x), settings.samples), generator.device
            index = torch.randint(len(stack), shape, generator=generator, device=device).to(p)
        pairs = _Pairs(score, x, p, q, stack, index, batch_size)
        change = pairs.output_change()  # first, because it finds what is wrong with the network
        if method == "integrated_gradients":
            maps, passes = _integrated_gradients(pairs, settings.steps), 2 * settings.steps
        elif method == "gradient_shap":
            maps, passes = _gradient_shap(pairs, settings.noise, generator), 2 * index.shape[1]
        else:
            # Forward and backward, both of x and of its baseline.
            maps, passes = _deep_lift(pairs), 4 * index.shape[1]
    return Heatmaps(method, maps.detach(), change, passes)


def ecinn_heatmaps(
    classifier: InvertibleClassifier,
    mu_bar: Float[Tensor, "classes dim"],
    x: Images,
    p: Classes,
    q: Classes,
) -> Heatmaps:
    """Eq. 4 at α₁: h(x, q) = f⁻¹(f(x) + α₁Δ) − x, one encode and one decode."""
    _check_pairs(x, p, q)
    _check_classes(len(classifier.mu), p, q)
    with exact_convolutions(), torch.no_grad():
        z, _ = classifier.encode_with_log_det(x)
        x_hat = classifier.decode(convincing_latent(z, classifier.mu, mu_bar, p, q))
        return Heatmaps("ecinn", equations.heatmap(x, x_hat), None, 2)


@dataclass(frozen=True)
class _Pairs:
    """Every image with the baselines it is compared with."""

    score: PairScore
    x: Images
    p: Classes
    q: Classes
    stack: Float[Tensor, "baselines channels height width"]
    index: Int[Tensor, "batch each"]
    """Which baselines, for every image."""
    batch_size: int

    def output_change(self) -> Float[Tensor, " batch"]:
        """F(x) − F(baseline), the mean over the image's baselines."""
        with torch.no_grad():
            at_x, at_baselines = (
                torch.cat([self.score.scores(part) for part in images.split(self.batch_size)])
                for images in (self.x, self.stack)
            )
        if at_x.ndim != 2:
            raise InputError(f"scores are of shape (images, classes), not {tuple(at_x.shape)}")
        _check_classes(at_x.shape[1], self.p, self.q)
        p, q = (y[:, None].expand_as(self.index) for y in (self.p, self.q))
        start = self.score.compare(at_baselines[self.index], p, q)
        return self.score.compare(at_x, self.p, self.q) - start.mean(1)

    def mean_map(self, size: int, attribute: _Attribute) -> Images:
        """The mean over baselines of what `attribute` gives for `size` pairs at a time."""
        total = torch.zeros_like(self.x)
        each = self.index.shape[1]
        for part in torch.arange(self.index.numel(), device=self.x.device).split(size):
            rows = part // each
            total.index_add_(0, rows, attribute(rows, self.index.flatten()[part]).detach())
        return total / each


def _integrated_gradients(pairs: _Pairs, steps: int) -> Images:
    """(x − b) ∫₀¹ ∇F(b + t(x − b)) dt, by Gauss and Legendre's rule."""
    method = _captum().IntegratedGradients(pairs.score)
    size = pairs.batch_size
    options = {"n_steps": steps, "internal_batch_size": size}
    return pairs.mean_map(size, _by(pairs, method.attribute, options))


def _deep_lift(pairs: _Pairs) -> Images:
    """DeepLIFT's rescale rule; DeepLiftSHAP is its mean over several baselines."""
    # Captum hangs hooks and tensors on modules: on copies of them, which share the weights, it
    # disturbs nobody who uses the network meanwhile and leaves nothing behind when it fails.
    shared = (*pairs.score.parameters(), *pairs.score.buffers())
    score = copy.deepcopy(pairs.score, {id(tensor): tensor for tensor in shared})
    for module in score.modules():
        if isinstance(module, (*_NON_LINEAR, *_POOLS)):
            # Captum's hooks mix up two that share a tensor, as a ReLU and the max-pool after it.
            module.register_forward_pre_hook(lambda _, inputs: inputs[0].clone())
    method = _captum().DeepLift(score)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*Setting forward, backward hooks", UserWarning)
        try:
            # x and its baseline go through the network side by side.
            return pairs.mean_map(pairs.batch_size // 2, _by(pairs, method.attribute, {}))
        except RuntimeError as error:
            if "more than once" not in str(error):
                raise
            raise InputError(
                "DeepLift needs a module for every non-linearity; here one is used more than once"
            ) from error


def _by(pairs: _Pairs, attribute: Callable[..., Tensor], options: dict[str, int]) -> _Attribute:
    """What a method of Captum's says of some rows of images and of baselines."""

    def of_rows(rows: Tensor, baseline: Tensor) -> Tensor:
        x, classes = pairs.x[rows].requires_grad_(), (pairs.p[rows], pairs.q[rows])
        return attribute(x, pairs.stack[baseline], additional_forward_args=classes, **options)

    return of_rows


def _gradient_shap(pairs: _Pairs, noise: float, generator: torch.Generator) -> Images:
    """Mean of (x' − b) ∇F(b + t(x' − b)) for x' = x + noise, t ~ U(0, 1) and random baselines b.

    Not Captum's own, whose draws come from global generators and depend on the batch size; the
    same draws give the same map.
    """
    x, device = pairs.x, generator.device
    share = torch.rand(pairs.index.numel(), generator=generator, device=device).to(x)
    drawn = 0

    def attribute(rows: Tensor, baseline: Tensor) -> Tensor:
        nonlocal drawn
        start, end = pairs.stack[baseline], x[rows]
        if noise:
            # One at a time, so that the numbers do not depend on how many are drawn together.
            shape = x.shape[1:]
            draws = [torch.randn(shape, generator=generator, device=device) for _ in rows]
            end = end + noise * torch.stack(draws).to(x)
        t = share[drawn : drawn + len(rows), None, None, None]
        drawn += len(rows)
        point = torch.lerp(start, end, t).requires_grad_()
        value = pairs.score(point, pairs.p[rows], pairs.q[rows])
        (gradient,) = torch.autograd.grad(value.sum(), point)
        return (end - start) * gradient

    return pairs.mean_map(pairs.batch_size, attribute)


def _score(explained: ExplainedINN | nn.Module) -> PairScore:
    if isinstance(explained, GenerativeClassifier):
        raise InputError("an INN is given with its means: ExplainedINN(classifier, mu_bar)")
    network = explained.classifier if isinstance(explained, ExplainedINN) else explained
    if any(module.training for module in network.modules()):
        raise InputError("the network is in training mode: call its eval() first")
    return explained.score if isinstance(explained, ExplainedINN) else PairScore(explained)


def _baselines(
    x: Images,
    method: HeatmapMethod,
    baseline: Tensor | None,
    baselines: Tensor | None,
    count: int,
    generator: torch.Generator,
) -> Float[Tensor, "baselines channels height width"]:
    """One image for Integrated Gradients and DeepLift, some random ones for the SHAP methods."""
    if method in ("integrated_gradients", "deep_lift"):
        stack = torch.zeros_like(x[:1]) if baseline is None else baseline[None]
    elif baselines is None or len(baselines) < 2:
        raise InputError(f"{method} compares with training images: give 2 baselines or more")
    else:
        chosen = torch.randperm(len(baselines), generator=generator, device=generator.device)
        stack = baselines[chosen[:count].to(baselines.device)]
    if stack.shape[1:] != x.shape[1:]:
        raise InputError(f"a baseline is of the images' shape, {tuple(x.shape[1:])}")
    return stack.to(x)


def _of_all(given: Tensor | int, x: Tensor) -> Tensor:
    return torch.full((len(x),), given, device=x.device) if isinstance(given, int) else given


def _check_pairs(x: Tensor, p: Tensor, q: Tensor) -> None:
    if x.ndim == 4 and not len(x):
        raise InputError("no images were given")
    if x.ndim != 4 or not x.is_floating_point():
        given = f"{x.dtype} of shape {tuple(x.shape)}"
        raise InputError(f"x is floats of shape (images, channels, height, width), not {given}")
    if not -_BEYOND <= float(x.min()) <= float(x.max()) <= 1 + _BEYOND:
        raise InputError(f"pixels lie in [0, 1], not up to {float(x.abs().max()):.3g}")
    if p.shape != (len(x),) or q.shape != (len(x),):
        raise InputError(f"p and q are one class each for {len(x)} images")
    if bool((p == q).any()):
        raise InputError(f"image {int((p == q).nonzero()[0])} has p = q: give it another target")


def _check_classes(classes: int, p: Tensor, q: Tensor) -> None:
    both = torch.cat([p, q])
    if bool(((both < 0) | (both >= classes)).any()):
        raise InputError(f"p and q are classes 0 to {classes - 1}")


def _captum() -> ModuleType:
    try:
        return importlib.import_module("captum.attr")
    except ImportError as error:
        raise InputError("this method needs Captum: pip install 'ecinn[heatmaps]'") from error

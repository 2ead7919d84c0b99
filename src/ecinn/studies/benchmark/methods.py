"""The methods that can be benchmarked, by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from ecinn.attribution import search as baselines
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.explanation.result import Counterfactuals
from ecinn.flow.precision import exact_convolutions
from ecinn.metrics.counterfactuals import Images
from ecinn.model import Model
from ecinn.studies.benchmark.quality import Observe

_BATCH = 500
Run = Callable[[Images, Int[Tensor, "batch 1"]], Counterfactuals]
"""8-bit images and a target each become counterfactuals."""


@dataclass(frozen=True)
class Workshop:
    """What methods are made from."""

    model: Model
    load_training: Callable[[], Dataset]
    observe: Observe = lambda what, done, total: None


def _ecinn(workshop: Workshop) -> Run:
    model = workshop.model
    return lambda images, q: baselines.ecinn(
        model.classifier, model.mu_bar, model.pixels(images), q
    )


def _model_means(workshop: Workshop) -> Run:
    model = workshop.model
    return lambda images, q: baselines.model_means(
        model.classifier, model.mu_bar, model.pixels(images), q
    )


def _pixel_gradient(norm: Literal["l1", "l2"]) -> Callable[[Workshop], Run]:
    def make(workshop: Workshop) -> Run:
        model = workshop.model
        return lambda images, q: baselines.pixel_gradient(
            model.classifier, model.mu_bar, model.pixels(images), q, norm=norm
        )

    return make


def _latent_gradient(workshop: Workshop) -> Run:
    model = workshop.model
    return lambda images, q: baselines.latent_gradient(
        model.classifier, model.mu_bar, model.pixels(images), q
    )


def _nearest_image(workshop: Workshop) -> Run:
    model, training = workshop.model, workshop.load_training()
    predicted = read(model, training.images, workshop.observe, "reading training images")
    return lambda images, q: baselines.nearest_image(
        model.classifier,
        model.mu_bar,
        model.pixels(images),
        q,
        images=training.images,
        predicted=predicted,
    )


METHODS: Mapping[str, Callable[[Workshop], Run]] = MappingProxyType(
    {
        "ecinn": _ecinn,
        "model-means": _model_means,
        "pixel-gradient-l1": _pixel_gradient("l1"),
        "pixel-gradient-l2": _pixel_gradient("l2"),
        "latent-gradient": _latent_gradient,
        "nearest-image": _nearest_image,
    }
)

ABOUT: Mapping[str, str] = MappingProxyType(
    {
        "ecinn": "x̂ = f⁻¹(f(x) + α₁Δ) along measured means",
        "model-means": "the same along the model's own means",
        "pixel-gradient-l1": "Wachter et al.: gradient steps on pixels, near in L1",
        "pixel-gradient-l2": "the same, near in L2",
        "latent-gradient": "Dombrowski et al.: gradient steps on the latent, through the image "
        "as published; with the flow's own posterior the same steps could be taken in latent "
        "space, and would then cost one encode and one decode",
        "nearest-image": "the nearest training image read as q; reading all training images once "
        "is not in its passes and seconds",
    }
)


def require_known(names: Sequence[str]) -> None:
    """Every name once, and each one of METHODS."""
    if not names:
        raise InputError(f"name at least one method of: {', '.join(METHODS)}")
    for name in names:
        if name not in METHODS:
            raise InputError(f"no method is called {name!r}; there are: {', '.join(METHODS)}")
        if list(names).count(name) > 1:
            raise InputError(f"the method {name} is named twice: name every method once")


@torch.inference_mode()
def read(
    model: Model,
    images: Images,
    observe: Observe = lambda what, done, total: None,
    what: str = "reading images",
) -> Int[Tensor, " batch"]:
    """C(x) of any number of 8-bit images, where they are."""
    predicted = torch.zeros(len(images), dtype=torch.long, device=images.device)
    with exact_convolutions():
        for start in range(0, len(images), _BATCH):
            part = slice(start, start + _BATCH)
            answer = model.classifier.predict(model.pixels(images[part]))
            predicted[part] = answer.to(images.device)
            observe(what, min(start + _BATCH, len(images)), len(images))
    return predicted

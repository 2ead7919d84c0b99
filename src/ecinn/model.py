"""A trained model people can use: predict, explain and sample on images as they have them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from ecinn.classifier.checkpoint import Checkpoint, load_checkpoint
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.data.photographs import Photograph, fit_photograph, read_photograph
from ecinn.errors import InputError
from ecinn.explanation.counterfactual import Targets, explain
from ecinn.explanation.result import Explanation
from ecinn.flow.precision import exact_convolutions
from ecinn.pixels import to_pixels, to_uint8

ImageLike = Tensor | np.ndarray | Image.Image | str | Path
ImagesLike = ImageLike | Sequence[ImageLike]


class Model:
    """A checkpoint in use. Images may be tensors, arrays, Pillow images or paths."""

    def __init__(self, checkpoint: Checkpoint, device: str | torch.device = "cpu") -> None:
        self.checkpoint = checkpoint
        self.device = torch.device(device)
        self.classifier: GenerativeClassifier = checkpoint.classifier.to(self.device)
        self.mu_bar = checkpoint.mu_bar.to(self.device)
        self.ood = checkpoint.ood.to(self.device)

    @property
    def class_names(self) -> tuple[str, ...]:
        """What the classes are called, by their number."""
        return self.checkpoint.class_names

    @torch.inference_mode()
    def predict(self, images: ImagesLike) -> Float[Tensor, "batch classes"]:
        """p(y|x) of every class, a row per image."""
        with exact_convolutions():
            return self.classifier.log_posterior(self.pixels(images)).exp()

    @torch.inference_mode()
    def explain(
        self,
        images: ImagesLike,
        target: Targets | str = "all",
        *,
        confidence: float | None = None,
        path: int | Sequence[float] | None = None,
        check: bool = True,
        correct: bool = False,
    ) -> Explanation:
        """Counterfactuals of every image for one target class, several, or all others.

        Args:
            confidence: how sure of the target the classifier shall be, instead of α₁.
            path: also give the path: at these α, or at so many from x to the counterfactual.
            check: have the classifier read the stored 8-bit images, one further evaluation.
            correct: correct what is not read as was asked, two further evaluations a time.
        """
        with exact_convolutions():
            return explain(
                self.classifier,
                self.mu_bar,
                self.pixels(images),
                self.targets(target),
                confidence=confidence,
                path=path,
                check=check,
                correct=correct,
                ood=self.ood,
                class_names=self.class_names,
            )

    @torch.inference_mode()
    def sample(
        self,
        labels: Tensor | Sequence[int],
        *,
        temperature: float = 0.5,
        seed: int = 0,
    ) -> UInt8[Tensor, "batch channels height width"]:
        """New images of these classes, from around the mean latent μ̄ of real ones.

        Latents of clean images lie about half as wide as those of the noisy ones that the network
        learned from, hence the default temperature. `classifier.sample` draws from p(x|y) itself.
        """
        label = torch.as_tensor(labels, device=self.device)
        classes = len(self.class_names)
        whole = label.ndim == 1 and not label.is_floating_point()
        if not whole or bool(((label < 0) | (label >= classes)).any()):
            raise InputError(f"labels are a list of classes 0 to {classes - 1}")
        if not temperature >= 0:
            raise InputError(f"temperature is 0 or more, not {temperature}")
        generator = torch.Generator(self.device).manual_seed(seed)
        means = self.mu_bar[label]
        noise = torch.randn(means.shape, generator=generator, device=self.device)
        with exact_convolutions():
            return to_uint8(self.classifier.decode(means + temperature * noise))

    def targets(self, target: Targets | str) -> Targets:
        """Class names become class numbers."""
        if isinstance(target, str) and target != "all":
            if target not in self.class_names:
                raise InputError(
                    f"no class is called {target!r}; there are: {', '.join(self.class_names)}"
                )
            return self.class_names.index(target)
        return target  # type: ignore[return-value]

    def pixels(self, images: ImagesLike) -> Float[Tensor, "batch channels height width"]:
        """Images of any kind as the classifier's input."""
        if isinstance(images, Tensor | np.ndarray):
            return self._tensor_pixels(torch.as_tensor(images))
        several = [images] if isinstance(images, str | Path | Image.Image) else list(images)
        if not several:
            raise InputError("no images were given")
        return torch.cat([self._one(image) for image in several])

    def _one(self, image: ImageLike) -> Tensor:
        if isinstance(image, Tensor | np.ndarray):
            return self._tensor_pixels(torch.as_tensor(image))
        return to_pixels(self.photograph(image).image[None].to(self.device))

    def photograph(self, image: str | Path | Image.Image) -> Photograph:
        """A file or Pillow image as the model reads it, with what had to be done to it."""
        digit = self.checkpoint.recipe.mnist_framing
        shape = self.classifier.image_shape
        if isinstance(image, Image.Image):
            return fit_photograph(image, shape, digit=digit)
        return read_photograph(Path(image), shape, digit=digit)

    def _tensor_pixels(self, images: Tensor) -> Float[Tensor, "batch channels height width"]:
        """8-bit values, or floats that are pixels of [0, 1] already."""
        shape = self.classifier.image_shape
        if shape[0] == 1 and images.shape[-2:] == shape[1:] and images.ndim in (2, 3):
            images = images.reshape(-1, *shape)
        elif images.ndim == 3:
            images = images[None]
        if images.ndim != 4 or images.shape[1:] != shape or not len(images):
            raise InputError(
                f"images are of shape (n, {', '.join(map(str, shape))}), not {tuple(images.shape)}"
            )
        images = images.to(self.device)
        if images.dtype == torch.uint8:
            return to_pixels(images)
        if not images.is_floating_point():
            raise InputError(f"pixels are uint8, or floats of [0, 1], not {images.dtype}")
        if not bool(torch.isfinite(images).all()) or bool(images.abs().max() > 2):
            raise InputError("float pixels lie in [0, 1]; give uint8 for values up to 255")
        return images.float()


def load(name_or_path: str | Path, device: str | torch.device = "cpu") -> Model:
    """A shipped model by its name, or any model by its path."""
    return Model(load_checkpoint(name_or_path), device)

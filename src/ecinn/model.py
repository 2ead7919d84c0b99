"""A trained model in use: predict, explain and sample, on images of any kind."""

import dataclasses
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor

from ecinn.blackbox.files import FILE as CLASSIFIER_FILE
from ecinn.blackbox.files import load_classifier
from ecinn.classifier.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.pretrained import download, is_repository, save_pretrained
from ecinn.classifier.recipes import Recipe
from ecinn.data.photographs import Photograph, image_files, read_photograph
from ecinn.errors import InputError
from ecinn.explanation.counterfactual import checked_confidence, explain
from ecinn.explanation.protocol import Reader
from ecinn.explanation.result import ALPHA_1, Confidence, Explanation, join
from ecinn.explanation.targets import AlreadyPredictedError, Targets, nothing_left, number
from ecinn.flow.device import resolve_device
from ecinn.flow.precision import exact_convolutions
from ecinn.pixels import Images, Inputs, pixels_of, to_pixels, to_uint8
from ecinn.progress import Observer, Progress, ignore

ImageLike = Tensor | np.ndarray | Image.Image | str | Path | bytes | io.IOBase
Number = np.integer | np.floating | Int[Tensor, ""] | Float[Tensor, ""]
"""A number of NumPy or torch."""
TargetsLike = Targets | str | Sequence[int | str | Number] | np.ndarray | Number

BATCH_SIZE = 128
"""Images that are explained at once."""


ImagesLike = Inputs | ImageLike | Sequence[ImageLike]


class Model:
    """A checkpoint in use. Images may be tensors, arrays, Pillow images, files or folders.

    Satisfies `InvertibleClassifier`, with arithmetic that is exact enough to invert.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: str | torch.device = "auto",
        reader: Reader | Path | None = None,
    ) -> None:
        """Put a checkpoint to use.

        Args:
            reader: the classifier that the model was distilled from, or the folder of its
                `classifier.toml`: explanations are about it and are verified on its answers.
        """
        self.checkpoint = checkpoint
        self._reader = reader
        self.device = resolve_device(device)
        self.classifier: GenerativeClassifier = checkpoint.classifier.to(self.device)
        self.mu_bar = checkpoint.mu_bar.to(self.device)
        self.ood = checkpoint.ood.to(self.device)
        self._fused: tuple[GenerativeClassifier, GenerativeClassifier] | None = None

    def __repr__(self) -> str:
        names = self.class_names
        classes = ", ".join(names if len(names) <= 4 else (*names[:2], "…", names[-1]))
        parameters = sum(parameter.numel() for parameter in self.classifier.parameters())
        shape = "×".join(map(str, self.image_shape))
        return (
            f"Model({self.name!r}: {len(names)} classes ({classes}), {shape} pixels, "
            f"{parameters / 1e6:.1f} M parameters, {self.device})"
        )

    @property
    def name(self) -> str:
        """The name of its recipe."""
        return self.recipe.name

    @property
    def recipe(self) -> Recipe:
        """The settings it was trained with."""
        return self.checkpoint.recipe

    @property
    def class_names(self) -> tuple[str, ...]:
        """The name of every class, by its number."""
        return self.checkpoint.class_names

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of its images."""
        return self.classifier.image_shape

    @property
    def mu(self) -> Float[Tensor, "classes dim"]:
        """Class means μ of the model; `mu_bar` holds the measured means μ̄."""
        return self.classifier.mu

    @property
    def tau(self) -> Tensor:
        """Inverse temperature of the posterior."""
        return self.classifier.tau

    @property
    def reader(self) -> Reader | None:
        """The classifier that explanations are about, if the model is its student."""
        if isinstance(self._reader, Path):
            self._reader = load_classifier(self._reader, self.class_names)
        return self._reader

    @property
    def student(self) -> "Model":
        """The model alone: it explains itself, and no other classifier is queried."""
        return self if self._reader is None else Model(self.checkpoint, self.device)

    @property
    def default_confidence(self) -> Confidence:
        """What `explain` requests by default: its recipe's confidence, or "alpha_1"."""
        return self.recipe.default_confidence or ALPHA_1

    def request(self, confidence: Confidence | Number | None) -> tuple[Confidence, bool]:
        """Return the confidence, for None the default, and whether that is the model's own."""
        if confidence is not None:
            return checked_confidence(confidence), False
        return self.default_confidence, self.default_confidence != ALPHA_1

    def fuse(self) -> GenerativeClassifier:
        """Return a faster copy for inference, made once: processes forked afterwards share it."""
        if self._fused is None or self._fused[0] is not self.classifier:
            self._fused = self.classifier, self.classifier.fused()
        return self._fused[1]

    @property
    def _network(self) -> GenerativeClassifier | Any:  # noqa: ANN401 (tests put others in)
        fusible = isinstance(self.classifier, GenerativeClassifier)
        return self.classifier if torch.is_grad_enabled() or not fusible else self.fuse()

    def encode_with_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """z = f(x) and log |det J| of pixels."""
        with exact_convolutions():
            return self._network.encode_with_log_det(x)

    def decode(self, z: Tensor) -> Tensor:
        """x = f⁻¹(z), as pixels of [0, 1]; `ecinn.pixels.to_uint8` makes 8-bit images of them."""
        dim = self.mu_bar.shape[1]
        if not isinstance(z, Tensor) or z.ndim != 2 or z.shape[1] != dim:
            given = tuple(z.shape) if isinstance(z, Tensor) else type(z).__name__
            raise InputError(
                f"latents are a tensor of shape (n, {dim}), not {given}: take those that `encode` "
                "returns"
            )
        with exact_convolutions():
            return self._network.decode(z.to(self.mu_bar))

    @torch.inference_mode()
    def encode(self, images: ImagesLike) -> Float[Tensor, "batch dim"]:
        """z = f(x) of images of any kind."""
        return self.encode_with_log_det(self.pixels(images))[0]

    @torch.inference_mode()
    def predict(self, images: ImagesLike) -> Float[Tensor, "batch classes"]:
        """p(y|x) of every class, one row per image."""
        with exact_convolutions():
            return self._network.log_posterior(self.pixels(images)).exp()

    @torch.inference_mode()
    def explain(
        self,
        images: ImagesLike,
        target: TargetsLike = "all",
        *,
        confidence: Confidence | Number | None = None,
        path: int | Number | Sequence[float] | None = None,
        check: bool = True,
        correct: bool = False,
        observe: Observer = ignore,
    ) -> Explanation:
        """Compute counterfactuals of every image for one target class, several, or all others.

        Images that are already predicted as a target are skipped and reported in `skipped`. A
        student's explanations are verified on the classifier that it was distilled from
        (`reader`), whose predictions and answers they show.

        Args:
            target: a class by name or number, several, one row per image, or "all".
            confidence: the p(q) of the convincing counterfactual, or "alpha_1" for the paper's
                α₁; None for the model's default, `default_confidence`.
            path: also return the path, at these α, or at this many from x to the counterfactual.
            check: let the classifier read the stored 8-bit images: one more evaluation.
            correct: correct α until the stored image is classified as requested, and α₀ until
                the stored tipping point is a tie: two more evaluations each time.
            observe: is told how many images are done.
        """
        confidence, by_default = self.request(confidence)
        given = self.read(images)
        targets = self.targets(target)
        parts: list[Explanation] = []
        skipped = []
        total = len(given.pixels)
        for start in range(0, total, BATCH_SIZE):
            rows = slice(start, min(start + BATCH_SIZE, total))
            try:
                part = explain(
                    self,
                    self.mu_bar,
                    given.pixels[rows],
                    _targets_of(targets, rows, total),
                    confidence=confidence,
                    path=number(path),
                    check=check,
                    correct=correct,
                    ood=self.ood,
                    class_names=self.class_names,
                    reader=self.reader,
                )
                parts.append(dataclasses.replace(part, indices=part.indices + start))
                left_out = part.skipped
            except AlreadyPredictedError as error:
                left_out = error.skipped
            skipped += [dataclasses.replace(s, index=s.index + start) for s in left_out]
            if total > BATCH_SIZE:
                observe(Progress("explaining", rows.stop, total))
        if not parts:
            raise nothing_left(skipped)
        whole = join(parts)
        kept = whole.indices.tolist()
        return dataclasses.replace(
            whole,
            model=self.name,
            confidence_by_default=by_default,
            planted=self.recipe.planted,
            sources=tuple(given.sources[i] for i in kept) if any(given.sources) else (),
            remarks=tuple(given.remarks[i] for i in kept) if any(given.remarks) else (),
            skipped=tuple(dataclasses.replace(s, source=given.sources[s.index]) for s in skipped),
        )

    @torch.inference_mode()
    def sample(
        self, labels: Tensor | Sequence[int], *, temperature: float = 1.0, seed: int = 0
    ) -> UInt8[Tensor, "batch channels height width"]:
        """Draw new images of these classes from p(x|y): f⁻¹(μ_y + temperature · ε).

        A temperature below 1 stays closer to the class mean: less variety, fewer failures.
        """
        wrong = InputError(f"labels are a list of classes 0 to {len(self.class_names) - 1}")
        try:
            label = torch.as_tensor(labels, device=self.device)
        except (TypeError, ValueError, RuntimeError):
            raise wrong from None
        whole = label.ndim == 1 and not label.is_floating_point()
        if not whole or bool(((label < 0) | (label >= len(self.class_names))).any()):
            raise wrong
        if not temperature >= 0:
            raise InputError(f"a temperature is 0 or more, not {temperature}")
        generator = torch.Generator(self.device).manual_seed(seed)
        with exact_convolutions():
            return to_uint8(self._network.sample(label, generator, temperature))

    def save(self, path: str | Path) -> None:
        """Write the model to one file, .safetensors or compressed .safetensors.xz."""
        save_checkpoint(self.checkpoint, Path(path))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a folder in Hugging Face's convention: the model, config.json and a model card.

        The classifier that a student explains is not part of it.
        """
        save_pretrained(self.checkpoint, Path(folder))

    @classmethod
    def from_pretrained(
        cls,
        name_or_folder: str | Path,
        device: str | torch.device = "auto",
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> "Model":
        """Load a folder that `save_pretrained` wrote, or a repository of the Hugging Face hub.

        Args:
            name_or_folder: a folder, or "owner/name" on the hub; also whatever `load` accepts.
            revision: branch, tag or commit on the hub.
            cache_dir: where downloads are kept; by default where Hugging Face keeps them.
            local_files_only: take what was downloaded before, and do not use the network.
        """
        if not Path(name_or_folder).exists() and is_repository(str(name_or_folder)):
            name_or_folder = download(
                str(name_or_folder),
                revision=revision,
                cache_dir=cache_dir,
                local_files_only=local_files_only,
            )
        return load(name_or_folder, device)

    def targets(self, target: TargetsLike) -> Any:  # noqa: ANN401
        """Turn class names, and numbers in text, into class numbers."""
        target = number(target)
        if isinstance(target, str):
            return "all" if target == "all" else self._class_number(target)
        if isinstance(target, np.ndarray) and target.dtype.kind in "iu":
            return torch.from_numpy(target.astype(np.int64)).to(self.device)
        if isinstance(target, Tensor):
            return target.to(self.device)
        if isinstance(target, int | np.integer):
            return int(target)
        if isinstance(target, Iterable) and not isinstance(target, bytes):
            listed = [number(each) for each in target]
            if any(isinstance(each, str) for each in listed):
                return [self._class_number(each) for each in listed]
            return listed
        raise InputError(f"a target is a class, several classes or 'all', not {target!r}")

    def _class_number(self, name: Any) -> int:  # noqa: ANN401
        if isinstance(name, int):
            return name
        if name not in self.class_names:
            if re.fullmatch(r"[+-]?\d{1,9}", str(name)):
                return int(name)
            raise InputError(
                f"no class is called {name!r}; there are: {', '.join(self.class_names)}"
            )
        return self.class_names.index(name)

    def pixels(self, images: ImagesLike) -> Images:
        """Images of any kind as the classifier's input."""
        return self.read(images).pixels

    def read(self, images: ImagesLike) -> Inputs:
        """Images of any kind as the classifier's input, with their files and remarks."""
        if isinstance(images, Inputs):
            return images
        if isinstance(images, Tensor | np.ndarray):
            pixels = pixels_of(images, self.image_shape).to(self.device)
            return Inputs(pixels, (None,) * len(pixels), ((),) * len(pixels))
        single = isinstance(images, str | Path | bytes | Image.Image) or hasattr(images, "read")
        if not single and not isinstance(images, Iterable):
            raise InputError(
                f"images are tensors, arrays, Pillow images, files or lists of these, "
                f"not {type(images).__name__}"
            )
        several: list[Any] = [images] if single else list(images)  # type: ignore[arg-type]
        parts = [part for image in several for part in self._read_one(image)]
        if not parts:
            raise InputError("no images were given")
        return Inputs.joined(parts)

    def _read_one(self, image: ImageLike) -> list[Inputs]:
        if isinstance(image, Tensor | np.ndarray):
            return [self.read(image)]
        if isinstance(image, str | Path) and Path(image).is_dir():
            return [part for file in image_files(Path(image)) for part in self._read_one(file)]
        photograph = self.photograph(image)
        pixels = to_pixels(photograph.image[None].to(self.device))
        source = str(Path(image).absolute()) if isinstance(image, str | Path) else None
        return [Inputs(pixels, (source,), (photograph.notes,))]

    def photograph(self, image: str | Path | bytes | io.IOBase | Image.Image) -> Photograph:
        """Read a file or Pillow image as the model needs it, with what was done to it."""
        shape, recipe = self.image_shape, self.recipe
        digit, crop, framing = recipe.mnist_framing, recipe.face_crop, recipe.framing
        return read_photograph(image, shape, digit=digit, crop=crop, framing=framing)


def _targets_of(targets: Any, rows: slice, total: int) -> Any:  # noqa: ANN401
    """The targets of some of the images, where every image has its own."""
    if isinstance(targets, Tensor) and targets.ndim == 2 and len(targets) == total:
        return targets[rows]
    return targets


def load(name_or_path: str | Path, device: str | torch.device = "auto") -> Model:
    """Load a shipped model by its name, or any model by its path.

    A model that `ecinn distill` made brings the classifier that it explains (`Model.reader`).
    """
    checkpoint = load_checkpoint(name_or_path)
    path = Path(name_or_path)
    folder = path if path.is_dir() else path.parent
    distilled = path.exists() and (folder / CLASSIFIER_FILE).is_file()
    return Model(checkpoint, device, folder if distilled else None)

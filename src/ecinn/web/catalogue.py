"""The models of the service, loaded once and found by name."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ecinn.classifier.checkpoint import model_name
from ecinn.classifier.recipes import Recipe
from ecinn.data.dataset import Dataset
from ecinn.data.own import DATASET
from ecinn.errors import InputError
from ecinn.model import Model
from ecinn.model import load as load_model

Kind = Literal["digits", "dots", "faces", "images"]
KINDS: Mapping[str, Kind] = {"mnist": "digits", "fakemnist": "dots", "celeba": "faces"}
TITLES: Mapping[str, str] = {
    "mnist": "Digits",
    "mnist-finetuned": "Digits, fine-tuned",
    "fakemnist": "Digits labelled by dots",
    "celeba-smile": "Faces: smile",
    "celeba-cheekbones": "Faces: cheekbones",
    "celeba-lipstick": "Faces: lipstick",
    "celeba-makeup": "Faces: makeup",
}
DEFAULT_MODELS = tuple(TITLES)
GENERATED_FACES = 8
GENERATED_SEED = 0
TEMPERATURE = 0.5
"""Sampling temperature of generated faces: lower is closer to a mean face, higher has more
failures."""


@dataclass(frozen=True)
class ServedModel:
    """A model and its test images."""

    name: str
    title: str
    kind: Kind
    model: Model
    samples: Dataset | None
    """Test images; None if they are not available."""
    generated: bool = False
    """True if the images are samples of a model instead."""

    def describe(self) -> dict[str, Any]:
        """Return what the page has to know."""
        channels, height, width = self.model.image_shape
        return {
            "name": self.name,
            "title": self.title,
            "kind": self.kind,
            "classes": list(self.model.class_names),
            "channels": channels,
            "height": height,
            "width": width,
            "samples": 0 if self.samples is None else len(self.samples),
            "default_confidence": self.model.default_confidence,
            "classifier": self.model.reader and self.model.reader.name,
            "fine_tuned": self.model.recipe.finetuning is not None,
            "generated": self.generated,
        }


Catalogue = Mapping[str, ServedModel]


def load_catalogue(
    names: Sequence[str],
    celeba: Path | None = None,
    *,
    ask_classifiers: bool = True,
    load: Callable[[Recipe, str], Dataset] | None = None,
) -> Catalogue:
    """Load models and their test images; without a folder of CelebA, faces are generated.

    Args:
        ask_classifiers: verify students on the classifiers that they were distilled from; False
            serves the students alone.
        load: loads the test images of a recipe and a model's path; None loads shipped datasets
            without progress.
    """
    catalogue: dict[str, ServedModel] = {}
    for name_or_path in names:
        model, name = load_model(name_or_path, "cpu"), model_name(name_or_path)
        if name in catalogue:
            raise InputError(f"two models are called {name!r}: rename a file or leave one out")
        if not ask_classifiers:
            model = model.student
        dataset, samples = model.recipe.dataset, None
        kind = KINDS.get(dataset.partition("/")[0], "images")
        available = celeba is not None or os.environ.get("ECINN_CELEBA")
        if kind in ("digits", "dots") or (kind == "faces" and available):
            samples = (
                load(model.recipe, name_or_path) if load else model.recipe.load("test", celeba)
            )
        elif dataset == DATASET and load is not None:
            with suppress(InputError):  # the pictures may be gone
                samples = load(model.recipe, name_or_path)
        generated = kind == "faces" and samples is None
        if generated:
            faces = [each.samples for each in catalogue.values() if each.generated]
            samples = faces[0] if faces else generated_faces(model)
        catalogue[name] = ServedModel(
            name, TITLES.get(name, name), kind, model, samples, generated
        )
    return catalogue


def generated_faces(model: Model) -> Dataset:
    """Return a few samples of a model of faces, all of whose models may show them.

    Their labels are those of this model; whoever has no CelebA can still see a face change.
    """
    labels = torch.arange(GENERATED_FACES) % len(model.class_names)
    images = model.sample(labels, temperature=TEMPERATURE, seed=GENERATED_SEED)
    return Dataset(images.cpu(), labels, model.class_names)

"""The models that are served: loaded once, found by their names alone."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ecinn.data.celeba import find_folder
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError
from ecinn.model import Model, load

Kind = Literal["digits", "dots", "faces", "images"]
DEFAULT_MODELS = (
    "mnist",
    "fakemnist",
    "celeba-smile",
    "celeba-cheekbones",
    "celeba-lipstick",
    "celeba-makeup",
)
TITLES: Mapping[str, str] = MappingProxyType(
    {
        "mnist": "Digits",
        "fakemnist": "Digits told by dots",
        "celeba-smile": "Faces: smile",
        "celeba-cheekbones": "Faces: cheekbones",
        "celeba-lipstick": "Faces: lipstick",
        "celeba-makeup": "Faces: makeup",
    }
)


@dataclass(frozen=True)
class Served:
    """A model with what people may ask of it."""

    name: str
    title: str
    kind: Kind
    model: Model
    samples: Dataset | None
    """Test images; None where they are not at hand."""

    @property
    def values(self) -> int:
        """Of one picture."""
        channels, height, width = self.model.classifier.image_shape
        return channels * height * width


Catalogue = Mapping[str, Served]


def load_catalogue(
    names: Sequence[str],
    celeba: Path | None = None,
    *,
    read: Callable[[str, Path | None], Dataset] | None = None,
) -> Catalogue:
    """The models, with their test images; faces only where a folder of CelebA is known.

    Args:
        read: gives the test images of a data set, by default without a word while it decodes.
    """
    served: dict[str, Served] = {}
    for name_or_path in names:
        model = load(name_or_path)
        name = _name(name_or_path)
        if name in served:
            raise InputError(f"two models are called {name!r}: rename a file or leave one out")
        dataset = model.checkpoint.recipe.dataset
        samples = _samples(model, celeba, read)
        served[name] = Served(name, TITLES.get(name, name), _kind(dataset), model, samples)
    return MappingProxyType(served)


def _samples(
    model: Model, celeba: Path | None, read: Callable[[str, Path | None], Dataset] | None
) -> Dataset | None:
    recipe = model.checkpoint.recipe
    if recipe.dataset.startswith("celeba"):
        if celeba is None and not os.environ.get("ECINN_CELEBA"):
            return None
        celeba = find_folder(celeba)
    elif recipe.dataset not in ("mnist", "fakemnist"):
        return None
    return recipe.load("test", celeba) if read is None else read(recipe.dataset, celeba)


def _kind(dataset: str) -> Kind:
    if dataset.startswith("celeba"):
        return "faces"
    kinds: Mapping[str, Kind] = {"mnist": "digits", "fakemnist": "dots"}
    return kinds.get(dataset, "images")


def _name(model: str) -> str:
    """A shipped model's name, or what its file is called, or its folder."""
    path = Path(model)
    return path.parent.name if path.name == "model.safetensors" else path.name.split(".")[0]

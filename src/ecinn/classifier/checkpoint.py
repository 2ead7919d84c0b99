"""A model in one file: weights, class means, recipe, metrics and training record."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.out_of_distribution import SHAPE_BITS, OODDetector, Pose, Shape, Texture
from ecinn.classifier.quantisation import pack, unpack
from ecinn.classifier.recipes import Recipe
from ecinn.classifier.tensor_files import (
    below,
    find_file,
    load_tensors,
    shipped_names,
    write_tensors,
)
from ecinn.files import ASSETS, rebuild
from ecinn.flow.network import latent_frequencies

SHIPPED = ASSETS / "models"
MODEL_FILE = "model.safetensors"
"""Name of the model in the folder of a training run."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A trained classifier with everything that explanations need."""

    recipe: Recipe
    classifier: GenerativeClassifier
    mu_bar: Float[Tensor, "classes dim"]
    """Mean latents of the clean training images, grouped by predicted class."""
    ood: OODDetector
    class_names: tuple[str, ...]
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """An `Evaluation` on the test images, if there was one."""
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Training record: seconds, images per second, curve, versions."""


def shipped_models() -> list[str]:
    """Return the names that `load_checkpoint` accepts instead of a path."""
    return shipped_names(SHIPPED)


def save_checkpoint(checkpoint: Checkpoint, path: Path) -> None:
    """Write a model, completely or not at all, with its weights quantised as the recipe says.

    Tied class means, μ = μ̄, are stored once.
    """
    mu_bar = checkpoint.mu_bar.cpu()
    packed = pack(checkpoint.classifier.state_dict(), checkpoint.recipe.stored_bits)
    tensors = {f"classifier.{name}": value for name, value in packed.items()}
    if not (checkpoint.recipe.tied and torch.equal(tensors["classifier.mu"].cpu(), mu_bar)):
        tensors["mu_bar"] = mu_bar
    limits = {} if checkpoint.ood.distance is None else {"distance": checkpoint.ood.distance}
    for name in ("texture", "pose", "shape"):
        score = getattr(checkpoint.ood, name)
        if score is not None:
            fields = score._asdict()
            limits[name] = fields.pop("limit")
            fields.pop("frequency", None)  # follows from the architecture
            fields = pack(fields, SHAPE_BITS, rounded="") if name == "shape" else fields
            tensors |= {f"typical.{name}.{field}": value for field, value in fields.items()}
    about = {
        "kind": "model",
        "recipe": dataclasses.asdict(checkpoint.recipe),
        "typical": checkpoint.ood.log_p,
        "typical_limits": limits,
        "class_names": checkpoint.class_names,
        "metrics": checkpoint.metrics,
        "training": checkpoint.training,
    }
    write_tensors(path, tensors, about)


def load_checkpoint(name_or_path: str | Path) -> Checkpoint:
    """Read a shipped model by its name, or any model by the path of its file or folder."""
    return load_tensors(find_file(name_or_path, SHIPPED, "model", MODEL_FILE), "model", _build)


def model_name(name_or_path: str | Path) -> str:
    """Return a shipped model's name, or the name of a model's file or folder."""
    path = Path(name_or_path)
    return path.parent.name if path.name == MODEL_FILE else path.name.split(".")[0]


def _build(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Checkpoint:
    recipe: Recipe = rebuild(Recipe, about["recipe"])
    classifier = GenerativeClassifier(recipe.architecture)
    classifier.load_state_dict(unpack(below(tensors, "classifier")))
    mu = classifier.mu.detach().clone()
    mu_bar = tensors.get("mu_bar", mu) if recipe.tied else tensors["mu_bar"]
    if mu_bar.shape != classifier.mu.shape:
        raise ValueError("mu_bar and mu differ in shape")
    limits = about.get("typical_limits", {})
    texture = pose = distance = shape = None
    if "texture" in limits:
        frequency = latent_frequencies(recipe.architecture)
        assert frequency is not None
        fitted = below(tensors, "typical.texture")
        texture = Texture(frequency, **fitted, limit=float(limits["texture"]))
    if "pose" in limits:
        pose = Pose(tensors["typical.pose.weight"], float(limits["pose"]))
    if "distance" in limits:
        distance = float(limits["distance"])
    if "shape" in limits:
        shape = Shape(**unpack(below(tensors, "typical.shape")), limit=float(limits["shape"]))
    low, high = about["typical"]
    return Checkpoint(
        recipe,
        classifier.eval().requires_grad_(requires_grad=False),
        mu_bar,
        OODDetector((float(low), float(high)), texture, pose, distance, shape),
        tuple(about["class_names"]),
        about["metrics"],
        about["training"],
    )

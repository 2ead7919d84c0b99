"""One safetensors file holds a model: weights, measured means, settings, metrics, its making."""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtyping import Float
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor

from ecinn.classifier.generative import GenerativeClassifier
from ecinn.classifier.out_of_distribution import OODDetector, Pose, Texture
from ecinn.classifier.quantisation import pack, unpack
from ecinn.classifier.recipes import Recipe
from ecinn.errors import InputError
from ecinn.files import ASSETS, atomic_write
from ecinn.flow.network import Architecture, latent_frequencies

FORMAT = "ecinn-2"
_FORMAT_1_NAMES = {
    "experiment": "recipe",
    "refinement": "finetuning",
    "averaging": "ema_decay",
    "teaching": "distillation_weight",
    "descent": "sgd",
    "reached_q_verified": "reached_q_corrected",
    "passes_verified": "passes_corrected",
}
"""What "ecinn-1", the format of the shipped files, calls the same things."""
SHIPPED = ASSETS / "models"
_SUFFIX = ".safetensors"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A trained classifier with all that explaining with it needs."""

    recipe: Recipe
    classifier: GenerativeClassifier
    mu_bar: Float[Tensor, "classes dim"]
    """Means of the clean training images' latents, grouped by predicted class."""
    ood: OODDetector
    """What is usual of the training images."""
    class_names: tuple[str, ...]
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """How it was made: seconds, images per second, curve, versions."""

    @property
    def typical(self) -> tuple[float, float]:
        """Between these log p(x) lie 99.8 % of the training images."""
        return self.ood.log_p


def shipped_models() -> list[str]:
    """Names that `load_checkpoint` knows without a path."""
    return sorted(path.stem for path in SHIPPED.glob(f"*{_SUFFIX}"))


def save_checkpoint(checkpoint: Checkpoint, path: Path) -> None:
    """Write it at once or not at all, the weights rounded as the recipe says."""
    packed = pack(checkpoint.classifier.state_dict(), checkpoint.recipe.stored_bits)
    tensors = {f"classifier.{name}": value for name, value in packed.items()}
    tensors["mu_bar"] = checkpoint.mu_bar
    usual, limits = _pack_ood(checkpoint.ood)
    tensors |= usual
    about = {
        "recipe": dataclasses.asdict(checkpoint.recipe),
        "typical": checkpoint.ood.log_p,
        "typical_limits": limits,
        "class_names": checkpoint.class_names,
        "metrics": checkpoint.metrics,
        "training": checkpoint.training,
    }
    write_tensors(path, tensors, about)


def load_checkpoint(name_or_path: str | Path) -> Checkpoint:
    """Read a shipped model by its name, or any model by its path."""
    path = _find(name_or_path)
    tensors, about = read_tensors(path)
    try:
        recipe = _rebuild(Recipe, about["recipe"])
        assert isinstance(recipe, Recipe)
        classifier = GenerativeClassifier(recipe.architecture)
        packed = {
            name.removeprefix("classifier."): value
            for name, value in tensors.items()
            if name.startswith("classifier.")
        }
        classifier.load_state_dict(unpack(packed))
        mu_bar = tensors["mu_bar"]
        if mu_bar.shape != classifier.mu.shape:
            raise RuntimeError("mu_bar and mu differ in shape")
        return Checkpoint(
            recipe,
            classifier.eval().requires_grad_(requires_grad=False),
            mu_bar,
            _unpack_ood(tensors, about, recipe.architecture),
            tuple(about["class_names"]),
            about["metrics"],
            about["training"],
        )
    except (KeyError, TypeError, ValueError, AssertionError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"{path} does not fit this version's networks ({reason}); "
            "use the version of ecinn that wrote it, or train it again"
        ) from error


def _pack_ood(usual: OODDetector) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Its tensors and its limits, where it has any beyond the likelihood's."""
    tensors: dict[str, Tensor] = {}
    limits: dict[str, float] = {}
    for name, part in (("texture", usual.texture), ("pose", usual.pose)):
        if part is not None:
            fields = part._asdict()
            limits[name] = fields.pop("limit")
            fields.pop("frequency", None)  # the architecture says it
            tensors |= {f"typical.{name}.{field}": value for field, value in fields.items()}
    return tensors, limits


def _unpack_ood(
    tensors: Mapping[str, Tensor], about: Mapping[str, Any], architecture: Architecture
) -> OODDetector:
    low, high = about["typical"]
    limits = about.get("typical_limits", {})
    texture = pose = None
    frequency = latent_frequencies(architecture)
    if "texture" in limits and frequency is not None:
        texture = Texture(
            frequency,
            tensors["typical.texture.mean"],
            tensors["typical.texture.whitening"],
            float(limits["texture"]),
        )
    if "pose" in limits:
        pose = Pose(tensors["typical.pose.weight"], float(limits["pose"]))
    return OODDetector((float(low), float(high)), texture, pose)


def _find(name_or_path: str | Path) -> Path:
    if str(name_or_path) in shipped_models():
        return SHIPPED / f"{name_or_path}{_SUFFIX}"
    path = Path(name_or_path)
    if path.is_dir() and (path / f"model{_SUFFIX}").is_file():
        return path / f"model{_SUFFIX}"
    if not path.is_file():
        raise InputError(
            f"no model {str(name_or_path)!r}: give a path to a {_SUFFIX} file, a folder that "
            f"`ecinn train` wrote, or one of: {', '.join(shipped_models())}"
        )
    return path


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Tensors and a JSON description in one safetensors file, atomically."""
    metadata = {"format": FORMAT, "about": json.dumps(about)}
    contiguous = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    atomic_write(path, safetensors.save(contiguous, metadata))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """The inverse of `write_tensors`."""
    try:
        data = path.read_bytes()
        tensors = safetensors.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata = header.get("__metadata__", {})
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except (SafetensorError, ValueError) as error:
        raise InputError(
            f"{path} is damaged or not a safetensors file ({error}); fetch or train it again"
        ) from error
    if metadata.get("format") not in ("ecinn-1", FORMAT):
        raise InputError(f"{path} was not written by `ecinn train` (format {FORMAT} is expected)")
    about = json.loads(metadata["about"])
    return tensors, about if metadata["format"] == FORMAT else _renamed(about)


def _renamed(value: Any) -> Any:  # noqa: ANN401
    """Use this format's names in what the first format wrote."""
    if isinstance(value, dict):
        return {_FORMAT_1_NAMES.get(name, name): _renamed(item) for name, item in value.items()}
    return [_renamed(item) for item in value] if isinstance(value, list) else value


def _rebuild(annotation: Any, value: Any) -> Any:  # noqa: ANN401
    """Turn what JSON made of a nested frozen dataclass back into it, checking every type."""
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        hints = typing.get_type_hints(annotation)
        return annotation(**{name: _rebuild(hints[name], item) for name, item in value.items()})
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple:
        return tuple(_rebuild(arguments[0], item) for item in value)
    if origin is typing.Literal:
        if value not in arguments:
            raise ValueError(f"{value!r} is none of {arguments}")
        return value
    if origin in (typing.Union, types.UnionType):
        kind = next(argument for argument in arguments if argument is not types.NoneType)
        return None if value is None else _rebuild(kind, value)
    if annotation is float and isinstance(value, int):
        return float(value)
    if not isinstance(value, annotation):
        raise TypeError(f"{value!r} is not {annotation}")
    return value

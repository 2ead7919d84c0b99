"""Counterfactual explanations of images in two network evaluations (ECINN)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ecinn.attribution.captum import CounterfactualAttribution
    from ecinn.attribution.heatmaps import attribute
    from ecinn.auditing.measurement import audit
    from ecinn.bulk.run import explain_dataset
    from ecinn.classifier.recipes import RECIPES, FineTuning, Recipe
    from ecinn.data.augmentation import Augmentation
    from ecinn.data.dataset import Dataset, load_dataset
    from ecinn.data.face_crop import FaceCrop
    from ecinn.errors import EcinnError, InputError
    from ecinn.explanation.counterfactual import class_means, explain
    from ecinn.explanation.protocol import InvertibleClassifier
    from ecinn.explanation.result import Certificate, Explanation
    from ecinn.flow.network import Architecture, Stage
    from ecinn.model import Model, load
    from ecinn.training.distillation import distill
    from ecinn.training.evaluation import Evaluation, evaluate
    from ecinn.training.fitting import fit
    from ecinn.training.loop import train

__version__ = "0.2.0.dev0"

__all__ = [
    "RECIPES",
    "Architecture",
    "Augmentation",
    "Certificate",
    "CounterfactualAttribution",
    "Dataset",
    "EcinnError",
    "Evaluation",
    "Explanation",
    "FaceCrop",
    "FineTuning",
    "InputError",
    "InvertibleClassifier",
    "Model",
    "Recipe",
    "Stage",
    "attribute",
    "audit",
    "class_means",
    "distill",
    "evaluate",
    "explain",
    "explain_dataset",
    "fit",
    "load",
    "load_dataset",
    "train",
]

_HOMES = {
    "attribution.captum": ("CounterfactualAttribution",),
    "attribution.heatmaps": ("attribute",),
    "auditing.measurement": ("audit",),
    "bulk.run": ("explain_dataset",),
    "classifier.recipes": ("RECIPES", "FineTuning", "Recipe"),
    "data.augmentation": ("Augmentation",),
    "data.dataset": ("Dataset", "load_dataset"),
    "data.face_crop": ("FaceCrop",),
    "errors": ("EcinnError", "InputError"),
    "explanation.counterfactual": ("class_means", "explain"),
    "explanation.protocol": ("InvertibleClassifier",),
    "explanation.result": ("Certificate", "Explanation"),
    "flow.network": ("Architecture", "Stage"),
    "model": ("Model", "load"),
    "training.distillation": ("distill",),
    "training.evaluation": ("Evaluation", "evaluate"),
    "training.fitting": ("fit",),
    "training.loop": ("train",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Import a public name when it is first used, so that `ecinn --help` needs no PyTorch."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ecinn' has no attribute {name!r}")
    value = getattr(import_module(f"ecinn.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

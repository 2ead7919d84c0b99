"""Counterfactual explanations of images in two network evaluations (ECINN)."""

from ecinn.classifier.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from ecinn.classifier.recipes import RECIPES, Recipe
from ecinn.data.dataset import Dataset, load_dataset
from ecinn.errors import EcinnError, InputError
from ecinn.explanation.counterfactual import class_means, explain
from ecinn.explanation.protocol import InvertibleClassifier
from ecinn.explanation.result import Certificate, Explanation
from ecinn.model import Model, load
from ecinn.training.evaluation import Evaluation, evaluate
from ecinn.training.loop import train

__version__ = "0.1.0"

__all__ = [
    "RECIPES",
    "Certificate",
    "Checkpoint",
    "Dataset",
    "EcinnError",
    "Evaluation",
    "Explanation",
    "InputError",
    "InvertibleClassifier",
    "Model",
    "Recipe",
    "class_means",
    "evaluate",
    "explain",
    "load",
    "load_checkpoint",
    "load_dataset",
    "save_checkpoint",
    "train",
]

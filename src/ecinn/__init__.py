"""Counterfactual explanations of images in two network evaluations (ECINN)."""

from ecinn.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from ecinn.data.dataset import Dataset, load_dataset
from ecinn.errors import EcinnError, InputError
from ecinn.evaluation import Evaluation, evaluate
from ecinn.experiments import EXPERIMENTS, Experiment
from ecinn.explain import class_means, explain
from ecinn.explanation import Certificate, Explanation
from ecinn.invertible_classifier import InvertibleClassifier
from ecinn.pretrained import Model, load
from ecinn.training import train

__version__ = "0.1.0"

__all__ = [
    "EXPERIMENTS",
    "Certificate",
    "Checkpoint",
    "Dataset",
    "EcinnError",
    "Evaluation",
    "Experiment",
    "Explanation",
    "InputError",
    "InvertibleClassifier",
    "Model",
    "class_means",
    "evaluate",
    "explain",
    "load",
    "load_checkpoint",
    "load_dataset",
    "save_checkpoint",
    "train",
]

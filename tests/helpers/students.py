"""A classifier of digits in a file, and a folder in which the shipped digits are its student."""

import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from ecinn.blackbox.files import open_classifier, save_classifier
from ecinn.classifier.checkpoint import MODEL_FILE
from ecinn.data.mnist import load_mnist
from ecinn.model import Model


class NearestMean(nn.Module):
    """Logits of digits: scaled negative distances to the mean digits, and a bias."""

    def __init__(self, bias: Tensor | None = None) -> None:
        super().__init__()
        data = load_mnist("train").first(5000)
        x = data.images.flatten(1).float() / 255
        means = torch.stack([x[data.labels == digit].mean(0) for digit in range(10)])
        self.register_buffer("means", means)
        self.register_buffer("bias", torch.zeros(10) if bias is None else bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.bias - 0.2 * torch.cdist(x.flatten(1), self.means).square()


def save_script(network: nn.Module, path: Path, side: int = 28) -> Path:
    """Write a network of grey images as TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(network, torch.zeros((2, 1, side, side))).save(path)
    return path


def student_folder(mnist: Model, folder: Path, never: int) -> Path:
    """Write the shipped digits as the student of a nearest-mean classifier.

    Args:
        never: the digit that the classifier never answers.
    """
    folder.mkdir()
    mnist.save(folder / MODEL_FILE)
    bias = torch.zeros(10)
    bias[never] = -1e4
    source = save_script(NearestMean(bias), folder / "nearest.pt")
    save_classifier(open_classifier(source, mnist.class_names), source, folder)
    source.unlink()
    return folder

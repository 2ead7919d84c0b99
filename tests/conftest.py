"""Fixtures that several packages share: a small classifier with every parameter randomised."""

import dataclasses
import functools
import lzma
import os
from collections.abc import Callable, Iterator

import pytest

import helpers.shape_checks  # noqa: F401  (it must come before the package)

# Before torch is imported, for this process and those it starts: waiting threads sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from ecinn.classifier.checkpoint import shipped_models
from ecinn.classifier.generative import GenerativeClassifier
from ecinn.data import mnist as digits
from ecinn.data import pen
from ecinn.data.dataset import Dataset
from ecinn.flow.network import Architecture, Stage
from ecinn.model import Model, load
from ecinn.pixels import StoredImages
from ecinn.training import calibration, teacher
from ecinn.training.augmented import TeacherSettings
from helpers.builders import randomise

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def decompressed_once() -> Iterator[None]:
    """Decompress the shipped images and models once, not in every test that loads them."""
    decompress = functools.lru_cache(maxsize=16)(lzma.decompress)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lzma, "decompress", decompress)
        patch.setitem(digits._READERS, ".xz", decompress)  # type: ignore[arg-type]
        yield


@pytest.fixture(scope="session", autouse=True)
def drawn_once() -> Iterator[None]:
    """Draw the shapes of an OOD detector once: many runs have the same images and seed."""
    again: dict[tuple[bytes, ...], StoredImages] = {}
    drawn: dict[tuple[int, bytes], tuple[StoredImages, torch.Tensor]] = {}

    def redraw(images: StoredImages, pens: pen.Pens) -> StoredImages:
        key = tuple(tensor.numpy().tobytes() for tensor in (images, *pens))
        if key not in again:
            again[key] = pen.redraw(images, pens)
        return again[key]

    def draw_shapes(count: int, generator: torch.Generator) -> StoredImages:
        key = (count, generator.get_state().numpy().tobytes())
        if key not in drawn:
            drawn[key] = (pen.draw_shapes(count, generator), generator.get_state())
        shapes, after = drawn[key]
        generator.set_state(after)
        return shapes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "redraw", redraw)
        patch.setattr(calibration, "draw_shapes", draw_shapes)
        yield


@pytest.fixture(scope="session")
def small_architecture() -> Architecture:
    return Architecture(
        channels=1,
        height=8,
        width=8,
        classes=3,
        stages=(Stage(2, 4), Stage(2, 4)),
        dense_width=8,
        seed=3,
    )


@pytest.fixture
def small_classifier(small_architecture: Architecture) -> GenerativeClassifier:
    classifier = GenerativeClassifier(small_architecture).double().eval()
    randomise(classifier)
    return classifier.requires_grad_(requires_grad=False)


@pytest.fixture(scope="session")
def mnist() -> Model:
    assert "mnist" in shipped_models()
    return load("mnist")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def uniform(generator: torch.Generator) -> Callable[..., torch.Tensor]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    return draw


@pytest.fixture
def small_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teachers that a run trains itself are small, and see every image once."""
    usual = teacher.default_settings

    def small(data: Dataset) -> TeacherSettings:
        return dataclasses.replace(usual(data), width=4, epochs=1)

    monkeypatch.setattr(teacher, "default_settings", small)

"""Answers of a classifier on the data, kept so that a resumed run does not ask again."""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ecinn.blackbox.classifier import BlackBox
from ecinn.classifier.checkpoint import MODEL_FILE
from ecinn.classifier.tensor_files import read_tensors, write_tensors
from ecinn.data.dataset import Dataset, Split, Splits
from ecinn.errors import InputError
from ecinn.progress import Observer, counter
from ecinn.training.networks import digest
from ecinn.training.state import STATE_FILES

ANSWERS_FILE = "answers.safetensors"
SPLITS: tuple[Split, ...] = ("validation", "train", "test")
"""Splits in query order: accuracy is measured on validation images."""
_AT_ONCE = 2048
"""Images per progress report."""


def ask(black_box: BlackBox, data: Dataset, observe: Observer) -> Float[Tensor, "images classes"]:
    """Ask about all images of a dataset."""
    report = counter(observe, f"asking {black_box.name}", len(data))
    parts = []
    for start in range(0, len(data), _AT_ONCE):
        parts.append(black_box.predict(data.images[start : start + _AT_ONCE]))
        report(min(start + _AT_ONCE, len(data)))
    return torch.cat(parts)


def keep_answers(
    black_box: BlackBox,
    data: Splits,
    answers: dict[str, Tensor],
    planned: int | None,
    folder: Path,
    start: str | None = None,
    sha256: str | None = None,
) -> None:
    """Write the answers, the queries so far, the epochs on the path and the initial model."""
    about = {
        "kind": "answers",
        "queries": black_box.queries,
        "output": black_box.output,
        "finetuning_epochs": planned,
        "init_from": start,
        **_fingerprint(black_box, data, sha256),
    }
    if answers:
        write_tensors(folder / ANSWERS_FILE, answers, about)


def known_answers(
    black_box: BlackBox,
    data: Splits,
    folder: Path,
    start: str | None = None,
    sha256: str | None = None,
    *,
    resume: bool = False,
) -> tuple[dict[str, Tensor], int | None]:
    """Return the answers and planned epochs of an earlier run here; count its queries.

    Args:
        start: name of the model that the student starts from, which must be the earlier run's.
        sha256: of the classifier's file; without a file, answers are reused only when a run is
            resumed.
    """
    path = folder / ANSWERS_FILE
    learned = any((folder / name).exists() for name in (*STATE_FILES, MODEL_FILE))
    if not path.is_file() or (sha256 is None and not (resume or learned)):
        return {}, None
    tensors, about = read_tensors(path)
    expected = {"kind": "answers", **_fingerprint(black_box, data, sha256)}
    if any(about.get(name, value) != value for name, value in expected.items()):
        if not learned:
            return {}, None
        raise InputError(
            f"{path} holds the answers of another classifier or to other images: choose another "
            "folder"
        )
    earlier = about.get("init_from", start)
    if earlier != start:
        raise InputError(
            f"the run in {folder} started from {earlier or 'random layers'}: give the "
            "same --init-from (init_from in Python), or choose another folder"
        )
    black_box.output = black_box.output or about["output"]
    black_box.queries += about["queries"]
    return tensors, about["finetuning_epochs"]


def _fingerprint(black_box: BlackBox, data: Splits, sha256: str | None) -> dict[str, Any]:
    """Identify data and classifier well enough to notice others."""
    parts = [getattr(data, name) for name in SPLITS]
    return {
        "classifier": black_box.name,
        "sha256": sha256,
        "preprocessing": repr((black_box.preprocessing, black_box.classes)),
        "images": [len(part) for part in parts],
        "first": digest(*(part.images[:100] for part in parts)).hex()[:16],
    }

"""`classifier.toml`: how a classifier is loaded and fed, beside the model that explains it."""

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ecinn.blackbox.classifier import TIMEOUT, BlackBox
from ecinn.blackbox.networks import load_network
from ecinn.blackbox.preprocessing import Preprocessing
from ecinn.errors import InputError
from ecinn.files import atomic_write

FILE = "classifier.toml"
LARGEST_COPY = 200 * 10**6
"""Bytes; a larger classifier is not copied but found by its path and checked by its hash."""
PREPROCESSING = ("size", "channels", "layout", "scale", "mean", "std")
OPTIONS = (*PREPROCESSING, "classes", "output", "timeout")
"""Settings that a TOML file may hold, each of them also an option of `ecinn distill`."""
_STORED = (*OPTIONS, "name", "file", "sha256")
_LISTS = ("size", "mean", "std", "classes")
_KINDS: dict[str, type] = {
    "size": int, "mean": float, "std": float, "scale": float, "timeout": float,
}  # fmt: skip


def read_options(path: Path, allowed: Sequence[str] = OPTIONS) -> dict[str, Any]:
    """Read settings of a classifier from a TOML file."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    for key, value in values.items():
        if key not in allowed:
            raise InputError(f"{path} sets {key!r}; it may set {', '.join(allowed)}")
        items = value if key in _LISTS else [value]
        kind = _KINDS.get(key, str)
        fits = (int, float) if kind is float else kind
        if not isinstance(items, list) or any(not isinstance(item, fits) for item in items):
            raise InputError(f"{path}: {key} cannot be {value!r}")
        converted = tuple(kind(item) for item in items)
        values[key] = converted if key in _LISTS else converted[0]
    return values


def open_classifier(
    path: Path,
    class_names: Sequence[str],
    options: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    budget: int | None = None,
    device: torch.device | None = None,
) -> BlackBox:
    """Load a classifier's file; what `OPTIONS` do not say is guessed from the file."""
    options = options or {}
    network = load_network(path, device)
    given = {key: options[key] for key in PREPROCESSING if key in options}
    # Names in the file that are other words for the same classes cannot be matched: ignore them.
    known = network.classes if sorted(network.classes) == sorted(class_names) else ()
    return BlackBox(
        network.call,
        class_names,
        name=name or path.name,
        preprocessing=Preprocessing(**(network.preprocessing() | given)),
        classes=options.get("classes", known),
        output=options.get("output"),
        batch=network.batch,
        budget=budget,
        timeout=options.get("timeout", TIMEOUT),
    )


def save_classifier(black_box: BlackBox, source: Path, folder: Path) -> None:
    """Write `classifier.toml` and copy the classifier beside it, unless it is too large."""
    stored = Path(f"classifier{source.suffix.lower()}")
    if source.stat().st_size <= LARGEST_COPY:
        atomic_write(folder / stored, source.read_bytes())
    else:
        stored = source.absolute()
    about = {
        "name": black_box.name,
        "file": str(stored),
        "sha256": file_hash(source),
        "classes": black_box.classes,
        "output": black_box.output,
        "timeout": black_box.timeout,
        **{key: getattr(black_box.preprocessing, key) for key in PREPROCESSING},
    }
    # Strings, numbers and lists of them are written alike in JSON and TOML.
    lines = [
        f"{key} = {json.dumps(value, ensure_ascii=False)}"
        for key, value in about.items()
        if value is not None
    ]
    atomic_write(folder / FILE, ("\n".join(lines) + "\n").encode())


def load_classifier(
    folder: Path, class_names: Sequence[str], device: torch.device | None = None
) -> BlackBox:
    """Load the classifier that `save_classifier` described in a folder."""
    options = read_options(folder / FILE, _STORED)
    path = folder / options.get("file", "")
    if not path.is_file():
        raise InputError(f"the classifier {path} is gone: put it back, or use --no-classifier")
    if file_hash(path) != options.get("sha256"):
        raise InputError(
            f"{path} is not the classifier that was distilled (its hash differs): put that one "
            "back, or use --no-classifier"
        )
    return open_classifier(path, class_names, options, name=options.get("name"), device=device)


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

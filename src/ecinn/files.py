"""Writing files completely or not at all, and reading dataclasses from JSON."""

import dataclasses
import json
import os
import shutil
import tempfile
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ecinn.errors import EcinnError, InputError

ASSETS = Path(__file__).parent / "assets"
"""Files that the package ships: models, MNIST, judges, measured results."""


def atomic_write(path: Path, data: bytes) -> None:
    """Replace the file at once, or leave what was there; folders are made where they lack."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        raise EcinnError(
            f"cannot write {path}: {error.strerror or error}; "
            "free some space or choose another folder (what was there before is unharmed)"
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:  # noqa: ANN401
    """Write a JSON file, completely or not at all."""
    atomic_write(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def atomic_folder(path: Path, files: Mapping[str, bytes], *, replace: bool = False) -> None:
    """Make a folder with these files at once, or not at all; an empty one is replaced.

    Args:
        replace: also replace a folder that is not empty.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        temporary.chmod(0o755)
        for name, data in files.items():
            atomic_write(temporary / "new" / name, data)
        if replace and path.exists():
            path.replace(temporary / "old")
        try:
            (temporary / "new").replace(path)
        except OSError:
            if (temporary / "old").exists():
                (temporary / "old").replace(path)
            raise
    except OSError as error:
        raise EcinnError(
            f"cannot write {path}: {error.strerror or error}; choose another folder"
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def output_folder(path: Path) -> Path:
    """Make sure that files can be written there; the first one makes it, so that none is empty."""
    try:
        there = next(folder for folder in (path, *path.parents) if folder.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise InputError(
            f"cannot write to the folder {path}: {error.strerror or error}; choose another one"
        ) from error
    return path


def rebuild(annotation: Any, value: Any) -> Any:  # noqa: ANN401
    """Turn JSON back into a nested frozen dataclass, checking every type."""
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        hints = typing.get_type_hints(annotation)
        return annotation(**{name: rebuild(hints[name], item) for name, item in value.items()})
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple:
        return tuple(rebuild(arguments[0], item) for item in value)
    if origin is typing.Literal:
        if value not in arguments:
            raise ValueError(f"{value!r} is none of {arguments}")
        return value
    if origin in (typing.Union, types.UnionType):
        kind = next(argument for argument in arguments if argument is not types.NoneType)
        return None if value is None else rebuild(kind, value)
    if annotation is float and isinstance(value, int):
        return float(value)
    if not isinstance(value, annotation):
        raise TypeError(f"{value!r} is not {annotation}")
    return value

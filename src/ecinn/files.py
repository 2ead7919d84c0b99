"""Writing files so that a reader finds the old one or the new one, never half of one."""

import os
import tempfile
from pathlib import Path

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

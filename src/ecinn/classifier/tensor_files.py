"""Files of tensors with a JSON description: how every network of the package is stored."""

import json
import lzma
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor

from ecinn.errors import InputError, first_line
from ecinn.files import atomic_write

FORMAT = "ecinn-2"
SUFFIX = ".safetensors"
COMPRESSED = ".xz"
"""After `SUFFIX`, the suffix of compressed files: a tenth smaller with 8-bit weights."""
Loaded = TypeVar("Loaded")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors and a JSON description to one safetensors file, completely or not at all.

    A name that ends in .xz compresses the file, without loss.
    """
    metadata = {"format": FORMAT, "about": json.dumps(about)}
    contiguous = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    data = safetensors.save(contiguous, metadata)
    atomic_write(path, lzma.compress(data) if path.suffix == COMPRESSED else data)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """Read the tensors and the description that `write_tensors` wrote."""
    try:
        data = path.read_bytes()
        if path.suffix == COMPRESSED:
            data = lzma.decompress(data)
        tensors = safetensors.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata = header.get("__metadata__", {})
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except (SafetensorError, ValueError, lzma.LZMAError) as error:
        raise InputError(
            f"{path} is damaged or not a safetensors file ({error}); fetch or train it again"
        ) from error
    if metadata.get("format") != FORMAT:
        raise InputError(
            f"{path} was not written by this version of ecinn (format {FORMAT} is expected): "
            "fetch or train it again"
        )
    return tensors, json.loads(metadata["about"])


def load_tensors(
    path: Path, kind: str, build: Callable[[dict[str, Tensor], dict[str, Any]], Loaded]
) -> Loaded:
    """Build an object from a file's tensors and description, if it is of this kind.

    A file without a kind holds a model; one that does not fit raises an `InputError`.
    """
    tensors, about = read_tensors(path)
    found = about.get("kind", "model") if isinstance(about, dict) else "unknown"
    if found != kind:
        raise InputError(f"{path} holds {found!r}, not {kind!r}: give another file")
    try:
        return build(tensors, about)
    except (KeyError, TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise InputError(
            f"{path} does not fit this version's networks ({first_line(error)}); "
            "use the version of ecinn that wrote it, or train it again"
        ) from error


def find_file(
    name_or_path: str | Path, shipped: Path, kind: str, default: str | None = None
) -> Path:
    """Return the path of a shipped file by its name, or of any file; in a folder, of `default`."""
    names = shipped_names(shipped)
    if str(name_or_path) in names:
        path = shipped / f"{name_or_path}{SUFFIX}"
        return path if path.is_file() else path.with_name(path.name + COMPRESSED)
    path = Path(name_or_path)
    if default is not None and path.is_dir():
        path = path / default
    if not path.is_file():
        folder = "" if default is None else f", a folder with a {default}"
        raise InputError(
            f"no {kind} {str(name_or_path)!r}: give a path to a {SUFFIX} file{folder}, "
            f"or one of: {', '.join(names)}"
        )
    return path


def below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names start with "prefix.", without that prefix."""
    start = f"{prefix}."
    return {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}


def shipped_names(folder: Path) -> list[str]:
    """Return the names of the files that ship in a folder."""
    files = (path.name.removesuffix(COMPRESSED) for path in folder.iterdir())
    return sorted({name.removesuffix(SUFFIX) for name in files if name.endswith(SUFFIX)})

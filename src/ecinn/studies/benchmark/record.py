"""Provenance and words of results, and writing them as JSON and Markdown without dates."""

import dataclasses
import functools
import hashlib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ecinn.drawing.table import Table
from ecinn.files import atomic_write
from ecinn.model import Model
from ecinn.studies.judges import Judges


def fingerprint(model: Model) -> str:
    """Return the first 16 hexadecimal digits of SHA-256 over all weights and class means."""
    tensors = {**model.classifier.state_dict(), "mu_bar": model.mu_bar}
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def provenance(command: str, model: Model, judges: Judges | None = None) -> dict[str, Any]:
    """Return everything needed to run a command again."""
    on_gpu = model.device.type == "cuda"
    return {
        "command": command,
        "model": model.name,
        "model_sha256": fingerprint(model),
        "judges": None if judges is None else dict(judges.record),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(model.device) if on_gpu else "cpu",
        "threads": torch.get_num_threads(),
    }


def document(title: str, tables: Sequence[Table], record: Mapping[str, Any]) -> str:
    """Return a Markdown page of tables followed by their provenance."""
    made = (
        f"Made with `{record['command']}`: model {record['model']} "
        f"(SHA-256 of its weights {record['model_sha256']}…), torch {record['torch']}, "
        f"{record['device']}, {record['threads']} thread(s)."
    )
    return "\n".join([f"# {title}", "", *(table.markdown() for table in tables), made, ""])


@functools.cache
def wording() -> dict[str, dict[str, str]]:
    """Return the words of all tables, by benchmark and name."""
    return tomllib.loads(Path(__file__).with_name("notes.toml").read_text(encoding="utf-8"))


def note(benchmark: str, name: str, /, **values: object) -> str:
    """Return a note for a table with the values filled in."""
    return wording()[benchmark][name].format(**values)


def jsonable(value: Any) -> Any:  # noqa: ANN401
    """Convert dataclasses to objects, and numbers that JSON cannot express to null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, value: Any) -> None:  # noqa: ANN401
    """Write a JSON file atomically."""
    text = json.dumps(jsonable(value), indent=1, ensure_ascii=False, allow_nan=False)
    atomic_write(path, (text + "\n").encode())


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    atomic_write(path, text.encode())

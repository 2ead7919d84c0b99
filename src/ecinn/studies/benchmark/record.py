"""Results as files that say how they were made, without dates."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ecinn.files import atomic_write
from ecinn.model import Model
from ecinn.studies.judges import Judges


def fingerprint(model: Model) -> str:
    """The first 16 hexadecimal digits of SHA-256 over all weights and measured means."""
    tensors = {**model.classifier.state_dict(), "mu_bar": model.mu_bar}
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def provenance(command: str, model: Model, judges: Judges | None = None) -> dict[str, Any]:
    """What has to be known to run it again."""
    on_gpu = model.device.type == "cuda"
    return {
        "command": command,
        "model": model.checkpoint.recipe.name,
        "model_sha256": fingerprint(model),
        "judges": None if judges is None else dict(judges.record),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(model.device) if on_gpu else "cpu",
        "threads": torch.get_num_threads(),
    }


def jsonable(value: Any) -> Any:  # noqa: ANN401
    """Dataclasses become objects, and what JSON has no number for becomes null."""
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
    """Replace the file at once."""
    text = json.dumps(jsonable(value), indent=1, ensure_ascii=False, allow_nan=False)
    atomic_write(path, (text + "\n").encode())


def write_text(path: Path, text: str) -> None:
    """Replace the file at once."""
    atomic_write(path, text.encode())

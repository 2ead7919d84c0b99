"""A model in Hugging Face's convention: a folder with the model, `config.json` and a card.

Only the model's file is read again; the others are for people and for the hub.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from ecinn.classifier.checkpoint import MODEL_FILE, Checkpoint, save_checkpoint
from ecinn.errors import InputError, first_line
from ecinn.files import atomic_write

CONFIG_FILE = "config.json"
CARD_FILE = "README.md"
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_FRONT_MATTER = """---
library_name: ecinn
pipeline_tag: image-classification
tags:
- counterfactual-explanations
- explainable-ai
- normalizing-flows
---

"""


def save_pretrained(checkpoint: Checkpoint, folder: Path) -> None:
    """Write model.safetensors, config.json and README.md, and replace those of another model."""
    # It imports a tenth of a second of what nothing else needs.
    from ecinn.classifier.card import card

    if folder.is_file():
        raise InputError(f"{folder} is a file: give the name of a folder")
    others = [name for name in (CONFIG_FILE, CARD_FILE) if (folder / name).exists()]
    if others and not (folder / MODEL_FILE).exists():
        raise InputError(f"{folder} holds a {others[0]} but no model: give a new folder")
    save_checkpoint(checkpoint, folder / MODEL_FILE)
    size = (folder / MODEL_FILE).stat().st_size
    text = json.dumps(config(checkpoint), indent=2, ensure_ascii=False)
    atomic_write(folder / CONFIG_FILE, f"{text}\n".encode())
    about = card(checkpoint, size, folder.resolve().name).markdown()
    atomic_write(folder / CARD_FILE, (_FRONT_MATTER + about).encode())


def config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Describe a model with the names that Hugging Face's tools read, and its recipe."""
    names = dict(enumerate(checkpoint.class_names))
    channels, height, width = checkpoint.classifier.image_shape
    return {
        "model_type": "ecinn",
        "num_channels": channels,
        "image_size": [height, width],
        "id2label": names,
        "label2id": {name: label for label, name in names.items()},
        "recipe": dataclasses.asdict(checkpoint.recipe),
    }


def is_repository(name: str) -> bool:
    """Return whether the name is one that the hub may have: owner/name."""
    return _REPOSITORY.fullmatch(name) is not None


def download(
    repository: str,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> Path:
    """Fetch a model from the hub; return its folder in the cache."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise InputError(
            f"there is no folder {repository}, and the hub needs huggingface_hub: "
            "pip install 'ecinn[hub]'"
        ) from error
    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            allow_patterns=[MODEL_FILE, CONFIG_FILE, CARD_FILE],
        )
    except Exception as error:  # of the network, the hub and the cache, with no common class
        raise InputError(
            f"there is no folder {repository}, and it was not found on the hub "
            f"({first_line(error)}): check the name and the connection"
        ) from error
    return Path(folder)

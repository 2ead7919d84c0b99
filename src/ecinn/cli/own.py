"""Pictures of your own in the folder of a run, for `ecinn train` and `ecinn distill`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ecinn.cli.app import err, plain
from ecinn.cli.progress import bars
from ecinn.errors import InputError
from ecinn.files import atomic_write, output_folder, rebuild

if TYPE_CHECKING:
    from ecinn.classifier.recipes import Recipe
    from ecinn.data.own import OwnData
    from ecinn.data.own_record import OwnDataOptions


def load_run(
    source: Path, folder: Path, options: "OwnDataOptions | None" = None, *, resume: bool
) -> "tuple[OwnData, Recipe | None]":
    """Load pictures for a new run, or those of a resumed run with its recipe.

    Args:
        options: None reads pictures by default, or as the resumed run did.
    """
    from ecinn.classifier.checkpoint import MODEL_FILE
    from ecinn.classifier.recipes import Recipe
    from ecinn.data.own import load_own_data
    from ecinn.data.own_record import RECORD_FILE, OwnDataOptions, read_record
    from ecinn.training.state import STATE_FILES

    record = read_record(folder / RECORD_FILE) if resume else None
    if record is None:
        if not resume and any((folder / name).exists() for name in (MODEL_FILE, *STATE_FILES)):
            raise InputError(f"{folder} already holds a run: resume it, or choose another folder")
        with bars() as observe:
            own = load_own_data(source, options or OwnDataOptions(), observe)
        for note in own.notes:
            err.print(plain(note))
        return own, None
    if options is not None and options != record.options:
        raise InputError("--resume uses the options of the first start: leave these out")
    with bars() as observe:
        own = load_own_data(source, record.options, observe, record)
    if own.record.counts[0] != record.counts[0]:
        raise InputError(
            f"{source} holds {own.record.counts[0]:,} of the {record.counts[0]:,} training "
            f"pictures with which the run in {folder} was started (from {record.source}): give "
            "the same pictures, or choose another folder"
        )
    stored = json.loads((folder / RECORD_FILE).read_bytes())["recipe"]
    return own, rebuild(Recipe, stored)


def keep_run(folder: Path, own: "OwnData", recipe: "Recipe") -> None:
    """Note the pictures and the recipe of a run, so that other commands find its pictures."""
    from ecinn.data.own_record import RECORD_FILE

    stored = {"recipe": asdict(recipe), "data": asdict(own.record)}
    atomic_write(output_folder(folder) / RECORD_FILE, (json.dumps(stored) + "\n").encode())

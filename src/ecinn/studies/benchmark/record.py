"""Provenance and words of results, and writing them as JSON and Markdown without dates."""

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ecinn import files
from ecinn.drawing.table import Table
from ecinn.drawing.words import fill, read_toml
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


@dataclass(frozen=True)
class Results:
    """All results of a command so far, to be written and printed."""

    title: str
    tables: Sequence[Table]
    values: Mapping[str, Any]
    """The numbers behind the tables."""
    records: Sequence[Mapping[str, Any]]
    """One provenance per model, all of the same command."""
    pictures: Mapping[str, str] = field(default_factory=dict)
    """Captions of pictures, by file name; they are written elsewhere."""

    def markdown(self) -> str:
        """Return a Markdown page of tables followed by their provenance and pictures."""
        record = self.records[0]
        models = ", ".join(record["model"] for record in self.records)
        weights = ", ".join(f"{record['model_sha256']}…" for record in self.records)
        made = (
            f"Made with `{record['command']}`: model {models} (SHA-256 of the weights {weights}), "
            f"torch {record['torch']}, {record['device']}, {record['threads']} thread(s)."
        )
        pictures = [f"![{caption}]({name})\n" for name, caption in self.pictures.items()]
        tables = [table.markdown() for table in self.tables]
        return "\n".join([f"# {self.title}", "", *tables, made, "", *pictures])

    def write(self, stem: Path) -> list[Path]:
        """Write STEM.md and STEM.json, and return the paths of all files of these results."""
        page, numbers = (stem.with_name(stem.name + end) for end in (".md", ".json"))
        files.atomic_write(page, self.markdown().encode())
        write_json(numbers, self.values)
        return [page, numbers, *(stem.with_name(name) for name in self.pictures)]


WORDS = read_toml(Path(__file__).with_name("tables.toml"))
"""Title, columns and notes of every table, by benchmark and name."""


def note(benchmark: str, name: str, /, **values: object) -> str:
    """Return a note for a table with the values filled in."""
    return fill(WORDS[benchmark][name], values)


def table(
    benchmark: str,
    name: str,
    /,
    records: Sequence[Any],
    notes: Sequence[str] = (),
    **values: Any,  # noqa: ANN401
) -> Table:
    """Lay out a table as `tables.toml` describes it, a row per record.

    Args:
        records: dataclasses or mappings of values; cells by heading if the file has no columns.
        notes: below those of the file.
        values: what titles, headings, notes and every cell may mention, and the conditions.
    """
    about = WORDS[benchmark][name]
    values["natural"] = not values.setdefault("planted", False)
    cells = [column[:2] for column in about.get("columns", ()) if all(map(values.get, column[2:]))]
    told = [[text] if isinstance(text, str) else text for text in about.get("notes", ())]
    if cells:
        rows = [record if isinstance(record, Mapping) else vars(record) for record in records]
        records = [
            {fill(h, values): fill(cell, {**values, **row}) for h, cell in cells} for row in rows
        ]
    said = [fill(text, values) for text, *when in told if all(map(values.get, when))]
    return Table.of(fill(about["title"], values), records, [*said, *notes])


def jsonable(value: Any) -> Any:  # noqa: ANN401
    """Convert dataclasses to objects, and numbers that JSON cannot express to null."""
    if dataclasses.is_dataclass(value):
        value = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, value: Any) -> None:  # noqa: ANN401
    """Write results as a JSON file, completely or not at all."""
    files.write_json(path, jsonable(value))

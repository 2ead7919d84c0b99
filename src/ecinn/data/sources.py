"""Labelled pictures as people keep them: class folders, archives, tables, arrays."""

import csv
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from ecinn.data.dataset import Split
from ecinn.data.decoded_images import ImageFiles, open_archive, reader, size_and_time
from ecinn.data.photographs import Source, image_suffixes
from ecinn.errors import InputError

SPLIT_NAMES: Mapping[str, Split] = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}
PATH_COLUMNS = ("path", "file", "filename", "file_name", "filepath", "image_path", "image", "img")
LABEL_COLUMNS = ("label", "class", "target", "category", "diagnosis", "y")
SPLIT_COLUMNS = ("split", "partition", "subset", "set")
KINDS = (
    "a folder with a folder of pictures for each class, a zip archive of one, a .csv or .parquet "
    "table, a .npz file of arrays, or a folder of Hugging Face datasets"
)
_ARRAYS = re.compile(r"(?:(?P<a>\w+)_)?(?P<kind>images?|labels?|x|y)(?:_(?P<b>\w+))?")


@dataclass(frozen=True)
class Columns:
    """Which columns of a table hold what; None guesses."""

    path: str | None = None
    label: str | None = None
    split: str | None = None


@dataclass(frozen=True)
class Pictures:
    """Every picture's name and label, and how to read it."""

    names: Sequence[str]
    labels: Sequence[str]
    read: Callable[[int], Source]
    version: str
    """Changes when the pictures change."""
    splits: Sequence[Split] | None = None
    """None: they are not split yet."""
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    class_names: tuple[str, ...] | None = None
    """None: the labels in order."""
    notes: tuple[str, ...] = ()


@contextmanager
def open_pictures(source: Path, columns: Columns) -> Iterator[Pictures]:
    """List the pictures of a source; they can be read until it is closed."""
    if not source.exists():
        raise InputError(f"there is no {source}: give {KINDS}")
    suffix = source.suffix.lower()
    if not os.access(source, os.R_OK | os.X_OK if source.is_dir() else os.R_OK):
        raise InputError(f"cannot read {source}: change its permissions")
    hugging_face = source.is_dir() and any((source / name).is_file() for name in _HUGGING_FACE)
    if columns != Columns() and not hugging_face and suffix not in (".csv", ".tsv", ".parquet"):
        raise InputError(
            f"columns need a table (CSV or Parquet), but {source} is none: leave them out"
        )
    if hugging_face:
        yield _hugging_face(source, columns)
    elif source.is_dir() or suffix == ".zip":
        yield from _folders(source)
    elif suffix in (".csv", ".tsv"):
        yield _table(source, *_read_csv(source), columns)
    elif suffix == ".parquet":
        yield _table(source, *_read_parquet(source), columns)
    elif suffix == ".npz":
        yield _arrays(source)
    else:
        raise InputError(f"{source} is not a kind of data that can be read: give {KINDS}")


def _folders(source: Path) -> Iterator[Pictures]:
    """Yield the pictures of class folders, each perhaps in a folder of its split."""
    files, folders, root = (*walk(source), "") if source.is_dir() else list_archive(source)
    suffixes = image_suffixes()
    pictures = [name for name in files if PurePosixPath(name).suffix.lower() in suffixes]
    tops = sorted({folder.split("/")[0] for folder in folders})
    in_splits = [top for top in tops if top.lower() in SPLIT_NAMES]
    depth = 1
    if any(SPLIT_NAMES[top.lower()] == "train" for top in in_splits):
        if others := sorted({*tops} - {*in_splits}):
            raise InputError(
                f"{source} holds split folders ({', '.join(in_splits)}) and others "
                f"({', '.join(others[:3])}): move or rename one kind"
            )
        depth = 2
    held = [name for name in pictures if name.count("/") >= depth]
    classes = {folder for folder in folders if folder.count("/") == depth - 1}
    empty = sorted(classes - {"/".join(name.split("/")[:depth]) for name in held})
    if empty:
        raise InputError(
            f"{source} has class folders without pictures ({', '.join(empty[:5])}"
            f"{', …' if len(empty) > 5 else ''}): add some, or remove the folders"
        )
    if not held:
        raise InputError(f"{source} holds no pictures in folders: give {KINDS}")
    parts = [name.split("/") for name in held]
    unnamed = sorted(name for name in classes if name != name.encode(errors="replace").decode())
    if unnamed:
        raise InputError(f"the class folder {unnamed[0]!a} is not named in UTF-8: rename it")
    notes = []
    if ignored := len(files) - len(held):
        others = sorted({PurePosixPath(name).suffix or name for name in {*files} - {*held}})
        notes.append(
            f"files that are not pictures in class folders were ignored: {ignored:,} "
            f"({', '.join(others[:5])})"
        )
    with reader(source) as read:
        yield Pictures(
            held,
            [part[depth - 1] for part in parts],
            lambda row: source / held[row] if source.is_dir() else read(root + held[row]),
            ImageFiles(source, tuple(held)).fingerprint(),
            [SPLIT_NAMES[part[0].lower()] for part in parts] if depth == 2 else None,
            notes=tuple(notes),
        )


def walk(folder: Path) -> tuple[list[str], list[str]]:
    """List all files and folders below a folder, by their relative names.

    Links to folders are followed, unless they lead back. Hidden files are left out.
    """
    files, folders = [], []

    def fail(error: OSError) -> None:
        raise InputError(
            f"cannot read the folder {error.filename}: {error.strerror}; change its permissions"
        )

    for root, inside, names in os.walk(folder, onerror=fail, followlinks=True):
        here = Path(root)
        below = here.relative_to(folder)
        inside[:] = sorted(
            name
            for name in inside
            if not name.startswith((".", "__")) and not _leads_back(here / name)
        )
        files += [(below / name).as_posix() for name in sorted(names) if name[0] != "."]
        folders += [(below / name).as_posix() for name in inside]
    return files, folders


def _leads_back(folder: Path) -> bool:
    """Return whether a link leads to a folder that holds it."""
    above = folder.absolute().parents
    return folder.is_symlink() and any(folder.samefile(parent) for parent in above)


def list_archive(path: Path) -> tuple[list[str], list[str], str]:
    """List files and folders below the one folder that holds them all, and that folder."""
    with open_archive(path) as archive:
        files = [
            name
            for name in sorted(archive.namelist())
            if not name.endswith("/") and not re.search(r"(^|/)(\.|__)", name)
        ]
    tops = {name.split("/")[0] for name in files}
    root = f"{tops.pop()}/" if len(tops) == 1 and any(n.count("/") > 1 for n in files) else ""
    files = [name.removeprefix(root) for name in files]
    folders = {parent.as_posix() for name in files for parent in PurePosixPath(name).parents}
    return files, sorted(folders - {"."}), root


def _read_csv(path: Path) -> tuple[list[str], list[list[str]]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            file.seek(0)
            separator = max(",;\t|", key=header.count)
            rows = [row for row in csv.reader(file, delimiter=separator) if any(row)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is not a readable table ({error}): save it as CSV") from None
    if len(rows) < 2:
        raise InputError(f"{path} has no rows: give a table with a header and a row per picture")
    wrong = next((n for n, row in enumerate(rows, 1) if len(row) != len(rows[0])), None)
    if wrong is not None:
        raise InputError(
            f"{path}, row {wrong} has {len(rows[wrong - 1])} columns, not {len(rows[0])}: fix it"
        )
    return [name.strip() for name in rows[0]], rows[1:]


def _read_parquet(path: Path) -> tuple[list[str], list[list[str]]]:
    columns: Mapping[str, Sequence[Any]]
    try:
        from pyarrow import parquet

        columns = parquet.read_table(path).to_pydict()
    except ImportError:
        raise InputError(f"{path} needs pyarrow: pip install pyarrow") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a readable table ({error}): save it again") from None
    values = zip(*columns.values(), strict=True)
    return list(columns), [[_text(value) for value in row] for row in values]


def _text(value: object) -> str:
    """Return a value of a table or an array as it would stand in a CSV file.

    >>> [_text(value) for value in ("cat", b"cat", 1, 1.0, 1.5, None, float("nan"))]
    ['cat', 'cat', '1', '1', '1.5', '', '']
    """
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, float):
        return "" if np.isnan(value) else str(value).removesuffix(".0")
    return "" if value is None else str(value)


def _table(path: Path, header: list[str], rows: list[list[str]], columns: Columns) -> Pictures:
    """Take paths relative to the table, labels, and the rest as columns for audits."""
    kinds = tuple(image_suffixes())
    found = dict(zip(header, zip(*rows, strict=True), strict=True))
    path_like = [
        name for name, values in found.items() if values and values[0].lower().endswith(kinds)
    ]
    for given in (columns.path, columns.label, columns.split):
        if given is not None and given not in found:
            raise InputError(f"{path} has no column {given!r}; there are: {', '.join(found)}")
    paths = columns.path or _column("path", PATH_COLUMNS, found, path_like, path)
    likely = [
        name
        for name in header
        if name.lower() in SPLIT_COLUMNS
        and {v.strip().lower() for v in found[name]} & {*SPLIT_NAMES}
    ]
    split = columns.split or next(iter(likely), None)
    rest = [name for name in header if name not in (paths, split)]
    labels = columns.label or _column("label", LABEL_COLUMNS, found, rest, path)
    splits = None
    if split is not None:
        words = [value.strip().lower() for value in found[split]]
        remedy = f"or rename the column {split!r} for a random split"
        if blank := words.count(""):
            raise InputError(f"{path}: {blank:,} rows have no split: fill them in, {remedy}")
        if unknown := {*words} - {*SPLIT_NAMES}:
            raise InputError(
                f"{path}: a split is train, validation or test, not {min(unknown)!r}: correct it, "
                f"choose another column with --split-column, {remedy}"
            )
        splits = [SPLIT_NAMES[word] for word in words]
    names = [value.strip() for value in found[paths]]
    return Pictures(
        names,
        [value.strip() for value in found[labels]],
        lambda row: path.parent / names[row],
        ImageFiles(path.parent, tuple(names)).fingerprint(),
        splits,
        {name: found[name] for name in rest if name != labels},
        notes=(
            f"{path.name}: pictures in column {paths!r}, labels in {labels!r}, "
            + (f"splits in {split!r}" if split else "no split"),
        ),
    )


def _column(
    what: str,
    usual: Sequence[str],
    found: Mapping[str, Sequence[str]],
    candidates: Sequence[str],
    path: Path,
) -> str:
    """Return the column that has a usual name, or is the only candidate."""
    for name in usual:
        for column in found:
            if column.lower() == name and (what != "path" or column in candidates):
                return column
    if len(candidates) == 1:
        return candidates[0]
    raise InputError(
        f"{path}: name the column of the {what} with --{what}-column; there are: "
        f"{', '.join(found)}"
    )


def _arrays(path: Path) -> Pictures:
    """Read images (NHW, NHWC or NCHW) and labels, of one split or several, from .npz."""
    images: dict[str, Any] = {}
    labels: dict[str, Any] = {}
    try:
        with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as archive:
            for key in archive.files:
                if match := _ARRAYS.fullmatch(key.lower()):
                    kind = images if match["kind"][0] in "ix" else labels
                    kind[match["a"] or match["b"] or ""] = archive[key]
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"{path} cannot be read ({error}): write it with numpy.savez") from None
    if not images or images.keys() != labels.keys() or not {*images} <= {"", *SPLIT_NAMES}:
        raise InputError(
            f"{path} needs the arrays images and labels, or train_images, train_labels and so on"
        )
    pictures, texts, splits = [], list[str](), []
    for key, array in images.items():
        label = np.squeeze(labels[key])
        if not array.ndim:
            raise InputError(f"{path}: the images are a single value: give an array of pictures")
        if label.ndim != 1 or len(label) != len(array):
            raise InputError(
                f"{path}: {len(array)} images but labels of shape {labels[key].shape}: "
                "give one label per image"
            )
        pictures.append(_channels_last(array, path))
        texts += [_text(value) for value in label.tolist()]
        splits += [SPLIT_NAMES[key]] * len(array) if key else []
    where = [(part, row) for part, array in enumerate(pictures) for row in range(len(array))]
    return Pictures(
        [f"{path.name} image {row}" for row in range(len(where))],
        texts,
        lambda row: Image.fromarray(pictures[where[row][0]][where[row][1]]),
        f"{path.name} {size_and_time(path)}",
        splits or None,
    )


def _channels_last(array: Any, path: Path) -> Any:  # noqa: ANN401
    """Return NHW, or NHWC with three channels, of a kind that Pillow has."""
    if array.ndim == 4 and array.shape[1] in (1, 3) and array.shape[3] not in (1, 3):
        array = array.transpose(0, 2, 3, 1)
    if array.ndim == 4 and array.shape[3] == 1:
        array = array[..., 0]
    colour = array.ndim == 4 and array.shape[3] == 3
    if not len(array) or 0 in array.shape or not (colour or array.ndim == 3):
        raise InputError(
            f"{path}: images of shape {array.shape}: give (n, height, width), with 3 channels "
            "last or first for colour"
        )
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype.kind not in "iufb":
        raise InputError(f"{path}: images are numbers, not {array.dtype}")
    low, high = float(array.min()), float(array.max())
    if not np.isfinite(low + high):
        raise InputError(f"{path}: images hold NaN or infinity: replace these values")
    if array.dtype.kind in "iub" and low >= 0 and high <= 255:
        return array.astype(np.uint8)
    if colour:
        if low < 0 or high > 1:
            raise InputError(
                f"{path}: colours are 0 to 255 (uint8) or 0 to 1 (floats), not {low:g} to {high:g}"
            )
        return (array * 255).round().astype(np.uint8)
    return array.astype(np.uint16 if array.dtype == np.uint16 else np.float32)


_HUGGING_FACE = ("dataset_dict.json", "dataset_info.json")


def _hugging_face(path: Path, columns: Columns) -> Pictures:
    """Read what `datasets.save_to_disk` wrote."""
    try:
        import datasets
    except ImportError:
        raise InputError(f"{path} needs datasets: pip install datasets") from None
    loaded = datasets.load_from_disk(str(path))
    parts: dict[str, Any] = dict(loaded) if isinstance(loaded, dict) else {"": loaded}
    features = next(iter(parts.values())).features
    is_image = {name for name, kind in features.items() if isinstance(kind, datasets.Image)}
    is_class = [name for name, kind in features.items() if hasattr(kind, "names")]
    image = columns.path or next(iter(sorted(is_image)), None)
    label = columns.label or next((n for n in (*is_class, *LABEL_COLUMNS) if n in features), None)
    if image not in is_image or label not in features or not {*parts} <= {"", *SPLIT_NAMES}:
        raise InputError(
            f"{path}: name the image and the label with --path-column and --label-column (there "
            f"are {', '.join(features)}); splits are train, validation and test"
        )
    tables = [p.cast_column(image, datasets.Image(decode=False)) for p in parts.values()]
    where = [(part, row) for part, table in enumerate(tables) for row in range(len(table))]
    names = getattr(features[label], "names", None)

    def texts(column: str) -> list[str]:
        values = (value for table in tables for value in table[column])
        return [names[v] if column == label and names else str(v) for v in values]

    def read(row: int) -> Source:
        part, number = where[row]
        stored = tables[part][number][image]
        return stored["bytes"] or Path(stored["path"])

    splits = [SPLIT_NAMES[key] for key in parts if key for _ in range(len(parts[key]))]
    plain = [n for n, kind in features.items() if n not in (image, label, *is_image)]
    return Pictures(
        [f"{path.name} image {row}" for row in range(len(where))],
        texts(str(label)),
        read,
        " ".join(table._fingerprint for table in parts.values()),
        splits or None,
        {n: texts(n) for n in plain if isinstance(features[n], datasets.Value)},
        tuple(names) if names else None,
    )

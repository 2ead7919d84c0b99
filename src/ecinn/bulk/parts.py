"""The folder of a run: numbered parts, each written whole or not at all, and what they are."""

import io
import json
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from ecinn.bulk.rows import Row
from ecinn.errors import InputError
from ecinn.files import atomic_write, output_folder

Format = Literal["parquet", "webdataset"]
SUFFIXES: dict[Format, str] = {"parquet": ".parquet", "webdataset": ".tar"}
RECORD = "_bulk.json"
"""Says what the run computes. Readers of Parquet folders ignore names that begin like this."""
LOCK = ".bulk.lock"
PICTURES = ("counterfactual", "tipping_point")
_OURS = re.compile(r"(\.?part-\d{5,}\.(parquet|tar|try)|\.?_bulk\.json)(\.\w+)?|\.bulk\.lock")


@contextmanager
def open_run(folder: Path, about: Mapping[str, Any]) -> Iterator[None]:
    """Begin a run, or continue one about the same; nobody else writes there meanwhile."""
    text = json.dumps(about, indent=1, ensure_ascii=False)
    about = json.loads(text)
    with suppress(PermissionError):  # said by `output_folder`
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is a file: name a folder with --out")
    output_folder(folder)
    if folder.exists():  # a folder that is refused is left as it is
        _check(folder, about)
    with _locked(folder):
        _check(folder, about)
        record = folder / RECORD
        if not record.exists():
            atomic_write(record, f"{text}\n".encode())
        _remove_unfinished(folder)
        try:
            yield
        finally:
            _remove_unfinished(folder)


def _remove_unfinished(folder: Path) -> None:
    """Remove files that killed processes have not finished."""
    for path in folder.glob(".*"):
        if path.name.startswith((".part-", f".{RECORD}.")):
            path.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes of this machine out, where the system has such locks."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"another run is writing to {folder}: wait for it, or choose another folder"
            ) from None
        yield


def _check(folder: Path, about: Mapping[str, Any]) -> None:
    """Refuse a folder with other files, or with a run about something else."""
    names, record = sorted(path.name for path in folder.iterdir()), folder / RECORD
    foreign = [name for name in names if not _OURS.fullmatch(name)]
    if foreign or (not record.exists() and any(name.startswith("part-") for name in names)):
        shown = ", ".join((foreign or names)[:3])
        raise InputError(f"{folder} holds other files ({shown}): choose an empty folder")
    if not record.exists():
        return
    try:
        before = json.loads(record.read_bytes())
        other = [key for key in about if before.get(key) != about[key]]
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{record} cannot be read ({error}): choose another folder") from None
    if other:
        raise InputError(
            f"{folder} holds a run with another {', '.join(other).replace('_', ' ')}: "
            "repeat the same command to continue it, or choose another folder"
        )


def part_path(folder: Path, number: int, kind: Format) -> Path:
    """Return the path of a part."""
    return folder / f"part-{number:05}{SUFFIXES[kind]}"


def write_part(path: Path, rows: Sequence[Row], class_names: Sequence[str], kind: Format) -> None:
    """Write the rows of a block, completely or not at all."""
    data = _parquet(rows, class_names) if kind == "parquet" else _webdataset(rows, path)
    atomic_write(path, data)


def count_rows(path: Path, kind: Format) -> Counter[str] | None:
    """Count rows and errors of a finished part; None if it is missing or damaged."""
    return _count_parquet(path) if kind == "parquet" else _count_webdataset(path)


def _count_parquet(path: Path) -> Counter[str] | None:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as table:
            reasons = table.read(columns=["error"])["error"]
    except (OSError, KeyError, pyarrow.ArrowException):
        return None
    return Counter(rows=len(reasons), errors=len(reasons) - reasons.null_count)


def _count_webdataset(path: Path) -> Counter[str] | None:
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            names = archive.getnames()
            file.seek(archive.offset)
            end = file.read()
    except (OSError, tarfile.TarError):
        return None
    if len(end) < 2 * tarfile.BLOCKSIZE or any(end):  # members may be missing
        return None
    rows = sum(name.endswith(".json") for name in names)
    explained = sum(name.endswith(f".{PICTURES[0]}.png") for name in names)
    return Counter(rows=rows, errors=rows - explained)


def _parquet(rows: Sequence[Row], class_names: Sequence[str]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(list(rows), schema(class_names))
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(table, sink)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def schema(class_names: Sequence[str]) -> Any:  # noqa: ANN401
    """Return the columns; posteriors have a field for every class."""
    import pyarrow as pa

    text, number, flag, whole = pa.string(), pa.float64(), pa.bool_(), pa.int64()
    posterior = pa.struct([(name, number) for name in class_names])
    certificate = pa.struct(
        {
            "posterior": posterior, "stored_posterior": posterior, "answer": posterior,
            "winner": text, "reached": flag, "clamped": number,
        }
    )  # fmt: skip
    columns = {
        "key": text, "predicted": text, "target": text, "error": text,
        "counterfactual": pa.binary(), "tipping_point": pa.binary(),
        "alpha": number, "alpha_0": number, "alpha_1": number,
        "certificate": certificate, "tipping_certificate": certificate,
        "as_requested": flag, "reachable": flag, "highest": number, "third_class": text,
        "explained": flag, "tied": flag, "bent": flag,
        "queries": whole, "corrections": whole, "passes": whole,
        "posterior": posterior, "answer": posterior, "log_p": number, "typical": flag,
        "out_of_distribution": pa.list_(text), "round_trip_error": number,
        "notes": pa.list_(text),
    }  # fmt: skip
    about = {"class_names": json.dumps(list(class_names), ensure_ascii=False)}
    return pa.schema(columns, about)


def _webdataset(rows: Sequence[Row], path: Path) -> bytes:
    """Write a sample for every row: its numbers as JSON, its pictures as PNG."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for number, row in enumerate(rows):
            name = f"{path.stem.removeprefix('part-')}-{number:06}"
            text = {"error": None} | {k: v for k, v in row.items() if k not in PICTURES}
            files = {"json": json.dumps(text, ensure_ascii=False).encode()}
            files |= {f"{key}.png": row[key] for key in PICTURES if row.get(key)}
            for suffix, content in files.items():
                member = tarfile.TarInfo(f"{name}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return sink.getvalue()

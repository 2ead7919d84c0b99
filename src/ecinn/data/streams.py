"""Pictures without labels, read in blocks: folders, zips, WebDataset shards, Parquet, arrays."""

import lzma
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np

from ecinn.data.decoded_images import ImageFiles, reader
from ecinn.data.photographs import Source, image_suffixes
from ecinn.data.sources import list_archive, walk
from ecinn.errors import InputError, first_line
from ecinn.progress import Observer, Progress, ignore

Kind = Literal["folder", "zip", "tar", "parquet", "npy"]
SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "tar": (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz"),
    "parquet": (".parquet",),
    "zip": (".zip",),
    "npy": (".npy",),
}
KINDS = "pictures, .tar shards or .parquet tables in a folder, a .zip, or a .npy array"
COLUMN = "image"
"""The column of a Parquet table that holds pictures, by default."""
ROWS = 32
"""Rows of a Parquet table that are decoded at once."""

Item = tuple[str, Callable[[], Source | np.ndarray]]
"""A picture's key, and a function that reads it; call it before the next item is taken."""


@dataclass(frozen=True)
class Block:
    """Consecutive pictures of one file or folder, which are explained into one part."""

    number: int
    path: str
    start: int
    count: int
    names: tuple[str, ...] = ()
    """Names of the pictures in a folder or zip archive; empty for other files."""
    file: str = ""
    """The file's path inside the input, with which keys in shards and tables begin."""


@dataclass(frozen=True)
class Stream:
    """List the files that hold pictures, with their counts; `Blocks` reads the pictures."""

    kind: Kind
    folder: Path
    files: tuple[tuple[str, int], ...]
    """The path inside `folder` of every file, or of one folder, and its number of pictures."""
    names: Sequence[str]
    version: str
    """Changes when the pictures change."""
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return sum(count for _, count in self.files)

    def blocks(self, size: int) -> Iterator[Block]:
        """Cut every file into blocks of this size, numbered from 0."""
        number = 0
        for file, count in self.files:
            path = str(self.folder / file)
            for start in range(0, count, size):
                stop = min(start + size, count)
                names = tuple(self.names[start:stop])
                yield Block(number, path, start, stop - start, names, file)
                number += 1


def open_stream(source: Path, column: str | None = None, observe: Observer = ignore) -> Stream:
    """Count the pictures of a source; none is read yet.

    Args:
        column: the column of Parquet tables that holds pictures, None for the usual one.
    """
    if not source.exists():
        raise InputError(f"there is no {source}: give {KINDS}")
    source = source.absolute()
    _check_access(source)
    kind, files, notes = _files(source)
    if column is not None and kind != "parquet":
        raise InputError(f"{source} holds no Parquet tables, which have columns: omit --column")
    if kind in ("folder", "zip"):
        names = tuple(files)
        version = ImageFiles(source, names).fingerprint()
        return Stream(kind, source.parent, ((source.name, len(names)),), names, version, notes)
    column = COLUMN if column is None else column
    counts = []
    folder = source if source.is_dir() else source.parent
    for done, name in enumerate(files, 1):
        _check_access(folder / name)
        counts.append((name, _count(kind, folder / name, column)))
        if len(files) > 1:
            observe(Progress("listing pictures", done, len(files)))
    empty = tuple(f"{name} holds no pictures" for name, count in counts if not count)
    if len(empty) == len(counts):
        raise InputError(f"{source} holds no pictures: give {KINDS}")
    version = ImageFiles(folder, tuple(files)).fingerprint(f"{kind} {column}")
    return Stream(kind, folder, tuple(counts), (), version, (*notes, *empty))


def _check_access(path: Path) -> None:
    if not os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK):
        raise InputError(f"cannot read {path}: change its permissions")


def _files(source: Path) -> tuple[Kind, list[str], tuple[str, ...]]:
    """Return what a source holds: names of pictures, or names of files that hold pictures."""
    if source.is_file():
        kind = _kind(source.name)
        if kind is None:
            raise InputError(f"{source} is not a kind of data that can be read: give {KINDS}")
        if kind != "zip":
            return kind, [source.name], ()
        inside, _, root = list_archive(source)
        names = [root + name for name in dict.fromkeys(inside)]
    else:
        kind, names = "folder", walk(source)[0]
    suffixes = image_suffixes()
    held: dict[Kind, list[str]] = {
        kind: [n for n in names if PurePosixPath(n).suffix.lower() in suffixes]
    }
    if kind == "folder":
        for name in names:
            if (shard := _kind(name)) in ("tar", "parquet"):
                held.setdefault(shard, []).append(name)
    present = [found for found, files in held.items() if files]
    if not present:
        raise InputError(f"{source} holds no pictures: give {KINDS}")
    if len(present) > 1:
        raise InputError(
            f"{source} holds different kinds of data ({', '.join(present)}): give a file, or a "
            "folder with one kind"
        )
    ignored = len(names) - len(held[present[0]])
    notes = (f"files that are not pictures were ignored: {ignored:,}",) if ignored else ()
    return present[0], held[present[0]], notes


def _kind(name: str) -> Kind | None:
    return next((kind for kind, ends in SUFFIXES.items() if name.lower().endswith(ends)), None)


def _count(kind: Kind, path: Path, column: str) -> int:
    if kind == "tar":
        return sum(1 for _ in _tar(path, path.name))
    return len(_array(path)) if kind == "npy" else _open_parquet(path, column).metadata.num_rows


class Blocks:
    """Reads blocks; those that follow each other in a file are read in one pass."""

    def __init__(self, kind: Kind, column: str = COLUMN) -> None:
        self._kind, self._column = kind, column
        self._path: Path | None = None
        self._position = 0
        self._items: Iterator[Item] = iter(())
        self._opened = ExitStack()

    def read(self, block: Block) -> Iterator[Item]:
        """Yield all pictures of a block."""
        path = Path(block.path)
        if path != self._path or (self._kind != "zip" and block.start < self._position):
            self.close()
            self._path = path
            if self._kind == "zip":
                self._read = self._opened.enter_context(reader(path))
        if self._kind == "folder":
            yield from ((name, partial(Path, path, name)) for name in block.names)
        elif self._kind == "zip":
            yield from ((name, partial(self._read, name)) for name in block.names)
        else:
            yield from self._following(path, block)

    def close(self) -> None:
        """Close the file that is open."""
        self._opened.close()
        self._items, self._path, self._position = iter(()), None, 0

    def _following(self, path: Path, block: Block) -> Iterator[Item]:
        if self._kind == "tar":
            self._items = self._items if self._position else _tar(path, block.file)
            skip = block.start - self._position
        else:
            if not self._position or block.start != self._position:
                self._items = (
                    _parquet(path, block.file, self._column, block.start)
                    if self._kind == "parquet"
                    else _rows(path, block.start)
                )
            skip = 0
        for number, item in enumerate(islice(self._items, skip + block.count)):
            self._position = block.start - skip + number + 1
            if number >= skip:
                yield item
        if self._position < block.start + block.count:
            raise InputError(f"{path} has changed since its pictures were counted: start again")


def _tar(path: Path, file: str) -> Iterator[Item]:
    """Yield the pictures of a WebDataset shard; other members of a sample are not read."""
    suffixes = image_suffixes()
    try:
        with tarfile.open(path) as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # it would keep all
                name = PurePosixPath(member.name)
                if member.isreg() and name.suffix.lower() in suffixes and name.name[0] != ".":
                    yield f"{file}/{member.name}", partial(_content, archive, member)
            # A damaged header ends an archive without an error: only zeros may follow the end.
            assert archive.fileobj is not None
            archive.fileobj.seek(archive.offset)
            if archive.fileobj.read(tarfile.BLOCKSIZE).strip(b"\0"):
                raise tarfile.ReadError(f"bad header at byte {archive.offset:,}")
    except (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = first_line(error).rstrip(":")
        raise InputError(
            f"{path} is damaged or not a tar archive ({reason}): fetch it again, or remove it"
        ) from error


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None
    return file.read()


def _open_parquet(path: Path, column: str) -> Any:  # noqa: ANN401
    import pyarrow
    from pyarrow import parquet, types

    try:
        table = parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**20)
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(
            f"{path} is damaged or not a Parquet file ({error}): fetch it again, or remove it"
        ) from None
    schema = table.schema_arrow
    if column not in schema.names:
        raise InputError(
            f"{path} has no column {column!r}: name the pictures with --column; there are: "
            f"{', '.join(schema.names)}"
        )
    kind = schema.field(column).type
    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:  # as Hugging Face does
        kind = kind.field("bytes").type
    readable = (types.is_binary, types.is_large_binary, types.is_string, types.is_large_string)
    if not any(is_kind(kind) for is_kind in readable):
        raise InputError(
            f"{path}: the column {column!r} holds {kind}, not pictures (bytes, or their paths): "
            "name another one with --column"
        )
    return table


def _parquet(path: Path, file: str, column: str, start: int) -> Iterator[Item]:
    """Yield the pictures of a column from a row on; damaged row groups raise for every row."""
    import pyarrow

    table, row = _open_parquet(path, column), 0
    for group in range(table.num_row_groups):
        stop = row + table.metadata.row_group(group).num_rows
        if stop <= start:
            row = stop
            continue
        try:
            for batch in table.iter_batches(ROWS, row_groups=[group], columns=[column]):
                for value in batch.column(0):
                    if row >= start:
                        yield f"{file}/{row}", partial(_value, value, path.parent)
                    row += 1
        except (OSError, pyarrow.ArrowException) as error:
            reason = InputError(f"row group {group} of {file} is damaged ({error})")
            for damaged in range(max(row, start), stop):
                yield f"{file}/{damaged}", partial(_fail, reason)
            row = stop


def _value(value: Any, folder: Path) -> Source:  # noqa: ANN401
    content = value.as_py()
    if isinstance(content, dict):
        content = content["bytes"] or content.get("path")
    if content is None:
        raise InputError("the picture is missing (null)")
    return content if isinstance(content, bytes) else folder / content


def _fail(error: InputError) -> Source:
    raise error


def _array(path: Path) -> np.ndarray:
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path} cannot be read ({error}): write it with numpy.save") from None
    if array.ndim not in (3, 4):
        raise InputError(f"{path} holds an array of shape {array.shape}, not of images")
    return array


def _rows(path: Path, start: int) -> Iterator[Item]:
    array = _array(path)
    return (
        (str(row), partial(np.array, array[row : row + 1])) for row in range(start, len(array))
    )

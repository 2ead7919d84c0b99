"""Decode images of a folder or a zip archive once, to one size, and cache them as one file."""

import hashlib
import io
import math
import os
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from ecinn.data.face_crop import FaceCrop
from ecinn.errors import EcinnError, InputError, first_line
from ecinn.progress import Observer, counter, ignore

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
CHUNK_SIZE = 64
"""Images that a thread decodes before it reports progress."""
_FORMAT = "ecinn-images-1"
_DECODING_ERRORS = (
    OSError, ValueError, SyntaxError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error,
    Image.DecompressionBombError,
)  # fmt: skip
Decode = Callable[[Image.Image], NDArray[np.uint8]]


@dataclass(frozen=True)
class ImageFiles:
    """Images by their names inside a folder or a zip archive."""

    path: Path
    names: tuple[str, ...]

    def fingerprint(self, framing: str = "") -> str:
        """Hash names, sizes and modification times of the files, and how they are framed."""
        digest = hashlib.sha256(f"{_FORMAT}{framing}".encode())
        if not self.path.is_dir():
            digest.update(f"{self.path.name} {size_and_time(self.path)}".encode())
        for name in self.names:
            version = size_and_time(self.path / name) if self.path.is_dir() else ""
            # Names of files are bytes, and some are not UTF-8.
            digest.update(f"\n{name} {version}".encode(errors="surrogateescape"))
        return digest.hexdigest()[:24]


def image_names(path: Path) -> list[str]:
    """List the images of a folder or a zip archive by their suffix, sorted."""
    if path.is_dir():
        try:
            names = [entry.name for entry in path.iterdir()]
        except OSError as error:
            raise InputError(f"cannot read the folder {path}: {error.strerror}") from error
    else:
        with open_archive(path) as archive:
            names = archive.namelist()
    return sorted(name for name in names if name.lower().endswith(SUFFIXES))


def decode_images(
    files: ImageFiles,
    rows: Sequence[int],
    size: tuple[int, int],
    observe: Observer = ignore,
    *,
    crop: FaceCrop | None = None,
    hq: bool = False,
) -> UInt8[Tensor, "batch 3 height width"]:
    """Return the images of these rows at height × width, from the cache if possible.

    Successive rows, such as a split of CelebA, are mapped into memory instead of copied. The first
    call decodes all files. If no cache can be written, it decodes only the rows.

    Args:
        crop: frames faces; None crops about the centre to the aspect ratio of the size.
        hq: the faces are framed as in CelebA-HQ.
    """
    if min(size) < 1:
        raise InputError(f"an image of {size[0]}×{size[1]} has no pixels: give a larger size")
    framing = f"{crop} {hq}" if crop else ""
    path = cache_folder() / f"images-{size[0]}x{size[1]}-{files.fingerprint(framing)}.npy"
    shape = (len(files.names), 3, *size)
    cached = read_array(path, shape)
    decode = partial(fit, size=size, crop=crop, hq=hq)
    if cached is None:
        with suppress(CacheError):
            write_array(path, shape, lambda array: _decode_all(array, files, decode, observe))
            cached = read_array(path, shape)
    if cached is not None:
        wanted = np.asarray(rows, dtype=np.int64)
        if len(wanted) and (np.diff(wanted) == 1).all():
            return torch.from_numpy(cached[wanted[0] : wanted[-1] + 1])
        return torch.from_numpy(cached[wanted])
    selection = ImageFiles(files.path, tuple(files.names[row] for row in rows))
    images = np.empty((len(rows), *shape[1:]), np.uint8)
    _decode_all(images, selection, decode, observe)
    return torch.from_numpy(images)


def cache_folder() -> Path:
    """Return ECINN_CACHE, else the system's cache folder for this package."""
    if folder := os.environ.get("ECINN_CACHE"):
        return Path(folder)
    if parent := os.environ.get("XDG_CACHE_HOME"):
        return Path(parent) / "ecinn"
    return Path("~/.cache/ecinn").expanduser()


def fit(
    picture: Image.Image,
    size: tuple[int, int],
    crop: FaceCrop | None = None,
    *,
    hq: bool = False,
) -> UInt8[np.ndarray, "3 height width"]:
    """Crop a face, or else about the centre to the aspect ratio of height × width, and resize."""
    colour = picture.convert("RGB")
    if crop is None:
        fitted = ImageOps.fit(colour, size[::-1], Image.Resampling.LANCZOS)
    else:
        fitted, _ = crop.fit(colour, size, hq=hq)
    return np.asarray(fitted).transpose(2, 0, 1)


def read_array(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8] | None:
    """Map an array of `write_array` into memory; None if it is missing or damaged.

    The array may be changed; the file stays as it is.
    """
    try:
        array = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    usable = isinstance(array, np.memmap) and array.dtype == np.uint8 and array.shape == shape
    return array if usable else None


def write_array(
    path: Path, shape: tuple[int, ...], fill: Callable[[NDArray[np.uint8]], None]
) -> None:
    """Fill an array in a temporary file and rename it, or leave nothing.

    Raises `CacheError` if there is no space for it; what `fill` raises is raised.
    """
    temporary = None
    try:
        with _told_if_full(path.parent, shape):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                dir=path.parent, prefix=".images-", delete=False
            ) as file:
                temporary = Path(file.name)
            array = np.lib.format.open_memmap(temporary, "w+", np.uint8, shape)
            if hasattr(os, "posix_fallocate"):
                # A full disk later would kill the process, which maps the file into memory.
                with temporary.open("r+b") as file:
                    os.posix_fallocate(file.fileno(), 0, temporary.stat().st_size)
        fill(array)
        with _told_if_full(path.parent, shape):
            array.flush()
            del array
            temporary.chmod(0o644)
            temporary.replace(path)
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


class CacheError(EcinnError):
    """The cache cannot be written."""


@contextmanager
def _told_if_full(folder: Path, shape: tuple[int, ...]) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        size, reason = math.prod(shape) / 1e9, getattr(error, "strerror", None) or error
        raise CacheError(
            f"cannot write {size:.2g} GB of decoded images to {folder} ({reason}): free some "
            "space, or set ECINN_CACHE to another folder"
        ) from error


def _decode_all(
    array: NDArray[np.uint8], files: ImageFiles, decode: Decode, observe: Observer
) -> None:
    with reader(files.path) as read:

        def decode_row(row: int) -> None:
            try:
                with Image.open(io.BytesIO(read(files.names[row]))) as picture:
                    array[row] = decode(picture)
            except _DECODING_ERRORS as error:
                raise InputError(
                    f"{files.path / files.names[row]} cannot be decoded ({first_line(error)}): "
                    "fetch it again, or remove it"
                ) from error

        in_threads(decode_row, len(files.names), counter(observe, "decoding images", len(array)))


def in_threads(work: Callable[[int], object], total: int, report: Callable[[int], None]) -> None:
    """Do the work of every row on all cores: Pillow decodes without the interpreter's lock."""
    # Formats are registered on first use; two threads that do so at once may miss some.
    Image.init()

    def work_on_chunk(start: int) -> int:
        stop = min(start + CHUNK_SIZE, total)
        for row in range(start, stop):
            work(row)
        return stop

    pool = ThreadPoolExecutor(os.cpu_count() or 1)
    try:
        for done in pool.map(work_on_chunk, range(0, total, CHUNK_SIZE)):
            report(done)
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def reader(path: Path) -> Iterator[Callable[[str], bytes]]:
    """Yield a function from names to bytes; threads take turns at an archive."""
    if path.is_dir():
        yield lambda name: (path / name).read_bytes()
        return
    lock = threading.Lock()
    with open_archive(path) as archive:

        def read(name: str) -> bytes:
            with lock:
                return archive.read(name)

        yield read


def open_archive(path: Path) -> zipfile.ZipFile:
    """Open a zip archive."""
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} is not a readable zip file ({error}): fetch it again") from error


def size_and_time(path: Path) -> str:
    """Return "" for a file that cannot be examined: decoding it will raise the error."""
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{status.st_size} {status.st_mtime_ns}"

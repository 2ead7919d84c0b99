"""Images of a folder or a zip archive, decoded once to one size and kept as one numpy file."""

import hashlib
import io
import os
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from ecinn.errors import InputError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
Observer = Callable[[int, int], None]
"""Is told how many images are decoded, and of how many."""
_FORMAT = "ecinn-images-1"
_CHUNK = 64
_CHANNELS = 3


@dataclass(frozen=True)
class ImageFiles:
    """Images by their names inside a folder or a zip archive."""

    path: Path
    names: tuple[str, ...]

    def fingerprint(self) -> str:
        """Another one if names, sizes or times of the files change."""
        digest = hashlib.sha256(_FORMAT.encode())
        if not self.path.is_dir():
            digest.update(f"{self.path.name} {_size_and_time(self.path)}".encode())
        for name in self.names:
            own = _size_and_time(self.path / name) if self.path.is_dir() else ""
            digest.update(f"\n{name} {own}".encode())
        return digest.hexdigest()[:24]


def image_names(path: Path) -> list[str]:
    """What in a folder or a zip archive has an image's suffix, in the order of the names."""
    if path.is_dir():
        try:
            names = [entry.name for entry in path.iterdir()]
        except OSError as error:
            raise InputError(f"cannot read the folder {path}: {error.strerror}") from error
    else:
        with _open_archive(path) as archive:
            names = archive.namelist()
    return sorted(name for name in names if name.lower().endswith(SUFFIXES))


def decode_images(
    files: ImageFiles, rows: Sequence[int], size: tuple[int, int], observe: Observer
) -> UInt8[Tensor, "batch 3 height width"]:
    """The images of these rows as height × width asks, from the cache where there is one.

    All files are decoded on the first call. Where no cache can be written, only the rows are.
    """
    if min(size) < 1:
        raise InputError(f"an image of {size[0]}×{size[1]} has no pixels: give a larger size")
    path = cache_folder() / f"images-{size[0]}x{size[1]}-{files.fingerprint()}.npy"
    shape = (len(files.names), _CHANNELS, *size)
    cached = _read(path, shape)
    if cached is None and _build(path, files, shape, observe):
        cached = _read(path, shape)
    if cached is not None:
        return torch.from_numpy(cached[np.asarray(rows, dtype=np.int64)])
    chosen = ImageFiles(files.path, tuple(files.names[row] for row in rows))
    images = np.empty((len(rows), *shape[1:]), np.uint8)
    _decode_into(images, chosen, observe)
    return torch.from_numpy(images)


def cache_folder() -> Path:
    """ECINN_CACHE, else the folder for caches that the system names."""
    if own := os.environ.get("ECINN_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "ecinn"
    return Path("~/.cache/ecinn").expanduser()


def fit(picture: Image.Image, size: tuple[int, int]) -> UInt8[np.ndarray, "3 height width"]:
    """Cropped about its centre to the aspect ratio of height × width, then resized to it."""
    height, width = size
    fitted = ImageOps.fit(picture.convert("RGB"), (width, height), Image.Resampling.LANCZOS)
    return np.asarray(fitted).transpose(2, 0, 1)


def _read(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8] | None:
    """The cached array, still on disk; None where there is none that can be used."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    usable = isinstance(array, np.memmap) and array.dtype == np.uint8 and array.shape == shape
    return array if usable else None


def _build(path: Path, files: ImageFiles, shape: tuple[int, ...], observe: Observer) -> bool:
    """Decode all files beside the cache's place and move them there; False if nothing can be."""
    temporary = None
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=".images-", suffix=".npy")
            os.close(handle)
            temporary = Path(name)
            array = np.lib.format.open_memmap(temporary, "w+", np.uint8, shape)
            _reserve(temporary)
        except (OSError, RuntimeError):
            return False
        _decode_into(array, files, observe)
        try:
            array.flush()
            del array
            temporary.chmod(0o644)
            temporary.replace(path)
        except OSError:
            return False
        return True
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _reserve(path: Path) -> None:
    """Take the disk space now: a mapped file that finds the disk full later kills the process."""
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _decode_into(array: NDArray[np.uint8], files: ImageFiles, observe: Observer) -> None:
    """On all cores: Pillow lets go of the interpreter while it decodes and resizes."""
    total, size = len(files.names), (array.shape[2], array.shape[3])
    # Formats are registered on first use; two threads that do so at once may miss some.
    Image.init()
    with _reader(files.path) as read:

        def decode(start: int) -> int:
            stop = min(start + _CHUNK, total)
            for row in range(start, stop):
                array[row] = _decode(files.path, files.names[row], read, size)
            return stop

        pool = ThreadPoolExecutor(os.cpu_count() or 1)
        try:
            for done in pool.map(decode, range(0, total, _CHUNK)):
                observe(done, total)
        finally:
            pool.shutdown(cancel_futures=True)


def _decode(
    path: Path, name: str, read: Callable[[str], bytes], size: tuple[int, int]
) -> NDArray[np.uint8]:
    try:
        with Image.open(io.BytesIO(read(name))) as picture:
            return fit(picture, size)
    except (
        OSError, ValueError, SyntaxError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error,
        Image.DecompressionBombError,
    ) as error:  # fmt: skip
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"{path / name} cannot be decoded ({reason}): fetch it again, or take it away"
        ) from error


@contextmanager
def _reader(path: Path) -> Iterator[Callable[[str], bytes]]:
    """Gives the bytes of a name; threads take turns at an archive, which has one position."""
    if path.is_dir():
        yield lambda name: (path / name).read_bytes()
        return
    turn = threading.Lock()
    with _open_archive(path) as archive:

        def read(name: str) -> bytes:
            with turn:
                return archive.read(name)

        yield read


def _open_archive(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} is not a readable zip file ({error}): fetch it again") from error


def _size_and_time(path: Path) -> str:
    """A file that cannot be asked is named by the error of its decoding, which is to come."""
    try:
        about = path.stat()
    except OSError:
        return ""
    return f"{about.st_size} {about.st_mtime_ns}"

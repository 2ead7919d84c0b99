"""Files of npm packages, fetched once and kept in the cache folder."""

import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ecinn.data.decoded_images import cache_folder
from ecinn.errors import EcinnError, InputError
from ecinn.files import atomic_folder


def npm_files(
    package: str, version: str, names: Sequence[str], *, otherwise: str = ""
) -> dict[str, bytes]:
    """Return files of a package by their paths in it, from the cache or from the npm registry.

    Args:
        otherwise: what else to do if npm fails, for messages.
    """
    kept = cache_folder() / f"{package}-{version}"
    if not all((kept / name).is_file() for name in names):
        atomic_folder(kept, _fetched(package, version, names, otherwise), replace=True)
    return {name: (kept / name).read_bytes() for name in names}


def _fetched(package: str, version: str, names: Sequence[str], otherwise: str) -> dict[str, bytes]:
    """Download the package, whose checksum npm verifies, and take the files that are used."""
    if (npm := shutil.which("npm")) is None:
        raise InputError(
            f"{package} comes from npm, which is not installed: install it{otherwise}"
        )
    with tempfile.TemporaryDirectory(prefix="ecinn-") as place:
        command = [npm, "pack", f"{package}@{version}", "--silent"]
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
        packed = list(Path(place).glob("*.tgz"))
        if done.returncode or not packed:
            raise EcinnError(
                f"npm could not fetch {package} {version}: check the network{otherwise}"
            )
        with tarfile.open(packed[0]) as archive:
            contents = {name: archive.extractfile(f"package/{name}") for name in names}
            return {name: file.read() for name, file in contents.items() if file is not None}

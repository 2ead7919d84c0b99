"""DICOM files (.dcm): stored values, their window and their polarity, through pydicom."""

import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ecinn.data.framing import Intensity
from ecinn.errors import InputError

MAGIC = b"DICM"
"""Follows the first 128 bytes."""


def is_dicom(source: object) -> bool:
    """Return whether a path or the contents of a file are DICOM."""
    if isinstance(source, bytes):
        return source[128:132] == MAGIC
    return isinstance(source, str | Path) and str(source).lower().endswith((".dcm", ".dicom"))


def require_pydicom() -> None:
    """Raise an `InputError` if pydicom is not installed."""
    if find_spec("pydicom") is None:
        raise InputError("DICOM files need pydicom: pip install 'ecinn[dicom]'")


def read_dicom(
    source: str | Path | io.BytesIO, notes: list[str]
) -> tuple[Image.Image, Intensity | None, bool]:
    """Return the first frame, the file's window, and whether small values are white.

    Values are rescaled to their unit (such as Hounsfield) with the file's slope and intercept.
    """
    require_pydicom()
    import pydicom
    from pydicom.errors import InvalidDicomError
    from pydicom.pixels.utils import pixel_array

    name = str(source) if isinstance(source, str | Path) else "the image"
    try:
        file = pydicom.dcmread(source)
        values = pixel_array(file)  # colours as RGB
    except FileNotFoundError:
        raise InputError(f"{name}: no such file") from None
    except InvalidDicomError:
        raise InputError(f"{name} is not a DICOM file: give another") from None
    except Exception as error:  # decoders of many formats raise anything
        reason = " ".join(str(error).split())
        raise InputError(f"{name} cannot be decoded as DICOM ({reason}): convert it") from None
    colour = int(file.get("SamplesPerPixel", 1)) == 3
    if values.ndim == (4 if colour else 3):
        notes.append(f"only the first of {len(values)} frames was used")
        values = values[0]
    if colour:
        if values.dtype != np.uint8:
            raise InputError(f"{name} has {values.dtype} colours: convert it to 8 bits")
        return Image.fromarray(np.ascontiguousarray(values)), None, False
    slope = _first(file, "RescaleSlope", 1.0)
    values = values * slope + _first(file, "RescaleIntercept", 0.0)
    return (
        Image.fromarray(values.astype(np.float32)),
        _window(file),
        file.get("PhotometricInterpretation") == "MONOCHROME1",
    )


def _window(file: Any) -> Intensity | None:  # noqa: ANN401
    """Return the file's first window; without one None."""
    centre, width = _first(file, "WindowCenter", None), _first(file, "WindowWidth", None)
    if centre is None or width is None or width <= 1:
        return None
    # PS3.3 C.11.2.1.2: black at centre − 0.5 − (width − 1)/2, white at centre − 0.5 + …
    half = (width - 1) / 2
    return Intensity(centre - 0.5 - half, centre - 0.5 + half, "DICOM window")


def _first(file: Any, word: str, usual: Any) -> Any:  # noqa: ANN401
    """Return a number of the header, the first where there are several."""
    value = file.get(word)
    if value is None or value == "":
        return usual
    try:
        return float(value)
    except TypeError:
        return float(value[0])

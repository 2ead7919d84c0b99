"""DICOM: units, windows, polarity and frames."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ecinn.data.framing import Framing, Intensity
from ecinn.data.own import load_own_data
from ecinn.data.own_record import OwnDataOptions
from ecinn.data.photographs import read_photograph
from ecinn.errors import InputError

pydicom = pytest.importorskip("pydicom")
SHAPE = (1, 8, 8)


def write(path: Path, values: np.ndarray, **header: Any) -> Path:
    file = pydicom.Dataset()
    file.file_meta = pydicom.dataset.FileMetaDataset()
    file.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    file.file_meta.MediaStorageSOPClassUID = pydicom.uid.SecondaryCaptureImageStorage
    file.file_meta.MediaStorageSOPInstanceUID = pydicom.uid.generate_uid()
    file.Rows, file.Columns = 8, 8
    file.SamplesPerPixel, file.PhotometricInterpretation = 1, "MONOCHROME2"
    file.BitsAllocated, file.BitsStored, file.HighBit, file.PixelRepresentation = 16, 12, 11, 0
    file.PixelData = values.astype(np.uint16).tobytes()
    for name, value in header.items():
        setattr(file, name, value)
    file.save_as(path, enforce_file_format=True)
    return path


@pytest.fixture
def values() -> np.ndarray:
    return np.random.default_rng(4).integers(0, 4096, (8, 8))


@pytest.mark.parametrize("inverted", [False, True])
def test_a_window_in_units(values: np.ndarray, inverted: bool, tmp_path: Path) -> None:  # noqa: FBT001
    path = write(
        tmp_path / "scan.dcm",
        values,
        RescaleSlope=2,
        RescaleIntercept=-1024,
        WindowCenter=[40.5, 300],
        WindowWidth=[401, 1500],
        PhotometricInterpretation="MONOCHROME1" if inverted else "MONOCHROME2",
    )
    expected = np.round(np.clip((values * 2.0 - 1024 + 160) / 400, 0, 1) * 255)
    for source in (path, path.read_bytes()):
        read = read_photograph(source, SHAPE, digit=False)
        assert np.array_equal(read.image[0], 255 - expected if inverted else expected)
        assert read.notes[0] == "values of -160 to 240 (DICOM window) became black to white"
        assert len(read.notes) == 1 + inverted
    given = Framing(intensity=Intensity(0.0, 1000.0, "given"))
    read = read_photograph(path, SHAPE, digit=False, framing=given)
    expected = np.round(np.clip((values * 2.0 - 1024) / 1000, 0, 1) * 255)
    assert np.array_equal(read.image[0], 255 - expected if inverted else expected)


def test_the_first_frame_is_used_and_noted(values: np.ndarray, tmp_path: Path) -> None:
    frames = np.stack([values, 4095 - values])
    path = write(tmp_path / "film.dcm", frames, NumberOfFrames=2)
    framing = Framing(intensity=Intensity(0.0, 4095.0, "12 bits"))
    read = read_photograph(path, SHAPE, digit=False, framing=framing)
    assert np.array_equal(read.image[0], np.round(values / 4095 * 255))
    assert read.notes[0] == "only the first of 2 frames was used"


def test_files_that_are_not_dicom(tmp_path: Path) -> None:
    (tmp_path / "a.dcm").write_bytes(b"rubbish")
    for name, says in (("a.dcm", "not a DICOM"), ("b.dcm", "no such file")):
        with pytest.raises(InputError, match=says):
            read_photograph(tmp_path / name, SHAPE, digit=False)


@pytest.mark.parametrize("windows", [1, 2])
def test_the_window_of_a_folder(
    windows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECINN_CACHE", str(tmp_path / "cache"))
    random = np.random.default_rng(6)
    for n in range(24):
        path = tmp_path / "scans" / "ab"[n % 2] / f"{n}.dcm"
        path.parent.mkdir(parents=True, exist_ok=True)
        centre = 1000.5 + 500 * (n // 2 % windows)
        write(path, random.integers(0, 4096, (8, 8)), WindowCenter=centre, WindowWidth=2001)
    own = load_own_data(tmp_path / "scans", OwnDataOptions(size=16))
    window = Intensity(0.0, 2000.0, "DICOM window")
    assert own.framing.intensity == (window if windows == 1 else None)
    assert any("own window" in note for note in own.notes) == (windows == 2)
    found = {image.numpy().tobytes() for data in (own.train, own.validation, own.test)
             for image in data.images}  # fmt: skip
    for path in (tmp_path / "scans").rglob("*.dcm"):
        read = read_photograph(path, (1, 16, 16), digit=False, framing=own.framing)
        assert read.image.numpy().tobytes() in found


def test_without_pydicom_the_extra_is_named(
    values: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "scan.dcm", values)
    monkeypatch.setattr("ecinn.data.dicom.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"ecinn\[dicom\]"):
        read_photograph(path, SHAPE, digit=False)

"""Pictures of your own: sources, size, bits, cache, splits, records and faults."""

import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ecinn.data.dataset import Dataset
from ecinn.data.framing import Framing, Intensity
from ecinn.data.own import OwnData, load_own_data, load_recorded
from ecinn.data.own_record import RECORD_FILE, OwnDataOptions
from ecinn.data.photographs import read_photograph
from ecinn.data.sources import Columns
from ecinn.errors import EcinnError, InputError
from ecinn.progress import Progress

CLASSES = ("cat", "dog")
PER_CLASS = 20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ECINN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def noise(seed: int, size: int = 16, channels: int = 3) -> np.ndarray:
    shape = (size, size, channels) if channels > 1 else (size, size)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write_folders(folder: Path, make: Callable[[int], np.ndarray] = noise) -> Path:
    """Twenty pictures of each class, numbered 0 to 39."""
    for number in range(2 * PER_CLASS):
        path = folder / CLASSES[number // PER_CLASS] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(make(number)).save(path)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folders(tmp_path / "pets")


def everything(own: OwnData) -> dict[bytes, tuple[str, str]]:
    """Label and side of every picture, by its pixels."""
    return {
        image.numpy().tobytes(): (data.class_names[int(label)], side)
        for side in ("train", "validation", "test")
        for data in [getattr(own, side)]
        for image, label in zip(data.images, data.labels, strict=True)
    }


def pixels(picture: np.ndarray) -> bytes:
    return picture.reshape(*picture.shape[:2], -1).transpose(2, 0, 1).tobytes()


def as_zip(folder: Path, target: Path) -> Path:
    path = target / "pets.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*.png")):
            archive.write(file, f"pets/{file.relative_to(folder)}")
    return path


def as_csv(folder: Path, target: Path) -> Path:
    rows = [f"pets/{f.relative_to(folder)};{f.parent.name};{int(f.stem) % 3}"
            for f in sorted(folder.rglob("*.png"))]  # fmt: skip
    path = target / "pets.csv"
    path.write_text("\n".join(["Image;class;camera", *rows, ""]))
    return path


def as_parquet(folder: Path, target: Path) -> Path:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    files = sorted(folder.rglob("*.png"))
    table = arrow.table({"path": [str(f) for f in files], "label": [f.parent.name for f in files]})
    parquet.write_table(table, target / "pets.parquet")
    return target / "pets.parquet"


def as_hugging_face(folder: Path, target: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    files = sorted(folder.rglob("*.png"))
    features = datasets.Features(
        {"picture": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))}
    )
    columns = {
        "picture": [str(f) for f in files],
        "label": [CLASSES.index(f.parent.name) for f in files],
    }
    datasets.Dataset.from_dict(columns, features).save_to_disk(target / "saved")
    return target / "saved"


def as_arrays(order: str) -> Callable[[Path, Path], Path]:
    def write(folder: Path, target: Path) -> Path:
        images = np.stack([np.asarray(Image.open(f)) for f in sorted(folder.rglob("*.png"))])
        if order == "NCHW":
            images = images.transpose(0, 3, 1, 2)
        labels = [CLASSES[n // PER_CLASS] for n in range(2 * PER_CLASS)]
        np.savez(target / "pets.npz", images=images, labels=labels)
        return target / "pets.npz"

    return write


SOURCES = {
    "folders": lambda folder, _: folder,
    "zip": as_zip,
    "csv": as_csv,
    "parquet": as_parquet,
    "Hugging Face": as_hugging_face,
    "NHWC": as_arrays("NHWC"),
    "NCHW": as_arrays("NCHW"),
}


@pytest.mark.filterwarnings("default")  # of the packages that write some of these files
@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_source_gives_the_same_pictures(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    own = load_own_data(SOURCES[kind](folder, tmp_path))
    found = everything(own)
    expected = {pixels(noise(n)): CLASSES[n // PER_CLASS] for n in range(2 * PER_CLASS)}
    assert {image: label for image, (label, _) in found.items()} == expected
    assert [len(own.train), len(own.validation), len(own.test)] == [32, 4, 4]
    assert own.train.class_names == CLASSES
    for data, n in ((own.train, 16), (own.validation, 2), (own.test, 2)):
        assert data.labels.bincount().tolist() == [n, n]
    assert own.framing == Framing()


def test_columns_are_refused_where_there_is_no_table(folder: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=np.zeros((4, 16, 16), np.uint8), labels=[0, 1, 0, 1])
    for source in (folder, tmp_path / "a.npz"):
        for name in ("path", "label", "split"):
            with pytest.raises(InputError, match="columns need a table"):
                load_own_data(source, OwnDataOptions(columns=Columns(**{name: "kind"})))


def test_columns_of_a_table_follow_their_pictures(folder: Path, tmp_path: Path) -> None:
    own = load_own_data(as_csv(folder, tmp_path))
    camera = {pixels(noise(n)): str(n % 3) for n in range(2 * PER_CLASS)}
    for data in (own.train, own.validation, own.test.first(2), own.train.select(slice(3, 9))):
        assert data.columns.keys() == {"camera"}
        found = [camera[image.numpy().tobytes()] for image in data.images]
        assert data.columns["camera"] == tuple(found)
    grouped = load_own_data(tmp_path / "pets.csv", OwnDataOptions(group="camera"))
    sides = [set(data.columns["camera"]) for data in (grouped.train, grouped.validation,
                                                       grouped.test)]  # fmt: skip
    assert [len(side) for side in sides] == [1, 1, 1]


@pytest.mark.parametrize("layout", ["folders", "column", "arrays"])
def test_a_given_split_is_kept(layout: str, folder: Path, tmp_path: Path) -> None:
    side = {n: ("training", "Val", "test")[n % 3] for n in range(2 * PER_CLASS)}
    source = tmp_path / "given"
    if layout == "folders":
        for n in side:
            path = source / side[n] / CLASSES[n // PER_CLASS] / f"{n}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noise(n)).save(path)
    elif layout == "column":
        source = tmp_path / "given.csv"
        rows = [f"pets/{CLASSES[n // PER_CLASS]}/{n:02}.png,{CLASSES[n // PER_CLASS]},{side[n]}"
                for n in side]  # fmt: skip
        source.write_text("\n".join(["file,label,split", *rows]))
    else:
        source = tmp_path / "given.npz"
        arrays: dict[str, Any] = {}
        for word in ("train", "val", "test"):
            rows = [n for n in side if side[n].lower().startswith(word)]
            arrays[f"{word}_images"] = np.stack([noise(n) for n in rows])
            arrays[f"{word}_labels"] = np.array([[CLASSES[n // PER_CLASS]] for n in rows])
        np.savez(source, **arrays)
    names = {"training": "train", "Val": "validation", "test": "test"}
    expected = {pixels(noise(n)): (CLASSES[n // PER_CLASS], names[side[n]]) for n in side}
    assert everything(load_own_data(source)) == expected


@pytest.mark.parametrize(
    ("sides", "size"), [([9, 12], 16), ([28], 28), ([31, 31, 60], 28), ([50, 400], 48),
                        ([300], 128), ([64, 70, 99], 64)]
)  # fmt: skip
def test_the_size_follows_from_the_median_short_side(
    sides: list[int], size: int, tmp_path: Path
) -> None:
    folder = write_folders(tmp_path / "sizes", lambda n: noise(n, sides[n % len(sides)], 1))
    own = load_own_data(folder)
    assert own.train.images.shape[1:] == (1, size, size)
    assert load_own_data(folder, OwnDataOptions(size=20)).test.images.shape[2:] == (20, 20)


def test_grey_pictures_stored_as_colours_are_grey(tmp_path: Path) -> None:
    def grey(n: int) -> np.ndarray:
        return np.stack([noise(n, channels=1)] * 3, 2)

    folder = write_folders(tmp_path / "grey", grey)
    assert load_own_data(folder).train.images.shape[1] == 1
    assert load_own_data(folder, OwnDataOptions(channels=3)).train.images.shape[1] == 3
    Image.fromarray(noise(99)).save(folder / "cat" / "coloured.png")
    assert load_own_data(folder).train.images.shape[1] == 3


@pytest.mark.parametrize("kind", ["12 bits", "floats", "signed"])
def test_bits_are_those_of_the_training_pictures(kind: str, tmp_path: Path) -> None:
    def deep(n: int) -> np.ndarray:
        values = np.random.default_rng(n).integers(0, 2000, (16, 16))
        values[0, 0] = 2500 + 10 * n  # the last picture has the highest value
        if kind == "12 bits":
            return values.astype(np.uint16)
        return (values / 3000 if kind == "floats" else values - 1000).astype(np.float32)

    folder = tmp_path / "deep"
    suffix = "png" if kind == "12 bits" else "tif"
    for n in range(2 * PER_CLASS):
        path = folder / CLASSES[n // PER_CLASS] / f"{n:02}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(deep(n)).save(path)
    for seed in range(50):
        own = load_own_data(folder, OwnDataOptions(seed=seed))
        if everything(own)[read(folder, 2 * PER_CLASS - 1, suffix, own)][1] != "train":
            break
    intensity = own.framing.intensity
    assert intensity is not None
    trained = [deep(n) for n in range(2 * PER_CLASS)
               if everything(own)[read(folder, n, suffix, own)][1] == "train"]  # fmt: skip
    assert len(trained) == 32
    low, high = np.min(trained), np.max(trained)
    expected = {"12 bits": (0, 4095), "floats": (0, 1), "signed": (float(low), float(high))}
    assert (intensity.low, intensity.high) == expected[kind]
    given = (0.25 * float(high), 0.75 * float(high))
    chosen = load_own_data(folder, OwnDataOptions(window=given)).framing.intensity
    assert chosen == Intensity(*given, "given")


def read(folder: Path, n: int, suffix: str, own: OwnData) -> bytes:
    """A file as a model with this framing reads it."""
    path = folder / CLASSES[n // PER_CLASS] / f"{n:02}.{suffix}"
    shape = tuple(own.train.images.shape[1:])
    image = read_photograph(path, shape, digit=False, framing=own.framing).image
    return image.numpy().tobytes()


def test_decoded_once_and_mapped_into_memory(folder: Path, cache: Path) -> None:
    seen: list[Progress] = []
    first = load_own_data(folder, observe=seen.append)
    assert {progress.task for progress in seen} == {"looking at pictures", "decoding images"}
    seen.clear()
    again = load_own_data(folder, observe=seen.append)
    assert not seen
    assert everything(again) == everything(first)
    assert again.notes == first.notes
    assert torch.equal(again.train.images, first.train.images)
    storages = {data.images.untyped_storage().data_ptr()
                for data in (again.train, again.validation, again.test)}  # fmt: skip
    assert len(storages) == 1
    again.train.images.zero_()  # changes memory, not the file
    assert everything(load_own_data(folder)) == everything(first)
    assert len(list(cache.iterdir())) == 2
    os.utime(folder / "cat" / "03.png", ns=(1, 1))
    load_own_data(folder, observe=seen.append)
    assert seen


@pytest.mark.parametrize("damage", ["images", "record", "cut off"])
def test_a_damaged_cache_is_built_again(damage: str, folder: Path, cache: Path) -> None:
    first = everything(load_own_data(folder))
    (images,), (record,) = cache.glob("*.npy"), cache.glob("*.json")
    if damage == "cut off":
        images.write_bytes(images.read_bytes()[:-1])
    else:
        (images if damage == "images" else record).unlink()
    assert everything(load_own_data(folder)) == first


def test_copies_are_moved_to_one_side(tmp_path: Path) -> None:
    folder = write_folders(tmp_path / "copies", lambda n: noise(n % 30))
    for n in range(3):
        Image.fromarray(noise(1000)).save(folder / "cat" / f"copy{n}.png")
    own = load_own_data(folder)
    sides = [{image.numpy().tobytes() for image in data.images}
             for data in (own.train, own.validation, own.test)]  # fmt: skip
    assert not sides[0] & sides[1] | sides[0] & sides[2] | sides[1] & sides[2]
    assert len(own.train) + len(own.validation) + len(own.test) == 2 * PER_CLASS + 3
    assert sum("different labels" in note for note in own.notes) == 1
    assert sum("moved to one side" in note for note in own.notes) == 1


def save_record(own: OwnData, folder: Path) -> None:
    from dataclasses import asdict

    folder.mkdir(exist_ok=True)
    (folder / RECORD_FILE).write_text(json.dumps({"data": asdict(own.record)}))


def test_a_record_finds_the_same_split_elsewhere(folder: Path, tmp_path: Path) -> None:
    own = load_own_data(folder)
    run = tmp_path / "run"
    save_record(own, run)

    def same(data: Dataset, reference: Dataset) -> bool:
        return {i.numpy().tobytes() for i in data.images} == {
            i.numpy().tobytes() for i in reference.images
        }

    for split in ("train", "validation", "test"):
        data, cautions = load_recorded(run, split)
        assert torch.equal(data.images, getattr(own, split).images)
        assert not cautions
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved, copy_function=shutil.copyfile)
    (moved / "dog").rename(moved / "zebra")
    (moved / "cat").rename(moved / "dog")
    (moved / "zebra").rename(moved / "cat")
    shutil.rmtree(folder)
    with pytest.raises(InputError, match="--data"):
        load_recorded(run, "test")
    for split in ("train", "validation", "test"):
        data, _ = load_recorded(run, split, moved)
        assert same(data, getattr(own, split))
    other = write_folders(tmp_path / "other", lambda n: noise(n + 500))
    data, cautions = load_recorded(run, "test", other)
    assert len(data) == 2 * PER_CLASS
    assert "new to the model" in cautions[0]
    with pytest.raises(InputError, match="no train pictures"):
        load_recorded(run, "train", other)


def test_a_damaged_record_of_the_cache_is_made_again(folder: Path, cache: Path) -> None:
    before = everything(load_own_data(folder))
    (record,) = cache.glob("own-*.json")
    for damage in (b"", b"rubbish", record.read_bytes()[:-40]):
        record.write_bytes(damage)
        assert everything(load_own_data(folder)) == before


def test_a_window_is_for_more_than_8_bits(folder: Path) -> None:
    with pytest.raises(InputError, match="--window is for pictures with more than 8 bits"):
        load_own_data(folder, OwnDataOptions(window=(50.0, 100.0)))


def test_pictures_added_later_are_left_out(folder: Path, tmp_path: Path) -> None:
    own = load_own_data(folder)
    save_record(own, tmp_path / "run")
    Image.fromarray(noise(700)).save(folder / "cat" / "new.png")
    for split in ("train", "validation", "test"):
        data, cautions = load_recorded(tmp_path / "run", split)
        assert len(data) == len(getattr(own, split))
        assert "1 pictures are new" in cautions[0]
    with pytest.raises(InputError, match=RECORD_FILE):
        load_recorded(tmp_path, "test")


def test_damaged_pictures_are_listed_or_left_out(folder: Path, cache: Path) -> None:
    good = (folder / "cat" / "01.png").read_bytes()
    (folder / "cat" / "01.png").write_bytes(good[:-40])
    (folder / "dog" / "25.png").write_text("no picture")
    with pytest.raises(InputError, match="2 of 40 pictures cannot be read") as error:
        load_own_data(folder)
    assert "cat/01.png" in str(error.value)
    assert "dog/25.png" in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(cache.iterdir())
    own = load_own_data(folder, OwnDataOptions(skip_damaged=True))
    assert len(everything(own)) == 38
    assert {pixels(noise(n)) for n in range(40) if n not in (1, 25)} == everything(own).keys()
    assert any("cat/01.png" in note and "dog/25.png" in note for note in own.notes)
    with pytest.raises(InputError, match="2 of 40"):  # also from the cache
        load_own_data(folder)


def few(folder: Path) -> None:
    for file in sorted((folder / "dog").iterdir())[1:]:
        file.unlink()


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty folder": (lambda folder: (folder / "ant").mkdir(), r"without pictures \(ant\)"),
    "one class": (lambda folder: shutil.rmtree(folder / "dog"), "has 1 class "),
    "one picture of a class": (few, r"fewer than 3 pictures \(dog\)"),
    "no picture at all": (
        lambda folder: [f.write_bytes(b"x") for f in folder.rglob("*.png")],
        "none of 40 files .* is a picture .* is empty or not an image",
    ),
    "a pipe": (lambda folder: os.mkfifo(folder / "dog" / "pipe.png"), "1 of 41 .* is a pipe"),
    "no folder": (shutil.rmtree, "there is no"),
    "nothing in it": (lambda folder: [shutil.rmtree(f) for f in folder.iterdir()], "no pictures"),
    "splits and classes": (lambda folder: (folder / "train" / "x").mkdir(parents=True), "others"),
    "a class name that is not UTF-8": (
        lambda folder: (folder / "dog").rename(folder / os.fsdecode(b"d\xffg")),
        "'d.udcffg' is not named in UTF-8",
    ),
    "too many classes": (
        lambda folder: [shutil.copytree(folder / "cat", folder / f"{n}") for n in range(99)],
        "has 101 classes",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_of_a_folder_is_one_line(fault: str, folder: Path, cache: Path) -> None:
    damage, says = FAULTS[fault]
    damage(folder)
    with pytest.raises(InputError, match=says) as error:
        load_own_data(folder)
    assert "\n" not in str(error.value)
    assert not cache.exists() or not list(cache.iterdir())


def test_an_unreadable_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = os.scandir

    def refuse(path: str) -> Any:
        if str(path).endswith("dog"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        with pytest.raises(InputError, match="dog: Permission denied"):
            load_own_data(folder)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder)
    with pytest.raises(InputError, match=r"cannot read .*: change its permissions"):
        load_own_data(folder)


def test_file_names_may_be_any_bytes(folder: Path) -> None:
    odd = folder / "cat" / os.fsdecode(b"\xff\n[red].png")
    (folder / "cat" / "01.png").rename(odd)
    assert pixels(noise(1)) in everything(load_own_data(folder))
    odd.write_bytes(b"no picture")
    with pytest.raises(InputError, match="1 of 40 pictures") as error:
        load_own_data(folder)
    assert "red" in str(error.value)


TABLES = {
    "file,label": "no rows",
    "file,label\na.png": "row 2 has 1 columns",
    "file,label\na.png,": "1 labels are missing",
    "file,label,set\na.png,b,Tuesday\nb.png,c,test": "not 'tuesday'",
    "file,label,set\na.png,b,\nb.png,c,test": "1 rows have no split",
    "one,two,three\na.png,b,c": "--label-column",
    "one,two\nx,y": "--path-column",
    "file,label,split\na.png,b,monday": "columns? 'nope'",
    "file,label,when\na.png,b,monday\nb.png,c,test": "not 'monday'",
}


@pytest.mark.parametrize("text", TABLES)
def test_every_fault_of_a_table_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    split = {"split": "nope", "when": "when"}
    column = next((name for word, name in split.items() if f",{word}\n" in text), None)
    with pytest.raises(InputError, match=TABLES[text]):
        load_own_data(tmp_path / "t.csv", OwnDataOptions(columns=Columns(split=column)))


def test_missing_files_of_a_table_are_listed(folder: Path, tmp_path: Path) -> None:
    path = as_csv(folder, tmp_path)
    path.write_text(path.read_text() + "pets/cat/99.png;cat;1\n")
    with pytest.raises(InputError, match=r"1 of 41 .*99\.png: no such file"):
        load_own_data(path)


def test_arrays_of_other_shapes_and_kinds_are_refused(tmp_path: Path) -> None:
    images, labels = np.zeros((4, 8, 8), np.uint8), np.arange(4) % 2
    for arrays, says in (
        ({"pictures": images}, "needs the arrays"),
        ({"images": np.uint8(3), "labels": labels}, "a single value"),
        ({"images": images, "labels": labels[:3]}, "4 images but labels of shape"),
        ({"images": images[0], "labels": labels}, "images but labels|of shape"),
        ({"images": np.zeros((4, 8, 8, 5)), "labels": labels}, "of shape"),
        ({"images": np.full((4, 8, 8, 3), 3.5), "labels": labels}, "colours are"),
        ({"images": np.full((4, 8, 8), np.nan), "labels": labels}, "NaN"),
    ):
        np.savez(tmp_path / "a.npz", **arrays)
        with pytest.raises(InputError, match=says):
            load_own_data(tmp_path / "a.npz")
    np.savez_compressed(tmp_path / "a.npz", images=noise(0, 64), labels=labels)
    whole = (tmp_path / "a.npz").read_bytes()
    np.save(tmp_path / "a.npy", images)
    damaged = whole[:300] + bytes(300) + whole[600:]
    for content in (b"rubbish", whole[:2000], damaged, (tmp_path / "a.npy").read_bytes()):
        (tmp_path / "a.npz").write_bytes(content)
        with pytest.raises(InputError, match="cannot be read"):
            load_own_data(tmp_path / "a.npz")
    (tmp_path / "a.xlsx").touch()
    with pytest.raises(InputError, match="a kind of data"):
        load_own_data(tmp_path / "a.xlsx")


@pytest.mark.parametrize("labels", [[0, 1], [0.0, 1.0], [b"0", b"1"], ["0", "1"]])
def test_labels_of_arrays_are_texts(labels: list[Any], tmp_path: Path) -> None:
    images = np.stack([noise(n, 16, 1) for n in range(8)])
    np.savez(tmp_path / "a.npz", images=images, labels=np.array(labels * 4))
    own = load_own_data(tmp_path / "a.npz")
    assert {label for label, _ in everything(own).values()} == {"0", "1"}


def test_missing_labels_are_counted(tmp_path: Path) -> None:
    labels = np.array([0, 1, np.nan] * 4)
    np.savez(tmp_path / "a.npz", images=np.zeros((12, 16, 16), np.uint8), labels=labels)
    with pytest.raises(InputError, match="4 labels are missing"):
        load_own_data(tmp_path / "a.npz")


@pytest.mark.parametrize("problem", ["full disk", "Ctrl-C"])
def test_nothing_is_half_written(
    problem: str, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def interrupt(progress: Progress) -> None:
        if problem == "Ctrl-C" and progress.task == "decoding images":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if problem == "full disk":
            patch.setattr(os, "posix_fallocate", no_space, raising=False)
        with pytest.raises((EcinnError, KeyboardInterrupt)) as error:
            load_own_data(folder, observe=interrupt)
    assert problem == "Ctrl-C" or "ECINN_CACHE" in str(error.value)
    assert not list(cache.iterdir())
    assert len(everything(load_own_data(folder))) == 40


def test_mixed_modes_and_sizes_are_noted(folder: Path) -> None:
    Image.fromarray(noise(1, 30, 1)).save(folder / "cat" / "grey.png")
    Image.new("RGBA", (16, 16), (9, 99, 9, 100)).save(folder / "cat" / "clear.png")
    frames = [Image.fromarray(noise(n)) for n in (50, 51)]
    frames[0].save(folder / "dog" / "film.gif", save_all=True, append_images=frames[1:])
    (folder / "dog" / "notes.txt").write_text("x")
    notes = " | ".join(load_own_data(folder).notes)
    for part in ("1 of 43 pictures: resized from 30×30", "the image is grey", "transparent",
                 "first of 2 frames", "(.txt)"):  # fmt: skip
        assert part in notes


def test_options_are_checked() -> None:
    for options in ({"size": 12}, {"size": 30}, {"size": 132}, {"channels": 2}):
        with pytest.raises(InputError, match="not"):
            OwnDataOptions(**options)
    with pytest.raises(InputError, match="multiple of 4"):
        OwnDataOptions(size=18)


def test_pictures_of_an_archive_are_read_from_memory(folder: Path, tmp_path: Path) -> None:
    path = as_zip(folder, tmp_path)
    with zipfile.ZipFile(path, "a") as archive:
        buffer = io.BytesIO()
        Image.fromarray(noise(77)).save(buffer, "png")
        archive.writestr("pets/cat/77.png", buffer.getvalue())
        archive.writestr("__MACOSX/pets/cat/._77.png", b"x")
    assert pixels(noise(77)) in everything(load_own_data(path))

"""CelebA and CelebA-HQ in the layouts people have, as small synthetic copies and for real."""

import io
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ecinn.classifier.recipes import find_recipe
from ecinn.cli.progress import load_images
from ecinn.data.celeba import ATTRIBUTES, class_names, load_celeba, read_files
from ecinn.data.dataset import load_dataset
from ecinn.data.face_crop import CELEBA_CROP, FaceCrop
from ecinn.errors import InputError
from ecinn.progress import Progress
from helpers.paths import SHARED

CELEBA = SHARED / "celeba"
needs_celeba = pytest.mark.skipif(not CELEBA.is_dir(), reason="needs ../shared/data/celeba")

NUMBERS = (1, 2, 3, 162_770, 162_771, 182_637, 182_638, 202_599)
SPLIT = {"train": (1, 2, 3, 162_770), "validation": (162_771, 182_637), "test": (182_638, 202_599)}
PARTITION = {number: k for k, numbers in enumerate(SPLIT.values()) for number in numbers}
HQ = {number: index for index, number in enumerate(reversed(NUMBERS))}
"""CelebA-HQ's index of every original."""
ALIGNED_1 = "img_align_celeba/000001.jpg"
Tables = dict[int, np.ndarray]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ECINN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ECINN_CELEBA", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def bits() -> Tables:
    random = np.random.default_rng(0)
    return {number: random.integers(0, 2, 40) for number in NUMBERS}


def colour(number: int) -> tuple[int, int, int]:
    return (number % 251, number // 800, 30 * (number % 8))


def encoded(number: int, kind: str = "jpeg", size: tuple[int, int] = (178, 218)) -> bytes:
    """Encode an image of one colour, which identifies the number."""
    buffer = io.BytesIO()
    options = {"lossless": True} if kind == "webp" else {"quality": 100} if kind == "jpeg" else {}
    Image.new("RGB", size, colour(number)).save(buffer, kind, **options)
    return buffer.getvalue()


def write_aligned(folder: Path, bits: Tables, *, layout: str = "folder") -> Path:
    """CelebA as a folder, as Kaggle packs it, as its authors shelve it, or with a zip."""
    folder.mkdir(parents=True)
    anno, evaluation = folder, folder
    images = folder / "img_align_celeba"
    if layout == "shelves":
        images, anno, evaluation = folder / "Img" / images.name, folder / "Anno", folder / "Eval"
        anno.mkdir()
        evaluation.mkdir()
    files = {f"{number:06}.jpg": encoded(number) for number in NUMBERS}
    if layout == "zip of webp":
        with zipfile.ZipFile(folder / "img_align_celeba.zip", "w") as archive:
            archive.writestr("__MACOSX/img_align_celeba/._000001.webp", b"not an image")
            for number in NUMBERS:
                archive.writestr(f"img_align_celeba/{number:06}.webp", encoded(number, "webp"))
    else:
        images = images / images.name if layout == "kaggle" else images
        images.mkdir(parents=True)
        for name, data in files.items():
            (images / name).write_bytes(data)
    rows = [[name, *(str(2 * b - 1) for b in bits[int(name[:6])])] for name in files]
    splits = [[name, str(PARTITION[int(name[:6])])] for name in files]
    if layout == "kaggle":
        table = [["image_id", *ATTRIBUTES], *rows]
        (anno / "list_attr_celeba.csv").write_text("\n".join(map(",".join, table)))
        table = [["image_id", "partition"], *splits]
        (evaluation / "list_eval_partition.csv").write_text("\n".join(map(",".join, table)))
    else:
        table = [[str(len(rows))], list(ATTRIBUTES), *rows]
        (anno / "list_attr_celeba.txt").write_text("\n".join(map("  ".join, table)) + "\n")
        (evaluation / "list_eval_partition.txt").write_text("\n".join(map(" ".join, splits)))
    return folder


def write_hq(folder: Path, bits: Tables) -> Path:
    (folder / "CelebA-HQ-img").mkdir(parents=True)
    rows, mapping = [], [["idx", "orig_idx", "orig_file"]]
    for number, index in sorted(HQ.items(), key=lambda item: item[1]):
        (folder / "CelebA-HQ-img" / f"{index}.jpg").write_bytes(encoded(number, size=(96, 96)))
        rows.append([f"{index}.jpg ", *(str(2 * b - 1) for b in bits[number])])
        mapping.append([str(index), str(number - 1), f"{number:06}.jpg"])
    table = [[str(len(rows))], list(ATTRIBUTES), *rows]
    (folder / "CelebAMask-HQ-attribute-anno.txt").write_text("\n".join(map(" ".join, table)))
    text = "\n".join("      ".join(row) for row in mapping)
    (folder / "CelebA-HQ-to-CelebA-mapping.txt").write_text(text + "\n")
    return folder


Layout = Callable[[Path, Tables], Path]
LAYOUTS: dict[str, Layout] = {
    "folder": write_aligned,
    "kaggle": lambda folder, bits: write_aligned(folder, bits, layout="kaggle"),
    "shelves": lambda folder, bits: write_aligned(folder, bits, layout="shelves"),
    "zip of webp": lambda folder, bits: write_aligned(folder, bits, layout="zip of webp"),
    "CelebA-HQ": write_hq,
}


def attributes(split: str, folder: Path | None = None) -> list[list[int]]:
    return load_celeba("Smiling", split, folder, size=(2, 2)).attributes.tolist()


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_a_given_folder_overrides_the_environment(
    tmp_path: Path, bits: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = write_aligned(tmp_path / "ours", bits)
    others = write_aligned(tmp_path / "others", {k: 1 - v for k, v in bits.items()})
    monkeypatch.setenv("ECINN_CELEBA", str(others))
    default, named = attributes("test"), attributes("test", ours)
    expected = [bits[number].tolist() for number in SPLIT["test"]]
    assert named == expected
    assert default == [[1 - bit for bit in row] for row in expected]


def test_attributes_may_be_0_and_1_and_a_face_may_occur_twice(
    tmp_path: Path, bits: Tables
) -> None:
    """If two files have the same number, the first by name is used."""
    folder = write_aligned(tmp_path / "celeba", bits)
    table = folder / "list_attr_celeba.txt"
    table.write_text(table.read_text().replace("-1", "0"))
    (folder / "img_align_celeba" / "1.png").write_bytes(encoded(2, "png"))
    faces = load_celeba("Smiling", "train", folder, size=(4, 4))
    smiling = [int(bits[number][ATTRIBUTES.index("Smiling")]) for number in SPLIT["train"]]
    assert faces.labels.tolist() == smiling
    assert np.abs(faces.images[0, :, 0, 0].int().numpy() - colour(1)).max() <= 4


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("split", SPLIT)
def test_every_layout_gives_each_split_its_faces_and_labels(
    layout: str, split: str, tmp_path: Path, bits: Tables
) -> None:
    folder = LAYOUTS[layout](tmp_path / "celeba", bits)
    numbers = SPLIT[split][::-1] if layout == "CelebA-HQ" else SPLIT[split]
    expected = np.stack([bits[number] for number in numbers])
    assert attributes(split, folder) == expected.tolist()
    for attribute in ("Smiling", "5_o_Clock_Shadow", "Young"):
        faces = load_celeba(attribute, split, folder, size=(10, 12))
        assert faces.labels.tolist() == expected[:, ATTRIBUTES.index(attribute)].tolist()
        assert faces.class_names == class_names(attribute)
        assert faces.images.shape == (len(numbers), 3, 10, 12)
    wanted = torch.tensor([colour(number) for number in numbers])[:, :, None, None]
    assert (faces.images.int() - wanted).abs().max() <= 4


@pytest.mark.parametrize("layout", ["folder", "CelebA-HQ"])
@pytest.mark.parametrize("crop", [CELEBA_CROP, FaceCrop(110, webp_quality=None), None])
def test_faces_are_cropped_as_their_layout_needs(
    layout: str, crop: FaceCrop | None, tmp_path: Path, bits: Tables
) -> None:
    folder, hq = LAYOUTS[layout](tmp_path / "celeba", bits), layout == "CelebA-HQ"
    shape = (96, 96, 3) if hq else (218, 178, 3)
    face = Image.fromarray(np.random.default_rng(2).integers(0, 256, shape, np.uint8))
    face.save(folder / (f"CelebA-HQ-img/{HQ[1]}.jpg" if hq else ALIGNED_1), "PNG")
    loaded = load_dataset("celeba/Smiling", "train", folder, crop=crop).images
    box = (0, 0, 96, 96) if hq else (0, 20, 178, 198)
    expected = face.resize((64, 64), Image.Resampling.LANCZOS, box=box)
    if crop is not None:
        expected, _ = crop.fit(face, (64, 64), hq=hq)
    image = loaded[-1 if hq else 0]
    assert np.array_equal(image.permute(1, 2, 0), np.asarray(expected))
    if crop == CELEBA_CROP:
        assert torch.equal(loaded, load_dataset("celeba/Smiling", "train", folder).images)


@pytest.mark.parametrize("crop", [FaceCrop(90), None])
def test_recipes_load_faces_with_their_own_crop(
    crop: FaceCrop | None, tmp_path: Path, bits: Tables
) -> None:
    folder = write_aligned(tmp_path / "celeba", bits)
    face = np.random.default_rng(4).integers(0, 256, (218, 178, 3), np.uint8)
    Image.fromarray(face).save(folder / ALIGNED_1, "PNG")
    recipe = replace(find_recipe("celeba-smile"), face_crop=crop)
    expected = load_dataset("celeba/Smiling", "train", folder, crop=crop).images
    assert not torch.equal(load_dataset("celeba/Smiling", "train", folder).images, expected)
    for images in (recipe.load("train", folder), load_images(recipe, "train", folder)):
        assert torch.equal(images.images, expected)


def test_columns_may_come_in_another_order(tmp_path: Path, bits: Tables) -> None:
    folder = write_aligned(tmp_path / "celeba", bits)
    path = folder / "list_attr_celeba.txt"
    count, *table = path.read_text().splitlines()
    turned = [[row.split()[0], *row.split()[:0:-1]] for row in table[1:]]
    path.write_text("\n".join([count, " ".join(ATTRIBUTES[::-1]), *map(" ".join, turned)]))
    assert attributes("test", folder) == [bits[n].tolist() for n in SPLIT["test"]]


def test_a_part_of_the_images_is_enough(tmp_path: Path, bits: Tables) -> None:
    folder = write_aligned(tmp_path / "celeba", bits)
    (folder / "img_align_celeba" / "000002.jpg").unlink()
    (folder / "img_align_celeba" / "000009.jpg").write_bytes(b"has no row, is not looked at")
    faces = load_celeba("Bald", "train", folder)
    column = ATTRIBUTES.index("Bald")
    assert faces.labels.tolist() == [int(bits[n][column]) for n in (1, 3, 162_770)]
    assert faces.attributes.tolist() == [bits[n].tolist() for n in (1, 3, 162_770)]
    assert read_files(folder).images.names[:2] == ("000001.jpg", "000003.jpg")


def test_default_folders_and_the_environment(
    tmp_path: Path, bits: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"\./celeba or \./data/celeba.*mmlab.*switchablenorms"):
        attributes("test")
    for place, numbers in (
        ("data/celeba", (1, 2)),
        ("celeba", (1, 3)),
        ("elsewhere", (1, 162_770)),
    ):
        folder = write_aligned(tmp_path / place, bits)
        for number in set(SPLIT["train"]) - set(numbers):
            (folder / "img_align_celeba" / f"{number:06}.jpg").unlink()
        if place == "elsewhere":
            monkeypatch.setenv("ECINN_CELEBA", place)
        assert attributes("train") == [bits[number].tolist() for number in numbers]
    monkeypatch.setenv("ECINN_CELEBA", "nowhere")
    with pytest.raises(InputError, match=r"no folder nowhere.*--celeba DIR or ECINN_CELEBA"):
        attributes("train")


def test_another_choice_of_rows_does_not_reuse_the_cache(tmp_path: Path, bits: Tables) -> None:
    """The same archive under a list whose first two faces have changed places."""
    folder = LAYOUTS["zip of webp"](tmp_path / "celeba", bits)
    before = load_celeba("Young", "train", folder).images
    table = (folder / ATTR).read_text().splitlines()
    (folder / ATTR).write_text("\n".join([*table[:2], table[3], table[2], *table[4:]]))
    after = load_celeba("Young", "train", folder).images
    assert not torch.equal(before[0], before[1])
    assert torch.equal(after, before[[1, 0, 2, 3]])


def test_a_cached_split_is_not_decoded_again(tmp_path: Path, bits: Tables, cache: Path) -> None:
    folder = write_aligned(tmp_path / "celeba", bits)
    seen: list[Progress] = []
    for split in SPLIT:
        load_celeba("Young", split, folder, observe=seen.append)
    load_celeba("Bald", "train", folder, observe=seen.append)
    assert seen == [Progress("decoding images", 8, 8)]
    assert len(list(cache.iterdir())) == 1


def _no_matching_image(folder: Path) -> None:
    for path in (folder / "img_align_celeba").iterdir():
        path.unlink()


def _no_images(folder: Path) -> None:
    _no_matching_image(folder)
    (folder / "img_align_celeba").rmdir()


def _bad_zip(folder: Path) -> None:
    _no_images(folder)
    (folder / "img_align_celeba.zip").write_bytes(b"<html>quota exceeded</html>")


def _damaged_member(folder: Path) -> None:
    path = folder / "img_align_celeba.zip"
    data = bytearray(path.read_bytes())
    start = data.index(b"WEBP")
    data[start : start + 4] = b"0000"
    path.write_bytes(data)


ATTR, PART = "list_attr_celeba.txt", "list_eval_partition.txt"
MAP = "CelebA-HQ-to-CelebA-mapping.txt"
FAULTS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no images": ("folder", _no_images, "no img_align_celeba or img_align_celeba.zip"),
    "none matches": ("folder", _no_matching_image, "none of the images"),
    "bad zip": ("folder", _bad_zip, "not a readable zip"),
    "damaged member": ("zip of webp", _damaged_member, r"000001\.webp cannot be decoded"),
    "damaged image": (
        "folder",
        lambda folder: (folder / "img_align_celeba" / "000003.jpg").write_bytes(b"\xff\xd8\xff"),
        r"000003\.jpg cannot be decoded",
    ),
    "cut image": (
        "folder",
        lambda folder: (folder / "img_align_celeba" / "000003.jpg").write_bytes(encoded(3)[:-99]),
        r"000003\.jpg cannot be decoded",
    ),
    "no table": ("folder", lambda folder: (folder / ATTR).unlink(), f"no {ATTR}"),
    "no splits": ("folder", lambda folder: (folder / PART).unlink(), f"no {PART}"),
    "empty table": ("folder", lambda folder: (folder / ATTR).write_text(""), "should name"),
    "binary table": ("folder", lambda folder: (folder / ATTR).write_bytes(b"\xff\0"), "text file"),
    "unknown column": (
        "folder", lambda folder: edit(folder / ATTR, "Smiling", "Grinning"), "line 2: should name",
    ),
    "short row": (
        "folder", lambda folder: edit(folder / ATTR, "000002.jpg", ""), "line 4: has 40 columns",
    ),
    "wrong value": (
        "folder", lambda folder: edit(folder / ATTR, "000001.jpg  ", "000001.jpg  7"),
        "line 3: attributes are 1 or -1, not '7",
    ),
    "wrong count": (
        "folder", lambda folder: edit(folder / ATTR, "8", "9"), "9 rows, but the file has 8",
    ),
    "no split of an image": (
        "folder", lambda folder: edit(folder / PART, "000002.jpg 0\n", ""), "no row for the image",
    ),
    "wrong split": (
        "folder", lambda folder: edit(folder / PART, "000002.jpg 0", "000002.jpg 3"),
        "line 2: the split is 0, 1 or 2",
    ),
    "short split": (
        "folder", lambda folder: edit(folder / PART, "000002.jpg 0", "000002.jpg"),
        "line 2: has 1 columns",
    ),
    "no mapping": ("CelebA-HQ", lambda folder: (folder / MAP).unlink(), f"no {MAP}"),
    "short mapping": (
        "CelebA-HQ", lambda folder: edit(folder / MAP, "000001.jpg", ""), "has 2 columns",
    ),
    "wrong mapping": (
        "CelebA-HQ", lambda folder: edit(folder / MAP, "000001.jpg", "me.jpg"), "'me.jpg' is not",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_reported_in_one_line(
    fault: str, tmp_path: Path, bits: Tables, cache: Path
) -> None:
    layout, damage, says = FAULTS[fault]
    folder = LAYOUTS[layout](tmp_path / "celeba", bits)
    read_files(folder)
    damage(folder)
    with pytest.raises(InputError, match=says) as error:
        load_celeba("Smiling", "train", folder)
    assert "\n" not in str(error.value)
    assert not cache.exists() or not list(cache.iterdir())


def test_an_empty_split_and_unknown_attributes_are_refused(tmp_path: Path, bits: Tables) -> None:
    folder = write_aligned(tmp_path / "celeba", bits)
    for number in SPLIT["test"]:
        (folder / "img_align_celeba" / f"{number:06}.jpg").unlink()
    with pytest.raises(InputError, match="no images of the test split"):
        load_celeba("Smiling", "test", folder)
    with pytest.raises(InputError, match="8×0 has no pixels"):
        load_celeba("Smiling", "train", folder, size=(8, 0))
    with pytest.raises(InputError, match=r"'smilling'; did you mean Smiling"):
        load_celeba("smilling", "train", folder)
    with pytest.raises(InputError, match="choose one of 5_o_Clock_Shadow, Arched"):
        class_names("zzz")


@pytest.mark.parametrize("kind", [Path, str])
def test_faces_are_loaded_by_the_name_of_the_dataset(
    kind: Callable[[Path], object], tmp_path: Path, bits: Tables
) -> None:
    folder = write_aligned(tmp_path / "celeba", bits)
    seen: list[Progress] = []
    faces = load_dataset("celeba/Young", "test", kind(folder), seen.append)
    expected = np.stack([bits[number] for number in SPLIT["test"]])
    assert faces.images.shape == (2, 3, 64, 64)
    assert faces.attributes.tolist() == expected.tolist()
    assert faces.attribute == ATTRIBUTES.index("Young")
    assert faces.labels.tolist() == expected[:, faces.attribute].tolist()
    assert [progress.done for progress in seen] == [8]


def test_all_forty_attributes_have_two_names() -> None:
    assert len(set(ATTRIBUTES)) == 40
    assert len({class_names(attribute) for attribute in ATTRIBUTES}) == 40
    for attribute in ATTRIBUTES:
        without, having = class_names(attribute)
        assert without != having
        assert "_" not in without + having
    for attribute, without, having in [
        ("Smiling", "not smiling", "smiling"),
        ("High_Cheekbones", "no high cheekbones", "high cheekbones"),
        ("Wearing_Lipstick", "not wearing lipstick", "wearing lipstick"),
        ("Heavy_Makeup", "no heavy makeup", "heavy makeup"),
        ("5_o_Clock_Shadow", "no 5 o'clock shadow", "5 o'clock shadow"),
        ("No_Beard", "beard", "no beard"),
    ]:
        assert class_names(attribute) == (without, having)


@pytest.mark.celeba
@needs_celeba
def test_the_shared_faces_are_all_there() -> None:
    files = read_files(CELEBA)
    assert torch.bincount(files.partition).tolist() == [24_996, 2_044, 989]
    numbers = torch.tensor([int(name[-11:-5]) for name in files.images.names])
    official = (numbers > 162_770).long() + (numbers > 182_637).long()
    assert torch.equal(files.partition, official)
    smiling = files.attributes[:, ATTRIBUTES.index("Smiling")].float().mean()
    assert 0.45 < smiling < 0.52


@pytest.mark.celeba
@needs_celeba
def test_shared_faces_are_as_pillow_decodes_them(tmp_path: Path) -> None:
    table = (CELEBA / ATTR).read_text().splitlines()
    (tmp_path / ATTR).write_text("\n".join(["150", *table[1:152]]))
    for name in (PART, "img_align_celeba.zip"):
        (tmp_path / name).symlink_to(CELEBA / name)
    faces = load_celeba("Smiling", "train", tmp_path)
    assert len(faces) == 150
    column = 1 + table[1].split().index("Smiling")
    with zipfile.ZipFile(CELEBA / "img_align_celeba.zip") as archive:
        for row, image, label in zip(table[2:152], faces.images, faces.labels, strict=True):
            fields = row.split()
            picture = Image.open(io.BytesIO(archive.read(f"img_align_celeba/{fields[0]}")))
            assert np.array_equal(image.permute(1, 2, 0), np.asarray(picture.convert("RGB")))
            assert int(fields[column]) == 2 * int(label) - 1

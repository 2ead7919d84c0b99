"""The registry of datasets, and MNIST as it ships."""

import gzip
import lzma
import struct
from pathlib import Path

import pytest
import torch

from ecinn.data.dataset import Dataset, load_dataset
from ecinn.data.mnist import SHIPPED, load_mnist, read_mnist, select_split
from ecinn.errors import InputError


def test_mnist_is_the_known_set() -> None:
    train, test = read_mnist("train"), read_mnist("test")
    assert (len(train), len(test)) == (60_000, 10_000)
    assert test.labels[:8].tolist() == [7, 2, 1, 0, 4, 1, 4, 9]
    assert torch.bincount(train.labels).tolist() == [
        5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949,
    ]  # fmt: skip
    assert round(train.images.float().mean().item() / 255, 4) == 0.1307


def as_bytes(images: torch.Tensor) -> list[bytes]:
    data, size = images.numpy().tobytes(), images[0].numel()
    return [data[start : start + size] for start in range(0, len(data), size)]


def test_held_out_digits_and_the_rest_are_the_training_digits() -> None:
    """Both keep the order of the file, so merging them gives the file."""
    published = read_mnist("train")
    train, validation, test = map(load_mnist, ("train", "validation", "test"))
    assert (len(train), len(validation), len(test)) == (58_000, 2_000, 10_000)
    assert torch.equal(test.images, read_mnist("test").images)
    whole, part = (as_bytes(data.images) for data in (published, train))
    kept, rows = 0, []
    for row, image in enumerate(whole):
        if kept < len(part) and image == part[kept]:
            assert train.labels[kept] == published.labels[row]
            kept += 1
        else:
            rows.append(row)
    assert kept == len(train)
    assert torch.equal(validation.images, published.images[rows])
    assert torch.equal(validation.labels, published.labels[rows])
    # Fixed for good: every published number depends on these rows.
    assert rows[:6] == [10, 45, 48, 51, 61, 94]
    assert sum(rows) == 61_697_607


def test_held_out_digits_are_like_the_rest() -> None:
    """A random draw: every class has its share, and so has every tenth of the file."""
    published, validation = read_mnist("train"), load_mnist("validation")
    expected = torch.bincount(published.labels) * len(validation) / len(published)
    found = torch.bincount(validation.labels)
    assert float(((found - expected).square() / expected).sum()) < 22  # χ² of 9 degrees, 1 %
    order = Dataset(published.images, torch.arange(60_000), published.class_names)
    drawn = select_split(order, "validation").labels
    tenths = torch.bincount(drawn // 6_000, minlength=10)
    assert float((tenths - 200).square().sum() / 200) < 22


PACK = {".xz": lzma.compress, ".gz": gzip.compress, "": bytes}


@pytest.mark.parametrize("suffix", PACK)
def test_mnist_is_read_from_plain_and_packed_files(
    suffix: str, tmp_path: Path, generator: torch.Generator
) -> None:
    images = torch.randint(256, (7, 28, 28), generator=generator, dtype=torch.uint8)
    labels = torch.randint(10, (7,), generator=generator, dtype=torch.uint8)
    for name, values in {"images-idx3": images, "labels-idx1": labels}.items():
        header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
        path = tmp_path / f"t10k-{name}-ubyte{suffix}"
        path.write_bytes(PACK[suffix](header + values.numpy().tobytes()))
    read = load_mnist("test", tmp_path)
    assert torch.equal(read.images[:, 0], images)
    assert torch.equal(read.labels, labels.long())


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("damage", ["missing", "truncated", "not packed", "not idx", "short"])
def test_damaged_mnist_names_the_file(damage: str, suffix: str, tmp_path: Path) -> None:
    for file in SHIPPED.glob("t10k*.xz"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shipped = tmp_path / "t10k-labels-idx1-ubyte.xz"
    labels = lzma.decompress(shipped.read_bytes())
    shipped.unlink()
    pack = PACK[suffix]
    broken = {
        "truncated": pack(labels)[:2_000],
        "not packed": b"<html>404</html>",
        "not idx": pack(b"nothing of the kind"),
        "short": pack(labels[:-7]),
    }
    if damage in broken:
        shipped.with_suffix(suffix).write_bytes(broken[damage])
    with pytest.raises(InputError, match="t10k-labels"):
        load_mnist("test", tmp_path)


@pytest.mark.parametrize(
    ("name", "split", "words"),
    [
        ("cifar", "train", "choose one of mnist, fakemnist, celeba/ATTRIBUTE"),
        ("celeba", "train", "celeba/ATTRIBUTE"),
        ("mnist/Smiling", "train", "there is no dataset 'mnist/Smiling'"),
        ("mnist", "val", "one of train, validation, test"),
    ],
)
def test_unknown_names_and_splits_are_refused(name: str, split: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        # __wrapped__ skips the runtime type checker, which users do not have.
        load_dataset.__wrapped__(name, split)


def test_class_names_differ() -> None:
    images, labels = torch.zeros((2, 1, 8, 8), dtype=torch.uint8), torch.arange(2)
    with pytest.raises(InputError, match="same name: ant, ant"):
        Dataset(images, labels, ("ant", "ant"))


def test_first_images_keep_their_attributes(generator: torch.Generator) -> None:
    images = torch.randint(256, (6, 1, 4, 4), generator=generator, dtype=torch.uint8)
    attributes = torch.randint(2, (6, 5), generator=generator, dtype=torch.uint8)
    whole = Dataset(images, attributes[:, 2].long(), ("no", "yes"), attributes, 2)
    some = whole.first(4)
    assert len(some) == 4
    assert torch.equal(some.images, images[:4])
    assert torch.equal(some.attributes, attributes[:4])
    assert torch.equal(some.labels, some.attributes[:, some.attribute].long())
    assert len(whole.first(None)) == 6
    with pytest.raises(InputError, match="at least one"):
        whole.first(0)

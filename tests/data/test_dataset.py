"""The registry of datasets, and MNIST as it ships."""

import gzip
from pathlib import Path

import pytest
import torch

from ecinn.data.dataset import Dataset, load_dataset
from ecinn.data.mnist import SHIPPED, load_mnist
from ecinn.errors import InputError


def test_mnist_is_the_known_set() -> None:
    train, test = load_mnist("train"), load_mnist("test")
    assert (len(train), len(test)) == (60_000, 10_000)
    assert test.labels[:8].tolist() == [7, 2, 1, 0, 4, 1, 4, 9]
    assert torch.bincount(train.labels).tolist() == [
        5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949,
    ]  # fmt: skip
    assert round(train.images.float().mean().item() / 255, 4) == 0.1307


@pytest.mark.parametrize("damage", ["missing", "truncated", "not gzip", "not idx", "short"])
def test_damaged_mnist_names_the_file(damage: str, tmp_path: Path) -> None:
    for file in SHIPPED.glob("*.gz"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    broken = tmp_path / "t10k-labels-idx1-ubyte.gz"
    data = broken.read_bytes()
    if damage == "missing":
        broken.unlink()
    elif damage == "truncated":
        broken.write_bytes(data[: len(data) // 2])
    elif damage == "not gzip":
        broken.write_bytes(b"<html>404</html>")
    elif damage == "not idx":
        broken.write_bytes(gzip.compress(b"nothing of the kind"))
    else:
        broken.write_bytes(gzip.compress(gzip.decompress(data)[:-7]))
    with pytest.raises(InputError, match="t10k-labels"):
        load_mnist("test", tmp_path)


@pytest.mark.parametrize(
    ("name", "split", "words"),
    [
        ("cifar", "train", "choose one of mnist, fakemnist, celeba/ATTRIBUTE"),
        ("celeba", "train", "celeba/ATTRIBUTE"),
        ("mnist/Smiling", "train", "there is no dataset 'mnist/Smiling'"),
        ("mnist", "validation", "no validation images"),
        ("fakemnist", "validation", "no validation images"),
        ("mnist", "val", "one of train, validation, test"),
    ],
)
def test_unknown_names_and_splits_are_refused(name: str, split: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        # __wrapped__ skips the runtime type checker, which users do not have.
        load_dataset.__wrapped__(name, split)


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

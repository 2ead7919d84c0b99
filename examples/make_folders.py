"""Write a public dataset as folders of pictures: SPLIT/CLASS/NUMBER.png.

python make_folders.py fashion /usr/share/datasets/fashion-mnist fashion --train 5000
python make_folders.py smiles CELEBA_FOLDER smiles
python make_folders.py mnist . mnist
"""

import argparse
import gzip
from pathlib import Path

import numpy as np
from PIL import Image

FASHION = (
    *("T-shirt", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Boot"),
)


def read_idx(path: Path) -> np.ndarray:
    """Read an array from a gzipped IDX file, the format of MNIST."""
    data = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(data, ">u4", count=data[3], offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)


def fashion(source: Path) -> dict[str, tuple[np.ndarray, list[str]]]:
    """Read Fashion-MNIST as Debian's package dataset-fashion-mnist ships it."""
    splits = {}
    for split, name in {"train": "train", "test": "t10k"}.items():
        labels = read_idx(source / f"{name}-labels-idx1-ubyte.gz")
        splits[split] = (
            read_idx(source / f"{name}-images-idx3-ubyte.gz"),
            [FASHION[label] for label in labels],
        )
    return splits


def smiles(source: Path) -> dict[str, tuple[np.ndarray, list[str]]]:
    """Read CelebA's faces, cropped and resized as ecinn does, with their label Smiling."""
    return packaged("celeba/Smiling", source)


def mnist(_: Path) -> dict[str, tuple[np.ndarray, list[str]]]:
    """Read the digits that come with ecinn."""
    return packaged("mnist")


def packaged(name: str, source: Path | None = None) -> dict[str, tuple[np.ndarray, list[str]]]:
    """Read a dataset that ecinn knows by name."""
    from ecinn.data.dataset import load_dataset

    splits = {}
    for split in ("train", "validation", "test"):
        data = load_dataset(name, split, source)
        images = data.images.permute(0, 2, 3, 1).numpy()
        names = [data.class_names[label] for label in data.labels]
        splits[split] = (images[..., 0] if images.shape[3] == 1 else images, names)
    return splits


READERS = {"fashion": fashion, "smiles": smiles, "mnist": mnist}


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset", choices=READERS)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, help="only the first training pictures")
    given = parser.parse_args()
    for split, (images, labels) in READERS[given.dataset](given.source).items():
        count = given.train if split == "train" else None
        for number, (image, label) in enumerate(zip(images[:count], labels, strict=False)):
            path = given.out / split / label / f"{number:05}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)


if __name__ == "__main__":
    main()

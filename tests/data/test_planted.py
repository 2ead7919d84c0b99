"""Planted cues: the mark determines the label, and nothing else has changed."""

import numpy as np
import pytest
import torch

from ecinn.data.dataset import Dataset, load_dataset
from ecinn.data.mnist import load_mnist
from ecinn.data.planted import FAKE_MNIST_CUE, Cue, load_fake_mnist, plant
from ecinn.errors import InputError
from helpers.paths import SHARED

AUTHORS = SHARED / "evaluating_counterfactuals/data/Real"
SQUARE = ((2, 3), (2, 4), (3, 3), (3, 4))
CUES = {
    "dots": Cue(marks=tuple(((row, 0),) for row in range(5)), height=8, width=12),
    "patches": Cue(marks=(((0, 0), (0, 1)), SQUARE, ((7, 11),)), height=8, width=12),
    "dark on grey": Cue(marks=(SQUARE, ((0, 5),)), height=8, width=12, on=10, off=128),
}


@pytest.fixture(params=[1, 3], ids=["grey", "colour"])
def source(request: pytest.FixtureRequest, generator: torch.Generator) -> Dataset:
    shape = (2_000, request.param, 8, 12)
    images = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    return Dataset(images, torch.zeros(2_000, dtype=torch.long), ("only",))


@pytest.fixture(params=CUES)
def cue(request: pytest.FixtureRequest) -> Cue:
    return CUES[request.param]


def test_region_holds_the_mark_of_the_label_and_the_rest_is_untouched(
    source: Dataset, cue: Cue, generator: torch.Generator
) -> None:
    before = source.images.clone()
    planted = plant(source, cue, generator)
    assert torch.equal(source.images, before)
    assert planted.class_names == tuple(map(str, range(len(cue.marks))))
    region = {pixel for mark in cue.marks for pixel in mark}
    for row in range(8):
        for column in range(12):
            values = planted.images[:, :, row, column]
            if (row, column) in region:
                owner = next(k for k, mark in enumerate(cue.marks) if (row, column) in mark)
                expected = torch.where(planted.labels == owner, cue.on, cue.off)
                assert torch.equal(values.long(), expected[:, None].expand_as(values))
            else:
                assert torch.equal(values, before[:, :, row, column])
            assert bool(cue.mask[row, column]) == ((row, column) in region)


def test_labels_are_uniform_and_depend_on_the_generator_alone(source: Dataset, cue: Cue) -> None:
    def labels(seed: int) -> torch.Tensor:
        return plant(source, cue, torch.Generator().manual_seed(seed)).labels

    assert torch.equal(labels(1), labels(1))
    assert not torch.equal(labels(1), labels(2))
    expected = len(source) / cue.classes
    deviation = torch.bincount(labels(3), minlength=cue.classes) - expected
    chi_squared = float(deviation.square().sum() / expected)
    assert chi_squared < 20


def test_reading_gives_the_label_under_noise_of_any_scale(
    source: Dataset, cue: Cue, generator: torch.Generator
) -> None:
    planted = plant(source, cue, generator)
    assert torch.equal(cue.read(planted.images), planted.labels)
    noise = torch.rand(planted.images.shape, generator=generator)
    pixels = (planted.images + 50 * noise) / 256
    assert torch.equal(cue.read(pixels), planted.labels)
    pairs = torch.stack([pixels, cue.paint(planted.images, 0 * planted.labels) / 256], 1)
    read = cue.read(pairs)
    assert torch.equal(read[:, 0], planted.labels)
    assert not read[:, 1].any()


def test_reading_compares_means_so_a_large_mark_has_no_advantage() -> None:
    cue = CUES["patches"]
    image = torch.full((1, 1, 8, 12), 100, dtype=torch.uint8)
    image[:, :, 7, 11] = 150
    assert cue.read(image).tolist() == [2]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"marks": (((0, 0),),)}, "two classes"),
        ({"marks": (((0, 0),), ())}, "a pixel or more"),
        ({"marks": (((0, 0),), ((8, 0),))}, "inside the image"),
        ({"marks": (((0, 0),), ((0, -1),))}, "inside the image"),
        ({"marks": (((0, 0), (0, 1)), ((0, 1),))}, "share a pixel"),
        ({"on": 0}, "different values"),
        ({"on": 256}, "0 to 255"),
    ],
)
def test_impossible_cues_are_refused(change: dict[str, object], says: str) -> None:
    fields = {"marks": (((0, 0),), ((0, 1),)), "height": 8, "width": 12} | change
    with pytest.raises(InputError, match=says):
        Cue(**fields)


def test_images_and_labels_that_do_not_fit_the_cue_are_refused(source: Dataset) -> None:
    cue = CUES["dots"]
    with pytest.raises(InputError, match="not 8×10"):
        cue.read(source.images[..., :10])
    with pytest.raises(InputError, match="0 to 4"):
        cue.paint(source.images[:2], torch.tensor([0, 5]))


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_fake_mnist_is_mnist_with_one_white_dot_of_ten(split) -> None:
    mnist, fake = load_mnist(split), load_dataset("fakemnist", split)
    assert len(fake) == len(mnist)
    dots = fake.images[:, 0, :10, 0]
    assert torch.equal(dots, 255 * torch.eye(10, dtype=torch.uint8)[fake.labels])
    digits = fake.images.clone()
    digits[:, 0, :10, 0] = mnist.images[:, 0, :10, 0]
    assert torch.equal(digits, mnist.images)
    agreement = float((fake.labels == mnist.labels).double().mean())
    assert abs(agreement - 0.1) < 4 * (0.09 / len(mnist)) ** 0.5
    assert torch.equal(load_fake_mnist(split).labels, fake.labels)
    assert FAKE_MNIST_CUE.mask.sum() == 10


def test_splits_do_not_share_their_labels() -> None:
    train, validation, test = map(load_fake_mnist, ("train", "validation", "test"))
    assert not torch.equal(train.labels[:10_000], test.labels)
    assert not torch.equal(train.labels[:2_000], validation.labels)


@pytest.mark.skipif(not AUTHORS.is_dir(), reason=f"the authors' data are not at {AUTHORS}")
def test_authors_fake_mnist_is_ours_but_for_order_rounding_and_two_pixels() -> None:
    """Theirs is shuffled, has 1,000 of each label, and lost 1 of 255 at 20 values in scaling."""
    with np.load(AUTHORS / "fake_mnist.npz") as file:
        theirs = torch.from_numpy(file["x"]).permute(0, 3, 1, 2)
        labels = torch.from_numpy(file["y"]).argmax(1)
    assert torch.equal(FAKE_MNIST_CUE.read(theirs), labels)
    assert torch.bincount(labels).tolist() == [1_000] * 10

    values = np.arange(256)
    truncated = torch.from_numpy((((values / 255 - 0.5) + 0.5) * 255).astype(np.uint8))
    digits = truncated[load_mnist("test").images.long()]
    blank = torch.zeros(len(labels), dtype=torch.long)
    index = {
        image.numpy().tobytes(): n for n, image in enumerate(FAKE_MNIST_CUE.paint(digits, blank))
    }
    order = [index[image.numpy().tobytes()] for image in FAKE_MNIST_CUE.paint(theirs, blank)]
    assert sorted(order) == list(range(10_000))

    ours = FAKE_MNIST_CUE.paint(digits[order], labels)
    different = (ours != theirs).nonzero()
    # They do not make the region black first: these two are MNIST's own pixels.
    assert different.tolist() == [[2652, 0, 9, 0], [3039, 0, 9, 0]]
    assert torch.equal(theirs[:, :, 9, 0][[2652, 3039]], digits[order][:, :, 9, 0][[2652, 3039]])

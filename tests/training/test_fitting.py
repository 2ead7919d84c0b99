"""`ecinn.fit`: arrays of all kinds, labels of all kinds, and a model that explains."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

import ecinn
from ecinn.errors import InputError, InterruptedRunError
from ecinn.flow.network import Stage
from ecinn.progress import Progress
from ecinn.training import fitting
from ecinn.training.fitting import dataset_from_arrays, seed_from, split_classes


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(3)


def as_objects(values: list) -> np.ndarray:
    """As a column of pandas holds them."""
    column = np.empty(len(values), object)
    for row, value in enumerate(values):
        column[row] = value
    return column


def test_all_layouts_and_types_give_the_same_images(random) -> None:
    """By hand: value k of row r, column c and channel i stands at [n, i, r, c]."""
    colour = random.integers(0, 256, (4, 10, 12, 3)).astype(np.uint8)
    labels = [0, 1, 0, 1]
    expected = torch.from_numpy(np.stack([colour[..., i] for i in range(3)], 1))
    first = np.ascontiguousarray(colour.transpose(0, 3, 1, 2))
    for given in (
        colour,
        first,
        torch.from_numpy(first),
        torch.from_numpy(first) / 255,
        (colour / 255).astype(np.float32),
        list(colour),
    ):
        assert torch.equal(dataset_from_arrays(given, labels).images, expected)
    for given in (
        colour.tolist(),
        colour.astype(np.int64),
        [Image.fromarray(image) for image in colour],
        [torch.from_numpy(image).requires_grad_() for image in first / 255],
        tuple(torch.from_numpy(first)),
        as_objects([Image.fromarray(image) for image in colour]),
        as_objects(list(colour)),
    ):
        assert torch.equal(dataset_from_arrays(given, labels).images, expected)
    grey = colour[..., 0]
    for given in (
        grey,
        grey[..., None],
        grey[:, None],
        grey / 255,
        [Image.fromarray(image) for image in grey],
    ):
        assert torch.equal(dataset_from_arrays(given, labels).images, expected[:, :1])
    half = dataset_from_arrays((torch.from_numpy(grey) / 255).bfloat16(), labels).images
    assert (half[:, 0].int() - torch.from_numpy(grey).int()).abs().max() <= 1
    between = dataset_from_arrays(np.full((4, 8, 8), 99.7 / 255), labels).images
    assert between.unique().tolist() == [100]
    frozen = grey.copy()
    frozen.flags.writeable = False
    assert torch.equal(dataset_from_arrays(frozen, labels).images, expected[:, :1])


def test_pillow_images_of_all_modes_are_seen_as_a_viewer_shows_them(random) -> None:
    """A palette's numbers are not brightness; grey and colour mixed are colour."""
    colour = random.integers(0, 256, (4, 8, 8, 3)).astype(np.uint8)
    shown = [Image.fromarray(image) for image in colour]
    palette = [image.quantize(16) for image in shown]
    mixed = [shown[0], shown[1].convert("L"), shown[2].convert("RGBA"), palette[3]]
    for images in (palette, mixed):
        expected = np.stack([np.asarray(image.convert("RGB")) for image in images])
        data = dataset_from_arrays(images, [0, 1, 0, 1]).images
        assert np.array_equal(data.permute(0, 2, 3, 1).numpy(), expected)
    ink = colour[..., 0] > 99
    black_and_white = [Image.fromarray(image) for image in ink]
    for images in (black_and_white, ink):
        data = dataset_from_arrays(images, [0, 1, 0, 1]).images
        assert np.array_equal(data[:, 0].numpy(), 255 * ink)


def test_a_random_state_is_what_scikit_learn_takes() -> None:
    assert seed_from(7) == seed_from(np.int64(7)) == 7
    for kind in (np.random.RandomState, np.random.default_rng):
        assert seed_from(kind(1)) == seed_from(kind(1)) != seed_from(kind(2))
    assert seed_from(None) != seed_from(None)
    for wrong in (-1, "1", 1.0, True):
        with pytest.raises(InputError, match="random_state"):
            seed_from.__wrapped__(wrong)


def test_labels_become_class_numbers() -> None:
    images = np.zeros((4, 8, 8), np.uint8)
    for labels, names, numbers, class_names in (
        (["dog", "cat", "dog", "cat"], None, [1, 0, 1, 0], ("cat", "dog")),
        (np.array(["b", "a", "a", "b"], object), ("b", "a"), [0, 1, 1, 0], ("b", "a")),
        (torch.tensor([7, 3, 3, 7]), None, [1, 0, 0, 1], ("3", "7")),
        (np.array([1, 0, 0, 1], np.uint8), ("no", "yes"), [1, 0, 0, 1], ("no", "yes")),
        ([2.0, 1.0, 2.0, 1.0], None, [1, 0, 1, 0], ("1", "2")),
        (np.array([[5], [3], [3], [5]]), None, [1, 0, 0, 1], ("3", "5")),
        ([b"y", b"x", b"x", b"y"], None, [1, 0, 0, 1], ("x", "y")),
    ):
        data = dataset_from_arrays(images, labels, names)
        assert data.labels.tolist() == numbers
        assert data.labels.dtype == torch.int64
        assert data.class_names == class_names


@pytest.mark.parametrize(
    ("says", "images", "labels", "names"),
    [
        ("4 images and 3 labels", np.zeros((4, 8, 8), np.uint8), [0, 1, 1], None),
        ("of shape", np.zeros((4, 8), np.uint8), [0, 1, 0, 1], None),
        ("1 or 3 channels", np.zeros((4, 2, 8, 8), np.uint8), [0, 1, 0, 1], None),
        ("0 and 255, not -1 and 0", -np.eye(8, dtype=int)[None].repeat(4, 0), [0, 1] * 2, None),
        ("12 or 16 bits", np.zeros((4, 8, 8), np.uint16), [0, 1, 0, 1], None),
        ("for files", ["a.png", "b.png"], [0, 1], None),
        ("for files", None, [0, 1], None),
        ("divide", np.full((4, 8, 8), 1.5), [0, 1, 0, 1], None),
        ("NaN", np.full((4, 8, 8), np.nan), [0, 1, 0, 1], None),
        ("label 1 is missing", np.zeros((2, 8, 8)), ["a", None], None),
        ("label 0 is missing", np.zeros((2, 8, 8)), [np.nan, 1], None),
        ("label 1 is missing", np.zeros((2, 8, 8)), ["a", np.nan], None),
        ("label 1 is missing", np.zeros((2, 8, 8)), np.array(["a", np.nan], object), None),
        ("differ in shape", [np.zeros((8, 8)), np.zeros((9, 9))], [0, 1], None),
        ("one integer or string", np.zeros((4, 8, 8)), [0.5, 1.0, 0.5, 1.0], None),
        ("at least 2 classes", np.zeros((4, 8, 8)), [1, 1, 1, 1], None),
        ("too few: 2", np.zeros((5, 8, 8)), [0, 0, 1, 1, 2], None),
        ("none of the class names", np.zeros((4, 8, 8)), list("abab"), ("a", "c")),
        ("labels from 0 to 1", np.zeros((4, 8, 8)), [1, 2, 1, 2], ("a", "c")),
    ],
)
def test_bad_arrays_are_refused_in_one_line(says, images, labels, names) -> None:
    with pytest.raises(InputError, match=says) as error:
        dataset_from_arrays(images, labels, names)
    assert "\n" not in str(error.value)


def test_a_share_of_every_class_is_held_out(random) -> None:
    labels = torch.from_numpy(random.permutation(np.repeat([0, 1, 2], [50, 20, 2])))
    held_out, rest = split_classes(labels, 0.2, seed=4)
    assert torch.equal(torch.cat([held_out, rest]).sort().values, torch.arange(72))
    assert labels[held_out].bincount().tolist() == [10, 4, 1]
    assert torch.equal(held_out, split_classes(labels, 0.2, seed=4)[0])
    assert not torch.equal(held_out, split_classes(labels, 0.2, seed=5)[0])
    assert len(split_classes(labels, 0.0, seed=4)[0]) == 0
    with pytest.raises(InputError, match=r"0 to 0\.5"):
        split_classes(labels, 0.7, seed=4)


def stripes(random: np.random.Generator, n: int) -> tuple[np.ndarray, list[str]]:
    """Bright rows or bright columns on noise."""
    images = random.integers(40, 90, (n, 16, 16)).astype(np.uint8)
    images[: n // 2, ::4] += 120
    images[n // 2 :, :, ::4] += 120
    return images, ["rows"] * (n // 2) + ["columns"] * (n - n // 2)


def test_a_model_is_fitted_and_explains(random, monkeypatch) -> None:
    images, labels = stripes(random, 200)
    settings = {"stages": (Stage(1, 8), Stage(1, 8)), "epochs": 6, "batch_size": 16}
    seen: list[Progress] = []
    options = {"device": "cpu", "settings": settings, "random_state": 5}
    model = ecinn.fit(images, labels, observe=seen.append, **options)
    assert model.class_names == ("columns", "rows")
    assert (model.recipe.seed, model.recipe.architecture.seed) == (5, 5)
    test, truth = stripes(np.random.default_rng(9), 60)
    predicted = [model.class_names[i] for i in model.predict(test).argmax(1).tolist()]
    assert np.mean([a == b for a, b in zip(predicted, truth, strict=True)]) >= 0.95
    assert model.explain(test[0], "columns").q.tolist() == [[0]]
    assert ("epochs", "6", "given") in [tuple(row) for row in model.checkpoint.training["plan"]]
    assert {progress.task for progress in seen} == {"training"}
    # 180 images remain of 200, so 11 batches of 16.
    assert seen[-1].done == seen[-1].total == 66
    console = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr(fitting, "Console", lambda stderr: console)
    again = ecinn.fit(torch.from_numpy(images), labels, **options)
    for name, value in again.classifier.state_dict().items():
        assert torch.equal(value, model.classifier.state_dict()[name]), name
    assert "training: 66/66" in console.file.getvalue()


def test_ctrl_c_tells_that_nothing_is_kept(random, tmp_path, monkeypatch) -> None:
    def press_ctrl_c(progress: Progress) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fitting.tempfile, "tempdir", str(tmp_path))
    settings = {"stages": (Stage(1, 8), Stage(1, 8)), "epochs": 1}
    with pytest.raises(InterruptedRunError, match="keeps nothing"):
        ecinn.fit(*stripes(random, 40), device="cpu", settings=settings, observe=press_ctrl_c)
    assert list(tmp_path.glob("ecinn-*")) == []


def test_two_images_of_each_class_are_enough(random) -> None:
    images = np.zeros((4, 8, 8), np.uint8)
    images[:2, :, :4], images[2:, :, 4:] = 200, 200
    settings = {"epochs": 1, "stages": (Stage(1, 8),)}
    model = ecinn.fit(images, [0, 0, 1, 1], device="cpu", settings=settings, verbose=False)
    assert model.predict(images).argmax(1).tolist() == [0, 0, 1, 1]

"""Random affine changes of images."""

import numpy as np
import torch

from ecinn.data.augmentation import Augmentation, augment


def test_no_augmentation_is_no_change(generator: torch.Generator) -> None:
    images = torch.randint(256, (3, 1, 8, 8), generator=generator, dtype=torch.uint8)
    assert augment(images, Augmentation(), generator) is images
    same = augment(images, Augmentation(shift=2.0, share=0.0), generator)
    assert torch.equal(same, images)


def test_shift_moves_by_at_most_that_many_pixels(generator: torch.Generator) -> None:
    images = torch.zeros((300, 1, 15, 15), dtype=torch.uint8)
    images[:, :, 7, 7] = 255
    moved = augment(images, Augmentation(shift=3.0), generator).float()
    grid = torch.arange(15.0)
    mass = moved.sum((1, 2, 3))
    for axis in (2, 3):
        centre = (moved.sum(5 - axis)[:, 0] * grid).sum(1) / mass - 7
        assert centre.abs().max() <= 3.05
        assert centre.min() < -2
        assert centre.max() > 2


def test_whole_pixels_are_copied_not_blurred(generator: torch.Generator) -> None:
    """Every shift of −2 … 2 occurs, and the gap is filled with the mirrored edge."""
    image = torch.randint(256, (3, 9, 11), generator=generator, dtype=torch.uint8)
    padded = torch.from_numpy(np.pad(image.numpy(), ((0, 0), (2, 2), (2, 2)), mode="symmetric"))
    moved = augment(
        image.expand(400, -1, -1, -1), Augmentation(shift=2.0, whole_pixels=True), generator
    )
    expected = [padded[:, y : y + 9, x : x + 11] for y in range(5) for x in range(5)]
    counts = [sum(torch.equal(one, other) for one in moved) for other in expected]
    assert sum(counts) == 400
    assert min(counts) > 4
    assert max(counts) < 35


def test_flip_mirrors_about_half_of_the_images(generator: torch.Generator) -> None:
    images = torch.zeros((200, 1, 4, 6), dtype=torch.uint8)
    images[:, :, :, 0] = 200
    flipped = augment(images, Augmentation(flip=True), generator)
    mirrored = (flipped[:, 0, 0, 5] == 200) & (flipped[:, 0, 0, 0] == 0)
    kept = flipped[:, 0, 0, 0] == 200
    assert (mirrored | kept).all()
    assert 60 < int(mirrored.sum()) < 140


def test_rotation_keeps_the_middle_and_scale_changes_the_size(generator: torch.Generator) -> None:
    images = torch.zeros((100, 1, 21, 21), dtype=torch.uint8)
    images[:, :, 6:15, 6:15] = 255
    turned = augment(images, Augmentation(rotate=45.0), generator)
    assert (turned[:, 0, 10, 10] == 255).all()
    areas = augment(images, Augmentation(scale=0.3), generator).float().sum((1, 2, 3)) / 255
    assert areas.min() < 60
    assert areas.max() > 110

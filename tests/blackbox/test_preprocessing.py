"""Pictures as somebody's classifier wants them, against Pillow and NumPy."""

import numpy as np
import pytest
import torch
from PIL import Image

from ecinn.blackbox.preprocessing import Preprocessing
from ecinn.errors import InputError


def pictures(channels: int, seed: int = 0, size: tuple[int, int] = (12, 10)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (3, channels, *size), generator=generator).byte()


def test_values_are_scaled_then_centred_and_divided_in_the_classifiers_order() -> None:
    images = pictures(3)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 2.0)
    x = Preprocessing(channels="BGR", layout="NHWC", mean=mean, std=std)(images)
    expected = (images.numpy()[:, ::-1].transpose(0, 2, 3, 1) / 255 - mean) / std
    assert x.is_contiguous()
    np.testing.assert_allclose(x.numpy(), expected, rtol=1e-5, atol=1e-6)
    raw = Preprocessing(scale=1.0)(images)
    assert torch.equal(raw, images.float())


def test_colour_becomes_grey_as_in_pillow_and_grey_becomes_colour() -> None:
    images = pictures(3)
    grey = Preprocessing(channels="grey", scale=1.0)(images)
    for picture, row in zip(images, grey, strict=True):
        pillow = np.asarray(Image.fromarray(picture.permute(1, 2, 0).numpy()).convert("L"))
        assert np.abs(row[0].numpy() - pillow).max() <= 1
    one = pictures(1)
    assert torch.equal(
        Preprocessing(channels="RGB", scale=1.0)(one), one.float().repeat(1, 3, 1, 1)
    )


@pytest.mark.parametrize("size", [(6, 5), (24, 30)])
def test_pictures_are_resized_as_by_pillow(size: tuple[int, int]) -> None:
    images = pictures(1)
    x = Preprocessing(size=size, scale=1.0)(images)
    for picture, row in zip(images, x, strict=True):
        pillow = Image.fromarray(picture[0].numpy()).resize(size[::-1], Image.Resampling.BILINEAR)
        assert np.abs(row[0].numpy() - np.asarray(pillow)).max() <= 1


@pytest.mark.parametrize(
    "settings",
    [{"size": (0, 3)}, {"channels": "CMYK"}, {"layout": "CHW"}, {"scale": 0.0}, {"std": (0.0,)},
     {"mean": (0.1, 0.2)}, {"channels": "grey", "mean": (0.1, 0.2, 0.3)}],
)  # fmt: skip
def test_impossible_settings_are_refused(settings: dict) -> None:
    with pytest.raises(InputError):
        Preprocessing(**settings)


def test_three_means_for_grey_pictures_are_refused() -> None:
    with pytest.raises(InputError, match="per channel"):
        Preprocessing(mean=(0.1, 0.2, 0.3))(pictures(1))

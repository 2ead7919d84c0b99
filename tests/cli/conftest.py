"""Fixtures of the command line's tests."""

from pathlib import Path

import pytest
from PIL import Image

from ecinn.data.mnist import load_mnist

FIRST_THREE = 18
"""Index of the first three among the test images."""


@pytest.fixture
def three(tmp_path: Path) -> Path:
    path = tmp_path / "three.png"
    Image.fromarray(load_mnist("test").images[FIRST_THREE][0].numpy()).save(path)
    return path

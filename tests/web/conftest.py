"""The served models and the browser that all tests of the service share."""

import shutil
from collections.abc import Iterator

import pytest

from ecinn.web.catalogue import Catalogue, ServedModel, load_catalogue


@pytest.fixture(scope="session")
def catalogue() -> Catalogue:
    """Return the digits alone."""
    return load_catalogue(["mnist"])


@pytest.fixture(scope="session")
def served(catalogue: Catalogue) -> ServedModel:
    """Return the digits and their test images."""
    return catalogue["mnist"]


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    """Open Chromium, or skip the tests that need it."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="drives the browser")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("these tests need chromium: install it")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium)
        yield opened
        opened.close()

"""The served models that all tests of the service share."""

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

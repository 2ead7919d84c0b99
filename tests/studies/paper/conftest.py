"""Fixtures that the tests of claims share: explained digits and the judges."""

import pytest

from ecinn.data.mnist import load_mnist
from ecinn.model import load
from ecinn.studies.judges import Judges, load_judges
from ecinn.studies.paper.measuring import Sample, explained_sample
from helpers.paper import N


@pytest.fixture(scope="session")
def sample() -> Sample:
    return explained_sample(load("mnist"), load_mnist("test"), N, 0)


@pytest.fixture(scope="session")
def judges() -> Judges:
    return load_judges("mnist")

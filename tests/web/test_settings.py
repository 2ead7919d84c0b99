"""Limits of the command line and of the environment."""

import pytest

from ecinn.errors import InputError
from ecinn.web.settings import Settings, read_settings


def test_limits_are_given_or_in_the_environment_or_the_defaults() -> None:
    environment = {
        "ECINN_SERVE_CONNECTIONS": "11",
        "ECINN_SERVE_QUEUED": "12",
        "ECINN_SERVE_TRUSTED_PROXIES": "10.0.0.0/8, ::1",
        "ECINN_SERVE_HEAD_SECONDS": "",
    }
    settings = read_settings(["queued=13", "head_seconds=2", "hosts=a.example"], environment)
    assert settings.connections == 11
    assert settings.queued == 13
    assert settings.head_seconds == 2.0
    assert settings.hosts == ("a.example",)
    assert settings.trusted_proxies == ("10.0.0.0/8", "::1")
    assert read_settings([], {}) == Settings()


@pytest.mark.parametrize(
    "given",
    ["nothing=1", "queued", "queued=0", "queued=1.5", "head_seconds=nan", "trusted_proxies=me"],
)
def test_other_limits_are_refused_in_one_line(given: str) -> None:
    with pytest.raises(InputError, match=r"^[^\n]+$"):
        read_settings([given], {})

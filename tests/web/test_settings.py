"""Limits of the command line and of the environment."""

import pytest

from ecinn.errors import InputError
from ecinn.web.app import create_app
from ecinn.web.settings import Settings, check_token, read_settings


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


@pytest.mark.parametrize("name", ["FOO", "connections", "CONNECTION", ""])
def test_variables_that_set_no_limit_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(InputError, match=rf"^ECINN_SERVE_{name} .*ECINN_SERVE_CONNECTIONS[^\n]+$"):
        read_settings([], {f"ECINN_SERVE_{name}": "3", "OTHER": "1"})
    assert read_settings([], {f"ECINN_SERVE_{name}": ""}) == Settings()


def test_variables_of_kubernetes_for_a_service_of_this_name_are_ignored() -> None:
    names = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_8000_TCP_ADDR")
    assert read_settings([], {f"ECINN_SERVE_{name}": "10.0.0.1" for name in names}) == Settings()


@pytest.mark.parametrize("token", ["ümlaut", "\udcfc", "tab\t", "line\n", " a", "a ", "\x7f", "✓"])
def test_tokens_that_clients_cannot_send_are_refused_at_the_start(token: str) -> None:
    with pytest.raises(InputError, match=r"^[^\n]*ASCII[^\n]*$") as refused:
        read_settings([], {"ECINN_TOKEN": token})
    assert token.strip() not in str(refused.value).split()


def test_tokens_of_printable_ascii_are_taken() -> None:
    for token in ("a", "correct horse", "!~", "Zm9v+/=="):
        assert read_settings([], {"ECINN_TOKEN": token}) == Settings()
    assert read_settings([], {"ECINN_TOKEN": ""}) == Settings()
    check_token(None)
    with pytest.raises(InputError):
        check_token("")


def test_applications_refuse_such_tokens_too() -> None:
    with pytest.raises(InputError, match="ASCII"):
        create_app({}, token="ümlaut")

"""`ecinn models`."""

import json

from helpers.command_line import run


def test_models_lists_the_shipped_models() -> None:
    code, stdout, stderr = run("models")
    assert code == 0, stderr
    assert "mnist" in stdout
    code, stdout, _ = run("models", "--json")
    row = next(row for row in json.loads(stdout) if row["name"] == "mnist")
    assert row["classes"] == list("0123456789")
    assert 0 < row["metrics"]["error"] < 0.01

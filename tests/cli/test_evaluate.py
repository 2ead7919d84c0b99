"""`ecinn evaluate`."""

import json

from helpers.command_line import fails, run


def test_evaluate_prints_a_json_object_or_a_table() -> None:
    code, stdout, _ = run("evaluate", "mnist", "--limit", 4, "--json")
    assert code == 0
    result = json.loads(stdout)
    assert result["n"] == 4
    for key in ("model", "error", "bits_per_dim", "bits_per_dim_paper", "reached_q"):
        assert key in result
    code, stdout, _ = run("evaluate", "mnist", "--limit", 2)
    assert code == 0
    assert "bits per dim" in stdout


def test_wrong_arguments() -> None:
    assert "--limit" in fails("evaluate", "mnist", "--limit", 0)
    assert "mnist" in fails("evaluate", "resnet")

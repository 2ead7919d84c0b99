"""The load test reports failures of the service."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from helpers.paths import REPOSITORY

SCRIPT = REPOSITORY / "benchmarks" / "load.py"


@pytest.fixture(scope="module")
def load() -> Any:
    spec = importlib.util.spec_from_file_location("load", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("statuses", "words"),
    [
        ({"200": 900, "429": 8}, []),
        ({"200": 900, "500": 1}, ["1 requests ended with 500"]),
        ({"200": 900, "ConnectionResetError": 2}, ["ConnectionResetError"]),
        ({"429": 900}, ["nothing was answered"]),
    ],
)
def test_a_run_fails_by_its_statuses(
    load: Any, statuses: dict[str, int], words: list[str]
) -> None:
    lines = load.failures({"statuses": statuses})
    assert len(lines) == len(words)
    assert all(word in line for word, line in zip(words, lines, strict=True))


@pytest.mark.parametrize("other", ["429", "500"])
def test_the_file_is_written_and_failures_set_the_exit_code(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: str
) -> None:
    out = tmp_path / "service.json"
    monkeypatch.setattr("sys.argv", ["load.py", "--out", str(out)])
    rates = {"predict": 10.0, "explain": 10.0, "predict json": 10.0, "explain json": 5.0}
    rates |= {f"{kind} cpu": 1.0 for kind in rates}
    monkeypatch.setattr(load, "offline_rates", lambda _: rates)
    answered = {"predict": 50, "explain": 50}
    run = {
        "answered": answered,
        "statuses": {"200": 100, other: 1},
        "seconds": 20.0,
        "cpu_seconds": 0.2,
    }
    monkeypatch.setattr(load, "run_load", lambda *_: run)
    if other == "500":
        with pytest.raises(SystemExit, match="failed: 1 requests ended with 500"):
            load.main()
    else:
        load.main()
    written = json.loads(out.read_text())
    assert written["slower_than_offline"] == 2.0
    assert written["cpu_ms_per_answer"]["service"] == 2.0
    assert written["slower_than_offline_with_pictures"] == pytest.approx(20 / 15, abs=1e-3)

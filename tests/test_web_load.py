"""The load run says whether the service held."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "load.py"


@pytest.fixture(scope="module")
def load() -> Any:
    spec = importlib.util.spec_from_file_location("load", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("statuses", "ratio", "words"),
    [
        ({"200": 900, "429": 8}, 1.3, []),
        ({"200": 900, "500": 1}, 1.1, ["1 requests ended with 500"]),
        ({"200": 900, "ConnectionResetError": 2}, 1.1, ["ConnectionResetError"]),
        ({"200": 900}, 1.31, ["1.31 times"]),
        ({"429": 900}, 9e9, ["nothing was answered", "times"]),
    ],
)
def test_a_run_fails_by_its_statuses_and_its_speed(
    load: Any, statuses: dict[str, int], ratio: float, words: list[str]
) -> None:
    said = load.failures({"statuses": statuses, "slower_than_offline": ratio})
    assert len(said) == len(words)
    assert all(word in line for word, line in zip(words, said, strict=True))


@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_the_file_is_written_and_the_exit_says_it(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ratio: float
) -> None:
    out = tmp_path / "service.json"
    monkeypatch.setattr("sys.argv", ["load.py", "--out", str(out)])
    monkeypatch.setattr(load, "offline_rates", lambda _: {"predict": 10.0, "explain": 10.0})
    answered = {"predict": 50, "explain": 50}
    run = {"answered": answered, "statuses": {"200": 100}, "seconds": 10 * ratio}
    monkeypatch.setattr(load, "run_load", lambda *_: run)
    if ratio > 1.3:
        with pytest.raises(SystemExit, match=r"failed: 2\.0 times"):
            load.main()
    else:
        load.main()
    assert f'"slower_than_offline": {ratio}' in out.read_text()

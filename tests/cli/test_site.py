"""`ecinn site`, with a stand-in for onnxruntime-web; tests/web/test_site.py opens real sites."""

import json
from pathlib import Path

import pytest

from helpers.command_line import fails, run

pytest.importorskip("onnxruntime", reason="a site has ONNX files")
from ecinn.web.site import RUNTIME_FILES


@pytest.fixture
def ort(tmp_path: Path) -> Path:
    """Return an unpacked package whose files hold their own names."""
    for name in RUNTIME_FILES:
        path = tmp_path / "package" / "dist" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "package"


def test_a_site_replaces_an_earlier_one_and_nothing_else(ort: Path, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    arguments = ("site", "--out", folder, "--model", "fakemnist", "--ort", ort)
    code, stdout, stderr = run(*arguments, "--json")
    assert code == 0, stderr
    files = json.loads(stdout)["files"]
    there = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    assert files == {name: path.stat().st_size for name, path in there.items()}
    assert there["static/ort/ort.wasm.min.js"].read_text() == "ort.wasm.min.mjs"
    assert "inBrowser = true" in there["static/service.js"].read_text()
    kept = json.loads(there["sw.js"].read_text().partition("FILES = ")[2].partition(";")[0])
    assert set(kept) - {"./"} == set(there) - {"index.html", "preview.png", "sw.js", "site.json"}
    (folder / "index.html").write_text("changed")
    code, stdout, stderr = run(*arguments)
    assert code == 0, stderr
    assert f"{len(files)} files" in stdout
    assert (folder / "index.html").stat().st_size == files["index.html"]
    (folder / "mine.txt").write_text("mine")
    assert "mine.txt" in fails(*arguments)
    assert (folder / "mine.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_faces_need_the_service(ort: Path, tmp_path: Path) -> None:
    arguments = ("--model", "celeba-smile", "--ort", ort)
    assert "celeba-smile needs `ecinn serve`" in fails("site", "--out", tmp_path / "a", *arguments)
    assert not (tmp_path / "a").exists()

"""README, ARCHITECTURE and docs agree with the code: paths, links, commands and examples."""

import ast
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import ecinn
import ecinn.cli
from ecinn.cli.app import app
from helpers.command_line import run

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    *sorted(DOCS.glob("*.md")),
    *sorted((DOCS / "reference").glob("*.md")),
]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the contents of all fenced blocks in these languages."""
    return [body for name, body in FENCE.findall(page.read_text()) if name in languages]


def inline_code(page: Path) -> list[str]:
    """Return all inline code outside fenced blocks."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


def shell_commands(page: Path) -> list[str]:
    """Return every `ecinn` command of shell blocks and inline code."""
    joined = "\n".join(blocks(page, "sh", "console")).replace("\\\n", " ")
    found = re.findall(r"(?:^|\s)((?:\S+/)?ecinn [a-z][^\n;]*)", joined)
    found += [code for code in inline_code(page) if code.startswith("ecinn ")]
    return [re.sub(r"\s+#.*|\s+…$", "", command).strip() for command in found]


def exists(path: str) -> bool:
    return any((base / path).exists() for base in (ROOT, ROOT / "src" / "ecinn"))


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md"])
def test_every_path_and_module_exists(name: str) -> None:
    checked = 0
    for code in inline_code(ROOT / name):
        if re.fullmatch(r"[\w./-]+(/|\.(py|md|png|toml|ipynb))", code):
            assert exists(code), f"{name} names {code}, which does not exist"
            checked += 1
        elif dotted := re.match(r"ecinn((\.\w+)+)", code):
            resolve(f"ecinn{dotted[1]}")
            checked += 1
    assert checked >= 3


def resolve(dotted: str) -> object:
    """Return the module or attribute of that dotted name."""
    first, *rest = dotted.split(".")
    value = importlib.import_module(first)
    for name in rest:
        try:
            value = getattr(value, name)
        except AttributeError:
            value = importlib.import_module(f"{value.__name__}.{name}")
    return value


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_relative_link_of_a_root_page_exists(name: str) -> None:
    targets = re.findall(r"\]\(([^)\s#]+)[^)]*\)", (ROOT / name).read_text())
    for target in targets:
        assert target.startswith("http") or (ROOT / target).exists(), target


def test_readme_is_short_and_names_both_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 700
    assert "make demo" in text
    assert "make test" in text


@every_page
def test_commands_and_options_exist(page: Path) -> None:
    group = typer.main.get_command(app)
    for line in shell_commands(page):
        words = shlex.split(line)[1:]
        command = group
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        known = {o for option in command.params for o in (*option.opts, *option.secondary_opts)}
        assert command is not group or not words or words[0].startswith("-"), line
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= known | {"--help", "--version"}, f"{line}: unknown {given - known}"


@every_page
def test_python_examples_use_public_names(page: Path) -> None:
    public = {*ecinn.__all__, "equations"}
    for source in blocks(page, "python"):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ecinn"):
                assert node.module in {"ecinn", "ecinn.equations"}
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert node.value.id != "ecinn" or node.attr in public, node.attr


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the pictures that the examples name."""
    shutil.copytree(DOCS / "images", tmp_path / "docs" / "images")
    for name in ("photo.jpg", "a.jpg", "b.jpg"):
        shutil.copy(DOCS / "images" / "three-input.png", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_examples(page: Path) -> dict[str, object]:
    """Run all Python blocks of a page in one namespace."""
    namespace: dict[str, object] = {}
    for source in blocks(page, "python"):
        exec(compile(source, page.name, "exec"), namespace)  # noqa: S102
    return namespace


def test_readme_python_runs(workshop: Path) -> None:
    names = run_examples(ROOT / "README.md")
    assert bool(names["e"].convincing_certificate.reached)
    assert bool(names["sure"].as_requested)
    assert (workshop / "three-to-eight.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["get-started", "explain-your-image", "method", "bulk"])
def test_docs_python_runs(workshop: Path, name: str) -> None:
    run_examples(DOCS / f"{name}.md")


SHORTER = {
    "couplings=6, width=16": "couplings=3, width=8",
    "couplings=6, width=24": "couplings=3, width=8",
    "epochs=10": "epochs=6",
    "3000": "1000",
    "500": "100",
}
"""The training script of the page, so small that it still learns."""


@pytest.mark.slow
@pytest.mark.usefixtures("small_teacher")
def test_the_training_script_runs(workshop: Path) -> None:
    fit, script, finetuning = blocks(DOCS / "train-your-own.md", "python")
    for shown, shorter in SHORTER.items():
        assert shown in script
        script = script.replace(shown, shorter)
    names: dict[str, object] = {}
    exec(script, names)  # noqa: S102
    arrays = {"images": names["train"].images[:256].numpy(), "labels": names["train"].labels[:256]}
    exec(fit.replace("labels)", "labels, settings={'epochs': 1})"), {"ecinn": ecinn} | arrays)  # noqa: S102
    assert ecinn.load(workshop / "mine.safetensors").class_names == ("0", "1")
    evaluation = ecinn.evaluate(names["model"], names["test"])
    assert evaluation.error < 0.01
    assert evaluation.reached_q > 0.99
    names["train"] = names["train"].first(128)
    exec(finetuning.replace("epochs=4", "epochs=1"), names)  # noqa: S102
    assert ecinn.load(workshop / "runs" / "shapes-finetuned").name == "shapes"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["README.md", "docs/get-started.md"])
def test_the_explain_command_prints_what_the_page_shows(workshop: Path, name: str) -> None:
    shown = re.search(
        r"```(?:console|sh)\n(?:\$ )?(ecinn explain [^\n]+)\n(?:```\n\n```text\n)?(.*?)```",
        (ROOT / name).read_text(),
        re.DOTALL,
    )
    assert shown is not None
    arguments = shlex.split(shown[1])[1:]
    code, stdout, stderr = run(*arguments)
    assert code == 0, stderr
    assert stdout.strip() == shown[2].strip()


def keys(value: object) -> set[str]:
    """Return all keys of a JSON report, without the names of classes."""
    if isinstance(value, list):
        return set().union(*map(keys, value))
    if not isinstance(value, dict):
        return set()
    posteriors = {"posterior", "stored_posterior"}
    return set(value).union(*(keys(v) for key, v in value.items() if key not in posteriors))


def test_every_json_key_is_documented(tmp_path: Path) -> None:
    page = DOCS / "reference" / "json.md"
    e = ecinn.load("mnist").explain(DOCS / "images" / "three-input.png", 8, path=2)
    report = e.save(tmp_path, film="gif")
    assert keys(report) <= set(inline_code(page))
    assert keys(json.loads(blocks(page, "json")[0])) == keys(report)


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT)
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "reference" / "cli.html").exists()

"""Files around the package agree with it: contributing guide, sdist, workflow."""

import re
import tomllib

import pytest

from helpers.paths import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def test_the_contributing_guide_names_paths_that_exist() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    paths = set(re.findall(r"`((?:src|tests|docs|notebooks|benchmarks)[\w/.]*)`", text))
    assert len(paths) > 10
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_the_sdist_holds_what_the_page_links_to(page: str) -> None:
    """Setuptools adds src, README and LICENSE by itself, MANIFEST.in the rest."""
    manifest = (REPOSITORY / "MANIFEST.in").read_text()
    folders = {"src", *re.findall(r"^graft (\S+)$", manifest, re.MULTILINE)}
    files = {
        "README.md",
        "LICENSE",
        *re.findall(r"^include (.+)$", manifest, re.MULTILINE)[0].split(),
    }
    links = re.findall(
        r"\]\((?!https?://|#)([^)#\s]+)|src=\"(?!https?://)([^\"]+)",
        (REPOSITORY / page).read_text(),
    )
    for link in ("".join(pair) for pair in links):
        assert (REPOSITORY / link).exists(), link
        assert link in files or link.partition("/")[0] in folders, link


def test_the_workflow_tries_every_python_and_the_lowest_torch_of_the_metadata() -> None:
    workflow = (REPOSITORY / ".github" / "workflows" / "test.yml").read_text()
    pythons, torches = (
        re.findall(r'"([\d.]+)"', re.search(rf"{name}: \[(.*?)\]", workflow)[1])
        for name in ("python", "torch")
    )
    prefix = "Programming Language :: Python :: "
    classified = [name.removeprefix(prefix) for name in PROJECT["classifiers"]]
    assert pythons == [version for version in classified if re.fullmatch(r"3\.\d+", version)]
    (requirement,) = (name for name in PROJECT["dependencies"] if name.startswith("torch"))
    assert requirement.startswith(f"torch>={torches[0]},")

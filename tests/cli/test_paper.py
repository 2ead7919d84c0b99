"""`ecinn paper`: what it makes, skips, writes, and says when something is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from ecinn.errors import InputError
from ecinn.studies.paper import artefact as registry
from ecinn.studies.paper import beta_models, style
from ecinn.studies.paper.artefact import Artefact, Context, Made
from helpers.command_line import fails, run
from helpers.paper import pdf_text


def simple(name: str, *needs: str) -> Artefact:
    """A page that says its seed."""

    def make(context: Context) -> Made:
        figure, axes = style.page(2.0, 1.0)
        style.write(axes, 1.0, 0.5, f"seed {context.seed}")
        caption = {name: f"caption of {name}"}
        return Made({name: figure}, data={name: {"seed": context.seed}}, captions=caption)

    return Artefact(name, f"about {name}", make, frozenset(needs), reported=f"paper on {name}")


def failing(context: Context) -> Made:
    raise InputError("there is no such\nthing")


@pytest.fixture
def artefacts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ECINN_CELEBA", raising=False)
    monkeypatch.chdir(tmp_path)
    book = Artefact(
        "supplement-1",
        "more of it",
        lambda context: Made(books={"supplement-1": [style.page(1.0, 1.0)[0]] * 3}),
    )
    table = Artefact("table-1", "numbers", lambda context: Made(pages={"table-1": "# Numbers\n"}))
    made = (simple("figure-1", "faces"), simple("figure-2"), simple("figure-9", "faces"))
    monkeypatch.setattr(registry, "ARTEFACTS", (*made, table, book))


def test_the_registry_is_the_paper_in_its_order() -> None:
    names = [artefact.name for artefact in registry.ARTEFACTS]
    assert len(set(names)) == len(names)
    figures = [int(name.removeprefix("figure-")) for name in names if name.startswith("figure-")]
    assert figures == list(range(1, 11))
    assert "table-1" in names
    faces = {artefact.name for artefact in registry.ARTEFACTS if "faces" in artefact.needs}
    assert {"figure-1", "figure-8", "figure-9", "supplement-1", "supplement-8"} <= faces
    assert not faces & {f"figure-{number}" for number in (2, 3, 4, 5, 6, 7, 10)}
    beta = {artefact.name for artefact in registry.ARTEFACTS if "beta" in artefact.needs}
    assert beta == {"figure-10", "supplement-10"}


@pytest.mark.usefixtures("artefacts")
def test_all_skips_artefacts_with_missing_data_and_makes_the_rest() -> None:
    code, stdout, stderr = run("paper", "all", "--out", "here")
    assert code == 0, stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("skipped")]
    assert line.startswith("skipped figure-1, figure-9: ")
    assert "--celeba DIR" in line
    files = {path.name for path in Path("here").iterdir()}
    figure = {"figure-2.pdf", "figure-2.png", "figure-2.json"}
    assert files == figure | {"table-1.md", "supplement-1.pdf", "README.md"}
    page = Path("here/README.md").read_text()
    assert "caption of figure-2" in page
    assert "paper on figure-2" in page
    assert "figure-1: needs faces" in page
    assert "here/README.md" in stdout


@pytest.fixture
def nothing_ships(artefacts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Figure 10's results are in no place but a folder that is given."""
    monkeypatch.setattr(beta_models, "SHIPPED", tmp_path / "none.safetensors")
    ten = (simple("figure-10", "beta"), simple("supplement-10", "beta"))
    monkeypatch.setattr(registry, "ARTEFACTS", (simple("figure-2"), *ten))


@pytest.mark.usefixtures("nothing_ships")
def test_figure_10_is_skipped_in_one_line_where_its_models_are_missing() -> None:
    code, _, stderr = run("paper", "all", "--out", "here")
    assert code == 0, stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("skipped")]
    assert line.startswith("skipped figure-10, supplement-10: ")
    assert "--beta DIR" in line
    assert "ecinn beta" in line
    assert "figure-10: needs models at increasing β" in Path("here/README.md").read_text()
    assert "--beta DIR" in fails("paper", "figure-10", "--out", "no")
    assert not Path("no").exists()
    assert "needs --beta" in run("paper", "list")[1]


@pytest.mark.usefixtures("nothing_ships")
def test_a_given_beta_folder_takes_precedence_over_shipped_results(monkeypatch) -> None:
    Path("models").mkdir()
    assert "no trade_off.safetensors in models" in fails("paper", "all", "--beta", "models")
    assert "in nowhere" in fails("paper", "all", "--beta", "nowhere")
    given = Path("models") / beta_models.FILE
    given.touch()
    code, _, stderr = run("paper", "all", "--beta", "models")
    assert code == 0, stderr
    assert "skipped" not in stderr
    assert Path("paper/figure-10.pdf").is_file()
    shipped = Path("shipped.safetensors")
    shipped.touch()
    monkeypatch.setattr(beta_models, "SHIPPED", shipped)
    assert beta_models.find(None) == shipped
    assert beta_models.find(Path("models")) == given
    assert "needs --beta" not in run("paper", "list")[1]


@pytest.mark.usefixtures("artefacts")
def test_given_folders_reach_the_context(tmp_path: Path) -> None:
    (tmp_path / "faces").mkdir()
    code, _, stderr = run("paper", "all", "--celeba", "faces", "--inception", "faces", "--seed", 7)
    assert code == 0, stderr
    assert "skipped" not in stderr
    assert "seed7" in pdf_text(Path("paper/figure-1.pdf").read_bytes()).replace(" ", "")
    about = json.loads(Path("paper/figure-1.json").read_text())
    assert about["data"] == {"seed": 7}
    assert about["caption"] == "caption of figure-1"
    assert about["paper"] == "paper on figure-1"
    assert about["command"] == (
        "ecinn paper figure-1 --out OUT --celeba DIR --inception DIR --seed 7"
    )
    assert "`ecinn paper all --out OUT --celeba DIR " in Path("paper/README.md").read_text()
    with Image.open("paper/figure-1.png") as picture:
        assert picture.size == (2 * 300, 300)


def test_given_models_and_a_limit_reach_the_context(artefacts, monkeypatch) -> None:
    seen = []
    claims = Artefact("claims", "judged", lambda context: seen.append(context) or Made())
    monkeypatch.setattr(registry, "ARTEFACTS", (claims,))
    files = ("--paper-model", "a", "--paper-model", "b.safetensors")
    assert run("paper", "claims", *files, "--limit", 30)[0] == 0
    assert run("paper", "claims")[0] == 0
    assert [context.paper_models for context in seen] == [(Path("a"), Path("b.safetensors")), ()]
    assert [context.limit for context in seen] == [30, None]
    assert "--limit" in fails("paper", "claims", "--limit", 19)


@pytest.mark.usefixtures("artefacts")
def test_single_names_and_the_whole_supplement() -> None:
    code, _, stderr = run("paper", "figure-2", "table-1", "--out", "one")
    assert code == 0, stderr
    assert {path.suffix for path in Path("one").iterdir()} == {".pdf", ".png", ".json", ".md"}
    assert not Path("one/README.md").exists()
    assert run("paper", "supplement", "--out", "more")[0] == 0
    assert Path("more/supplement-1.pdf").is_file()
    assert not Path("more/figure-2.pdf").exists()


@pytest.mark.usefixtures("artefacts")
def test_wrong_input_ends_in_one_line_and_writes_nothing() -> None:
    assert "did you mean figure-2" in fails("paper", "figure-22", "--out", "no")
    assert "ecinn paper list" in fails("paper", "xyz", "--out", "no")
    assert "--celeba DIR" in fails("paper", "figure-1", "--out", "no")
    assert "no folder" in fails("paper", "all", "--celeba", "nowhere", "--out", "no")
    assert "no folder" in fails("paper", "all", "--inception", "nowhere", "--out", "no")
    assert not Path("no").exists()


def test_a_missing_folder_in_the_environment_is_an_error(artefacts, monkeypatch) -> None:
    monkeypatch.setenv("ECINN_CELEBA", "nowhere")
    assert "no folder nowhere" in fails("paper", "all", "--out", "no")


@pytest.mark.usefixtures("artefacts")
def test_list_names_all_artefacts_and_their_needs() -> None:
    code, stdout, _ = run("paper", "list")
    assert code == 0
    rows = {line.split()[0]: line for line in stdout.splitlines()}
    assert list(rows) == ["figure-1", "figure-2", "figure-9", "table-1", "supplement-1"]
    assert "--celeba" in rows["figure-1"]
    assert "about figure-2" in rows["figure-2"]
    assert not Path("paper").exists()
    (line,) = run("paper", "list", "figure-9")[1].splitlines()
    assert line.split() == rows["figure-9"].split()


@pytest.mark.usefixtures("artefacts")
def test_available_artefacts_are_made_although_others_lack_data() -> None:
    code, stdout, stderr = run("paper", "figure-1", "figure-2", "--out", "here")
    assert code == 1
    assert "figure-2" in stdout
    assert stderr.splitlines()[-1].startswith("error: could not make figure-1")
    assert "--celeba DIR" in stderr
    assert Path("here/figure-2.pdf").is_file()


def test_a_failing_artefact_does_not_stop_the_others(artefacts, monkeypatch) -> None:
    broken = Artefact("figure-3", "broken", failing)
    monkeypatch.setattr(registry, "ARTEFACTS", (broken, simple("figure-4")))
    code, _, stderr = run("paper", "all", "--out", "here")
    assert code == 1
    assert "failed figure-3: there is no such thing" in stderr
    assert stderr.splitlines()[-1].startswith("error: could not make figure-3")
    assert Path("here/figure-4.pdf").is_file()
    assert not Path("here/figure-3.pdf").exists()
    assert "figure-3: there is no such" in Path("here/README.md").read_text()
    assert "no such thing" in fails("paper", "figure-3", "--out", "here")


@pytest.mark.usefixtures("artefacts")
def test_the_same_seed_gives_the_same_files() -> None:
    for folder in ("one", "two"):
        assert run("paper", "all", "--out", folder)[0] == 0
    for path in Path("one").iterdir():
        assert path.read_bytes() == (Path("two") / path.name).read_bytes()


def without_matplotlib(*arguments: str) -> subprocess.CompletedProcess:
    code = (
        f"import sys; sys.modules['matplotlib'] = None; sys.argv = {['ecinn', *arguments]};"
        "import ecinn.cli; ecinn.cli.main()"
    )
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_list_needs_no_matplotlib() -> None:
    done = without_matplotlib("paper", "list")
    assert done.returncode == 0, done.stderr
    assert "figure-10" in done.stdout


@pytest.mark.slow
def test_a_figure_without_matplotlib_names_the_extra_to_install(tmp_path: Path) -> None:
    done = without_matplotlib("paper", "figure-3", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "ecinn[paper]" in done.stderr
    assert "Traceback" not in done.stderr

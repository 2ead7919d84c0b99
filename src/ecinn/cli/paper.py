"""`ecinn paper`: every figure and table of the paper, made with our models."""

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ecinn.cli.app import Device, app, device_name, err, out, plain
from ecinn.cli.progress import CelebA, bars
from ecinn.data.celeba import find_folder
from ecinn.errors import EcinnError, InputError
from ecinn.files import output_folder
from ecinn.studies.benchmark.record import write_text
from ecinn.studies.paper import beta_models

if TYPE_CHECKING:
    from ecinn.studies.paper.artefact import Artefact, Context, Made

GIVE = {
    "faces": "faces are needed, give --celeba DIR (a folder of CelebA or CelebA-HQ)",
    "inception": "Inception-V3 is needed, give --inception DIR (a folder that `ecinn inception` "
    "wrote ATTRIBUTE.safetensors to)",
    "beta": "models at ascending β are needed, give --beta DIR (a folder that "
    "`ecinn beta --out DIR` wrote)",
}


@app.command()
def paper(
    names: Annotated[
        list[str],
        typer.Argument(help="list, all, supplement, or names like figure-6 and table-1."),
    ],
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the files.")] = Path("paper"),
    celeba: CelebA = None,
    inception: Annotated[
        Path | None,
        typer.Option(help="Folder of what `ecinn inception` wrote, as ATTRIBUTE.safetensors."),
    ] = None,
    beta: Annotated[
        Path | None, typer.Option(help="Folder of what `ecinn beta` wrote, for figure 10.")
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            min=0, help="Draws the images that are shown; those of figure 10 `ecinn beta` drew."
        ),
    ] = 0,
    device: Device = "cpu",
) -> None:
    """Make the paper's figures and tables with the shipped models: PDF, PNG and their numbers."""
    known = _artefacts()
    if "list" in names:
        others = [name for name in names if name != "list"]
        _print_list(_asked(others or ["all"], known))
        return
    asked = _asked(names, known)
    several = not {artefact.name for artefact in asked} <= set(names)
    faces = _faces(celeba)
    if inception is not None and not inception.is_dir():
        raise InputError(f"no folder {inception}: give one that `ecinn inception` wrote to")
    have = {
        "faces": faces is not None,
        "inception": inception is not None,
        "beta": beta_models.find(beta) is not None,
    }
    missing = {
        artefact.name: GIVE[min(need for need in artefact.needs if not have[need])]
        for artefact in asked
        if not all(have[need] for need in artefact.needs)
    }
    if len(missing) == len(asked):
        raise InputError("; ".join(f"{name}: {why}" for name, why in missing.items()))
    chosen = device_name(device)
    folder = output_folder(out_dir)

    from ecinn.studies.paper.artefact import Context

    with bars() as observe:
        context = Context(seed, faces, inception, beta, chosen, observe)
        failed = _make_all(asked, missing, context, folder, " ".join(names), go_on=several)
    if not several:
        failed += [name for name in missing if name not in failed]
    if failed:
        raise EcinnError(f"{', '.join(failed)} could not be made: the lines above say why")


def _make_all(
    asked: Sequence["Artefact"],
    missing: dict[str, str],
    context: "Context",
    folder: Path,
    names: str,
    *,
    go_on: bool,
) -> list[str]:
    """Make and write one after the other; the names of those that failed."""
    from ecinn.studies.paper import writing

    made: list[tuple[Artefact, Made]] = []
    without, failed = dict(missing), []
    for why in sorted(set(missing.values())):
        skipped = ", ".join(name for name, reason in missing.items() if reason == why)
        err.print(f"skipped {skipped}: {plain(why)}")
    for number, artefact in enumerate(asked):
        context.observe("making the paper", number, len(asked))
        if artefact.name in missing:
            continue
        try:
            one = writing.make(artefact, context)
        except EcinnError as error:
            if not go_on:
                raise
            failed.append(artefact.name)
            without[artefact.name] = " ".join(str(error).split())
            why = f"{artefact.name}: {without[artefact.name]}"
            err.print(f"not made: {plain(why)}")
            continue
        written = writing.write(artefact, one, folder, context)
        files = ", ".join(path.name for path in written)
        out.print(f"{artefact.name}: {plain(files)}")
        for part, need in one.skipped.items():
            without[part] = GIVE[need]
            err.print(f"skipped {part}: {plain(GIVE[need])}")
        made.append((artefact, one))
        if go_on:
            # After every one, so that an interrupted run leaves a list of what there is.
            page = writing.contents(made, without, writing.command(names, context))
            write_text(folder / "README.md", page)
    context.observe("making the paper", len(asked), len(asked))
    where = folder / "README.md" if made and go_on else folder
    out.print(f"wrote {plain(str(where))}")
    return failed


def _artefacts() -> tuple["Artefact", ...]:
    try:
        from ecinn.studies.paper.registry import ARTEFACTS
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise InputError(
            "the figures need matplotlib: pip install 'ecinn[paper]', in a clone '.[paper]'"
        ) from None
    return ARTEFACTS


def _asked(names: Sequence[str], known: Sequence["Artefact"]) -> list["Artefact"]:
    """Those of that name, and all whose name begins with it: supplement stands for its parts."""
    chosen: list[str] = []
    for name in names:
        matching = [
            artefact.name
            for artefact in known
            if name in ("all", artefact.name) or artefact.name.rpartition("-")[0] == name
        ]
        if not matching:
            close = difflib.get_close_matches(name, [artefact.name for artefact in known], 3)
            hint = f"did you mean {' or '.join(close)}?" if close else "see `ecinn paper list`"
            raise InputError(f"the paper has no {name!r}; {hint}")
        chosen += matching
    return [artefact for artefact in known if artefact.name in chosen]


def _faces(celeba: Path | None) -> Path | None:
    """The folder of faces that is named, or found in the usual places; else None."""
    try:
        return find_folder(celeba)
    except InputError:
        if celeba is not None or os.environ.get("ECINN_CELEBA"):
            raise
        return None


def _print_list(known: Sequence["Artefact"]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    options = {"faces": "--celeba", "inception": "--inception"}
    if beta_models.find(None) is None:
        options["beta"] = "--beta"
    for artefact in known:
        needs = ", ".join(options[need] for need in sorted(artefact.needs) if need in options)
        table.add_row(artefact.name, plain(artefact.title), f"needs {needs}" if needs else "")
    out.print(table)

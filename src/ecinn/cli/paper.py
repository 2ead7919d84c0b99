"""`ecinn paper`: make every figure and table of the paper with our models."""

import difflib
import os
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ecinn.cli.app import Device, app, err, out, plain
from ecinn.cli.progress import CelebA, bars
from ecinn.errors import EcinnError, InputError
from ecinn.files import atomic_write, output_folder
from ecinn.progress import counter

if TYPE_CHECKING:
    from ecinn.studies.paper.artefact import Artefact, Context, Made

MISSING = {
    "faces": "needs faces: give --celeba DIR (a folder of CelebA or CelebA-HQ)",
    "beta": "needs models at increasing β: give --beta DIR (a folder that `ecinn beta --out DIR` "
    "wrote)",
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
        typer.Option(
            help="Folder of ATTRIBUTE.safetensors files from `ecinn inception`, to be explained "
            "instead of the shipped residual network."
        ),
    ] = None,
    beta: Annotated[
        Path | None, typer.Option(help="Folder from `ecinn beta`, for figure 10.")
    ] = None,
    paper_model: Annotated[
        list[Path] | None,
        typer.Option(
            help="Model that judges the claims as the paper's recipe, from `ecinn train "
            "mnist-paper`; again for a model of other images."
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=20, help="Images per claim at most, for a quick look at the claims."),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            min=0, help="Selects the images; those of figure 10 were selected by `ecinn beta`."
        ),
    ] = 0,
    device: Device = "auto",
) -> None:
    """Make the paper's figures and tables with the shipped models: PDF, PNG and numbers."""
    from ecinn.flow.device import resolve_device
    from ecinn.studies.paper import artefact, beta_models

    if "list" in names:
        _print_list(_select([name for name in names if name != "list"] or ["all"]))
        return
    selected = _select(names)
    several = not {chosen.name for chosen in selected} <= set(names)
    faces = _faces(celeba)
    if inception is not None and not inception.is_dir():
        raise InputError(f"no folder {inception}: give one that `ecinn inception` wrote to")
    available = {"faces": faces is not None, "beta": beta_models.find(beta) is not None}
    lacking = {need for need, given in available.items() if not given}
    missing = {
        chosen.name: MISSING[min(chosen.needs & lacking)]
        for chosen in selected
        if chosen.needs & lacking
    }
    if len(missing) == len(selected):
        raise InputError("; ".join(f"{name} {reason}" for name, reason in missing.items()))
    with bars() as observe:
        chosen_device = str(resolve_device(device))
        given = (seed, faces, inception, beta, chosen_device, observe)
        context = artefact.Context(*given, tuple(paper_model or ()), limit)
        command, folder = artefact.command(" ".join(names), context), output_folder(out_dir)
        failed = _make_all(selected, missing, context, folder, command, go_on=several)
    if not several:
        failed += [name for name in missing if name not in failed]
    if failed:
        raise EcinnError(f"could not make {', '.join(failed)}: the lines above say why")


def _make_all(
    selected: Sequence["Artefact"],
    missing: dict[str, str],
    context: "Context",
    folder: Path,
    command: str,
    *,
    go_on: bool,
) -> list[str]:
    """Make and write one after the other; return the names of those that failed."""
    from ecinn.studies.paper.artefact import contents, write

    made: list[tuple[Artefact, Made]] = []
    not_made, failed = dict(missing), []
    for reason in sorted(set(missing.values())):
        skipped = ", ".join(name for name in missing if missing[name] == reason)
        err.print(f"skipped {skipped}: {plain(reason)}")
    done = counter(context.observe, "making the paper", len(selected))
    for number, artefact in enumerate(selected):
        done(number)
        if artefact.name in missing:
            continue
        try:
            content = artefact.make(context)
        except EcinnError as error:
            if not go_on:
                raise
            failed.append(artefact.name)
            not_made[artefact.name] = " ".join(str(error).split())
            err.print(f"failed {artefact.name}: {plain(not_made[artefact.name])}")
            continue
        written = write(artefact, content, folder, context)
        out.print(f"{artefact.name}: {plain(', '.join(path.name for path in written))}")
        made.append((artefact, content))
        if go_on:
            # After every artefact, so that an interrupted run leaves a list of its files.
            atomic_write(folder / "README.md", contents(made, not_made, command).encode())
    done(len(selected))
    out.print(f"wrote {plain(str(folder / 'README.md' if made and go_on else folder))}")
    return failed


def _select(names: Sequence[str]) -> list["Artefact"]:
    """Find artefacts by name; "supplement" stands for all its parts, and "all" for everything."""
    from ecinn.studies.paper.artefact import ARTEFACTS

    aliases = {a.name: {"all", a.name, a.name.rpartition("-")[0]} for a in ARTEFACTS}
    for name in names:
        if not any(name in known for known in aliases.values()):
            close = difflib.get_close_matches(name, aliases, 3)
            hint = f"did you mean {' or '.join(close)}?" if close else "see `ecinn paper list`"
            raise InputError(f"the paper has no {name!r}; {hint}")
    return [artefact for artefact in ARTEFACTS if aliases[artefact.name] & set(names)]


def _faces(celeba: Path | None) -> Path | None:
    """Return the given folder of faces, or one from the usual places, or None."""
    from ecinn.data.celeba import find_folder

    given = celeba is not None or os.environ.get("ECINN_CELEBA")
    with nullcontext() if given else suppress(InputError):
        return find_folder(celeba)
    return None


def _print_list(known: Sequence["Artefact"]) -> None:
    from rich.table import Table

    from ecinn.studies.paper import beta_models

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    options = {"faces": "--celeba"}
    if beta_models.find(None) is None:
        options["beta"] = "--beta"
    for artefact in known:
        needs = ", ".join(options[need] for need in sorted(artefact.needs) if need in options)
        table.add_row(artefact.name, plain(artefact.title), f"needs {needs}" if needs else "")
    out.print(table)

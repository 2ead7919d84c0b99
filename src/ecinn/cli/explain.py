"""`ecinn explain`: pictures and raw counterfactuals of image files."""

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ecinn.classifier.out_of_distribution import IN_WORDS
from ecinn.cli.app import Device, Json, app, device_name, out, plain, print_json
from ecinn.cli.progress import CelebA, load_images
from ecinn.drawing.pictures import percent
from ecinn.errors import InputError
from ecinn.explanation.counterfactual import Targets
from ecinn.explanation.files import write_report
from ecinn.files import output_folder
from ecinn.model import Model, load
from ecinn.pixels import to_pixels


class Film(StrEnum):
    """Kinds of film that browsers show."""

    GIF = "gif"
    WEBP = "webp"


@app.command()
def explain(
    images: Annotated[list[Path] | None, typer.Argument(help="Image files of any kind.")] = None,
    model: Annotated[str, typer.Option(help="A model's name or path.")] = "mnist",
    target: Annotated[
        list[str] | None,
        typer.Option(help="Class to explain against, repeatable; by default 'all'."),
    ] = None,
    sample: Annotated[
        list[int] | None, typer.Option(help="Explain this image of the test set; repeatable.")
    ] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the pictures.")] = Path(
        "explanations"
    ),
    confidence: Annotated[
        float | None, typer.Option(help="How sure of the target, above 0 and below 1.")
    ] = None,
    correct: Annotated[
        bool, typer.Option("--correct", help="Correct what is not read as was asked.")
    ] = False,
    film: Annotated[
        Film | None, typer.Option(help="Also the way there: a film, and a plot of every class.")
    ] = None,
    frames: Annotated[int, typer.Option(min=2, max=200, help="Of a film.")] = 24,
    check: Annotated[
        bool, typer.Option(help="Ask the classifier what it says of the stored 8-bit images.")
    ] = True,
    celeba: CelebA = None,
    device: Device = "cpu",
    json_output: Json = False,
) -> None:
    """Show why each image is what it is, and not the target: pictures and raw counterfactuals."""
    if correct and not check:
        raise InputError("--correct reads the stored images, --no-check does not: leave one out")
    explainer = load(model, device_name(device))
    inputs, failures = _inputs(explainer, images or [], sample or [], celeba)
    if not inputs and not failures:
        raise InputError("name an image file, or take a test image with --sample 0")
    targets = _parse_targets(target or ["all"], explainer)
    # All are explained before anything is written.
    explained = []
    for name, pixels, notes in inputs:
        try:
            result = explainer.explain(
                pixels,
                targets,
                confidence=confidence,
                path=None if film is None else frames,
                check=check,
                correct=correct,
            )
            explained.append((name, notes, result))
        except InputError as error:
            failures.append(f"{name}: {error}")
    if not explained:
        raise InputError(failures[0])
    folder = output_folder(out_dir)
    kind = "gif" if film is None else film.value
    reports = [write_report(folder, *explanation, film=kind) for explanation in explained]
    if json_output:
        print_json({"model": model, "explanations": reports, "failed": failures})
    else:
        for report in reports:
            _describe(report)
    if failures:
        left_out = f"left out {len(failures)} of {len(failures) + len(explained)} images"
        raise InputError(f"{left_out}: {'; '.join(failures)}")


def _inputs(
    model: Model, paths: Sequence[Path], samples: Sequence[int], celeba: Path | None
) -> tuple[list[tuple[str, torch.Tensor, list[str]]], list[str]]:
    """Name, pixels and remarks of every image that was asked for; and what could not be read."""
    taken: set[str] = set()
    inputs: list[tuple[str, torch.Tensor, list[str]]] = []
    failures: list[str] = []
    for path in paths:
        try:
            photograph = model.photograph(path)
        except InputError as error:
            failures.append(str(error))
            continue
        stem = re.sub(r"[^\w.-]+", "_", path.stem) or "image"
        name = next(n for n in _numbered(stem) if n not in taken)
        taken.add(name)
        inputs.append((name, to_pixels(photograph.image[None]), list(photograph.notes)))
    if samples:
        data = load_images(model.checkpoint.recipe.dataset, "test", celeba)
        for index in samples:
            if not 0 <= index < len(data):
                raise InputError(f"--sample {index}: the test images are 0 to {len(data) - 1}")
            label = data.class_names[int(data.labels[index])]
            name = next(n for n in _numbered(f"sample-{index}") if n not in taken)
            taken.add(name)
            inputs.append((name, to_pixels(data.images[index][None]), [f"label {label}"]))
    return inputs, failures


def _numbered(stem: str) -> Iterator[str]:
    yield stem
    number = 2
    while True:
        yield f"{stem}-{number}"
        number += 1


def _parse_targets(targets: Sequence[str], model: Model) -> Targets:
    """'all', or classes by their names or numbers."""
    if list(targets) == ["all"]:
        return "all"
    if "all" in targets:
        raise InputError("--target all names every class already: leave the others out")
    return [_parse_target(target, model) for target in targets]


def _parse_target(target: str, model: Model) -> int:
    if target not in model.class_names and re.fullmatch(r"[+-]?\d{1,9}", target):
        return int(target)
    label = model.targets(target)
    assert isinstance(label, int)
    return label


def _describe(report: dict[str, Any]) -> None:
    """One image's results in words."""
    predicted = report["predicted"]
    share = report["posterior"][predicted]
    out.print(f"[bold]{plain(report['input'])}[/]: {predicted} ({percent(share)})", end="")
    remarks = "; ".join(report["notes"])
    out.print(f"  [dim]{plain(remarks)}[/]" if remarks else "")
    if report["out_of_distribution"]:
        why = ", ".join(IN_WORDS[reason] for reason in report["out_of_distribution"])
        out.print(f"  [yellow]unlike the training images ({why}): take it with caution[/]")
    for target in report["targets"]:
        convincing = target["convincing"]
        posterior = convincing["stored_posterior"] or convincing["posterior"]
        where = "stored image" if convincing["stored_posterior"] else "before rounding"
        verdict = f"{convincing['winner']} {percent(posterior[convincing['winner']])} ({where})"
        colour = "green" if target["as_asked"] else "yellow"
        third = target["third_class"]
        asked = report["confidence"]
        missed = "not reached"
        if asked is not None:
            got = posterior[target["target"]]
            verdict = f"{percent(got)} of {100 * asked:g} % asked ({where})"
            missed = f"read as {convincing['winner']}: not as asked"
        if not target["as_asked"]:
            untried = target["reachable"] and not target["corrections"]
            verdict += f", {missed}" + (" (try --correct)" if untried else "")
        asides = [f"at the tipping point {third} wins"] if third else []
        if not target["reachable"]:
            asides.append(f"{100 * target['highest']:.1f} % is the highest on this line")
        if target["corrections"]:
            asides.append(f"alpha corrected {target['corrections']} times")
        note = f"  [dim]{'; '.join(asides)}[/]" if asides else ""
        out.print(f"  to {target['target']}:  [{colour}]{verdict}[/]{note}")
    out.print(f"  wrote {plain(report['picture'])}")
    out.print(f"  and {2 * len(report['targets'])} raw counterfactuals beside it")
    for target in report["targets"]:
        if target["film"]:
            out.print(f"  film {plain(target['film']['file'])}, and its plot")

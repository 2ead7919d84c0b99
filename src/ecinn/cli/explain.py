"""`ecinn explain`: counterfactuals of image files as pictures and JSON."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ecinn.cli.app import (
    AskClassifier,
    Check,
    Correct,
    Device,
    Json,
    OwnSource,
    RequestedConfidence,
    app,
    err,
    out,
    parse_confidence,
    plain,
    print_json,
)
from ecinn.cli.progress import CelebA, bars, load_images
from ecinn.errors import InputError
from ecinn.files import output_folder

if TYPE_CHECKING:
    from ecinn.data.dataset import Dataset
    from ecinn.explanation.result import Confidence
    from ecinn.model import Model
    from ecinn.pixels import Inputs


class Film(StrEnum):
    """Film formats that browsers show."""

    GIF = "gif"
    WEBP = "webp"


FRAMES = 24
"""Frames of a film."""


@app.command()
def explain(
    images: Annotated[
        list[Path] | None, typer.Argument(help="Image files of any kind, or folders of them.")
    ] = None,
    model: Annotated[str, typer.Option(help="A model's name or path.")] = "mnist",
    target: Annotated[
        list[str] | None,
        typer.Option(help="Class to explain against, repeatable.", show_default="all others"),
    ] = None,
    sample: Annotated[
        list[int] | None, typer.Option(help="Explain this image of the test set; repeatable.")
    ] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the pictures.")] = Path(
        "explanations"
    ),
    confidence: RequestedConfidence = None,
    correct: Correct = False,
    film: Annotated[
        Film | None, typer.Option(help="Also write the path as a film and a plot.")
    ] = None,
    frames: Annotated[
        int | None,
        typer.Option(min=2, max=200, help="Frames of the film.", show_default=str(FRAMES)),
    ] = None,
    check: Check = True,
    classifier: AskClassifier = True,
    celeba: CelebA = None,
    source: OwnSource = None,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Show why an image is one class and not another: counterfactuals and heatmaps."""
    from ecinn.explanation.files import write_pictures
    from ecinn.model import load
    from ecinn.pixels import Inputs

    if correct and not check:
        raise InputError("--correct needs the check: leave out --no-check")
    if frames is not None and film is None:
        raise InputError("--frames needs --film: add --film gif, or leave --frames out")
    if not sample and (celeba is not None or source is not None):
        raise InputError("--celeba and --data are used with --sample only: leave them out")
    explainer = load(model, device)
    if not classifier and explainer.student is not explainer:
        explainer = explainer.student
        err.print("explaining the student only; its classifier is not queried")

    def load_samples() -> "Dataset":
        return load_images(explainer.recipe, "test", celeba, model=model, source=source)

    inputs, failures = _inputs(explainer, images or [], sample or [], load_samples)
    if not inputs and not failures:
        raise InputError("name an image file, or take a test image with --sample 0")
    if not inputs:
        raise InputError(failures[0]["reason"])
    targets = _parse_targets(target or ["all"], explainer)
    # Everything is explained before anything is written.
    with bars() as observe:
        explanation = explainer.explain(
            Inputs.joined(inputs),
            targets,
            confidence=parse_confidence(confidence),
            path=None if film is None else frames or FRAMES,
            check=check,
            correct=correct,
            observe=observe,
        )
    folder = output_folder(out_dir)
    report = write_pictures(explanation, folder, None if film is None else film.value)
    # Images are counted as they were given, also where some could not be read.
    unread = {failure["index"] for failure in failures}
    read = [index for index in range(len(inputs) + len(failures)) if index not in unread]
    for image in (*report["images"], *report["failures"]):
        image["index"] = read[image["index"]]
    report["failures"] += failures
    if json_output:
        print_json(report)
    else:
        out.print(f"Counterfactuals: {plain(explanation.requested)}")
        if explanation.verification is not None:
            said, asked = explanation.verification.classifier, report["classifier"]
            out.print(
                f"Read by {plain(said)} ({asked['queries']} queries); not explained: "
                f"{asked['not_explained']} of {asked['counterfactuals']}"
            )
        for image in report["images"]:
            _describe(image, explanation.confidence, "label " if explanation.planted else "")
    if report["failures"]:
        reasons = "; ".join(_reason(failure) for failure in report["failures"])
        number = len(report["failures"])
        raise InputError(f"left out {number} of {number + len(explanation)} images: {reasons}")


def _inputs(
    model: "Model",
    paths: Sequence[Path],
    samples: Sequence[int],
    load_samples: Callable[[], "Dataset"],
) -> tuple[list["Inputs"], list[dict[str, Any]]]:
    """Read every image; return also those that could not be read, with the reason."""
    from ecinn.data.photographs import image_files
    from ecinn.pixels import Inputs, to_pixels

    inputs: list[Inputs] = []
    failures: list[dict[str, Any]] = []
    files = [file for path in paths for file in (image_files(path) if path.is_dir() else [path])]
    for index, file in enumerate(files):
        try:
            inputs.append(model.read(file))
        except InputError as error:
            source = str(file.absolute())
            failures.append({"index": index, "source": source, "reason": str(error)})
    if samples:
        data = load_samples()
        for index in samples:
            if not 0 <= index < len(data):
                raise InputError(f"--sample {index}: the test images are 0 to {len(data) - 1}")
            pixels = to_pixels(data.images[index][None].to(model.device))
            label = data.class_names[int(data.labels[index])]
            inputs.append(Inputs(pixels, (f"sample-{index}",), ((f"label {label}",),)))
    return inputs, failures


def _reason(failure: dict[str, Any]) -> str:
    """Name the file in front of the reason, unless the reason does."""
    name = Path(failure["source"] or "").name
    return failure["reason"] if name in failure["reason"] else f"{name}: {failure['reason']}"


def _parse_targets(targets: Sequence[str], model: "Model") -> Any:  # noqa: ANN401
    """Turn 'all', or class names and numbers, into targets."""
    if list(targets) == ["all"]:
        return "all"
    if "all" in targets:
        raise InputError("--target all already includes every class: leave the others out")
    return model.targets(list(dict.fromkeys(targets)))


def _describe(image: dict[str, Any], confidence: "Confidence", prefix: str = "") -> None:
    """Print the result of one image.

    Args:
        prefix: stands before every class, such as "label ".
    """
    from ecinn.drawing.pictures import percent

    predicted = image["predicted"]
    name = Path(image["source"] or f"image {image['index']}").name
    share = percent(image.get("answer", image["posterior"])[predicted])
    out.print(f"[bold]{plain(name)}[/]: {prefix}{plain(predicted)} ({share})")
    for note in image["notes"]:
        out.print(f"  [dim]{plain(note)}[/]")
    for target in image["targets"]:
        convincing = target["convincing"]
        asked = "answer" in convincing
        stored = convincing["answer"] if asked else convincing["stored_posterior"]
        posterior = stored or convincing["posterior"]
        where = "stored image" if stored else "before rounding"
        winner = convincing["winner"]
        if confidence == "alpha_1":
            verdict = f"{prefix}{winner} {percent(posterior[winner])} ({where})"
        else:
            obtained = percent(posterior[target["target"]])
            verdict = f"{obtained}, requested {100 * confidence:g} % ({where})"
        if asked:
            said = "" if target["explained"] else "not explained; "
            own = percent(convincing["stored_posterior"][target["target"]])
            verdict = f"{said}{verdict}; student {own}; {target['queries']} queries"
        elif not target["as_requested"] and target["reachable"] and not target["corrections"]:
            verdict += "; try --correct"
        if target["corrections"] and not asked:
            verdict += f"; corrections: {target['corrections']}"
        colour = "green" if target["as_requested"] else "yellow"
        out.print(f"  to {prefix}{plain(target['target'])}:  [{colour}]{plain(verdict)}[/]")
        tipping = target["tipping_point"]
        read = tipping.get("answer") or tipping["stored_posterior"] or tipping["posterior"]
        shares = (
            f"{prefix}{name} {percent(read[name])}" for name in (predicted, target["target"])
        )
        out.print(f"    tipping point: {plain(', '.join(shares))} ({where})")
    out.print(f"  wrote {plain(image['picture'])}")
    out.print(f"  and {3 * len(image['targets'])} counterfactuals and heatmaps next to it")
    for target in image["targets"]:
        if target["path"]:
            out.print(f"  film {plain(target['path']['film'])}, and its plot")

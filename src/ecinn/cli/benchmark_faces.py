"""`ecinn benchmark faces`: the models of faces on all test faces, with pictures."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from ecinn.cli.app import Device, Json, device_name, err, plain, print_json
from ecinn.cli.benchmark import RESULTS, Out, Seed, benchmark, print_tables, say_written
from ecinn.cli.progress import CelebA, bars, load_images
from ecinn.drawing.pictures import webp_bytes
from ecinn.errors import InputError
from ecinn.files import atomic_write, output_folder
from ecinn.model import Model, load
from ecinn.studies.benchmark import tables
from ecinn.studies.benchmark.face_jury import jury_table
from ecinn.studies.benchmark.faces import FaceResult, faces_table, measure_faces
from ecinn.studies.benchmark.record import jsonable, provenance, write_json, write_text
from ecinn.studies.inception.training import load_inception

MODELS = "celeba-smile,celeba-cheekbones,celeba-lipstick,celeba-makeup"


@benchmark.command("faces")
def faces_benchmark(
    models: Annotated[str, typer.Option(help="Names or paths with commas between.")] = MODELS,
    inception: Annotated[
        Path | None,
        typer.Option(
            help="Folder of what `ecinn inception` wrote: ATTRIBUTE.json, and "
            "ATTRIBUTE.safetensors to show it counterfactuals."
        ),
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, max=20, help="Faces in a picture.")] = 10,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many test faces.")
    ] = None,
    seed: Seed = 0,
    celeba: CelebA = None,
    out_dir: Out = RESULTS,
    device: Device = "cpu",
    json_output: Json = False,
) -> None:
    """Measure the models of faces; draw random faces, and those of the worst counterfactuals."""
    chosen = device_name(device)
    names = [name.strip() for name in models.split(",") if name.strip()]
    loaded = {name: load(name, chosen) for name in names}
    for name, model in loaded.items():
        if not model.checkpoint.recipe.dataset.startswith("celeba/"):
            raise InputError(f"{name} is no model of faces: leave it out")
    labels = [model.checkpoint.recipe.name for model in loaded.values()]
    if len(set(labels)) < len(labels):
        raise InputError("two of these are the same recipe: measure them one by one")
    others = {name: _inception_error(inception, model) for name, model in loaded.items()}
    networks = {name: _inception(inception, model) for name, model in loaded.items()}
    folder = output_folder(out_dir)
    command = f"ecinn benchmark faces --celeba DIR --models {','.join(names)} --n {n}"
    command += "" if inception is None else " --inception DIR"
    command += f" --seed {seed}" + ("" if limit is None else f" --limit {limit}")
    results: dict[str, FaceResult] = {}
    record: dict[str, Any] = {}
    pages: list[str] = []
    for name, model in loaded.items():
        data = load_images(model.checkpoint.recipe.dataset, "test", celeba).first(limit)
        label = model.checkpoint.recipe.name
        with bars() as observe:
            result, sheets = measure_faces(
                model,
                data,
                n=n,
                seed=seed,
                inception_error=others[name],
                inception=networks[name],
                observe=observe,
            )
        results[label] = result
        record[label] = provenance(command, model)
        for kind, sheet in {"random": sheets.random, "worst": sheets.worst}.items():
            atomic_write(folder / f"{label}-{kind}.webp", webp_bytes(sheet))
            words = "Drawn at random" if kind == "random" else "The least likely of all"
            pages.append(f"## {label}: {words.lower()}\n\n![{words}]({label}-{kind}.webp)\n")
        # After every model, so that an interrupted run leaves what it measured.
        write_json(folder / "celeba.json", {"record": record, "results": jsonable(results)})
        page = tables.document("Faces", _tables(results), record[label])
        write_text(folder / "celeba.md", "\n".join([page, *pages]))
    if json_output:
        print_json({"record": record, "results": jsonable(results)})
    else:
        print_tables(_tables(results))
        say_written(folder / "celeba.md", folder / "celeba.json")


def _tables(results: Mapping[str, FaceResult]) -> list[tables.Table]:
    made = [faces_table(results)]
    asked = {name: result.convinced for name, result in results.items() if result.convinced}
    if asked:
        made.append(jury_table(asked, {name: results[name].inception_error for name in asked}))
    return made


def _attribute(model: Model) -> str:
    return model.checkpoint.recipe.dataset.partition("/")[2]


def _inception(folder: Path | None, model: Model) -> nn.Module | None:
    """The network itself, whose file is large and may have been left elsewhere."""
    if folder is None:
        return None
    path = folder / f"{_attribute(model)}.safetensors"
    if not path.is_file():
        err.print(f"no {plain(path.name)} in --inception: it is not shown counterfactuals")
        return None
    return load_inception(path, model.device, model.class_names).classifier


def _inception_error(folder: Path | None, model: Model) -> float | None:
    if folder is None:
        return None
    attribute = _attribute(model)
    path = folder / f"{attribute}.json"
    try:
        return float(json.loads(path.read_text())["errors"]["test"])
    except OSError:
        raise InputError(
            f"{path} is missing: make it with `ecinn inception celeba/{attribute} "
            f"--out {folder}/{attribute}.safetensors`"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path} is not what `ecinn inception` writes: make it again") from None

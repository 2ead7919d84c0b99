"""`ecinn beta`: train a model for every β of Figure 10 and keep the results it shows."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ecinn.cli.app import Device, app, err, out, plain
from ecinn.cli.progress import bars, load_images
from ecinn.errors import InputError, InterruptedRunError
from ecinn.files import output_folder
from ecinn.progress import Progress

if TYPE_CHECKING:
    from ecinn.classifier.checkpoint import Checkpoint
    from ecinn.data.dataset import Dataset


@app.command()
def beta(
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for models and results.")],
    betas: Annotated[
        list[float] | None,
        typer.Option("--beta", help="One β; repeat for more. Default: eight from 0.02 to 50."),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs; default: the recipe's.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only the first N images of every split.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Selects the digits that are shown.")] = 0,
    device: Device = "auto",
) -> None:
    """Train models at increasing β for Figure 10; run it again to continue."""
    from ecinn.classifier.checkpoint import MODEL_FILE, save_checkpoint
    from ecinn.flow.device import resolve_device
    from ecinn.model import Model
    from ecinn.studies.judges import load_judges
    from ecinn.studies.paper import beta_models
    from ecinn.training import loop
    from ecinn.training.state import STATE_FILES

    chosen = resolve_device(device)
    recipes = [
        beta_models.settings(value, epochs) for value in sorted(set(betas or beta_models.BETAS))
    ]
    train, held_out, test = (
        load_images("mnist", split).first(limit) for split in ("train", "validation", "test")
    )
    places = beta_models.draw_digits(test, seed)
    jury = beta_models.Jury.assemble(load_judges("mnist").to(chosen), test)
    results = output_folder(out_dir) / beta_models.FILE
    # Finished models of other β stay in the results.
    models = _finished(out_dir, epochs, train, test)
    try:
        for number, recipe in enumerate(recipes, 1):
            task = f"β = {recipe.beta:g} ({number}/{len(recipes)})"
            if recipe.beta in models:
                err.print(f"{task}: already trained")
            else:
                folder = out_dir / f"beta-{recipe.beta:g}"
                with bars() as show:

                    def observe(progress: Progress, task: str = task) -> None:
                        show(replace(progress, task=f"{task}, {progress.task}"))

                    model = loop.train(
                        recipe,
                        train,
                        folder,
                        held_out=held_out,
                        test=test,
                        device=chosen,
                        resume=True,
                        observe=observe,
                    )
                metrics = {**model.metrics, **jury.judge(Model(model, chosen))}
                model.classifier.cpu()
                models[recipe.beta] = replace(model, metrics=metrics)
                save_checkpoint(models[recipe.beta], folder / MODEL_FILE)
                for name in STATE_FILES:  # only needed to continue
                    (folder / name).unlink(missing_ok=True)
            compared = beta_models.compare(list(models.values()), test, places, chosen)
            beta_models.save(compared, results)
            _print_result(models[recipe.beta])
    except (KeyboardInterrupt, InterruptedRunError):
        raise InterruptedRunError("interrupted; run the same command to continue") from None
    out.print(f"wrote {plain(str(results))}")


def _finished(
    out_dir: Path, epochs: int | None, train: "Dataset", test: "Dataset"
) -> dict[float, "Checkpoint"]:
    """Load the models that earlier runs trained and measured, by β."""
    from ecinn.classifier.checkpoint import MODEL_FILE, load_checkpoint
    from ecinn.studies.paper import beta_models

    models = {}
    for path in sorted(out_dir.glob(f"beta-*/{MODEL_FILE}")):
        model = load_checkpoint(path)
        if model.metrics.keys() >= set(beta_models.JUDGED):
            recipe = beta_models.settings(model.recipe.beta, epochs)
            images = (model.training["training_images"], model.metrics["n"])
            if model.recipe != recipe or images != (len(train), len(test)):
                raise InputError(f"{path} was trained with other settings: choose another folder")
            models[recipe.beta] = model
    return models


def _print_result(model: "Checkpoint") -> None:
    metrics = model.metrics
    out.print(
        f"β = {model.recipe.beta:g}: {100 * (1 - metrics['error']):.2f} % correct, "
        f"{metrics['bits_per_dim']:.3f} bits/dim, {100 * metrics['reached_q']:.2f} % reach q, "
        f"the oracle reads q in {metrics['convinced']} of {metrics['judged']}, "
        f"Fréchet distance {metrics['frechet']:.2f}"
    )

"""`ecinn beta`: train a model for every β of Figure 10 and keep what the figure shows."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer

from ecinn.classifier.checkpoint import (
    MODEL_FILE,
    Checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from ecinn.classifier.recipes import Recipe
from ecinn.cli.app import Device, app, device_name, err, out, plain
from ecinn.cli.progress import bars, load_images, training_bar
from ecinn.data.dataset import Dataset
from ecinn.errors import InputError, InterruptedRunError
from ecinn.files import output_folder
from ecinn.model import Model
from ecinn.progress import Progress
from ecinn.studies.judges import load_judges
from ecinn.studies.paper import beta_models
from ecinn.training import loop as training
from ecinn.training.evaluation import evaluate


@app.command()
def beta(
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for models and results.")],
    betas: Annotated[
        list[float] | None,
        typer.Option("--beta", help="One β; repeat it for more. Eight from 0.02 to 50 if none."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many training and test images.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws the digits that are shown.")] = 0,
    device: Device = "auto",
) -> None:
    """Train models at ascending β for Figure 10; run again, it goes on where it stopped."""
    chosen = torch.device(device_name(device))
    asked = sorted(set(betas or beta_models.BETAS))
    wanted = [beta_models.settings(value, epochs) for value in asked]
    train = load_images("mnist", "train").first(limit)
    test = load_images("mnist", "test").first(limit)
    places = beta_models.draw_digits(test, seed)
    jury = beta_models.Jury.assemble(load_judges("mnist").to(chosen), test)
    output_folder(out_dir)
    results = out_dir / beta_models.FILE
    earlier = _earlier(out_dir, asked, epochs, train, test)
    models: list[Checkpoint] = []
    try:
        for number, settings in enumerate(wanted, 1):
            folder = out_dir / f"beta-{settings.beta:g}"
            which = f"β = {settings.beta:g} ({number}/{len(wanted)})"
            model = _finished(folder, settings, train, test)
            if model is None:
                model = _train(settings, train, test, jury, folder, chosen, which)
            else:
                err.print(f"{which}: trained already")
            models.append(model)
            compared = beta_models.compare([*models, *earlier], test, places, chosen)
            beta_models.save(compared, results)
            _say(model)
    except (KeyboardInterrupt, InterruptedRunError):
        raise InterruptedRunError("interrupted; go on with the same command") from None
    out.print(f"wrote {plain(str(results))}")


def _earlier(
    out_dir: Path, asked: list[float], epochs: int | None, train: Dataset, test: Dataset
) -> list[Checkpoint]:
    """Models of other β that lie there finished: they stay in the results."""
    found = []
    for path in sorted(out_dir.glob(f"beta-*/{MODEL_FILE}")):
        value = load_checkpoint(path).recipe.beta
        if value not in asked:
            found.append(_finished(path.parent, beta_models.settings(value, epochs), train, test))
    return [model for model in found if model is not None]


def _finished(folder: Path, settings: Recipe, train: Dataset, test: Dataset) -> Checkpoint | None:
    """The model that an earlier run trained and measured there."""
    path = folder / MODEL_FILE
    if not path.is_file():
        return None
    model = load_checkpoint(path)
    if not model.metrics.keys() >= beta_models.MEASURED:
        return None
    images = (model.training["training_images"], model.metrics["n"])
    if model.recipe != settings or images != (len(train), len(test)):
        raise InputError(f"{path} was trained with other settings: choose another folder")
    return model


def _train(
    settings: Recipe,
    train: Dataset,
    test: Dataset,
    jury: beta_models.Jury,
    folder: Path,
    device: torch.device,
    which: str,
) -> Checkpoint:
    """Train, or go on, and measure; what was needed to go on is removed at the end."""
    with _bar(which) as observe:
        model = training.train(
            settings, train, folder, device=device, resume=True, observe=observe
        )
    with bars() as observe:
        result = evaluate(Model(model, device), test, observe=observe)
        judged = jury.say(Model(model, device))
    model.classifier.cpu()
    metrics = dataclasses.asdict(result) | dataclasses.asdict(judged)
    model = dataclasses.replace(model, metrics=metrics)
    save_checkpoint(model, folder / MODEL_FILE)
    for name in training.STATE_FILES:
        (folder / name).unlink(missing_ok=True)
    return model


def _say(model: Checkpoint) -> None:
    metrics = model.metrics
    out.print(
        f"β = {model.recipe.beta:g}: {100 * (1 - metrics['error']):.2f} % right, "
        f"{metrics['bits_per_dim']:.3f} bits/dim, {100 * metrics['reached_q']:.2f} % reach q, "
        f"the oracle reads q in {metrics['convinced']} of {metrics['judged']}, "
        f"Fréchet distance {metrics['frechet']:.2f}"
    )


@contextmanager
def _bar(which: str) -> Iterator[Callable[[Progress], None]]:
    """Epoch, loss, error and speed under a bar."""
    with training_bar() as show:

        def observe(p: Progress) -> None:
            f = p.figures
            words = (
                f"{which}, epoch {f['epoch']}/{f['epochs']}  loss {f['loss']:.3f}  "
                f"bits/dim {f['bits_per_dim']:.3f}  error {100 * f['error']:.2f} %  "
                f"{f['images_per_second']:,.0f} images/s"
            )
            show(words, p.done, p.total, None)

        yield observe

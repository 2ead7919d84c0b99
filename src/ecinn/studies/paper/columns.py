"""Columns of the claims page: which model of every dataset stands in each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ecinn.classifier.checkpoint import shipped_models
from ecinn.drawing.words import fill
from ecinn.errors import InputError
from ecinn.model import Model
from ecinn.studies.paper.artefact import Context
from ecinn.studies.paper.claim import document

NO_FACES = "needs the pictures of CelebA (`--celeba DIR`)"


@dataclass(frozen=True)
class Column:
    """The models that judge the claims together, by the dataset they were trained on."""

    title: str
    about: str
    models: Mapping[str, Model]
    absent: Mapping[str, str]
    """Why the model of a dataset is missing."""

    def lacks(self, datasets: Sequence[str]) -> list[str]:
        """Return the datasets of which no model belongs in this column, at hand or not."""
        return [name for name in datasets if name not in self.models and name not in self.absent]


def columns(context: Context) -> list[Column]:
    """Find the models of all columns; those that are absent are noted."""
    datasets = {name for column in document()["column"] for name in column["models"]}
    given = {}
    for path in context.paper_models:
        model = context.model(str(path))
        dataset = model.recipe.dataset
        if dataset not in datasets:
            known = ", ".join(sorted(datasets))
            raise InputError(f"{path} is a model of {dataset!r}: give a model of {known}")
        if "error" not in model.checkpoint.metrics:
            raise InputError(f"{path} has no test error: give a model that `ecinn train` wrote")
        if dataset in given:
            raise InputError(f"two models of {dataset!r} were given: give one of each dataset")
        given[dataset] = model
    return [_column(context, entry, given) for entry in document()["column"]]


def _column(context: Context, entry: Mapping[str, Any], given: Mapping[str, Model]) -> Column:
    option, models, absent = entry.get("option"), dict[str, Model](), dict[str, str]()
    own = given if option else {}
    for dataset, name in (entry["models"] | dict.fromkeys(own, "")).items():
        if dataset.startswith("celeba/") and context.celeba is None:
            absent[dataset] = NO_FACES
        elif dataset in own:
            models[dataset] = own[dataset]
        elif name in shipped_models():
            models[dataset] = context.model(name)
        else:
            absent[dataset] = f"no model given (`{option}`)" if option else f"no model `{name}`"
    return Column(entry["title"], fill(entry["about"], {}), models, absent)


def stages(model: Model) -> str:
    """Name the stages of training that a model went through."""
    distilled = ["distilled from a teacher"] if model.recipe.distillation_weight > 0 else []
    refined = ["fine-tuned"] if model.recipe.finetuning is not None else []
    return " and ".join(distilled + refined) or "neither distilled nor fine-tuned"

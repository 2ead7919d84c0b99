"""Figures 8 and 9: faces into smiles and out of them; heatmaps of four labels by five methods."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ecinn.attribution.heatmaps import DEFAULTS, METHODS, HeatmapMethod, heatmaps
from ecinn.attribution.scores import ExplainedINN
from ecinn.drawing import pictures
from ecinn.errors import InputError
from ecinn.model import Model
from ecinn.pixels import to_uint8
from ecinn.studies.benchmark.heatmap_measures import LABELS as METHOD_NAMES
from ecinn.studies.inception.training import load_inception
from ecinn.studies.paper import grid
from ecinn.studies.paper.artefact import Artefact, Context, Made, Need
from ecinn.studies.paper.digits import said
from ecinn.studies.paper.draws import draw, generator
from ecinn.studies.paper.explained import columns, every_image

FACE_MODELS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "celeba-smile": ("¬smile", "smile"),
        "celeba-cheekbones": ("¬cheekb.", "cheekb."),
        "celeba-lipstick": ("¬lipstick", "lipstick"),
        "celeba-makeup": ("¬makeup", "makeup"),
    }
)
"""With what the classes are called where there is little room; ¬ means “not”."""
GRADIENT_METHODS = METHODS[1:]
SAMPLE = 200
"""Random training faces: their mean is what Integrated Gradients and DeepLift compare with, the
first of them are the SHAP methods' baselines."""
_BATCH = 16
"""Faces at once with gradients: some 1.5 GB."""


def _figure_8(context: Context) -> Made:
    model, data = context.model("celeba-smile"), context.data("celeba/Smiling", "test")
    draws = generator(context, 8)
    places = torch.cat([draw(model, data, data.labels == label, 5, draws) for label in (0, 1)])
    explanation = model.explain(data.images[places], 1 - data.labels[places][:, None])
    shown = every_image(explanation, tuple(places.tolist()))
    figure = grid.draw(columns(shown, names=FACE_MODELS["celeba-smile"]), 3)
    caption = (
        "Ten random test faces that the model reads as they are labelled: five into a smile, five "
        f"out of one. {said(shown)}"
    )
    name = "figure-8"
    return Made({name: figure}, data={name: shown.numbers()}, captions={name: caption})


class Rows:
    """Random faces of one label with everybody's maps of them, a row per face."""

    def __init__(self, context: Context, name: str, n: int, draws: torch.Generator) -> None:
        self.context = context
        self.name = name
        self.model: Model = context.model(name)
        dataset = self.model.checkpoint.recipe.dataset
        data, training = (context.data(dataset, split) for split in ("test", "train"))
        self.attribute = dataset.partition("/")[2]
        everybody = torch.ones(len(data), dtype=torch.bool)
        self.places: Int[Tensor, " n"] = draw(self.model, data, everybody, n, draws)
        self.explanation = self.model.explain(data.images[self.places], check=False)
        order = torch.randperm(len(training), generator=draws)[:SAMPLE]
        self.sample = self.model.pixels(training.images[order])

    def of_inn(self) -> list[tuple[grid.Panel, ...]]:
        """Input, counterfactual, ECINNh, and the gradient methods on the INN."""
        e = self.explanation
        inn = ExplainedINN(self.model.classifier, self.model.mu_bar)
        maps = [e.heatmap[:, 0], *self._gradient_maps(inn)]
        rows = []
        for row in range(len(self.places)):
            faces = (to_uint8(e.x[row]), e.stored_convincing[row, 0])
            panels = [grid.Panel(pictures.image_array(face)) for face in faces]
            rows.append((*panels, *(_panel(each[row]) for each in maps)))
        return rows

    def of_cnn(self, network: nn.Module) -> list[tuple[grid.Panel, ...]]:
        """Input, and the gradient methods on another network, of the same p and q."""
        maps = self._gradient_maps(network)
        inputs = [pictures.image_array(to_uint8(x)) for x in self.explanation.x]
        return [
            (grid.Panel(array), *(_panel(each[row]) for each in maps))
            for row, array in enumerate(inputs)
        ]

    def _gradient_maps(self, explained: ExplainedINN | nn.Module) -> list[Tensor]:
        made = []
        for method in GRADIENT_METHODS:
            made.append(self._maps(explained, method))
            self.context.observe(
                f"{self.name}, heatmaps", len(made) % len(GRADIENT_METHODS), len(GRADIENT_METHODS)
            )
        return made

    def _maps(self, explained: ExplainedINN | nn.Module, method: HeatmapMethod) -> Tensor:
        e, device = self.explanation, self.model.device
        x, p, q = (each.to(device) for each in (e.x, e.p, e.q[:, 0]))
        baseline, some = self.sample.mean(0), self.sample[: DEFAULTS.baselines]
        return heatmaps(
            explained, x, p, q, method, baseline=baseline, baselines=some, batch_size=_BATCH
        ).maps.cpu()

    @property
    def names(self) -> list[str]:
        """What the model reads in each face."""
        return [FACE_MODELS[self.name][int(p)] for p in self.explanation.p]

    @property
    def numbers(self) -> list[dict[str, Any]]:
        """Which faces are shown."""
        numbers = every_image(self.explanation, tuple(self.places.tolist())).numbers
        kept = ("test_image", "p", "q", "alpha_0", "alpha_1")
        return [{key: row[key] for key in kept} for row in numbers()]


def _panel(heatmap: Tensor) -> grid.Panel:
    return grid.Panel(pictures.heatmap_array(heatmap, pictures.robust_limit(heatmap)))


def inn_grid(rows: list[Rows]) -> grid.Grid:
    """All rows, with the methods as headings."""
    panels = tuple(row for each in rows for row in each.of_inn())
    names = tuple(name for each in rows for name in each.names)
    headings = ("input", "counterf.", *(_short(method) for method in METHODS))
    return grid.Grid(panels, names, headings)


def cnn_grid(rows: list[Rows]) -> grid.Grid:
    """The same rows on Inception-V3, which the context must have."""
    panels = tuple(row for each in rows for row in each.of_cnn(_inception(each)))
    names = tuple(name for each in rows for name in each.names)
    headings = ("input", *(_short(method) for method in GRADIENT_METHODS))
    return grid.Grid(panels, names, headings)


def _short(method: HeatmapMethod) -> str:
    return METHOD_NAMES[method].replace("Integrated Gradients", "IntGrad").replace(
        "DeepLiftSHAP", "DeepL.SHAP"
    ).replace("GradientSHAP", "GradSHAP")  # fmt: skip


def _figure_9(context: Context) -> Made:
    draws = generator(context, 9)
    rows = [Rows(context, name, 1, draws) for name in FACE_MODELS]
    figures = {"figure-9a": grid.draw(inn_grid(rows), 3)}
    words = (
        "A random test face of each label that its model reads as labelled. Each map has its own "
        "scale (full colour at its 99.5th percentile, white: zero). ECINNh: red lighter, blue "
        "darker; the others: red speaks for q, blue for p. They attribute the difference of "
        "linear logits q − p; baselines are training faces."
    )
    captions = {"figure-9a": f"(a) Heatmaps on the INNs. {words}"}
    if context.inception is not None:
        figures["figure-9b"] = grid.draw(cnn_grid(rows), 3)
        captions["figure-9b"] = "(b) The same faces, p and q on Inception-V3, of the same label."
    else:
        captions["figure-9a"] += " Part (b), on Inception-V3, needs --inception DIR."
    data = {"figure-9": {each.name: each.numbers for each in rows}}
    skipped: Mapping[str, Need] = {"figure-9b": "inception"} if "figure-9b" not in figures else {}
    return Made(figures, data=data, captions=captions, skipped=skipped)


def _inception(rows: Rows) -> nn.Module:
    assert rows.context.inception is not None
    path = rows.context.inception / f"{rows.attribute}.safetensors"
    if not path.is_file():
        raise InputError(
            f"{path} is missing: make it with "
            f"`ecinn inception celeba/{rows.attribute} --out {path}`"
        )
    return load_inception(path, rows.model.device, rows.model.class_names).classifier


FIGURE_8 = Artefact(
    "figure-8",
    "ten faces: five into a smile, five out of one",
    _figure_8,
    frozenset({"faces"}),
    reported=(
        "Rows input, α₀, α₁; five columns into smile, five into frown; p(q|x) > 1 − 10⁻⁴ for all."
    ),
)
FIGURE_9 = Artefact(
    "figure-9",
    "heatmaps of four labels by five methods, on INNs and on Inception-V3",
    _figure_9,
    frozenset({"faces"}),
    reported=(
        "ECINNh is coherent where established methods are noisy on INNs; on Inception-V3 they are "
        "not. The lipstick model looks at makeup."
    ),
)

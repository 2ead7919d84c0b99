"""Make Figures 8 and 9: faces into and out of smiles, and heatmaps of four labels."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ecinn.attribution.heatmaps import METHODS, HeatmapMethod
from ecinn.attribution.scores import ExplainedINN
from ecinn.drawing import pictures
from ecinn.errors import InputError
from ecinn.pixels import to_uint8
from ecinn.progress import counter
from ecinn.studies.benchmark.heatmap_measures import LABELS as METHOD_NAMES
from ecinn.studies.benchmark.heatmap_measures import WHITE_NOISE
from ecinn.studies.benchmark.heatmaps import SAMPLE
from ecinn.studies.face_judges import load_face_judges
from ecinn.studies.inception.training import load_inception
from ecinn.studies.paper.artefact import Context, Made, caption
from ecinn.studies.paper.explained import columns, draw, every_image, explain_each
from ecinn.studies.paper.measuring import GRADIENT_METHODS, ExplainedImages
from ecinn.studies.paper.style import Grid, Panel, draw_grid

FACE_MODELS: Mapping[str, tuple[str, str]] = {
    "celeba-smile": ("¬smile", "smile"),
    "celeba-cheekbones": ("¬cheekb.", "cheekb."),
    "celeba-lipstick": ("¬lipstick", "lipstick"),
    "celeba-makeup": ("¬makeup", "makeup"),
}
"""Models with short names of their classes; ¬ means “not”."""
SHORT_NAMES = {
    "integrated_gradients": "IntGrad",
    "deep_lift_shap": "DeepL.SHAP",
    "gradient_shap": "GradSHAP",
}
_BATCH_SIZE = 16
"""Faces at once with gradients: about 1.5 GB."""


def figure_8(context: Context) -> Made:
    """Ten faces, five into a smile and five out of one."""
    tested, generator = context.tested("celeba-smile"), context.generator(8)
    labels = tested[1].labels
    places = torch.cat([draw([tested], labels == label, 5, generator) for label in (0, 1)])
    shown = explain_each(tested, places, 1 - labels[places][:, None])
    figure = draw_grid(columns(shown, names=FACE_MODELS["celeba-smile"]))
    return Made.single("figure-8", figure, shown.numbers(), legend=shown.legend())


class Faces:
    """Faces explained by the model of one label with all methods, a row per face.

    Args:
        places: positions of the faces in the test set.
        training: positions of the baselines in the training set.
        generator: draws the white noise.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        places: Int[Tensor, " faces"],
        training: Int[Tensor, " sample"],
        generator: torch.Generator,
    ) -> None:
        self.context, self.name, self.places = context, name, places
        self.generator = generator
        self.model, data = context.tested(name)
        self.attribute = self.model.recipe.dataset.partition("/")[2]
        images = data.images[places]
        self.explanation = self.model.explain(images, confidence="alpha_1", check=False)
        e, device = self.explanation, self.model.device
        x, p, q = (values.to(device) for values in (e.x, e.p, e.q[:, 0]))
        sample = context.data(self.model.recipe.dataset, "train").images[training]
        self.explained = ExplainedImages(self.model, x, p, q, self.model.pixels(sample))

    def inn_rows(self) -> list[tuple[Panel, ...]]:
        """Input, counterfactual, ECINNh, the gradient methods on the INN, and white noise."""
        e = self.explanation
        faces = torch.stack([to_uint8(e.x), e.stored_convincing[:, 0]], 1)
        return _rows(faces, [e.heatmap[:, 0], *self._gradient_maps(self.explained.inn)])

    def cnn_rows(self) -> list[tuple[Panel, ...]]:
        """Input, the gradient methods on a CNN for the same p and q, and white noise."""
        return _rows(to_uint8(self.explanation.x)[:, None], self._gradient_maps(self._cnn()))

    def _gradient_maps(self, explained: ExplainedINN | nn.Module) -> list[Tensor]:
        done = counter(self.context.observe, f"{self.name}, heatmaps", len(GRADIENT_METHODS))
        made = self.explained.maps(explained, done=done, batch_size=_BATCH_SIZE)
        noise = self.explained.white_noise(explained, self.generator)
        return [*(heatmaps.maps.cpu() for heatmaps in made.values()), noise.cpu()]

    def _cnn(self) -> nn.Module:
        """Return Inception-V3 if the context has it, else the shipped residual network."""
        if self.context.inception is None:
            return load_face_judges(device=self.model.device).classifier(self.attribute)
        path = Path(self.context.inception) / f"{self.attribute}.safetensors"
        if not path.is_file():
            raise InputError(
                f"{path} is missing: make it with "
                f"`ecinn inception celeba/{self.attribute} --out {path}`"
            )
        return load_inception(path, self.model.device, self.model.class_names).classifier

    @property
    def names(self) -> list[str]:
        """The class that the model predicts for each face."""
        return [FACE_MODELS[self.name][int(p)] for p in self.explanation.p]

    @property
    def numbers(self) -> list[dict[str, Any]]:
        """Positions and α of the faces."""
        rows = every_image(self.explanation, self.places).numbers()
        kept = ("test_image", "p", "q", "alpha_0", "alpha_1")
        return [{key: row[key] for key in kept} for row in rows]


def _rows(images: Tensor, maps: Sequence[Tensor]) -> list[tuple[Panel, ...]]:
    """Arrange the images of every face and its maps, each map with a scale of its own."""
    rows = []
    for row, faces in enumerate(images):
        arrays = [pictures.image_array(face) for face in faces]
        for face_maps in maps:
            limit = pictures.robust_limit(face_maps[row])
            arrays.append(pictures.heatmap_array(face_maps[row], limit))
        rows.append(tuple(map(Panel, arrays)))
    return rows


def draw_faces(context: Context, n: int, generator: torch.Generator) -> list[Faces]:
    """Draw n test faces that all four models classify correctly; every model explains them."""
    tested = [context.tested(name) for name in FACE_MODELS]
    model, data = tested[0]
    everybody = torch.ones(len(data), dtype=torch.bool)
    places = draw(tested, everybody, n, generator)
    training = context.data(model.recipe.dataset, "train")
    sample = torch.randperm(len(training), generator=generator)[:SAMPLE]
    return [Faces(context, name, places, sample, generator) for name in FACE_MODELS]


def inn_grids(labels: Sequence[Faces]) -> list[Grid]:
    """Arrange the maps on the INNs: a grid per face, a row per label, a column per method."""
    return _grids(labels, [each.inn_rows() for each in labels], ("input", "counterf."), METHODS)


def cnn_grids(labels: Sequence[Faces]) -> list[Grid]:
    """Arrange the same rows on a CNN."""
    return _grids(labels, [each.cnn_rows() for each in labels], ("input",), GRADIENT_METHODS)


def _grids(
    labels: Sequence[Faces],
    rows: Sequence[Sequence[tuple[Panel, ...]]],
    first: tuple[str, ...],
    methods: Sequence[HeatmapMethod],
) -> list[Grid]:
    names = [SHORT_NAMES.get(method, METHOD_NAMES[method]) for method in methods]
    return [
        Grid(panels, classes, (*first, *names, WHITE_NOISE))
        for panels, classes in zip(
            zip(*rows, strict=True),
            zip(*(each.names for each in labels), strict=True),
            strict=True,
        )
    ]


def figure_9(context: Context) -> Made:
    """Heatmaps of one face by the models of four labels, on INNs and on a CNN."""
    labels = draw_faces(context, 1, context.generator(9))
    grids = {"figure-9a": inn_grids(labels)[0], "figure-9b": cnn_grids(labels)[0]}
    other = "figure-9b" if context.inception is None else "figure-9b-inception"
    captions = {"figure-9a": caption("figure-9"), "figure-9b": caption(other)}
    data = {"figure-9": {label.name: label.numbers for label in labels}}
    figures = {name: draw_grid(grid) for name, grid in grids.items()}
    return Made(figures, data=data, captions=captions)

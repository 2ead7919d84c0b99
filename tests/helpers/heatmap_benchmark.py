"""A heatmap benchmark of a few tiny images."""

from ecinn.data.planted import Cue
from ecinn.model import Model
from ecinn.studies.benchmark import heatmap_measures, heatmap_tables, heatmaps
from ecinn.studies.benchmark.heatmaps import measure_heatmaps
from helpers.builders import random_images

N, FIRST, SEED = 6, 4, 5


CUE = Cue(marks=(((0, 0), (0, 1)), ((3, 3),), ((7, 7), (7, 6), (6, 7))), height=8, width=8)


def make_small(monkeypatch) -> None:
    """Few images and resamples, and a cue that fits them."""
    for name, value in {"CHECKED": FIRST, "SAMPLE": 30, "RESAMPLES": 50}.items():
        monkeypatch.setattr(heatmaps, name, value)
    for module in (heatmap_measures, heatmap_tables):
        monkeypatch.setattr(module, "CUES", {"tiny": CUE})


def measure(model: Model, n: int = N, **more):
    shape = model.classifier.image_shape[0], len(model.class_names)
    data, training = random_images(12, *shape, 1), random_images(40, *shape, 2)
    return measure_heatmaps(model, data, training, n=n, seed=SEED, **more)


def row_of(block, method: str):
    return next(row for row in block.rows if row.method == method)

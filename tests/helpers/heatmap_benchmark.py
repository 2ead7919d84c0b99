"""A heatmap benchmark of a few tiny images."""

from ecinn.data.planted import Cue
from ecinn.model import Model
from ecinn.studies.benchmark.heatmaps import Settings, measure_heatmaps
from helpers.builders import random_images

N, FIRST, SEED = 6, 4, 5
CUE = Cue(marks=(((0, 0), (0, 1)), ((3, 3),), ((7, 7), (7, 6), (6, 7))), height=8, width=8)
SMALL = Settings(checked=FIRST, sample=30, resamples=50)


def measure(model: Model, n: int = N, settings: Settings = SMALL, **more):
    """Few images and resamples, and a cue that fits them."""
    shape = model.classifier.image_shape[0], len(model.class_names)
    data, training = random_images(12, *shape, 1), random_images(40, *shape, 2)
    options = {"n": n, "seed": SEED, "settings": settings, "cues": {"tiny": CUE}}
    return measure_heatmaps(model, data, training, **options, **more)


def row_of(block, method: str):
    return next(row for row in block.rows if row.method == method)

"""The authors' published files, real and made up."""

import json
from pathlib import Path

import numpy as np
import pytest

from helpers.paths import SHARED

N = 6
PUBLISHED = SHARED / "evaluating_counterfactuals"


needs_the_authors = pytest.mark.skipif(
    not PUBLISHED.is_dir(), reason="needs ../shared/data/evaluating_counterfactuals"
)


def write_folder(folder: Path, seed: int = 0) -> None:
    """A copy of their repository with six images; the fourth failed, the fifth is all black."""
    random = np.random.default_rng(seed)
    for name in ("mnist", "fake_mnist"):
        real = folder / "data" / "Real" / f"{name}.npz"
        real.parent.mkdir(parents=True, exist_ok=True)
        x = random.integers(0, 256, (N, 28, 28, 1), np.uint8)
        np.savez(real, x=x, y=np.eye(10, dtype=np.float32)[random.integers(0, 10, N)])
        for method in ("GB", "GL", "GEN"):
            path = folder / "data" / method / f"{name}.npz"
            path.parent.mkdir(exist_ok=True)
            images = random.integers(0, 256, (N, 28, 28), np.uint8)
            images[4] = 0
            np.savez(
                path,
                cfs=images,
                orig_pred=np.array([0, 1, 2, 3, 4, 5]),
                q=np.array([1, 2, 3, -1, 5, 6]),
                cf_pred=np.array([1, 7, 2, -1, 5, 6]),
            )
        scores = folder / "output" / f"{name}_[0]" / "results.json"
        scores.parent.mkdir(parents=True)
        three = [{"method": method, "scores": [0.5, 0.25, 6]} for method in ("GB", "GL", "GEN")]
        fid = [{"method": "GEN", "scores": [90.5, -1, -1]}]
        labels = [{"method": "GEN", "scores": {"MNIST": [0.25, 0.125, 6]}}]
        scores.write_text(
            json.dumps({"ElasticNet": three, "FID": fid, "LabelVariationScore": labels})
        )

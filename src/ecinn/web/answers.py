"""Explanations as the service answers them: JSON with PNGs, a zip of files, a film, a sheet."""

import base64
import dataclasses
import io
import json
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ecinn import equations
from ecinn.classifier.out_of_distribution import REASONS
from ecinn.drawing import pictures
from ecinn.drawing.heatmaps import overlay_array
from ecinn.explanation.files import write_pictures
from ecinn.explanation.result import Explanation
from ecinn.pixels import to_uint8
from ecinn.web import words
from ecinn.web.passes import Reading


def predictions(reading: Reading) -> list[dict[str, Any]]:
    """What the classifier says of every picture."""
    answers = []
    for row, unlike in enumerate(reading.out_of_distribution.tolist()):
        why = tuple(r for r, yes in zip(REASONS, unlike, strict=True) if yes)
        answers.append(
            {
                "predicted": int(reading.p[row]),
                "posterior": reading.posterior[row].tolist(),
                "typical": not why,
                "reasons": words.reasons(why),
            }
        )
    return answers


def explanations(e: Explanation) -> list[dict[str, Any]]:
    """All that is known of every picture and target."""
    return [_explanation(e, row) for row in range(len(e.x))]


def sheet(e: Explanation) -> bytes:
    """The explanation sheet as a PNG."""
    return pictures.png_bytes(e.picture())


def film(e: Explanation) -> bytes:
    """The path there and back as a GIF."""
    assert e.path is not None
    return pictures.film_bytes(e.path.film(), "gif")


def archive(e: Explanation, notes: Sequence[tuple[str, ...]]) -> bytes:
    """Of every picture the sheet, every counterfactual, its heatmap, and all numbers as JSON."""
    buffer = io.BytesIO()
    with (
        tempfile.TemporaryDirectory(prefix="ecinn-") as place,
        zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as files,
    ):
        folder = Path(place)
        for row, remarks in enumerate(notes):
            one = e[row]
            name = f"picture-{row + 1}"
            one = dataclasses.replace(one, remarks=(tuple(remarks),))
            report = write_pictures(one, folder, names=[name])["images"][0]
            for target in report["targets"]:
                for kind in ("tipping_point", "convincing", "heatmap"):
                    target[kind]["file"] = Path(target[kind]["file"]).name
            report["picture"] = Path(report["picture"]).name
            files.writestr(
                f"{name}-certificate.json", json.dumps(report, indent=1, ensure_ascii=False)
            )
        for path in sorted(folder.iterdir()):
            files.write(path, path.name)
    return buffer.getvalue()


def png_url(array: pictures.Array) -> str:
    """A picture as a data URL."""
    return data_url(pictures.png_bytes(pictures.to_image(array)))


def data_url(png: bytes) -> str:
    """A PNG file that can stand where a page wants an address."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _explanation(e: Explanation, row: int) -> dict[str, Any]:
    why = e.reasons(row)
    return {
        "input": _image_url(to_uint8(e.x[row])),
        "predicted": int(e.p[row]),
        "posterior": e.posterior[row].tolist(),
        "typical": not why,
        "reasons": words.reasons(why),
        "targets": [_target(e, row, column) for column in range(e.q.shape[1])],
    }


def _target(e: Explanation, row: int, column: int) -> dict[str, Any]:
    heatmap, limit = e.heatmap[row, column], _limit(e, row)
    third = int(e.third_class[row, column])
    return {
        "target": int(e.q[row, column]),
        "alpha_0": float(e.alpha_0[row, column]),
        "alpha_1": float(e.alpha[row, column]),
        "tipping_point": _image_url(e.stored_tipping_point[row, column]),
        "convincing": _image_url(e.stored_convincing[row, column]),
        "heatmap": png_url(pictures.heatmap_array(heatmap, limit)),
        "overlay": png_url(overlay_array(to_uint8(e.x[row]), heatmap, limit)),
        "tipping_posterior": e.tipping_certificate.verdict[row, column].tolist(),
        "convincing_posterior": e.convincing_certificate.verdict[row, column].tolist(),
        "reached": bool(e.convincing_certificate.reached[row, column]),
        "third_class": None if third < 0 else third,
        "words": words.certificate(e, row, column),
        "path": _path(e, row, column, limit),
    }


def _path(e: Explanation, row: int, column: int, limit: float) -> dict[str, Any] | None:
    if e.path is None:
        return None
    images = e.path.images[row, column]
    maps = equations.heatmap(e.x[row].expand_as(images), images)
    return {
        "alphas": e.path.alphas[row, column].tolist(),
        "images": [_image_url(image) for image in to_uint8(images)],
        "heatmaps": [png_url(pictures.heatmap_array(heatmap, limit)) for heatmap in maps],
        "posteriors": e.path.verdict[row, column].tolist(),
    }


def _image_url(stored: Tensor) -> str:
    return png_url(pictures.image_array(stored))


def _limit(e: Explanation, row: int) -> float:
    """One scale for all targets and the whole way, so that the maps can be compared."""
    return max(pictures.robust_limit(heatmap) for heatmap in e.heatmap[row])

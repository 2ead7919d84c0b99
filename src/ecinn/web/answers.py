"""Build the service's answers: JSON with PNGs and sentences, a zip of files, a film, a sheet."""

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
from ecinn.classifier.out_of_distribution import IN_WORDS, REASONS
from ecinn.drawing import pictures
from ecinn.drawing.heatmaps import overlay_array
from ecinn.drawing.pictures import data_url, percent
from ecinn.explanation.files import bent_in_words, file_names, write_pictures
from ecinn.explanation.result import ALPHA_1, Explanation, Verification
from ecinn.pixels import to_uint8
from ecinn.web.passes import Prediction


def predictions(prediction: Prediction, names: Sequence[str]) -> list[dict[str, Any]]:
    """Describe every image with the keys of `Explanation.to_dict()`."""
    images = []
    for row, flags in enumerate(prediction.out_of_distribution.tolist()):
        reasons = [reason for reason, flag in zip(REASONS, flags, strict=True) if flag]
        answer = prediction.answer
        asked = {} if answer is None else {"answer": _named(names, answer[row])}
        images.append(
            {
                "predicted": names[int(prediction.p[row])],
                "posterior": _named(names, prediction.posterior[row]),
                **asked,
                "log_p": float(prediction.log_p[row]),
                "typical": not reasons,
                "out_of_distribution": reasons,
                "caution": caution(reasons),
            }
        )
    return images


def explanation(e: Explanation) -> bytes:
    """Write `e.to_dict()` as JSON, with pictures as data URLs and with sentences."""
    report = e.to_dict()
    stored, tipping_points, convincing = to_uint8(e.x), e.stored_tipping_point, e.stored_convincing
    for row, image in enumerate(report["images"]):
        limit, heatmaps = e.heatmap_limit(row), e.heatmap[row]
        image["image"] = _image_url(stored[row])
        image["caution"] = caution(e.reasons(row))
        for column, target in enumerate(image["targets"]):
            heatmap = heatmaps[column]
            target["tipping_point"]["image"] = _image_url(tipping_points[row, column])
            target["convincing"]["image"] = _image_url(convincing[row, column])
            target["heatmap"] = {
                "full_colour": limit,
                "image": data_url(pictures.heatmap_array(heatmap, limit)),
                "overlay": data_url(overlay_array(stored[row], heatmap, limit)),
            }
            target["sentences"] = sentences(e, row, column)
            if e.path is not None:
                images = e.path.images[row, column]
                maps = equations.heatmap(e.x[row].expand_as(images), images)
                target["path"]["images"] = [_image_url(image) for image in to_uint8(images)]
                target["path"]["heatmaps"] = [
                    data_url(pictures.heatmap_array(heatmap, limit)) for heatmap in maps
                ]
    return to_json(report)


def to_json(answer: dict[str, Any]) -> bytes:
    """Write JSON without validation: answers are many and large."""
    text = json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()


def sheet(e: Explanation) -> bytes:
    """Draw the explanation sheet as a PNG."""
    return pictures.png_bytes(e.picture())


def film(e: Explanation) -> bytes:
    """Draw the path, forwards and backwards, as a GIF."""
    assert e.path is not None
    return pictures.film_bytes(e.path.film(), "gif")


def archive(e: Explanation) -> bytes:
    """Zip the sheet, counterfactuals and heatmaps of every image, and `explanation.json`."""
    buffer = io.BytesIO()
    with (
        tempfile.TemporaryDirectory(prefix="ecinn-") as place,
        zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as files,
    ):
        folder = Path(place)
        # A file system takes names of 255 bytes, in which the target and the kind have to fit.
        short = tuple(source and f"{Path(source).stem[:40]}.x" for source in e.sources)
        names = file_names(dataclasses.replace(e, sources=short))
        report = write_pictures(e, folder, names=names)
        for image in report["images"]:
            image["picture"] = Path(image["picture"]).name
            for target in image["targets"]:
                for kind in ("tipping_point", "convincing", "heatmap"):
                    target[kind]["file"] = Path(target[kind]["file"]).name
        files.writestr("explanation.json", json.dumps(report, indent=1, ensure_ascii=False))
        for path in sorted(folder.iterdir()):
            files.write(path, path.name)
    return buffer.getvalue()


def sentences(e: Explanation, row: int, column: int) -> list[str]:
    """Describe one counterfactual, the most important first."""
    p, q = int(e.p[row]), int(e.q[row, column])
    verdict = e.convincing_certificate.verdict[row, column]
    winner = int(e.convincing_certificate.winner[row, column])
    name = [
        e.named(label) if e.planted else article(name) for label, name in enumerate(e.class_names)
    ]
    reached = f"{name[winner]} ({percent(float(verdict[winner]))})"
    if e.verification is not None:
        return _verified_sentences(e, e.verification, row, column, name, reached)
    lines = [f"The stored image is classified as {reached}."]
    if winner != q:
        lines.append(f"The target, {name[q]}, was not reached.")
    if not bool(e.reachable[row, column]):
        highest = percent(float(e.convincing_certificate.posterior[row, column, q]))
        lines.append(f"The highest reachable confidence is {highest}.")
    elif e.confidence != ALPHA_1 and not bool(e.as_requested[row, column]):
        lines.append(f"It misses the request: {e.requested}.")
    at_tie = e.tipping_certificate.verdict[row, column]
    most = int(at_tie.argmax())
    said = [f"{name[y]} with {percent(float(at_tie[y]))}" for y in dict.fromkeys((p, q, most))]
    tie = "" if e.corrected else f"; before rounding to 8 bits, {name[p]} and {name[q]} tie"
    lines.append(f"The stored tipping point is {' and '.join(said)}{tie}.")
    return lines + _caution_sentence(e, row)


def _verified_sentences(
    e: Explanation, v: Verification, row: int, column: int, name: Sequence[str], reached: str
) -> list[str]:
    """Say what the explained classifier reads, and what its student does."""
    p, q, queries = int(e.p[row]), int(e.q[row, column]), int(v.queries[row, column])
    own = e.convincing_certificate.stored_posterior
    assert own is not None
    student = int(own[row, column].argmax())
    lines = [
        f"{v.classifier} classifies the stored image as {reached}; its student as "
        f"{name[student]} ({percent(float(own[row, column, student]))})."
    ]
    if e.explained is not None and not bool(e.explained[row, column]):
        best = percent(float(e.convincing_certificate.verdict[row, column, q]))
        does = f"never gives {name[q]} the requested probability"
        if e.confidence == ALPHA_1:
            does = f"never reads {name[q]}"
        if bool(e.as_requested[row, column]):
            does = f"does so only far outside (α = {float(e.alpha[row, column]):.1f})"
        lines.insert(
            0,
            f"Not explained: {v.classifier} {does}. The best of {queries} pictures that it was "
            f"asked about is shown ({name[q]}: {best}).",
        )
    if bool(v.bent[row, column]):
        words = bent_in_words(e, v, row, column)
        lines.append(f"{words[0].upper()}{words[1:]}.")
    at_tie = e.tipping_certificate.verdict[row, column]
    tie = f"{name[p]} {percent(float(at_tie[p]))}, {name[q]} {percent(float(at_tie[q]))}"
    third = int(e.third_class[row, column])
    more = f", but {name[third]} is more likely" if third >= 0 else ""
    where = "At the tipping point" if bool(v.tied[row, column]) else "Nearest to a tie"
    lines.append(f"{where}, {v.classifier} answers {tie}{more}.")
    lines.append(f"{v.classifier} was asked about the input and {queries} pictures.")
    return lines + _caution_sentence(e, row)


def _caution_sentence(e: Explanation, row: int) -> list[str]:
    warning = caution(e.reasons(row))
    return [f"Caution: {warning[0].lower()}{warning[1:]}"] if warning else []


def caution(reasons: Sequence[str]) -> str | None:
    """Warn of an out-of-distribution image."""
    if not reasons:
        return None
    words = " and ".join(IN_WORDS[reason] for reason in reasons)
    return f"This image does not look like a training image: it is {words}."


def article(name: str) -> str:
    """Return a digit with its article, and other class names as they are.

    >>> article("8"), article("3"), article("smiling")
    ('an 8', 'a 3', 'smiling')
    """
    if not name.isdigit():
        return name
    return f"an {name}" if name.startswith("8") or name in ("11", "18") else f"a {name}"


def _named(names: Sequence[str], values: Tensor) -> dict[str, float]:
    return dict(zip(names, values.tolist(), strict=True))


def _image_url(stored: Tensor) -> str:
    return data_url(pictures.image_array(stored))

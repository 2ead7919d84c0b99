"""An explanation as JSON, as pictures, and as a file that can be loaded again."""

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxtyping import Bool
from torch import Tensor

from ecinn.classifier.out_of_distribution import IN_WORDS
from ecinn.classifier.tensor_files import load_tensors, write_tensors
from ecinn.drawing.pictures import (
    film_bytes,
    heatmap_array,
    image_array,
    percent,
    png_bytes,
    to_image,
)
from ecinn.errors import InputError
from ecinn.explanation.path import CounterfactualPath
from ecinn.explanation.reading import Reading
from ecinn.explanation.result import Certificate, Explanation, Skipped, Verification
from ecinn.files import atomic_write, output_folder

VERSION = 1
"""Version of the JSON; raised when a key changes its meaning or disappears."""
TENSORS = "explanation.safetensors"
JSON = "explanation.json"
KIND = "explanation"
_READINGS: dict[str, type[Certificate | CounterfactualPath | Verification]] = {
    "tipping_certificate": Certificate,
    "convincing_certificate": Certificate,
    "path": CounterfactualPath,
    "verification": Verification,
}


def to_dict(e: Explanation) -> dict[str, Any]:
    """Every number of an explanation as plain Python values.

    Includes the queries and answers of the explained classifier, if there are any.
    """
    asked = {} if e.verification is None else {"classifier": _asked(e, e.verification)}
    return {
        "version": VERSION,
        "model": e.model,
        **asked,
        "confidence": e.confidence,
        "requested": e.requested,
        "passes": e.passes,
        "images": [_image(e, index) for index in range(len(e))],
        "failures": [dataclasses.asdict(skipped) for skipped in e.skipped],
    }


def _asked(e: Explanation, verification: Verification) -> dict[str, Any]:
    return {
        "name": verification.classifier,
        "queries": len(e) + int(verification.queries.sum()),
        "counterfactuals": e.q.numel(),
        "not_explained": int((~_explained(e)).sum()),
    }


def notes(e: Explanation, index: int) -> tuple[str, ...]:
    """Sentences about one image: how it was read, and warnings about its explanation."""
    said = list(e.remarks[index]) if e.remarks else []
    if e.reasons(index):
        why = ", ".join(IN_WORDS[reason] for reason in e.reasons(index))
        said.append(f"out of distribution: {why}")
    student = int(e.posterior[index].argmax())
    if e.verification is not None and student != int(e.p[index]):
        said.append(
            f"the student reads {e.named(student)}, {e.verification.classifier} reads "
            f"{e.named(int(e.p[index]))}: the explanation starts from the latter"
        )
    for target, q in enumerate(e.q[index].tolist()):
        name = e.named(q)
        if e.verification is not None:
            if not bool(_explained(e)[index, target]):
                said.append(f"to {name}: {_not_explained(e, e.verification, index, target)}")
            if bool(e.verification.bent[index, target]):
                said.append(f"to {name}: {bent_in_words(e, e.verification, index, target)}")
        elif not bool(e.reachable[index, target]):
            highest = float(e.convincing_certificate.posterior[index, target, q])
            said.append(f"to {name}: {percent(highest)} is the highest reachable confidence")
        elif not bool(e.as_requested[index, target]):
            winner = e.named(int(e.convincing_certificate.winner[index, target]))
            said.append(f"to {name}: not reached, the counterfactual is predicted as {winner}")
        third = int(e.third_class[index, target])
        if third >= 0:
            said.append(f"to {name}: {e.named(third)} wins at the tipping point")
    return tuple(said)


def _not_explained(e: Explanation, v: Verification, index: int, target: int) -> str:
    q = int(e.q[index, target])
    share = percent(float(e.convincing_certificate.verdict[index, target, q]))
    if bool(e.as_requested[index, target]):
        alpha = float(e.alpha[index, target])
        return f"not explained: {v.classifier} gives {share} only far outside (α = {alpha:.1f})"
    asked = int(v.queries[index, target])
    return f"not explained: {v.classifier} gives {share} at best, after {asked} queries"


def bent_in_words(e: Explanation, v: Verification, index: int, target: int) -> str:
    """Say that the direction is bent, and from which class most of all."""
    most = e.named(int(v.instead[index, target].argmax()))
    return f"the change also leads away from {most}, which {v.classifier} saw instead"


def _explained(e: Explanation) -> Bool[Tensor, "batch targets"]:
    assert e.explained is not None
    return e.explained


def _image(e: Explanation, index: int) -> dict[str, Any]:
    return {
        "index": int(e.indices[index]),
        "source": e.sources[index] if e.sources else None,
        "notes": list(notes(e, index)),
        "predicted": e.class_names[int(e.p[index])],
        "posterior": _posterior(e, e.posterior[index]),
        **({} if e.verification is None else {"answer": _posterior(e, e.reading[index])}),
        "log_p": float(e.log_p[index]),
        "typical": None if e.typical is None else bool(e.typical[index]),
        "out_of_distribution": list(e.reasons(index)),
        "round_trip_error": float(e.round_trip_error[index]),
        "targets": [_target(e, index, target) for target in range(e.q.shape[1])],
    }


def _target(e: Explanation, index: int, target: int) -> dict[str, Any]:
    q = int(e.q[index, target])
    reachable = bool(e.reachable[index, target])
    highest = float(e.convincing_certificate.posterior[index, target, q])
    third = int(e.third_class[index, target])
    corrections = int(e.corrections[index, target])
    # Every query decodes once more; every correction without a classifier also encodes.
    passes, asked = e.passes + 2 * corrections, {}
    if e.verification is not None:
        queries = int(e.verification.queries[index, target])
        passes = e.passes + queries
        asked = {
            "explained": bool(_explained(e)[index, target]),
            "tied": bool(e.verification.tied[index, target]),
            "bent": bool(e.verification.bent[index, target]),
            "queries": queries,
        }
    return {
        "target": e.class_names[q],
        "alpha_0": float(e.alpha_0[index, target]),
        "alpha_1": float(e.alpha_1[index, target]),
        "alpha": float(e.alpha[index, target]),
        "reachable": reachable,
        "highest": None if reachable else highest,
        "as_requested": bool(e.as_requested[index, target]),
        **asked,
        "corrections": corrections,
        "passes": passes,
        "third_class": None if third < 0 else e.class_names[third],
        "tipping_point": _certificate(e, e.tipping_certificate, index, target),
        "convincing": _certificate(e, e.convincing_certificate, index, target),
        "path": _path(e, index, target),
    }


def _certificate(
    e: Explanation, certificate: Certificate, index: int, target: int
) -> dict[str, Any]:
    stored, answer = certificate.stored_posterior, certificate.answer
    return {
        "posterior": _posterior(e, certificate.posterior[index, target]),
        "stored_posterior": None if stored is None else _posterior(e, stored[index, target]),
        **({} if answer is None else {"answer": _posterior(e, answer[index, target])}),
        "winner": e.class_names[int(certificate.winner[index, target])],
        "reached": bool(certificate.reached[index, target]),
        "clamped": float(certificate.clamped[index, target]),
    }


def _path(e: Explanation, index: int, target: int) -> dict[str, Any] | None:
    if e.path is None:
        return None
    columns = e.path.verdict[index, target].T.tolist()
    return {
        "alphas": e.path.alphas[index, target].tolist(),
        "posterior": dict(zip(e.class_names, columns, strict=True)),
    }


def _posterior(e: Explanation, values: Tensor) -> dict[str, float]:
    return dict(zip(e.class_names, values.tolist(), strict=True))


def write_pictures(
    e: Explanation, folder: Path, film: str | None = None, names: list[str] | None = None
) -> dict[str, Any]:
    """Write the sheet of every image, and every counterfactual, heatmap and film.

    Args:
        film: "gif" or "webp", to write the paths as films.
        names: what the files of each image begin with; by default the names of their sources.

    Returns:
        `to_dict()`, with the path of each file beside what it shows.
    """
    if film is not None and e.path is None:
        raise InputError("a film needs a path: explain with path=24, for example")
    report = to_dict(e)
    names = names or file_names(e)
    for index, (name, image) in enumerate(zip(names, report["images"], strict=True)):
        limit = e.heatmap_limit(index)
        for target, described in enumerate(image["targets"]):
            label = re.sub(r"[^\w-]+", "_", described["target"])
            stem = folder / f"{name}-to-{label}"
            shown = {
                "tipping_point": image_array(e.stored_tipping_point[index, target]),
                "convincing": image_array(e.stored_convincing[index, target]),
                "heatmap": heatmap_array(e.heatmap[index, target], limit),
            }
            described["heatmap"] = {"full_colour": limit}
            for kind, array in shown.items():
                file = stem.with_name(f"{stem.name}-{kind.replace('_', '-')}.png")
                atomic_write(file, png_bytes(to_image(array)))
                described[kind]["file"] = str(file)
            if e.path is not None and film is not None:
                moving = stem.with_name(f"{stem.name}-path.{film}")
                plot = stem.with_name(f"{stem.name}-path.png")
                atomic_write(moving, film_bytes(e.path.film(index, target), film))
                atomic_write(plot, png_bytes(e.path.plot(index, target)))
                described["path"] |= {"film": str(moving), "plot": str(plot)}
        sheet = folder / f"{name}-explanation.png"
        atomic_write(sheet, png_bytes(e.picture(index)))
        image["picture"] = str(sheet)
    return report


def file_names(e: Explanation) -> list[str]:
    """A file name for every image, each used once: that of its source, or its number."""
    names: list[str] = []
    for source, index in zip(e.sources or (None,) * len(e), e.indices.tolist(), strict=True):
        stem = f"image-{index}" if source is None else re.sub(r"[^\w.-]+", "_", Path(source).stem)
        stem = stem or "image"
        numbered = (f"{stem}-{number}" for number in itertools.count(2))
        names.append(next(n for n in itertools.chain([stem], numbered) if n not in names))
    return names


def save(e: Explanation, folder: Path, film: str | None = None) -> dict[str, Any]:
    """Write pictures, JSON and tensors; see `Explanation.save`."""
    output_folder(folder)
    report = write_pictures(e, folder, film)
    atomic_write(folder / JSON, json.dumps(report, indent=1, ensure_ascii=False).encode())
    fields = dict(_flat_fields(e))
    tensors = {name: value.clone() for name, value in fields.items() if isinstance(value, Tensor)}
    about = {name: value for name, value in fields.items() if name not in tensors}
    about |= {"kind": KIND, "skipped": [dataclasses.asdict(skipped) for skipped in e.skipped]}
    write_tensors(folder / TENSORS, tensors, about)
    return report


def load(path: Path) -> Explanation:
    """Read what `save` wrote, from its folder or from the safetensors file itself."""
    file = path / TENSORS if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"{path} holds no explanation: give a folder that `save` wrote")
    return load_tensors(file, KIND, _restore)


def _flat_fields(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """List all fields by name; those of a certificate or path as "name.field"."""
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if isinstance(item, Reading | Verification):
            yield from _flat_fields(item, f"{field.name}.")
        else:
            yield f"{prefix}{field.name}", item


def _restore(tensors: dict[str, Tensor], about: dict[str, Any]) -> Explanation:
    """Build the explanation whose `_flat_fields` these are."""
    fields = {name: _as_tuple(value) for name, value in about.items() if name != "kind"}
    fields |= tensors
    fields["skipped"] = tuple(Skipped(**skipped) for skipped in about["skipped"])
    for name, kind in _READINGS.items():
        parts = {f.name: fields.pop(f"{name}.{f.name}", None) for f in dataclasses.fields(kind)}
        fields[name] = None if parts["posterior"] is None else kind(**parts)
    return Explanation(**fields)


def _as_tuple(value: Any) -> Any:  # noqa: ANN401
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value

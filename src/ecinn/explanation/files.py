"""An explanation as files: the picture, the raw counterfactuals, and what was measured as JSON."""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from ecinn.drawing.pictures import film_bytes, image_array, png_bytes, to_image
from ecinn.explanation.path import CounterfactualPath
from ecinn.explanation.result import Certificate, Explanation
from ecinn.files import atomic_write


def write_report(
    folder: Path, name: str, notes: list[str], e: Explanation, *, film: str = "gif"
) -> dict[str, Any]:
    """All files of one image; returns what was written and measured."""
    picture = folder / f"{name}-explanation.png"
    targets = []
    for column, q in enumerate(e.q[0].tolist()):
        label = re.sub(r"[^\w-]+", "_", e.class_names[q])
        files = {}
        kinds = [("tipping_point", e.stored_tipping_point), ("convincing", e.stored_convincing)]
        for kind, stored in kinds:
            path = folder / f"{name}-to-{label}-{kind.replace('_', '-')}.png"
            atomic_write(path, png_bytes(to_image(image_array(stored[0, column]))))
            files[kind] = str(path)
        targets.append(
            {
                "target": e.class_names[q],
                "alpha_0": float(e.alpha_0[0, column]),
                "alpha_1": float(e.alpha_1[0, column]),
                "alpha": float(e.alpha[0, column]),
                "reachable": bool(e.reachable[0, column]),
                "highest": None
                if bool(e.reachable[0, column])
                else float(e.convincing_certificate.posterior[0, column, q]),
                "as_asked": bool(e.as_asked[0, column]),
                "corrections": int(e.corrections[0, column]),
                "passes": e.passes + 2 * int(e.corrections[0, column]),
                "third_class": _name_or_none(e, int(e.third_class[0, column])),
                "tipping_point": _certificate(e, e.tipping_certificate, column)
                | {"file": files["tipping_point"]},
                "convincing": _certificate(e, e.convincing_certificate, column)
                | {"file": files["convincing"]},
                "film": _write_film(folder / f"{name}-to-{label}-path", e.path, column, film),
            }
        )
    atomic_write(picture, png_bytes(e.picture()))
    return {
        "input": name,
        "notes": notes,
        "predicted": e.class_names[int(e.p[0])],
        "posterior": _posterior(e, e.posterior[0]),
        "log_p": float(e.log_p[0]),
        "typical": None if e.typical is None else bool(e.typical[0]),
        "out_of_distribution": list(e.reasons(0)),
        "round_trip_error": float(e.round_trip_error[0]),
        "confidence": e.confidence,
        "passes": e.passes,
        "picture": str(picture),
        "targets": targets,
    }


def _write_film(
    stem: Path, path: CounterfactualPath | None, column: int, kind: str
) -> dict[str, Any] | None:
    """The film and the plot of one target's path, and its numbers; None if there is none."""
    if path is None:
        return None
    film, plot = stem.with_name(f"{stem.name}.{kind}"), stem.with_name(f"{stem.name}.png")
    atomic_write(film, film_bytes(path.film(0, column), kind))
    atomic_write(plot, png_bytes(path.plot(0, column)))
    return {
        "file": str(film),
        "plot": str(plot),
        "alphas": path.alphas[0, column].tolist(),
        "posterior": dict(zip(path.class_names, path.verdict[0, column].T.tolist(), strict=True)),
    }


def _certificate(e: Explanation, certificate: Certificate, column: int) -> dict[str, Any]:
    stored = certificate.stored_posterior
    return {
        "posterior": _posterior(e, certificate.posterior[0, column]),
        "stored_posterior": None if stored is None else _posterior(e, stored[0, column]),
        "winner": e.class_names[int(certificate.winner[0, column])],
        "reached": bool(certificate.reached[0, column]),
        "clamped": float(certificate.clamped[0, column]),
    }


def _posterior(e: Explanation, values: Tensor) -> dict[str, float]:
    return dict(zip(e.class_names, values.tolist(), strict=True))


def _name_or_none(e: Explanation, label: int) -> str | None:
    return None if label < 0 else e.class_names[label]
